// Launches returns over any number of steps, in float where that is enough: in tiles of windows (n_step_windows.cuh),
// or in blocks of n steps (n_step_blocks.cuh).
#pragma once

#include "common/device.h"
#include "returns/n_step_blocks.cuh"
#include "returns/n_step_windows.cuh"

namespace dcs {

template <typename T, bool kGradients, typename Number, bool kPlain>
cudaError_t launch_n_step_blocks_in(const ReturnsProblem& p, const Device& device, cudaStream_t stream) {
  const auto params = n_step_blocks_params<T, Number>(p, n_step_rates<Number>(p));
  const auto kernel = n_step_blocks_kernel<T, Number, kPlain, kGradients>;
  const cudaError_t error = allow_shared(kernel, params.shared_bytes(), device.shared_per_block);
  if (error != cudaSuccess) return error;
  return launch_dependent(
      kernel, device.cluster > 1, params.blocks(), kNStepThreads, params.shared_bytes(), stream, params);
}

template <typename T, bool kGradients>
cudaError_t launch_n_step_windows(const ReturnsProblem& p, const Device& device, cudaStream_t stream) {
  const auto params = n_step_windows_params<T>(p);
  return launch_dependent(n_step_windows_kernel<T, kGradients>, device.cluster > 1,
      ceil_div(params.count, params.outputs), kNStepWindowThreads, n_step_windows_bytes<T>(), stream, params);
}

// Of those of which takes_n_step_blocks(p, device.shared_per_block).
template <typename T, bool kGradients>
cudaError_t launch_shared_windows(const ReturnsProblem& p, const Device& device, cudaStream_t stream) {
  if (takes_n_step_windows(p)) return launch_n_step_windows<T, kGradients>(p, device, stream);
  if constexpr (sizeof(T) <= 4) {
    if (is_plain(p) && p.steps <= kFloatSteps && float_holds_window(p))
      return launch_n_step_blocks_in<T, kGradients, typename Types<T>::Acc, true>(p, device, stream);
  }
  return launch_n_step_blocks_in<T, kGradients, double, false>(p, device, stream);
}

}  // namespace dcs
