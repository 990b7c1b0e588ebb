// Which temporal difference scans of contiguous time are small (cuda/returns/small_rows), and what their blocks take.
// Host code without CUDA or torch types.
#pragma once

#include <cstdint>
#include <optional>

#include "dcs/returns/flat_rows_plan.h"
#include "dcs/scan/plan/rows.h"

namespace dcs {

// Steps of a thread: as few as these where the GPU has room for all threads, else as many as those. A kernel each.
constexpr int small_returns_fewest(int64_t bytes, bool has_ratios) { return bytes == 2 && !has_ratios ? 8 : 4; }
constexpr int small_returns_most(bool has_ratios) { return has_ratios ? 4 : 8; }
// Warps of a block, for which a multiprocessor has registers; where a block takes several rows, at least and at most;
// blocks of a multiprocessor that rows are shared out over.
constexpr int kSmallReturnsWarps = 32;
constexpr int64_t kFewestSmallReturnsWarps = 4, kMostSmallReturnsTileWarps = 16, kSmallReturnsBlocks = 2;

struct SmallReturnsPlan : SmallRowsPlan {
  int steps;  // of a thread
};

// Without ratios, or with ratios and values of the steps' own; flags are bools, and discounts numbers of which a power
// is no larger than they are.
inline bool has_small_form(const ReturnsProblem& p) {
  const FlatForm form = flat_form(p);
  return !p.steps && !p.is_gradient && bytes_of(p.dtype) <= 4 && (!p.terminated.data || p.terminated_is_bool) &&
      (!p.truncated.data || p.truncated_is_bool) &&
      (form == FlatForm::kOwn || form == FlatForm::kLambda || form == FlatForm::kRatios);
}

// So few steps that the GPU has room for all of their threads, whatever their alignment, in rows that fit into a block
// or a cluster.
inline std::optional<SmallReturnsPlan> plan_small_returns(const ReturnsProblem& p, const DeviceLimits& device) {
  if (!is_contiguous(p) || !has_small_form(p) || takes_short_returns(p)) return std::nullopt;
  const bool all_near = (!p.bootstrap_value.data || is_near(p, p.bootstrap_value.strides)) &&
      all_step_operands(p, [&](const void*, const Strides& s, int64_t) { return has_pitch(p, s) && is_near(p, s); });
  if (!all_near) return std::nullopt;
  const int64_t bytes = bytes_of(p.dtype);
  const bool has_ratios = p.rhos.data;
  for (const int steps : {small_returns_fewest(bytes, has_ratios), small_returns_most(has_ratios)}) {
    // Blocks of more rows leave fewer threads without a step of their own.
    for (const int64_t least : {kFewestSmallReturnsWarps, kMostSmallReturnsTileWarps}) {
      // Rows that are longer than a cluster of such blocks holds take less time as flat rows.
      const SmallRowsLimits limits{
          least, kMostSmallReturnsTileWarps, kSmallReturnsWarps, kMostSmallReturnsTileWarps, kSmallReturnsBlocks};
      const auto rows = share_small_rows(p.rows(), p.length, steps, limits, device);
      if (!rows || !are_at_once(*rows, p.rows(), limits, device)) continue;
      SmallReturnsPlan plan{*rows, steps};
      plan.dependent = device.cluster > 0 && plan.blocks <= kDependentBlocks * device.multiprocessors;
      return plan;
    }
  }
  return std::nullopt;
}

}  // namespace dcs
