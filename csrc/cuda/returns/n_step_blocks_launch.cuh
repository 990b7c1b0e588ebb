// Launches returns over n steps in blocks of n steps (n_step_blocks.cuh), in float where that is enough.
#pragma once

#include <cfloat>
#include <cmath>

#include "common/device.h"
#include "returns/n_step_blocks.cuh"

namespace dcs {

// Whether float holds the product of a window's gates, where that is known. A carry that is not finite must not be lost
// where it vanishes, nor one of 0 become a NaN where it overflows.
inline bool float_holds_window(const ReturnsProblem& p) {
  const double gate = std::fabs(p.gamma.value * p.trace.value);
  if (p.gamma.kind != GammaKind::kNumber || p.trace.kind != GammaKind::kNumber || gate == 0) return true;
  const double product = std::pow(gate, p.steps);
  return product >= FLT_MIN && product <= FLT_MAX;
}

template <typename T, typename Out, bool kGradients, typename Number, bool kPlain>
cudaError_t launch_n_step_blocks_in(const ReturnsProblem& p, const Device& device, cudaStream_t stream) {
  const auto params = n_step_blocks_params<T, Out, Number>(p, n_step_rates<Number>(p));
  const auto kernel = n_step_blocks_kernel<T, Out, Number, kPlain, kGradients>;
  const cudaError_t error = allow_shared(kernel, params.shared_bytes(), device.shared_per_block);
  if (error != cudaSuccess) return error;
  return launch_dependent(
      kernel, device.cluster > 1, params.blocks(), kNStepThreads, params.shared_bytes(), stream, params);
}

// Of those of which takes_n_step_blocks(p, device.shared_per_block). Out: the type of the targets.
template <typename T, typename Out, bool kGradients>
cudaError_t launch_n_step_blocks(const ReturnsProblem& p, const Device& device, cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4) {
    if (is_plain(p) && p.steps <= kFloatSteps && float_holds_window(p))
      return launch_n_step_blocks_in<T, Out, kGradients, typename Types<T>::Acc, true>(p, device, stream);
  }
  return launch_n_step_blocks_in<T, Out, kGradients, double, false>(p, device, stream);
}

}  // namespace dcs
