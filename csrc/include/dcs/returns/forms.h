// The operands that kernels of the temporal difference scan are made for. Host code without CUDA or torch types.
#pragma once

#include "dcs/returns/problem.h"

namespace dcs {

// Those of the common calls are known to the compiler: gamma and the trace are numbers there, flags are bool, and
// policy-gradient advantages come with ratios alone. kAnyForm asks for everything as it runs: three times the
// instructions a step.
enum ReturnsForm { kWithValues = 1, kWithNext = 2, kWithRhos = 4, kAnyForm = 8, kValuesAreNext = 16 };
constexpr int kAdvantages = kWithValues, kRatios = kWithValues | kWithRhos,
              kMixed = kWithNext;  // gae, vtrace, td_lambda_returns
constexpr int kAdvantagesNext = kAdvantages | kWithNext, kRatiosNext = kRatios | kWithNext;  // with torchrl's values
constexpr int kMixedShifted = kWithValues | kValuesAreNext;  // td_lambda_returns with bootstrap_value

// Whether forms beside kAdvantages are worth their code for a type.
constexpr bool has_common_forms(ElementType dtype) {
  return dtype == ElementType::Float || dtype == ElementType::BFloat16;
}

inline int form_of(const ReturnsProblem& p) {
  const int given = (p.values.data ? kWithValues : 0) | (p.next_values.data ? kWithNext : 0) |
      (p.rhos.data ? kWithRhos : 0) | (p.values_are_next ? kValuesAreNext : 0);
  const bool any = p.is_gradient || p.gamma.kind != GammaKind::kNumber || p.trace.kind != GammaKind::kNumber ||
      !p.terminated_is_bool || !p.truncated_is_bool || (p.pg_advantages.data && !p.rhos.data);
  const bool is_known = given == kAdvantages ||
      (has_common_forms(p.dtype) &&
          (given == kRatios || given == kMixed || given == kMixedShifted || given == kAdvantagesNext ||
              given == kRatiosNext));
  return any || !is_known ? kAnyForm : given;
}

// What a step of kernels for all options may have: one stream of values, its own or the next state's; ratios and
// policy-gradient advantages, too; either of these with next states' values beside its own; all of it and discounts of
// its own. Gradients: by discounts that are numbers or rows'; or by ratios and discounts of steps, too.
enum class ColumnForm { kPlain, kRatios, kNext, kRatiosNext, kAll, kGradients, kAnyGradients };

constexpr bool is_gradient(ColumnForm form) {
  return form == ColumnForm::kGradients || form == ColumnForm::kAnyGradients;
}
// Whether all operands may be there, and whether the gates of a step may be its own.
constexpr bool has_all(ColumnForm form) { return form == ColumnForm::kAll || form == ColumnForm::kAnyGradients; }
constexpr bool has_factors(ColumnForm form) {
  return has_all(form) || form == ColumnForm::kRatios || form == ColumnForm::kRatiosNext;
}
// Whether next states' values are beside the steps' own.
constexpr bool has_next(ColumnForm form) { return form == ColumnForm::kNext || form == ColumnForm::kRatiosNext; }

inline bool has_step_rates(const ReturnsProblem& p) {
  return p.gamma.kind == GammaKind::kStep || p.trace.kind == GammaKind::kStep;
}

inline ColumnForm column_form(const ReturnsProblem& p) {
  if (p.is_gradient) {
    const bool any = has_step_rates(p) || p.rhos.data || p.next_values.data;
    return any ? ColumnForm::kAnyGradients : ColumnForm::kGradients;
  }
  const bool has_both = p.values.data && !p.values_are_next && p.next_values.data;
  if (has_both || has_step_rates(p)) return ColumnForm::kAll;
  return p.rhos.data || p.pg_advantages.data ? ColumnForm::kRatios : ColumnForm::kPlain;
}
// Of kernels that have forms of their own for next states' values beside the steps'.
inline ColumnForm serial_form(const ReturnsProblem& p) {
  const ColumnForm form = column_form(p);
  if (form != ColumnForm::kAll || has_step_rates(p)) return form;
  return p.rhos.data || p.pg_advantages.data ? ColumnForm::kRatiosNext : ColumnForm::kNext;
}

}  // namespace dcs
