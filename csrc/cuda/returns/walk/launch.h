// The launcher of the temporal difference scan in which threads walk along columns, or take several of few steps;
// defined for each storage type in a file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "common/device.h"
#include "dcs/returns/problem.h"

namespace dcs {

template <typename T>
cudaError_t launch_walk(const ReturnsProblem& problem, const Device& device, cudaStream_t stream);

}  // namespace dcs
