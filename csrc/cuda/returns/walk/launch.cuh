// Launches the temporal difference scan in which a thread walks along a column (kernel.cuh), or takes several of few
// steps.
#pragma once

#include "returns/few_steps/launch.cuh"
#include "returns/walk/kernel.cuh"
#include "returns/walk/launch.h"

namespace dcs {

// Enough columns to fill multiprocessors with large blocks; with fewer, blocks of a warp share them out evenly.
constexpr int64_t kColumnsOfLargeBlocks = 4 * kReturnsWalkThreads;

template <typename T, int kUnit, WalkForm kForm>
cudaError_t launch_walk_as(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  const auto params = walk_params<T>(problem, kUnit);
  const int threads = params.cells >= kColumnsOfLargeBlocks * device.multiprocessors ? kReturnsWalkThreads : 32;
  return launch_dependent(returns_walk_kernel<T, kUnit, kForm>, device.cluster > 1, ceil_div(params.cells, threads),
      threads, 0, stream, params);
}

template <typename T>
cudaError_t launch_walk(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {
    if (takes_few_returns(problem, device.multiprocessors)) return launch_few_returns<T>(problem, device, stream);
  }
  const WalkForm form = walk_form(problem);
  if constexpr (sizeof(T) == 2) {
    // Pairs are half the threads: only where enough are left.
    if (columns_pair(problem) && problem.rows() >= 2 * kWalkedColumns * device.multiprocessors) {
      if (form == WalkForm::kPlain) return launch_walk_as<T, 2, WalkForm::kPlain>(problem, device, stream);
      if (form == WalkForm::kRatios) return launch_walk_as<T, 2, WalkForm::kRatios>(problem, device, stream);
    }
  }
  if (form == WalkForm::kPlain) return launch_walk_as<T, 1, WalkForm::kPlain>(problem, device, stream);
  if (form == WalkForm::kRatios) return launch_walk_as<T, 1, WalkForm::kRatios>(problem, device, stream);
  return launch_walk_as<T, 1, WalkForm::kAll>(problem, device, stream);
}

}  // namespace dcs
