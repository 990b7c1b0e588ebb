// The gradients of a step of returns over n steps, for kernels that make the scan's results (n_step_blocks.cuh,
// n_step_windows.cuh).
#pragma once

#include <cuda_runtime.h>

namespace dcs {

// Of a step's value, and of the next value of the step before it in time.
template <typename Number>
struct NStepGradients {
  Number of_value, of_next;
};
// Of a step, of which the scan's result is y, and `before` that of the step before, if there is one (symbols:
// torch_dcs_ops/ops/returns/gradients.py). A step's own value has what the scan leaves of its target's gradient; where
// steps have none of their own their states are the next ones of the steps before.
template <typename Params, typename Number>
__device__ __forceinline__ NStepGradients<Number> gradients_of_step(const Params& call, Number reward, Number y,
    Number before, Number gamma, bool has_before, bool terminates, bool truncates) {
  const bool lacks = truncates || (terminates && call.ends_lack);
  const Number of_own = call.of_targets ? reward - y : -y;
  Number of_next = 0;
  if (has_before) {
    if (!lacks) of_next = gamma * before;
    if (!call.has_own_values && !terminates) of_next += of_own;
  }
  return {(call.has_own_values ? of_own : Number(0)) + (call.has_next_values ? Number(0) : of_next), of_next};
}

}  // namespace dcs
