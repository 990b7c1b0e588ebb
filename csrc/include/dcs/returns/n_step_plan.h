// What kernels of returns over n steps ask of a call. Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

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

// Windows whose beginnings a block has room for.
inline bool takes_n_step_blocks(const ReturnsProblem& p, int64_t shared_bytes) {
  constexpr int64_t kMany = int64_t{1} << 31;
  return counts_in_32_bits(p) && p.rows() < kMany && p.rows() * ceil_div(p.length, share_of(p.steps)) < kMany &&
      p.steps * kNStepThreads * 8 + 1024 <= shared_bytes;
}

}  // namespace dcs
