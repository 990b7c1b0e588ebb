// What kernels of returns over n steps ask of a call. Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "dcs/returns/plan.h"

namespace dcs {

// Discounts that are numbers or one a row, and flags that are bool.
inline bool is_plain(const ReturnsProblem& p) {
  return !has_step_rates(p) && p.terminated_is_bool && p.truncated_is_bool;
}

// Roundings of so many steps stay small in float.
constexpr int64_t kFloatSteps = 64;
constexpr int kNStepThreads = 128;

// Whether float holds the product of a window's gates, where that is known. A carry that is not finite must not be lost
// where it vanishes, nor one of 0 become a NaN where it overflows.
inline bool float_holds_window(const ReturnsProblem& p) {
  const double gate = std::fabs(p.gamma.value * p.trace.value);
  if (p.gamma.kind != GammaKind::kNumber || p.trace.kind != GammaKind::kNumber || gate == 0) return true;
  const double product = std::pow(gate, p.steps);
  return product >= FLT_MIN && product <= FLT_MAX;
}

// Steps that are worth a thread of n_step_blocks.cuh, where there are fewer in a window.
constexpr int64_t kLeastShare = 16;
inline int64_t share_of(int64_t n) { return n * std::max<int64_t>(1, kLeastShare / n); }

// Tiles of elements in shared memory (n_step_windows.cuh), and how many of them threads have, and ask for at once.
constexpr int kNStepWindowThreads = 256, kNStepWindowBatch = 4;
constexpr int window_elements(int64_t number_bytes) { return number_bytes == 8 ? 4 : 8; }

// Elements of a tile whose windows, and the step behind them, it has all of: half of them at least.
inline int64_t window_outputs(const ReturnsProblem& p, int64_t number_bytes) {
  return kNStepWindowThreads * window_elements(number_bytes) - p.steps;
}
static_assert(2 * kFloatSteps <= kNStepWindowThreads * window_elements(8));

// Whether each tensor's rows lie one behind the other.
inline bool windows_are_packed(const ReturnsProblem& p) {
  return all_step_operands(p, [&](const void*, const Strides& s, int64_t) {
    return std::abs(s.time) == 1 && (p.inner == 1 || s.inner == p.length) &&
        (p.outer == 1 || s.outer == p.inner * p.length);
  });
}
// A single column is as good as a row. Discounts of rows are not known to leave float room for their products. Blocks
// of so few steps that neighboring threads find them in one sector of memory are faster by n_step_blocks.cuh: half
// precision of 9 to 16 steps took 1.05 to 1.4 times as long in tiles on an H200, others 0.55 to 0.86.
constexpr int64_t kWindowSector = 32;
inline bool takes_n_step_windows(const ReturnsProblem& p) {
  const bool is_wide = p.dtype == ElementType::Double || (!has_row_rates(p) && float_holds_window(p));
  const bool is_row = std::abs(p.rewards.strides.time) == 1 || p.rows() == 1;
  const bool is_near = p.steps > kLeastShare / 2 && p.steps * bytes_of(p.dtype) <= kWindowSector;
  return is_row && !is_near && is_wide && is_plain(p) && p.steps <= kFloatSteps && counts_in_32_bits(p) &&
      p.rows() * p.length < int64_t{1} << 30;
}

// Windows whose beginnings a block has room for.
inline bool takes_n_step_blocks(const ReturnsProblem& p, int64_t shared_bytes) {
  constexpr int64_t kMany = int64_t{1} << 31;
  return counts_in_32_bits(p) && p.rows() < kMany && p.rows() * ceil_div(p.length, share_of(p.steps)) < kMany &&
      p.steps * kNStepThreads * 8 + 1024 <= shared_bytes;
}

}  // namespace dcs
