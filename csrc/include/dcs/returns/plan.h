// Into what pieces a temporal difference scan of any shape is cut (cuda/returns/chunks). Host code without CUDA or
// torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "dcs/limits.h"
#include "dcs/returns/problem.h"
#include "dcs/scan/plan/powers.h"

namespace dcs {

// Threads of a block, of which some scan; steps of one of those, at most: a tile is in shared memory.
constexpr int kChunkThreads = 256, kScanThreads = 128;
constexpr int scan_steps(int64_t element_bytes) { return element_bytes > 4 ? 8 : 16; }
constexpr int tile_slots(int64_t element_bytes) { return kScanThreads * scan_steps(element_bytes); }
constexpr int kColumnsOfTile = 64;  // at most, where they have more steps than a thread scans
// Blocks a multiprocessor, at least, for which nobody divides rows; that divided rows are spread over.
constexpr int kWholeRowBlocks = 3, kChunkBlocks = 8, kRowBlocks = 16;

// Rows, and columns, that are divided: of so many steps at least, and so many at most for 100 multiprocessors. On an
// H200 rows divided by time then take less time than those of one block each.
constexpr int64_t kLeastDividedRow = 12000, kLeastDividedColumn = 1000;
constexpr int64_t kDividedRowsPercent = 30, kDividedColumnsPercent = 400;

// How a tile lies in time: neighboring slots are neighboring rows of one step; steps of several rows, each scanned by
// threads of its own; steps of rows one behind the other, scanned as one sequence that is cut where a row ends.
enum class ReturnsOrder { kColumns, kRows, kFlat };

// A walk is what one block goes through, or several blocks one after the other in time, its chunks.
struct ReturnsPlan {
  ReturnsOrder order;
  int64_t walk_rows, walks;
  int64_t walk_steps;    // flat: of all its rows
  int sequences, parts;  // of a tile; threads of a sequence
  int part_steps;        // 4, 8 or 16
  int tile_steps, slots;
  int64_t chunk_steps, chunks;  // of a walk
  double part_power;            // of gamma * trace where they are numbers, over a part; those of steps count as 1

  int64_t workspace_bytes() const { return chunks > 1 ? walks * chunks * sequences * 24 : 0; }
};

inline int steps_of_part(int64_t wanted, int64_t most) {
  int64_t steps = 4;
  while (steps < most && steps < wanted) steps *= 2;
  return static_cast<int>(steps);
}

// Rows are divided among blocks where there are too few of them.
inline void divide_walks(ReturnsPlan& plan, int64_t multiprocessors) {
  const int64_t tiles = ceil_div(plan.walk_steps, plan.tile_steps);
  int64_t chunks = 1;
  if (plan.walks < kWholeRowBlocks * multiprocessors)
    chunks = std::min(tiles, ceil_div(kChunkBlocks * multiprocessors, plan.walks));
  plan.chunk_steps = ceil_div(tiles, chunks) * plan.tile_steps;
  plan.chunks = ceil_div(plan.walk_steps, plan.chunk_steps);
}

inline ReturnsPlan plan_columns_of_returns(const ReturnsProblem& p, int64_t bytes, int64_t multiprocessors) {
  const int64_t rows = p.rows(), length = p.length, steps = scan_steps(bytes);
  ReturnsPlan plan{};
  plan.order = ReturnsOrder::kColumns;
  const int64_t most = length <= steps ? kScanThreads : kColumnsOfTile, even = ceil_div(rows, ceil_div(rows, most));
  plan.walk_rows = rows <= most ? rows : std::min(most, ceil_div(even, 16) * 16);
  plan.walks = ceil_div(rows, plan.walk_rows);
  plan.walk_steps = length;
  plan.sequences = static_cast<int>(plan.walk_rows);
  plan.parts = static_cast<int>(std::min(kScanThreads / plan.walk_rows, ceil_div(length, steps)));
  plan.part_steps = steps_of_part(ceil_div(length, plan.parts), steps);
  plan.tile_steps = plan.parts * plan.part_steps;
  plan.slots = plan.tile_steps * plan.sequences;
  divide_walks(plan, multiprocessors);
  return plan;
}

// Rows of a walk, so that tiles are full.
inline int64_t rows_of_walk(int64_t rows, int64_t length, int64_t slots, int64_t multiprocessors) {
  if (length > slots) {
    for (int64_t n = 1; n <= 4 && rows / n >= 2 * kWholeRowBlocks * multiprocessors; ++n)
      if (10 * n * length >= 9 * ceil_div(n * length, slots) * slots) return n;
    return 1;
  }
  if (rows * length <= kRowBlocks * multiprocessors * slots)
    return std::min(ceil_div(rows, multiprocessors), slots / length);
  const int64_t tiles = rows * length / (kRowBlocks * multiprocessors) / slots;
  int64_t best = 0, best_tiles = 1;
  for (int64_t m = tiles; m < tiles + 4; ++m) {
    const int64_t n = m * slots / length;
    if (n * best_tiles > best * m) best = n, best_tiles = m;
  }
  return best;
}

inline ReturnsPlan plan_rows_of_returns(const ReturnsProblem& p, int64_t bytes, int64_t multiprocessors) {
  const int64_t rows = p.rows(), steps = scan_steps(bytes), slots = tile_slots(bytes);
  const bool own_rates = p.gamma.kind == GammaKind::kRow || p.trace.kind == GammaKind::kRow;
  ReturnsPlan plan{};
  plan.part_steps = static_cast<int>(steps);
  if (own_rates && p.length <= slots) {
    plan.order = ReturnsOrder::kRows;
    plan.part_steps = steps_of_part(p.length, steps);
    plan.parts = static_cast<int>(ceil_div(p.length, plan.part_steps));
    plan.walk_rows = std::min(rows, int64_t{kScanThreads / plan.parts});
    plan.sequences = static_cast<int>(plan.walk_rows);
    plan.tile_steps = plan.parts * plan.part_steps;
    plan.slots = plan.tile_steps * plan.sequences;
  } else {
    plan.order = ReturnsOrder::kFlat;
    plan.parts = kScanThreads;
    plan.walk_rows = own_rates ? 1 : std::min(rows, rows_of_walk(rows, p.length, slots, multiprocessors));
    plan.sequences = 1;
    plan.tile_steps = plan.slots = static_cast<int>(slots);
  }
  plan.walks = ceil_div(rows, plan.walk_rows);
  plan.walk_steps = plan.order == ReturnsOrder::kRows ? p.length : plan.walk_rows * p.length;
  plan.chunks = 1;
  plan.chunk_steps = ceil_div(plan.walk_steps, plan.tile_steps) * plan.tile_steps;
  if (plan.order == ReturnsOrder::kFlat && plan.walk_rows == 1) divide_walks(plan, multiprocessors);
  return plan;
}

// Of a discount: where it is one a step it is a factor of each.
inline double number_of(const ReturnsDiscount& rate) { return rate.kind == GammaKind::kStep ? 1.0 : rate.value; }

inline bool is_contiguous(const ReturnsProblem& p) { return p.length > 1 && p.rewards.strides.time == 1; }

inline ReturnsPlan plan_returns(const ReturnsProblem& p, int64_t multiprocessors) {
  const int64_t bytes = p.dtype == ElementType::Double ? 8 : p.dtype == ElementType::Float ? 4 : 2;
  ReturnsPlan plan = is_contiguous(p) ? plan_rows_of_returns(p, bytes, multiprocessors)
                                      : plan_columns_of_returns(p, bytes, multiprocessors);
  plan.part_power = bounded_power(number_of(p.gamma) * number_of(p.trace), plan.part_steps);
  return plan;
}

// Whether sizes and strides are 32-bit numbers, as the kernels count.
inline bool counts_in_32_bits(const ReturnsProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const auto fits = [](const Strides& s) { return std::max({s.outer, s.time, s.inner}) <= kMost; };
  const auto operand_fits = [&](const auto& operand) { return !operand.data || fits(operand.strides); };
  return std::max({p.outer, p.length, p.inner}) <= kMost && operand_fits(p.rewards) && operand_fits(p.values) &&
      operand_fits(p.next_values) && operand_fits(p.bootstrap_value) && operand_fits(p.rhos) &&
      operand_fits(p.terminated) && operand_fits(p.truncated) && operand_fits(p.gamma.tensor) &&
      operand_fits(p.trace.tensor) && operand_fits(p.advantages) && operand_fits(p.targets) &&
      operand_fits(p.pg_advantages);
}

// Where rows are too few to fill the GPU by one block, or one warp of a block, each: then time is divided as well.
inline std::optional<ReturnsPlan> plan_chunks(const ReturnsProblem& p, int64_t multiprocessors) {
  if (p.steps || !counts_in_32_bits(p)) return std::nullopt;
  const bool rows = is_contiguous(p);
  if (p.length < (rows ? kLeastDividedRow : kLeastDividedColumn)) return std::nullopt;
  if (p.rows() * 100 > multiprocessors * (rows ? kDividedRowsPercent : kDividedColumnsPercent)) return std::nullopt;
  const ReturnsPlan plan = plan_returns(p, multiprocessors);
  return plan.chunks > 1 ? std::optional<ReturnsPlan>(plan) : std::nullopt;
}

}  // namespace dcs
