// What a thread that scans a column of the temporal difference scan serially knows of it, and makes of a step.
#pragma once

#include "returns/serial_columns/params.cuh"

namespace dcs {

template <typename T, ColumnForm kForm>
struct ReturnsColumn {
  using Acc = typename Types<T>::Acc;
  static constexpr bool kAll = kForm == ColumnForm::kAll, kRatios = kForm != ColumnForm::kPlain;

  Rates<Acc> rates;
  Acc y = 0, after = 0;  // the carry, and the value of the state behind the next step

  // Flags are bits of the column; a ratio, or a next state's value, that is not there is not read.
  struct Step {
    Acc reward, value, next_value, rho;
    uint32_t terminates, truncates;
    bool is_last;
  };
  struct Results {
    Acc advantage, target, pg;
  };

  // The discounts of a step; 1 those that are not one a step.
  struct StepRates {
    Acc gamma, trace;
  };

  // step_rates(): asked for where there are such.
  template <typename Own>
  __device__ __forceinline__ Results step(
      const ReturnsColumnParams<Acc>& params, const Step& of, const Own& step_rates) {
    const bool has_own = params.has_own_values, is_cut = (of.terminates | of.truncates) || of.is_last;
    Acc own_gamma = rates.gamma, rest = rates.rest, factor = 1;
    if constexpr (kAll) {
      // A discount that is no step's own is 1 there, and the others are 1 in `rates`.
      if (params.gamma.last || params.trace.last) {
        const StepRates own = step_rates();
        const Acc own_trace = params.trace.last ? own.trace : rates.trace;
        if (params.gamma.last) own_gamma = own.gamma;
        rest = own_gamma - own_gamma * own_trace;
        factor = own.gamma * own.trace;
      }
    }
    const Acc weight = has_own || is_cut ? own_gamma : rest;
    // What counts for nothing is not read.
    const bool counts_for_nothing = !has_own && weight == Acc(0);
    const bool drops = (of.terminates | (of.truncates & params.truncated_drops)) || counts_for_nothing;
    const Acc following = params.has_next_values ? of.next_value : after, own = has_own ? of.value : Acc(0);
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

}  // namespace dcs
