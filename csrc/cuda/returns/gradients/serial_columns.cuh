// All of it in one kernel, where there are enough columns to fill the GPU, or few steps: one thread per column, serial
// in time, which it reads a batch at a time, all loads of a batch before the first use.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "returns/gradients/params.cuh"

namespace dcs {

constexpr int kSerialGradientsThreads = 128;

// Loads of a batch: enough bytes in flight to saturate memory.
template <typename T, bool kFactors>
constexpr int kSerialGradientsBatch = sizeof(T) > 4 || kFactors ? 4 : 8;

// A thread's column.
template <typename T, int kBatch>
struct Column {
  const GradientsParams<T>& params;
  uint32_t slow, within;  // the column, `within` beside time
  int64_t step = 0;       // the batch's first one

  __device__ __forceinline__ explicit Column(const GradientsParams<T>& given) : params(given) {
    const uint32_t number = blockIdx.x * kSerialGradientsThreads + threadIdx.x;
    slow = params.shape.slow == 1 ? 0 : params.by_within.of(number);
    within = number - slow * params.by_within.divisor;
  }
  __device__ __forceinline__ bool is_there() const {
    return slow < params.shape.slow && within < params.by_within.divisor;
  }
  __device__ __forceinline__ bool goes_on() const { return step < params.length; }
  __device__ __forceinline__ bool has(int j) const { return step + j < params.length; }
  __device__ __forceinline__ bool is_last(int j) const { return step + j == params.length - 1; }
  // The offset of a per-row value.
  __device__ __forceinline__ int64_t row(const Strides& strides) const { return strides.at(slow, within); }
  template <typename Element>
  __device__ __forceinline__ Element* address(const GradientsOperand<Element>& operand) const {
    return operand.data + (slow * operand.slow + within * operand.within + step * operand.time);
  }
  // Steps of the batch; those beyond the column's end are read as its last one is.
  template <typename To, typename Element>
  __device__ __forceinline__ void read(const GradientsOperand<Element>& from, To (&to)[kBatch]) const {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) to[j] = To();
    if (!from.data) return;
    Element* const begin = address(from);
    const int last = static_cast<int>(min(params.length - 1 - step, int64_t{kBatch - 1}));
#pragma unroll
    for (int j = 0; j < kBatch; ++j) to[j] = static_cast<To>(begin[min(j, last) * from.time]);
  }
  template <typename Element, typename Value>
  __device__ __forceinline__ void write(const GradientsOperand<Element>& to, const Value (&values)[kBatch]) const {
    if (!to.data) return;
    Element* const begin = address(to);
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (has(j)) begin[j * to.time] = cast<Element>(values[j]);
  }
};

// The discounts of a column. kSteps: they may be per step.
template <typename T, int kBatch, bool kSteps>
struct ColumnRates {
  using Acc = typename Types<T>::Acc;
  Rates<Acc> row;
  bool has_steps;
  Acc gammas[kBatch], traces[kBatch];

  __device__ __forceinline__ explicit ColumnRates(const Column<T, kBatch>& column)
      : row(column.params.rates), has_steps(kSteps && column.params.step_rates) {
    if (column.params.row_rates)
      row = rates_of<Acc>(column.params.gamma, column.params.trace, column.row(column.params.gamma.tensor.strides),
          column.row(column.params.trace.tensor.strides));
  }
  __device__ __forceinline__ void read(const Column<T, kBatch>& column) {
    if (!has_steps) return;
    if (column.params.step_gamma.data) column.read(column.params.step_gamma, gammas);
    if (column.params.step_trace.data) column.read(column.params.step_trace, traces);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!column.params.step_gamma.data) gammas[j] = row.gamma;
      if (!column.params.step_trace.data) traces[j] = row.trace;
    }
  }
  __device__ __forceinline__ Acc gamma(int j) const { return has_steps ? gammas[j] : row.gamma; }
  // The share of gamma that the next target leaves to the next state's value.
  __device__ __forceinline__ Acc rest(int j) const { return has_steps ? gammas[j] - gammas[j] * traces[j] : row.rest; }
  // gamma * lambda * y
  __device__ __forceinline__ Acc carried(int j, Acc y) const {
    return has_steps ? gammas[j] * traces[j] * y : row.gate.step(Acc(0), y);
  }
};

// kFactors: there may be ratios, per-step discounts, or gradients of policy-gradient advantages.
template <typename T, bool kFactors>
__global__ void __launch_bounds__(kSerialGradientsThreads)
    gradients_serial_columns_kernel(const __grid_constant__ GradientsParams<T> params) {
  overlap_launches();
  using Acc = typename Types<T>::Acc;
  constexpr int kBatch = kSerialGradientsBatch<T, kFactors>;
  Column<T, kBatch> column(params);
  if (!column.is_there()) return;
  ColumnRates<T, kBatch, kFactors> rates(column);
  const bool has_ratios = params.rhos.data, has_own = params.has_own_values;
  // From the step before: the carry, and the gradient of its next state's value.
  Acc carried = 0, of_next = 0;
#pragma unroll 1
  for (; column.goes_on(); column.step += kBatch) {
    T of_advantages[kBatch], of_targets[kBatch], of_pg[kBatch], rhos[kBatch];
    bool ends[kBatch], lacks[kBatch];
    column.read(params.of_advantages, of_advantages);
    column.read(params.of_targets, of_targets);
    column.read(params.ends, ends);
    column.read(params.lacks_after, lacks);
    if constexpr (kFactors) {
      column.read(params.of_pg, of_pg);
      column.read(params.rhos, rhos);
      rates.read(column);
    }
    Acc bases[kBatch], of_values[kBatch], of_nexts[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const Acc of_target = cast<Acc>(of_targets[j]);
      const Acc s = cast<Acc>(of_advantages[j]) + of_target + carried;
      Acc base = s, own = s;  // own: the carry, before discounts
      if constexpr (kFactors) {
        const Acc rho = cast<Acc>(rhos[j]), of_policy = ratio_of(has_ratios, rho, params.clip_pg) * cast<Acc>(of_pg[j]);
        base = ratio_of(has_ratios, rho, params.clip_rho) * s + of_policy;
        own = ratio_of(has_ratios, rho, params.clip_c) * s + of_policy;
      }
      const bool is_cut = ends[j] || column.is_last(j);
      bases[j] = base;
      of_values[j] = (has_own ? of_target - base : Acc(0)) + (params.has_next_values ? Acc(0) : of_next);
      of_nexts[j] = lacks[j] ? Acc(0) : (has_own || is_cut ? rates.gamma(j) : rates.rest(j)) * base;
      if (column.has(j)) {
        of_next = of_nexts[j];
        carried = is_cut ? Acc(0) : rates.carried(j, own);
      }
    }
    column.write(params.rewards, bases);
    column.write(params.values, of_values);
    column.write(params.next_values, of_nexts);
  }
  if (params.bootstrap_value) params.bootstrap_value[column.row(params.of_bootstrap)] = cast<T>(of_next);
}

}  // namespace dcs
