// All of it in one kernel, where there are enough columns to fill the GPU, or few steps: a thread walks along all steps
// of its own column, which it reads a batch at a time, all loads of a batch before the first use.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "returns/gradients/params.cuh"

namespace dcs {

constexpr int kWalkThreads = 128;

// Loads of a batch: as many bytes as keep memory busy.
template <typename T, bool kFactors>
constexpr int kWalkBatch = sizeof(T) > 4 || kFactors ? 4 : 8;

// A thread's column.
template <typename T, int kBatch>
struct Walk {
  const GradientsParams<T>& params;
  uint32_t slow, within;  // the column, `within` beside time
  int64_t step = 0;       // the batch's first one

  __device__ __forceinline__ explicit Walk(const GradientsParams<T>& given) : params(given) {
    const uint32_t column = blockIdx.x * kWalkThreads + threadIdx.x;
    slow = params.shape.slow == 1 ? 0 : params.by_within.of(column);
    within = column - slow * params.by_within.divisor;
  }
  __device__ __forceinline__ bool is_there() const {
    return slow < params.shape.slow && within < params.by_within.divisor;
  }
  __device__ __forceinline__ bool goes_on() const { return step < params.length; }
  __device__ __forceinline__ bool has(int j) const { return step + j < params.length; }
  __device__ __forceinline__ bool is_last(int j) const { return step + j == params.length - 1; }
  // Of a value a row.
  __device__ __forceinline__ int64_t row(const Strides& strides) const {
    return slow * strides.outer + within * strides.inner;
  }
  template <typename Element>
  __device__ __forceinline__ Element* place(const GradientsOperand<Element>& operand) const {
    return operand.data + (slow * operand.slow + within * operand.within + step * operand.time);
  }
  // Steps of the batch; those beyond the column's end are read as its last one is.
  template <typename To, typename Element>
  __device__ __forceinline__ void read(const GradientsOperand<Element>& from, To (&to)[kBatch]) const {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) to[j] = To();
    if (!from.data) return;
    Element* const begin = place(from);
    const int last = static_cast<int>(min(params.length - 1 - step, int64_t{kBatch - 1}));
#pragma unroll
    for (int j = 0; j < kBatch; ++j) to[j] = static_cast<To>(begin[min(j, last) * from.time]);
  }
  template <typename Element, typename Value>
  __device__ __forceinline__ void write(const GradientsOperand<Element>& to, const Value (&values)[kBatch]) const {
    if (!to.data) return;
    Element* const begin = place(to);
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (has(j)) begin[j * to.time] = cast<Element>(values[j]);
  }
};

// The discounts of a column. kSteps: they may be one a step.
template <typename T, int kBatch, bool kSteps>
struct WalkRates {
  using Acc = typename Types<T>::Acc;
  Rates<Acc> row;
  bool has_steps;
  Acc gammas[kBatch], traces[kBatch];

  __device__ __forceinline__ explicit WalkRates(const Walk<T, kBatch>& walk)
      : row(walk.params.rates), has_steps(kSteps && walk.params.step_rates) {
    if (walk.params.row_rates)
      row = rates_of<Acc>(walk.params.gamma, walk.params.trace, walk.row(walk.params.gamma.tensor.strides),
          walk.row(walk.params.trace.tensor.strides));
  }
  __device__ __forceinline__ void read(const Walk<T, kBatch>& walk) {
    if (!has_steps) return;
    if (walk.params.step_gamma.data) walk.read(walk.params.step_gamma, gammas);
    if (walk.params.step_trace.data) walk.read(walk.params.step_trace, traces);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!walk.params.step_gamma.data) gammas[j] = row.gamma;
      if (!walk.params.step_trace.data) traces[j] = row.trace;
    }
  }
  __device__ __forceinline__ Acc gamma(int j) const { return has_steps ? gammas[j] : row.gamma; }
  // What of gamma the next target leaves to the value of the next state.
  __device__ __forceinline__ Acc rest(int j) const { return has_steps ? gammas[j] - gammas[j] * traces[j] : row.rest; }
  // gamma * lambda * y
  __device__ __forceinline__ Acc carried(int j, Acc y) const {
    return has_steps ? gammas[j] * traces[j] * y : row.gate.step(Acc(0), y);
  }
};

// kFactors: there may be ratios, discounts of steps, or gradients of policy-gradient advantages.
template <typename T, bool kFactors>
__global__ void __launch_bounds__(kWalkThreads)
    gradients_walk_kernel(const __grid_constant__ GradientsParams<T> params) {
  overlap_launches();
  using Acc = typename Types<T>::Acc;
  constexpr int kBatch = kWalkBatch<T, kFactors>;
  Walk<T, kBatch> walk(params);
  if (!walk.is_there()) return;
  WalkRates<T, kBatch, kFactors> rates(walk);
  const bool has_ratios = params.rhos.data, has_own = params.has_own_values;
  // Of the step before: what it hands on, and what its next state's value is worth.
  Acc carried = 0, of_next = 0;
#pragma unroll 1
  for (; walk.goes_on(); walk.step += kBatch) {
    T of_advantages[kBatch], of_targets[kBatch], of_pg[kBatch], rhos[kBatch];
    bool ends[kBatch], lacks[kBatch];
    walk.read(params.of_advantages, of_advantages);
    walk.read(params.of_targets, of_targets);
    walk.read(params.ends, ends);
    walk.read(params.lacks_after, lacks);
    if constexpr (kFactors) {
      walk.read(params.of_pg, of_pg);
      walk.read(params.rhos, rhos);
      rates.read(walk);
    }
    Acc bases[kBatch], of_values[kBatch], of_nexts[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const Acc of_target = cast<Acc>(of_targets[j]);
      const Acc s = cast<Acc>(of_advantages[j]) + of_target + carried;
      Acc base = s, own = s;  // own: what it hands on, before discounts
      if constexpr (kFactors) {
        const Acc rho = cast<Acc>(rhos[j]), of_policy = ratio_of(has_ratios, rho, params.clip_pg) * cast<Acc>(of_pg[j]);
        base = ratio_of(has_ratios, rho, params.clip_rho) * s + of_policy;
        own = ratio_of(has_ratios, rho, params.clip_c) * s + of_policy;
      }
      const bool is_cut = ends[j] || walk.is_last(j);
      bases[j] = base;
      of_values[j] = (has_own ? of_target - base : Acc(0)) + (params.has_next_values ? Acc(0) : of_next);
      of_nexts[j] = lacks[j] ? Acc(0) : (has_own || is_cut ? rates.gamma(j) : rates.rest(j)) * base;
      if (walk.has(j)) {
        of_next = of_nexts[j];
        carried = is_cut ? Acc(0) : rates.carried(j, own);
      }
    }
    walk.write(params.rewards, bases);
    walk.write(params.values, of_values);
    walk.write(params.next_values, of_nexts);
  }
  if (params.bootstrap_value) params.bootstrap_value[walk.row(params.of_bootstrap)] = cast<T>(of_next);
}

}  // namespace dcs
