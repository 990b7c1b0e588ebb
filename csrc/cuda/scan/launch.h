// The launchers of windows, and of aligned operands: these one an element type, each in a file of its own so that they
// compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/problem.h"

namespace dcs {

cudaError_t launch_direct_window(const ScanProblem&, cudaStream_t);
cudaError_t launch_composed_window(const ScanProblem&, const ComposedWindowPlan&, void* workspace, cudaStream_t);

using AlignedLauncher = cudaError_t(const ScanProblem&, const AlignedPlan&, void* workspace, cudaStream_t);
AlignedLauncher launch_aligned_float, launch_aligned_half, launch_aligned_bfloat16;

}  // namespace dcs
