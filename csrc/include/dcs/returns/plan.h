// What the plans of a temporal difference scan ask of its tensors, and of which scans a thread takes a column. Host
// code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "dcs/limits.h"
#include "dcs/returns/forms.h"
#include "dcs/scan/plan/powers.h"
#include "dcs/scan/plan/traits.h"

namespace dcs {

inline bool has_row_rates(const ReturnsProblem& p) {
  return p.gamma.kind == GammaKind::kRow || p.trace.kind == GammaKind::kRow;
}

// The strides of all operands with a value for every step, and of the others.
template <typename Problem, typename Visit>
void each_step_strides(Problem& p, const Visit& visit) {
  for (auto* input : {&p.rewards, &p.values, &p.next_values, &p.rhos, &p.terminated, &p.truncated})
    if (input->data) visit(input->strides);
  for (auto* rate : {&p.gamma, &p.trace})
    if (rate->kind == GammaKind::kStep) visit(rate->tensor.strides);
  for (auto* output : {&p.advantages, &p.targets, &p.pg_advantages})
    if (output->data) visit(output->strides);
}
template <typename Problem, typename Visit>
void each_row_strides(Problem& p, const Visit& visit) {
  if (p.bootstrap_value.data) visit(p.bootstrap_value.strides);
  if (p.bootstrap_gradient.data) visit(p.bootstrap_gradient.strides);
  for (auto* rate : {&p.gamma, &p.trace})
    if (rate->kind == GammaKind::kRow) visit(rate->tensor.strides);
}

inline bool is_contiguous(const ReturnsProblem& p) {
  // Gradients of sums are one element everywhere.
  const Strides* like = &p.rewards.strides;
  if (p.is_gradient) like = &(p.advantages.data ? p.advantages : p.targets.data ? p.targets : p.pg_advantages).strides;
  return p.length > 1 && like->time == 1;
}

// Rows whose time is contiguous as one dimension, where their strides allow it.
inline ReturnsProblem with_rows_together(const ReturnsProblem& p) {
  if (!is_contiguous(p) || p.inner == 1) return p;
  bool are_even = true;
  const auto is_even = [&](const Strides& s) { are_even = are_even && (p.outer == 1 || s.outer == p.inner * s.inner); };
  each_step_strides(p, is_even);
  each_row_strides(p, is_even);
  if (!are_even) return p;
  ReturnsProblem together = p;
  together.outer = p.outer * p.inner;
  together.inner = 1;
  const auto join = [](Strides& s) { s.outer = s.inner; };
  each_step_strides(together, join);
  each_row_strides(together, join);
  return together;
}

// Whether all steps of all columns lie one behind the other in every tensor.
inline bool lies_linear(const ReturnsProblem& p) {
  bool is_linear = true;
  each_step_strides(p, [&](const Strides& s) {
    is_linear = is_linear && (p.inner == 1 || s.inner == 1) && (p.length == 1 || s.time == p.inner) &&
        (p.outer == 1 || s.outer == p.length * p.inner);
  });
  return is_linear;
}

// Whether sizes and strides are 32-bit numbers, as the kernels count.
inline bool counts_in_32_bits(const ReturnsProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  bool fits = p.outer * p.length <= kMost && p.length * p.inner <= kMost && p.inner <= kMost;
  const auto is_near = [&](const Strides& s) { fits = fits && std::abs(s.time) < kMost / 8 && s.inner < kMost / 8; };
  each_step_strides(p, is_near);
  each_row_strides(p, is_near);
  return fits;
}

// Columns that fill the GPU, so many for each multiprocessor, or few steps: a thread may take each serially.
// Neighboring ones that are a sector of memory at least, for all that a longer column reads is to be used. Blocks share
// out the steps of float columns of the common forms, and tiles those of other columns with as many steps as
// kLeastTiledColumn, which is faster as long as columns are fewer.
constexpr int64_t kSerialReturnsColumns = 64, kSerialReturnsLongColumns = 160, kSerialReturnsFloatColumns = 256,
                  kFewSerialReturnsSteps = 16, kSerialReturnsSector = 32;
constexpr int64_t kLeastTiledColumn = 64;

inline bool takes_serial_columns(const ReturnsProblem& p, int64_t multiprocessors) {
  if (p.steps || is_contiguous(p) || !counts_in_32_bits(p) || p.rows() >= int64_t{1} << 31) return false;
  if (p.length <= kFewSerialReturnsSteps) return true;
  const bool blocks_share = p.dtype == ElementType::Float && form_of(p) != kAnyForm;
  const int64_t least = blocks_share  ? kSerialReturnsFloatColumns
      : p.length >= kLeastTiledColumn ? kSerialReturnsLongColumns
                                      : kSerialReturnsColumns;
  return p.rows() >= least * multiprocessors && p.inner * bytes_of(p.dtype) >= kSerialReturnsSector;
}

// Visits the operands with a value for every step: pointer, strides, bytes of an element. True where `test` is for all.
template <typename Test>
bool all_step_operands(const ReturnsProblem& p, const Test& test) {
  const int64_t bytes = bytes_of(p.dtype);
  const auto input = [&](const ReturnsInput& of, int64_t size) { return !of.data || test(of.data, of.strides, size); };
  const auto output = [&](const ReturnsOutput& of) { return !of.data || test(of.data, of.strides, bytes); };
  const auto rate = [&](const ReturnsDiscount& of) {
    return of.kind != GammaKind::kStep || input(of.tensor, bytes_of(of.dtype));
  };
  return input(p.rewards, bytes) && input(p.values, bytes) && input(p.next_values, bytes) && input(p.rhos, bytes) &&
      input(p.terminated, p.terminated_is_bool ? 1 : bytes) && input(p.truncated, p.truncated_is_bool ? 1 : bytes) &&
      rate(p.gamma) && rate(p.trace) && output(p.advantages) && output(p.targets) && output(p.pg_advantages);
}

// Where rows' values behind them lie apart by one stride.
inline bool has_even_bootstrap(const ReturnsProblem& p) {
  const Strides& s = p.bootstrap_value.strides;
  return !p.bootstrap_value.data || p.inner == 1 || p.outer == 1 || s.outer == s.inner * p.inner;
}

// Rows of 1, 2, 4 or 8 vectors of 16 bytes, one behind the other (cuda/returns/small.cuh): a lane has a vector. As flat
// rows those of 64 bytes and less take up to twice the time.
constexpr int64_t kMostShortRowLanes = 8;

inline bool takes_short_returns(const ReturnsProblem& p) {
  const int64_t vector = 16 / bytes_of(p.dtype), lanes = p.length / vector;
  if (p.steps || bytes_of(p.dtype) > 4 || form_of(p) == kAnyForm || p.length % vector || lanes < 1 ||
      lanes > kMostShortRowLanes || (lanes & (lanes - 1)) || !has_even_bootstrap(p))
    return false;
  return all_step_operands(p, [&](const void* data, const Strides& s, int64_t bytes) {
    return s.time == 1 && (p.inner == 1 || s.inner == p.length) && (p.outer == 1 || s.outer == p.inner * p.length) &&
        reinterpret_cast<uintptr_t>(data) % (vector * bytes) == 0;
  });
}

}  // namespace dcs
