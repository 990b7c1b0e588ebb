// The launchers of the temporal difference scan of contiguous rows as one flat sequence, one a storage type; each in a
// file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "common/device.h"
#include "dcs/returns/flat_rows_plan.h"

namespace dcs {

using FlatReturnsLauncher = cudaError_t(
    const ReturnsProblem&, const FlatReturnsPlan&, const Device&, void* workspace, cudaStream_t);

FlatReturnsLauncher launch_flat_returns_float, launch_flat_returns_half, launch_flat_returns_bfloat16,
    launch_flat_returns_double;

}  // namespace dcs
