// What the kernel of small temporal difference scans of contiguous time is called with (kernel.cuh).
#pragma once

#include "dcs/returns/small_rows_plan.h"
#include "returns/step.cuh"
#include "scan/rows/small_params.cuh"

namespace dcs {

// Operands and results from the scan's first step on, the last one in memory; null where there are none.
template <typename Acc>
struct SmallReturnsParams {
  static constexpr bool reverse = true;

  SmallOperand rewards, values, terminated, truncated;
  SmallOperand next_values;
  SmallRowOperand bootstrap;
  Divisor length, inner, cluster;  // steps of a row, inner rows, blocks of a cluster
  int rows, group_rows;            // of all, of a block or cluster
  int levels;                      // of shuffles: 2^levels lanes are farther than a row reaches
  bool crosses_warps;              // whether a row may go on in another warp
  bool has_own_values;
  uint32_t truncated_drops;  // all bits where a truncated step's next value is not read
  Rates<Acc> rates;
  double powers[6];  // of gamma * trace over 1, 2, 4, ... lanes
  SmallOperand advantages, targets;
  SmallOperand rhos, pg_advantages;
  Acc clip_rho, clip_c, clip_pg;

  __device__ __forceinline__ bool has_ratios() const { return true; }
  // Whether all results are stored without shared memory.
  bool stores_words() const {
    bool are_words = true;
    for (const SmallOperand* result : {&advantages, &targets, &pg_advantages})
      are_words = are_words && (!result->data || result->in_words);
    return are_words;
  }
};

template <typename T>
SmallReturnsParams<typename Types<T>::Acc> small_returns_params(const ReturnsProblem& p, const SmallReturnsPlan& plan) {
  using Acc = typename Types<T>::Acc;
  SmallReturnsParams<Acc> params{};
  const SmallOperands<ReturnsProblem> of(p, true, plan.steps);
  const auto input = [&](const ReturnsInput& from, int64_t bytes) {
    return of.operand(from.data, from.strides, bytes);
  };
  const auto output = [&](const ReturnsOutput& to) { return of.operand(to.data, to.strides, sizeof(T)); };
  params.rewards = input(p.rewards, sizeof(T));
  params.values = input(p.values, sizeof(T));
  params.next_values = input(p.next_values, sizeof(T));
  params.terminated = input(p.terminated, 1);
  params.truncated = input(p.truncated, 1);
  params.rhos = input(p.rhos, sizeof(T));
  params.bootstrap = of.row_operand(p.bootstrap_value.data, p.bootstrap_value.strides, sizeof(T));
  params.advantages = output(p.advantages);
  params.targets = output(p.targets);
  params.pg_advantages = output(p.pg_advantages);
  params.has_own_values = p.values.data && !p.values_are_next;
  params.truncated_drops = p.next_values.data ? 0 : ~0u;
  params.rates = number_rates<Acc>(p.gamma.value, p.trace.value);
  params.clip_rho = static_cast<Acc>(p.clip_rho);
  params.clip_c = static_cast<Acc>(p.clip_c);
  params.clip_pg = static_cast<Acc>(p.clip_pg);
  of.place(params, plan, params.rates.carried);
  params.crosses_warps = p.length % plan.steps || 32 * plan.steps % p.length;
  return params;
}

}  // namespace dcs
