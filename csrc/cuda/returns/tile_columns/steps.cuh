// What a thread makes of some neighboring steps of a cell, which is a column or a pair of columns of halves, once it
// has read their operands: their differences, and what is carried over them.
#pragma once

#include "returns/serial_columns/params.cuh"
#include "scan/carry/segment.cuh"
#include "scan/columns/resident_cells.cuh"
#include "dcs/returns/tile_plan.h"

namespace dcs {

template <typename T, int kUnit, ColumnForm kForm, int kCount>
struct TileSteps {
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  using Cell = Vector<T, kUnit>;
  using Flags = std::conditional_t<kUnit == 2, uint16_t, uint8_t>;
  static constexpr bool kAll = kForm == ColumnForm::kAll, kGates = kForm != ColumnForm::kPlain;
  static constexpr int kSteps = kCount;
  using Resident = ResidentCells<Cell, kSteps>;

  const ReturnsColumnParams<Acc>& call;
  Rates<Acc> rates[kUnit];

  Acc results[kSteps][kUnit];  // the differences, then what is carried behind them
  Resident values;
  std::conditional_t<kGates, Resident, NoCells> rhos;
  Acc factors[kAll ? kSteps : 1][kUnit];  // of the steps' own discounts
  // A bit a step: nothing is carried to it; v' is not read; v' counts gamma, not what the next target leaves of it.
  uint32_t cuts[kUnit] = {}, drops[kUnit] = {}, heavy[kUnit] = {};

  __device__ __forceinline__ explicit TileSteps(const ReturnsColumnParams<Acc>& given) : call(given) {}

  // Of the cell whose first column it is.
  __device__ __forceinline__ void find_rates(int outer, int64_t column) {
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      rates[u] = call.rates;
      if (!call.row_rates) continue;
      const auto at = [&](const Strides& strides) { return outer * strides.outer + (column + u) * strides.inner; };
      rates[u] = rates_of<Acc>(
          call.row_gamma, call.row_trace, at(call.row_gamma.tensor.strides), at(call.row_trace.tensor.strides));
    }
  }

  // A bit of each flag that is not 0.
  __device__ __forceinline__ void add_flag(int i, Flags flags, uint32_t (&bits)[kUnit]) const {
#pragma unroll
    for (int u = 0; u < kUnit; ++u)
      if (flags & 0xffu << 8 * u) bits[u] |= 1u << i;
  }
  __device__ __forceinline__ void add_flag(int i, const Cell& numbers, uint32_t (&bits)[kUnit]) const {
#pragma unroll
    for (int u = 0; u < kUnit; ++u)
      if (cast<Acc>(numbers.get(u)) != Acc(0)) bits[u] |= 1u << i;
  }
  // From the steps that terminate, which are in `drops`, those that are truncated, and those that are a row's last.
  __device__ __forceinline__ void set_flags(const uint32_t (&truncates)[kUnit], uint32_t lasts) {
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      cuts[u] = drops[u] | truncates[u] | lasts;
      drops[u] |= truncates[u] & call.truncated_drops;
      heavy[u] = call.has_own_values ? ~0u : cuts[u];
      if constexpr (!kAll) drops[u] = left_out(call.has_own_values, rates[u], drops[u], cuts[u]);
    }
  }

  // `own`: the value that is taken from the difference where `takes_own`, now or later (take_from_difference).
  __device__ __forceinline__ void set_step(int i, const Cell& reward_cell, bool takes_own, const Acc (&own)[kUnit],
      const Acc (&following)[kUnit], Acc own_gamma, Acc own_trace) {
    Acc reward[kUnit];
    unpack(reward_cell, reward);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      bool is_dropped = drops[u] & 1u << i;
      Acc gamma = rates[u].gamma, rest = rates[u].rest;
      if constexpr (kAll) {
        // A discount that is no step's own is 1 there, and the others are 1 in `rates`.
        factors[i][u] = own_gamma * own_trace;
        if (call.gamma.last || call.trace.last) {
          if (call.gamma.last) gamma = own_gamma;
          rest = gamma - gamma * (call.trace.last ? own_trace : rates[u].trace);
        }
      }
      const Acc weight = heavy[u] & 1u << i ? gamma : rest;
      // What counts for nothing is not read.
      if constexpr (kAll) is_dropped = is_dropped || (!call.has_own_values && weight == Acc(0));
      results[i][u] = (is_dropped ? reward[u] : reward[u] + weight * following[u]) - (takes_own ? own[u] : Acc(0));
    }
  }
  __device__ __forceinline__ void take_from_difference(int i, const Cell& own_cell) {
    Acc own[kUnit];
    unpack(own_cell, own);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) results[i][u] -= own[u];
  }
  __device__ __forceinline__ Cell target_of(int i) const {
    Acc own[kUnit], targets[kUnit];
    unpack(values.get(i), own);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) targets[u] = results[i][u] + (call.has_own_values ? own[u] : Acc(0));
    return pack<Acc, T, kUnit>(targets);
  }

  __device__ __forceinline__ Acc ratio(const Acc& rho, Acc most) const {
    return kGates && call.rhos.last ? clipped(rho, most) : Acc(1);
  }
  // Within a part of halves gamma * trace is a float.
  __device__ __forceinline__ Acc gated(int u, Acc x, Acc y) const {
    if constexpr (sizeof(T) == 2) return plain_step(x, rates[u].gate.value, y);
    else return rates[u].gate.step(x, y);
  }
  // What a step's own options make of gamma * trace, and of the difference.
  struct Step {
    Acc delta, factor, gate;  // the last one times the clipped ratio is the factor
    bool is_cut;
  };
  template <typename Visit>
  __device__ __forceinline__ void visit_columns(int i, const Visit& visit) const {
    Acc ratios[kUnit] = {};
    if constexpr (kGates) unpack(rhos.get(i), ratios);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      Step step{results[i][u], 1, 1, (cuts[u] & 1u << i) != 0};
      if constexpr (kAll) step.gate = factors[i][u];
      if constexpr (kGates) {
        step.delta *= ratio(ratios[u], call.clip_rho);
        step.factor = step.gate * ratio(ratios[u], call.clip_c);
      }
      visit(u, step, ratios[u]);
    }
  }
  // The result of a step from the one behind it; with gates its policy-gradient advantages.
  __device__ __forceinline__ void finish_step(int i, Acc (&y)[kUnit], Acc (&pg)[kUnit]) {
    visit_columns(i, [&](int u, const Step& step, Acc rho) {
      const Acc own = results[i][u];
      if constexpr (kGates) pg[u] = ratio(rho, call.clip_pg) * (step.is_cut ? own : gated(u, own, step.gate * y[u]));
      y[u] = step.is_cut ? step.delta : gated(u, step.delta, step.factor * y[u]);
      results[i][u] = y[u];
    });
  }
};

}  // namespace dcs
