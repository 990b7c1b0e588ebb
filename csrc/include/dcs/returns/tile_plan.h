// Into what tiles a temporal difference scan along a strided time is cut (cuda/returns/tile_columns). Host code without
// CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "dcs/returns/plan.h"
#include "dcs/scan/plan/columns.h"

namespace dcs {

// Next states' values beside its own are in every form.
inline WalkForm tile_form(const ReturnsProblem& p) {
  if (p.gamma.kind == GammaKind::kStep || p.trace.kind == GammaKind::kStep) return WalkForm::kAll;
  return p.rhos.data || p.pg_advantages.data ? WalkForm::kRatios : WalkForm::kPlain;
}

// Steps of a cell that a thread holds: as many as leave room for so many blocks a multiprocessor.
constexpr int tile_column_steps(int64_t bytes, int unit, WalkForm form) {
  if (bytes > 4) return form == WalkForm::kPlain ? 8 : 4;
  return (form == WalkForm::kPlain ? 16 : form == WalkForm::kRatios && bytes == 2 && unit == 1 ? 12 : 8) / unit;
}
constexpr int tile_column_blocks(int64_t bytes) { return bytes > 4 ? 2 : 3; }

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

// So many neighboring columns make a word, in every operand.
inline bool columns_make_words(const ReturnsProblem& p, int unit) {
  return p.inner % unit == 0 && all_step_operands(p, [&](const void* data, const Strides& s, int64_t bytes) {
    return s.inner == 1 && reinterpret_cast<uintptr_t>(data) % (unit * bytes) == 0 && s.time % unit == 0 &&
        s.outer % unit == 0;
  });
}
inline bool columns_pair(const ReturnsProblem& p) { return columns_make_words(p, 2); }

// Every operand's rows of columns are whole words of 16 bytes, and there is a column for every lane of a warp.
inline bool columns_take_words(const ReturnsProblem& p) {
  return p.length > 1 && p.inner >= 32 && all_step_operands(p, [&](const void* data, const Strides& s, int64_t bytes) {
    const auto whole = [&](int64_t elements) { return elements * bytes % 16 == 0; };
    return s.inner == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && whole(p.inner) && whole(s.time) &&
        (p.outer == 1 || whole(s.outer));
  });
}

// What carries between tiles are multiplied by, as the scan of differences has it.
inline ScanProblem carried_scan(const ReturnsProblem& p) {
  ScanProblem scan{};
  scan.dtype = p.dtype;
  scan.outer = p.outer, scan.length = p.length, scan.inner = p.inner;
  scan.reverse = true;
  const auto number = [](const ReturnsDiscount& rate) { return rate.kind == GammaKind::kNumber ? rate.value : 1.0; };
  scan.gamma_kind = tile_form(p) != WalkForm::kPlain ? GammaKind::kStep
      : has_row_rates(p)                             ? GammaKind::kRow
                                                     : GammaKind::kNumber;
  scan.gamma_value = number(p.gamma) * number(p.trace);
  return scan;
}

// A thread's fewest steps in a tile, a batch of them.
constexpr int kFewestTileSteps = 8, kTileBatch = 4;

// Any strides and options.
inline std::optional<HeldColumnsPlan> plan_tiles(const ReturnsProblem& p, int64_t multiprocessors, bool has_clusters) {
  const ScanProblem scan = carried_scan(p);
  if (p.steps || !counts_in_32_bits(p) || !powers_fold(scan) || p.rows() >= int64_t{1} << 31) return std::nullopt;
  const WalkForm form = tile_form(p);
  const bool step = form != WalkForm::kPlain;
  const int64_t bytes = bytes_of(p.dtype);
  HeldColumnsPlan plan{};
  plan.pairs = bytes == 2 && form != WalkForm::kAll && columns_pair(p);
  const int columns = plan.pairs ? 2 : 1;
  const int64_t folded_span = share_cells(plan, p.outer, p.inner / columns, step);
  const int64_t most = tile_column_steps(bytes, columns, form), least = std::min<int64_t>(most, kFewestTileSteps);
  // As many blocks for every multiprocessor; lanes read some tiles at most at once.
  const int64_t whole = ceil_div(p.length, plan.parts * most);
  const int64_t at_once_read = int64_t{1} << (plan.fan_bits + most_read_bits(step));
  const int64_t spread = whole == 1 ? 1 : ceil_div(plan.walks * whole, multiprocessors) * multiprocessors / plan.walks;
  const int64_t tiles = std::max(whole, whole <= at_once_read ? std::min(spread, at_once_read) : spread);
  const auto even_steps = [&](int64_t of) { return ceil_div(p.length, of * plan.parts * kTileBatch) * kTileBatch; };
  plan.part_steps = static_cast<int>(std::max(least, even_steps(tiles)));
  plan.tiles = ceil_div(p.length, int64_t{plan.part_steps} * plan.parts);
  share_words(plan, folded_span, tile_column_blocks(bytes) * multiprocessors, step);
  fill_held_powers(plan, scan.gamma_value);
  const int64_t blocks = plan.walks * plan.tiles;
  plan.dependent =
      has_clusters && p.rows() * p.length <= kMostEarlyElements && blocks <= kEarlyBlocks * multiprocessors;
  if (plan.tiles > 1)
    plan.workspace_bytes = (plan.tiles + 2 * plan.groups) * plan.walks * plan.span * 16 * (step ? 2 * columns : 1);
  // Blocks and words are counted in 32 bits.
  return blocks * plan.span * columns < int64_t{1} << 30 ? std::optional<HeldColumnsPlan>(plan) : std::nullopt;
}

// Whole words of enough columns for most multiprocessors (returns/warp_columns.cuh).
inline bool takes_warp_columns(const ReturnsProblem& p, int64_t multiprocessors) {
  const int64_t columns = bytes_of(p.dtype) == 2 ? 64 : 32;
  return form_of(p) != kAnyForm && bytes_of(p.dtype) <= 4 && columns_take_words(p) &&
      p.outer * ceil_div(p.inner, columns) * 4 >= multiprocessors * 3;
}

// Few columns one beside the other with time outside, all of it in registers (returns/small.cuh): kSmallColumns of them
// a block, kSmallSteps steps a lane, at most kSmallWarps warps. A block's loads ask for every row of memory that it has
// a step of, and for whole sectors of 32 bytes there: with fewer columns a block, for more blocks, or wider words of
// fewer lanes it was slower. Two blocks a multiprocessor at most: with more the other kernels have enough of them, and
// read longer pieces of memory.
constexpr int kSmallColumns = 8, kSmallSteps = 4, kSmallWarps = 16, kSmallWarpSteps = 32 / kSmallColumns * kSmallSteps;

inline bool takes_few_columns(const ReturnsProblem& p, int64_t multiprocessors) {
  if (bytes_of(p.dtype) > 4 || form_of(p) == kAnyForm || p.outer != 1 || p.length > kSmallWarps * kSmallWarpSteps ||
      p.rows() > 2 * kSmallColumns * multiprocessors)
    return false;
  return all_step_operands(p, [&](const void*, const Strides& s, int64_t) {
    return (p.inner == 1 || s.inner == 1) && (p.length == 1 || s.time == p.inner);
  });
}

// Fewer steps than kLeastTiledColumn are a round of blocks that share a column's time (returns/block_columns.cuh).
inline std::optional<HeldColumnsPlan> plan_tile_columns(
    const ReturnsProblem& p, int64_t multiprocessors, bool has_clusters) {
  if (is_contiguous(p) || p.length < kLeastTiledColumn || takes_walk(p, multiprocessors) ||
      takes_few_columns(p, multiprocessors) || takes_warp_columns(p, multiprocessors))
    return std::nullopt;
  return plan_tiles(p, multiprocessors, has_clusters);
}

// Kernels that blocks share time in have a plan and a workspace: of plan_tile_columns(...), else of plan_chunks(...),
// whose problem has its rows together.
struct ReturnsPlans {
  std::optional<HeldColumnsPlan> tiles;
  std::optional<ReturnsPlan> chunks;
  int64_t workspace_bytes() const { return tiles ? tiles->workspace_bytes : chunks ? chunks->workspace_bytes() : 0; }
};

}  // namespace dcs
