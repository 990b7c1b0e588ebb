// What a thread makes of some neighboring steps of a column once it has read their operands: their differences, and
// what is carried over them.
#pragma once

#include "returns/serial_columns/params.cuh"
#include "scan/carry/segment.cuh"
#include "scan/columns/resident_cells.cuh"
#include "dcs/returns/tile_plan.h"

namespace dcs {

// A column's discounts, and what its steps are made of. Call: what the kernel is called with.
template <typename T, ColumnForm kForm, int kCount, typename Call = ReturnsColumnParams<typename Types<T>::Acc>>
struct TileColumn {
  using Element = T;
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  static constexpr bool kAll = has_all(kForm), kGates = has_factors(kForm);
  static constexpr int kSteps = kCount;
  using Resident = ResidentCells<T, kSteps>;

  const Call& call;
  Rates<Acc> rates;

  __device__ __forceinline__ explicit TileColumn(const Call& given) : call(given) {}

  __device__ __forceinline__ void find_rates(int outer, int64_t column) {
    rates = call.rates;
    if (!call.row_rates) return;
    const auto at = [&](const Strides& strides) { return strides.at(outer, column); };
    rates = rates_of<Acc>(
        call.row_gamma, call.row_trace, at(call.row_gamma.tensor.strides), at(call.row_trace.tensor.strides));
  }
  // A bit of each flag that is not 0.
  __device__ __forceinline__ static void add_flag(int i, uint8_t flag, uint32_t& bits) {
    if (flag) bits |= 1u << i;
  }
  __device__ __forceinline__ static void add_flag(int i, T number, uint32_t& bits) {
    if (cast<Acc>(number) != Acc(0)) bits |= 1u << i;
  }
  __device__ __forceinline__ Acc ratio(const Acc& rho, Acc most) const {
    return kGates && call.has_ratios() ? clipped(rho, most) : Acc(1);
  }
  // Within a half-precision part gamma * trace is a float.
  __device__ __forceinline__ Acc gated(Acc x, Acc y) const {
    if constexpr (sizeof(T) == 2) return plain_step(x, rates.gate.value, y);
    else return rates.gate.step(x, y);
  }
};

template <typename T, ColumnForm kForm, int kCount, typename Call = ReturnsColumnParams<typename Types<T>::Acc>>
struct TileSteps : TileColumn<T, kForm, kCount, Call> {
  using Column = TileColumn<T, kForm, kCount, Call>;
  using Column::call, Column::rates, Column::gated, Column::ratio;
  using Column::Column;
  using Column::kAll, Column::kGates, Column::kSteps;
  using typename Column::Acc, typename Column::Resident, typename Column::Wide;

  Acc results[kSteps];  // the differences, then what is carried behind them
  Resident values;
  std::conditional_t<kGates, Resident, NoCells> rhos;
  Acc factors[kAll ? kSteps : 1];  // of the steps' own discounts
  // A bit a step: nothing is carried to it; v' is not read; v' counts gamma, not what the next target leaves of it.
  uint32_t cuts = 0, drops = 0, heavy = 0;

  // From the steps that terminate, which are in `drops`, those that are truncated, and those that are a row's last.
  __device__ __forceinline__ void set_flags(uint32_t truncates, uint32_t lasts) {
    cuts = drops | truncates | lasts;
    drops |= truncates & call.truncated_drops;
    heavy = call.has_own_values ? ~0u : cuts;
    if constexpr (!kAll) drops = left_out(call.has_own_values, rates, drops, cuts);
  }

  // `own`: the value that is taken from the difference where `takes_own`, now or later (take_from_difference).
  __device__ __forceinline__ void set_step(
      int i, Acc reward, bool takes_own, Acc own, Acc following, Acc own_gamma, Acc own_trace) {
    bool is_dropped = drops & 1u << i;
    Acc gamma = rates.gamma, rest = rates.rest;
    if constexpr (kAll) {
      // A discount that is no step's own is 1 there, and the others are 1 in `rates`.
      factors[i] = own_gamma * own_trace;
      if (call.gamma.last || call.trace.last) {
        if (call.gamma.last) gamma = own_gamma;
        rest = gamma - gamma * (call.trace.last ? own_trace : rates.trace);
      }
    }
    const Acc weight = heavy & 1u << i ? gamma : rest;
    // What counts for nothing is not read.
    if constexpr (kAll) is_dropped = is_dropped || (!call.has_own_values && weight == Acc(0));
    results[i] = (is_dropped ? reward : reward + weight * following) - (takes_own ? own : Acc(0));
  }
  __device__ __forceinline__ void take_from_difference(int i, Acc own) { results[i] -= own; }
  __device__ __forceinline__ Acc target_of(int i) const {
    const Acc own = cast<Acc>(values.get(i));
    return results[i] + (call.has_own_values ? own : Acc(0));
  }

  // What a step's own options make of gamma * trace, and of the difference.
  struct Step {
    Acc delta, factor, gate;  // the last one times the clipped ratio is the factor
    Acc rho;
    bool is_cut;
  };
  __device__ __forceinline__ Step step_of(int i) const {
    Step step{results[i], 1, 1, 0, (cuts & 1u << i) != 0};
    if constexpr (kAll) step.gate = factors[i];
    if constexpr (kGates) {
      step.rho = cast<Acc>(rhos.get(i));
      step.delta *= ratio(step.rho, call.clip_rho);
      step.factor = step.gate * ratio(step.rho, call.clip_c);
    }
    return step;
  }
  // From the result of the step behind it to a step's own; its policy-gradient advantage, with gates.
  __device__ __forceinline__ Acc finish_step(int i, Acc& y) {
    const Step step = step_of(i);
    Acc pg = 0;
    if constexpr (kGates)
      pg = ratio(step.rho, call.clip_pg) * (step.is_cut ? results[i] : gated(results[i], step.gate * y));
    y = step.is_cut ? step.delta : gated(step.delta, step.factor * y);
    results[i] = y;
    return pg;
  }
};

}  // namespace dcs
