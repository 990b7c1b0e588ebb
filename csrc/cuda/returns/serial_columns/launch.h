// The launcher of the temporal difference scan in which threads take columns serially, or several of few steps;
// defined for each storage type in a file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "common/device.h"
#include "dcs/returns/problem.h"

namespace dcs {

template <typename T>
cudaError_t launch_serial_returns(const ReturnsProblem& problem, const Device& device, cudaStream_t stream);

}  // namespace dcs
