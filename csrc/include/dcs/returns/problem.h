// What a kernel of `_temporal_difference_scan` is asked to do, free of torch types. With v' the value of the next state
// (torch_dcs_ops/reference/returns.py has it all, and what of it is selected away rather than multiplied by 0):
//   base_t  = r_t + gamma_t (1 - terminated_t) v'_t - v_t
//   A_t     = min(clip_rho, rho_t) base_t + c_t A_{t+1}                 c_t = gamma_t lambda_t min(clip_c, rho_t),
//   nothing carried where an episode ends target_t = A_t + v_t         pg_t = min(clip_pg, rho_t) (base_t + gamma_t
//   lambda_t A_{t+1})
// Without values, or where they are next states' alone: target_t = r_t + (gamma_t - c_t) v'_t + c_t target_{t+1}.
#pragma once

#include <cstdint>

#include "dcs/scan/problem.h"

namespace dcs {

// One operand seen as (outer, time, inner); null: not given, or not asked for.
struct ReturnsInput {
  const void* data = nullptr;
  Strides strides;
};
struct ReturnsOutput {
  void* data = nullptr;
  Strides strides;
};

// gamma, or the trace: `kNumber` takes `value`, `kRow` and `kStep` read `data` in `dtype`. One a row has any floating
// dtype, and its time stride is 0. One a step has that of the arithmetic, double for double rewards, else float; or,
// for backends that read it so, the half precision of the rewards.
struct ReturnsDiscount {
  GammaKind kind = GammaKind::kNumber;
  double value = 1.0;
  ElementType dtype = ElementType::Double;
  ReturnsInput tensor;

  constexpr bool is_narrow() const {
    return kind == GammaKind::kStep && (dtype == ElementType::Half || dtype == ElementType::BFloat16);
  }
};

// All sizes are at least 1.
struct ReturnsProblem {
  ElementType dtype;  // of all but flags, gamma and trace
  int64_t outer = 1;
  int64_t length = 1;
  int64_t inner = 1;

  ReturnsInput rewards, values, next_values;
  bool values_are_next = false;  // `values` are read as v' of the step before, and not as v
  ReturnsInput bootstrap_value;  // time stride 0
  ReturnsInput rhos;             // null: 1
  ReturnsInput terminated, truncated;
  bool terminated_is_bool = true, truncated_is_bool = true;  // else in `dtype`
  ReturnsDiscount gamma, trace;
  double clip_rho = 1.0, clip_c = 1.0, clip_pg = 1.0;
  int64_t steps = 0;  // `_n_step_returns` over so many, fewer than `length`, into `targets`; values are v' of the step
                      // before. 0: the scan

  ReturnsOutput advantages, targets, pg_advantages;  // without values, `targets` alone

  // Gradients of another problem: the tensors stand for those that `as_scan` (gradients_plan.h) names. Whether that had
  // its steps' own values, and next ones; whether `rewards` are gradients of its targets; whether steps that terminate
  // lack a next value, and no others.
  bool is_gradient = false, of_own_values = false, of_next_values = false, of_targets = false, ends_lack = false;
  ReturnsOutput bootstrap_gradient;  // time stride 0

  int64_t rows() const { return outer * inner; }
};

}  // namespace dcs
