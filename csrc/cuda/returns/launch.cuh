// Launches the kernel that a temporal difference scan takes (dcs/returns/kernels.h).
#pragma once

#include "common/device.h"
#include "returns/any_columns.cuh"
#include "returns/chunks/launch.cuh"
#include "returns/launch.h"
#include "returns/n_step_launch.cuh"
#include "returns/small_launch.cuh"
#include "returns/tile_columns/launch.cuh"
#include "returns/walk/launch.cuh"

namespace dcs {

// As many warps of a block as a column has steps for.
template <typename T>
cudaError_t launch_any_columns(const ReturnsProblem& problem, cudaStream_t stream) {
  int warps = 1;  // a power of two: lanes scan the warps' totals
  while (warps < kAnyColumnWarps && warps * kAnyColumnSteps<T> < problem.length) warps *= 2;
  returns_any_columns_kernel<T>
      <<<static_cast<unsigned>(ceil_div(problem.rows(), 32)), 32 * warps, 0, stream>>>(problem);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_returns(const ReturnsProblem& problem, const ReturnsKernelPlan& plan, const Device& device,
    void* workspace, cudaStream_t stream) {
  switch (plan.kernel) {
    case ReturnsKernel::kNSteps: return NStepLaunch<T>(problem, device, stream).run();
    case ReturnsKernel::kShortRows:
    case ReturnsKernel::kFewColumns:
      if constexpr (sizeof(T) <= 4) return SmallReturnsLaunch<T>(problem, device, stream).run(plan.kernel);
      break;
    case ReturnsKernel::kWalk: return launch_walk<T>(problem, columns_pair(problem), device, stream);
    case ReturnsKernel::kTileColumns: return launch_tile_columns<T>(problem, plan.tiles, workspace, stream);
    case ReturnsKernel::kChunks: return launch_chunks<T>(problem, plan.chunks, workspace, device, stream);
    default: break;
  }
  return launch_any_columns<T>(problem, stream);
}

}  // namespace dcs
