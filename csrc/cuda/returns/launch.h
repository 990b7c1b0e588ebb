// The launchers of the temporal difference scan, one a storage type; each in a file of its own so that they compile
// side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/returns/plan.h"
#include "common/device.h"

namespace dcs {

// `chunks`: of plan_chunks(...), null where it has none; `workspace` is its own, and the problem has its rows together.
using ReturnsLauncher = cudaError_t(
    const ReturnsProblem&, const Device&, const ReturnsPlan* chunks, void* workspace, cudaStream_t);

ReturnsLauncher launch_returns_float, launch_returns_half, launch_returns_bfloat16, launch_returns_double;

}  // namespace dcs
