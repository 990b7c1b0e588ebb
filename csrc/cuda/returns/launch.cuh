// Launches the kernel that a temporal difference scan takes (dcs/returns/kernels.h).
#pragma once

#include "returns/any_columns.cuh"
#include "returns/chunks/launch.cuh"
#include "returns/launch.h"
#include "returns/n_step_launch.cuh"
#include "returns/small_launch.cuh"
#include "returns/tile_columns/launch.cuh"
#include "returns/walk/launch.cuh"

namespace dcs {

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
