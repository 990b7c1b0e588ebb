// What the kernels of the temporal difference scan are called with in which threads take columns of any strides.
#pragma once

#include <type_traits>

#include "common/divisor.cuh"
#include "dcs/returns/plan.h"
#include "returns/step.cuh"

namespace dcs {

// A tensor, null if it is not there: the last step of its first column. In bytes: to the next outer index, to the next
// cell, and to the step before.
template <typename Byte>
struct ColumnTensor {
  Byte* last = nullptr;
  int64_t outer = 0;
  int cell = 0, back = 0;
};

template <typename Byte>
__device__ __forceinline__ Byte* last_of_cell(const ColumnTensor<Byte>& tensor, uint32_t outer, uint32_t cell) {
  Byte* at = tensor.last + static_cast<int64_t>(static_cast<int>(cell)) * tensor.cell;
  if (outer) at += outer * tensor.outer;
  return at;
}

// A cell is so many neighboring columns as a thread takes.
template <typename Acc>
struct ReturnsColumnParams {
  ColumnTensor<const char> rewards, values, next_values, rhos, gamma, trace, terminated, truncated, bootstrap;
  ColumnTensor<char> advantages, targets, pg_advantages, bootstrap_gradient;
  ReturnsDiscount row_gamma, row_trace;
  Rates<Acc> rates;  // where none is a row's
  Acc clip_rho, clip_c, clip_pg;
  bool row_rates, has_own_values, has_next_values;
  bool of_targets;     // of gradients, as the next one: those of rewards are of targets
  uint32_t ends_lack;  // all bits where an end lacks a next value, and no other step
  bool terminated_is_bool, truncated_is_bool;
  bool gamma_is_narrow, trace_is_narrow;  // those of steps
  uint32_t truncated_drops;               // all bits where a truncated step's next value is not read
  int length;
  uint32_t cells;
  Divisor in_line;

  __device__ __forceinline__ bool has_ratios() const { return rhos.last; }
};

template <typename T>
ReturnsColumnParams<typename Types<T>::Acc> returns_column_params(const ReturnsProblem& p, int unit) {
  using Acc = typename Types<T>::Acc;
  ReturnsColumnParams<Acc> params{};
  const auto set = [&](auto& tensor, auto* data, const Strides& strides, int64_t size) {
    using Byte = std::remove_pointer_t<decltype(tensor.last)>;
    if (!data) return;
    const int64_t back = p.length > 1 ? strides.time * size : 0;
    tensor.last = static_cast<Byte*>(data) + (p.length - 1) * back;
    tensor.outer = p.outer > 1 ? strides.outer * size : 0;
    tensor.cell = static_cast<int>(p.inner > 1 ? strides.inner * size * unit : 0);
    tensor.back = static_cast<int>(-back);
  };
  const auto input = [&](auto& tensor, const ReturnsInput& from, int64_t size) {
    set(tensor, from.data, from.strides, size);
  };
  const auto output = [&](auto& tensor, const ReturnsOutput& to) { set(tensor, to.data, to.strides, sizeof(T)); };
  params.has_own_values = p.values.data && !p.values_are_next;
  params.has_next_values = p.next_values.data;
  params.truncated_drops = params.has_next_values ? 0 : ~0u;
  if (p.is_gradient) params.has_own_values = p.of_own_values, params.has_next_values = p.of_next_values;
  params.of_targets = p.of_targets;
  params.ends_lack = p.ends_lack ? ~0u : 0;
  const bool is_one_stream = !p.is_gradient && !params.has_own_values && params.has_next_values;
  input(params.rewards, p.rewards, sizeof(T));
  input(params.values, is_one_stream ? p.next_values : p.values, sizeof(T));
  if (!is_one_stream) input(params.next_values, p.next_values, sizeof(T));
  input(params.rhos, p.rhos, sizeof(T));
  input(params.terminated, p.terminated, p.terminated_is_bool ? 1 : sizeof(T));
  input(params.truncated, p.truncated, p.truncated_is_bool ? 1 : sizeof(T));
  const auto of_rows = [](const Strides& s) { return Strides{s.outer, 0, s.inner}; };
  input(params.bootstrap, {p.bootstrap_value.data, of_rows(p.bootstrap_value.strides)}, sizeof(T));
  output(params.bootstrap_gradient, {p.bootstrap_gradient.data, of_rows(p.bootstrap_gradient.strides)});
  if (p.gamma.kind == GammaKind::kStep) input(params.gamma, p.gamma.tensor, bytes_of(p.gamma.dtype));
  if (p.trace.kind == GammaKind::kStep) input(params.trace, p.trace.tensor, bytes_of(p.trace.dtype));
  output(params.advantages, p.advantages);
  output(params.targets, p.targets);
  output(params.pg_advantages, p.pg_advantages);
  params.gamma_is_narrow = p.gamma.is_narrow();
  params.trace_is_narrow = p.trace.is_narrow();
  params.row_gamma = p.gamma;
  params.row_trace = p.trace;
  params.row_rates = has_row_rates(p);
  params.rates = rates_beside_steps<Acc>(p);
  params.clip_rho = static_cast<Acc>(p.clip_rho);
  params.clip_c = static_cast<Acc>(p.clip_c);
  params.clip_pg = static_cast<Acc>(p.clip_pg);
  params.terminated_is_bool = p.terminated_is_bool;
  params.truncated_is_bool = p.truncated_is_bool;
  params.length = static_cast<int>(p.length);
  params.cells = static_cast<uint32_t>(p.rows() / unit);
  params.in_line = Divisor(static_cast<uint32_t>(p.inner / unit));
  return params;
}

}  // namespace dcs
