// What a thread that scans a column of the temporal difference scan serially knows of it, and makes of a step.
#pragma once

#include "returns/serial_columns/params.cuh"

namespace dcs {

// Flags are bits of the column; a ratio, or a next state's value, that is not there is not read.
template <typename Acc>
struct ColumnStep {
  Acc reward, value, next_value, rho;
  uint32_t terminates, truncates;
  bool is_last;
};
template <typename Acc>
struct ColumnResults {
  Acc advantage, target, pg;
};

// The discounts of a step; 1 those that are not one a step.
template <typename Acc>
struct ColumnStepRates {
  Acc gamma, trace;
};
// A discount that is no step's own is 1 there, and the others are 1 in `rates`. step_rates(): asked for where there are
// such. `factor`: of what is carried.
template <typename Acc, typename Own>
__device__ __forceinline__ void take_step_rates(const ReturnsColumnParams<Acc>& params, const Rates<Acc>& rates,
    const Own& step_rates, Acc& gamma, Acc& rest, Acc& factor) {
  if (!params.gamma.last && !params.trace.last) return;
  const ColumnStepRates<Acc> own = step_rates();
  if (params.gamma.last) gamma = own.gamma;
  rest = gamma - gamma * (params.trace.last ? own.trace : rates.trace);
  factor = own.gamma * own.trace;
}

template <typename T, ColumnForm kForm>
struct ReturnsColumn {
  using Acc = typename Types<T>::Acc;
  static constexpr bool kAll = has_all(kForm), kRatios = has_factors(kForm), kNext = has_next(kForm);

  Rates<Acc> rates;
  Acc y = 0, after = 0;  // the carry, and the value of the state behind the next step

  template <typename Own>
  __device__ __forceinline__ ColumnResults<Acc> step(
      const ReturnsColumnParams<Acc>& params, const ColumnStep<Acc>& of, const Own& step_rates) {
    const bool has_own = kNext || params.has_own_values, has_next = kNext || params.has_next_values,
               is_cut = (of.terminates | of.truncates) || of.is_last;
    Acc own_gamma = rates.gamma, rest = rates.rest, factor = 1;
    if constexpr (kAll) take_step_rates(params, rates, step_rates, own_gamma, rest, factor);
    const Acc weight = has_own || is_cut ? own_gamma : rest;
    // What counts for nothing is not read.
    const bool counts_for_nothing = !has_own && weight == Acc(0);
    const bool drops = (of.terminates | (kNext ? 0 : of.truncates & params.truncated_drops)) || counts_for_nothing;
    const Acc following = has_next ? of.next_value : after, own = has_own ? of.value : Acc(0);
    const Acc difference = (drops ? of.reward : of.reward + weight * following) - own;
    Acc pg = 0, delta = difference;
    if constexpr (kRatios) {
      const auto ratio = [&](Acc most) { return params.rhos.last ? clipped(of.rho, most) : Acc(1); };
      const Acc carried = factor * y;
      pg = ratio(params.clip_pg) * (is_cut ? difference : rates.gate.step(difference, carried));
      delta *= ratio(params.clip_rho);
      factor *= ratio(params.clip_c);
    }
    y = is_cut ? delta : rates.gate.step(delta, factor * y);
    after = of.value;
    return {y, y + own, pg};
  }
};

// The same of gradients (`as_scan`, dcs/returns/gradients_plan.h).
template <typename T, ColumnForm kForm>
struct GradientColumn {
  using Acc = typename Types<T>::Acc;

  Rates<Acc> rates;
  Acc y = 0, after = 0;  // the carry, and the gradient of the step before's next value

  template <typename Own>
  __device__ __forceinline__ ColumnResults<Acc> step(
      const ReturnsColumnParams<Acc>& params, const ColumnStep<Acc>& of, const Own& step_rates) {
    const Acc s = of.reward + of.value + y, of_target = params.of_targets ? of.reward : Acc(0);
    const bool is_cut = of.terminates || of.is_last;
    Acc own_gamma = rates.gamma, rest = rates.rest, factor = 1, base = s, carried = s;
    if constexpr (has_all(kForm)) {
      take_step_rates(params, rates, step_rates, own_gamma, rest, factor);
      const auto ratio = [&](Acc most) { return params.rhos.last ? clipped(of.rho, most) : Acc(1); };
      const Acc of_policy = params.next_values.last ? ratio(params.clip_pg) * of.next_value : Acc(0);
      base = ratio(params.clip_rho) * s + of_policy;
      carried = ratio(params.clip_c) * s + of_policy;
    }
    const Acc of_value =
        (params.has_own_values ? of_target - base : Acc(0)) + (params.has_next_values ? Acc(0) : after);
    after = of.truncates | (of.terminates & params.ends_lack)
        ? Acc(0)
        : (params.has_own_values || is_cut ? own_gamma : rest) * base;
    y = is_cut ? Acc(0) : rates.gate.step(Acc(0), factor * carried);
    return {base, of_value, after};
  }
};

template <typename T, ColumnForm kForm>
using ColumnOf = std::conditional_t<is_gradient(kForm), GradientColumn<T, kForm>, ReturnsColumn<T, kForm>>;

}  // namespace dcs
