// The row kernels' launchers, one a storage type; each in a file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/cross_entropy/problem.h"
#include "common/device.h"

namespace dcs {

using RowsLauncher = cudaError_t(const RowsProblem&, const Device&, cudaStream_t);

RowsLauncher launch_cross_entropy_float, launch_cross_entropy_half, launch_cross_entropy_bfloat16,
    launch_cross_entropy_double;

}  // namespace dcs
