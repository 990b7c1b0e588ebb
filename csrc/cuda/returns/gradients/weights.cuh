// What a step makes of what is scanned (symbols: torch_dcs_ops/ops/returns/gradients.py).
#pragma once

#include "returns/step.cuh"

namespace dcs {

// b is `ratio` of s and `policy`; what is carried to the next step, before the gate of a row, `factor` of s and
// `carried`.
template <typename Acc>
struct GradientWeights {
  Acc ratio = 1, policy = 0, factor = 1, carried = 0;
  __device__ __forceinline__ Acc base(Acc s) const { return ratio * s + policy; }
  __device__ __forceinline__ Acc carry(Acc s) const { return factor * s + carried; }
};

// The same without ratios and policy gradients, where gates have gammas of steps.
template <typename Acc>
struct GammaWeights {
  Acc factor = 1;
  static constexpr Acc carried = 0;
  __device__ __forceinline__ Acc base(Acc s) const { return s; }
  __device__ __forceinline__ Acc carry(Acc s) const { return factor * s; }
};

// `policy`: p of a step, or 0; `of_step`: what its own discounts make of the gate.
template <typename Acc>
__device__ __forceinline__ GradientWeights<Acc> gradient_weights(Acc ratio, Acc clipped_c, Acc policy, Acc of_step) {
  return {ratio, policy, of_step * clipped_c, of_step * policy};
}

}  // namespace dcs
