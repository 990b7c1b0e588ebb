// The launchers of the temporal difference scan, one a storage type; each in a file of its own so that they compile
// side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/returns/kernels.h"
#include "common/device.h"

namespace dcs {

// All kernels but flat rows (flat_rows/launch.h).
using ReturnsLauncher = cudaError_t(
    const ReturnsProblem&, const ReturnsKernelPlan&, const Device&, void* workspace, cudaStream_t);

ReturnsLauncher launch_returns_float, launch_returns_half, launch_returns_bfloat16, launch_returns_double;

}  // namespace dcs
