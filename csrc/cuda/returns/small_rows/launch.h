// The launchers of small temporal difference scans of contiguous time, one a storage type; each in a file of its own so
// that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/returns/small_rows_plan.h"

namespace dcs {

using SmallReturnsLauncher = cudaError_t(const ReturnsProblem&, const SmallReturnsPlan&, cudaStream_t);

SmallReturnsLauncher launch_small_returns_float, launch_small_returns_half, launch_small_returns_bfloat16;

}  // namespace dcs
