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
constexpr int kColumnsOfTile = 64;   // at most
constexpr int kChunkBlocks = 8;      // a multiprocessor, over which time is spread
constexpr int64_t kPieceBytes = 24;  // of a sequence in a chunk

// Rows, and columns, that are divided: of so many steps at least, and so many at most for 100 multiprocessors. On an
// H200 rows divided by time then take less time than those of one block each.
constexpr int64_t kLeastDividedRow = 12000, kLeastDividedColumn = 1000;
constexpr int64_t kDividedRowsPercent = 30, kDividedColumnsPercent = 400;

// A walk is all steps of some neighboring rows, the sequences of a tile: of several columns, whose neighboring slots
// are neighboring rows of one step, or of one row whose time is contiguous. Several blocks go through it, one after the
// other in time: each has a chunk, whole tiles.
struct ReturnsPlan {
  bool columns;
  int64_t walks;
  int sequences, parts;  // of a tile; threads of a sequence
  int part_steps;        // 4, 8 or 16; of one row as many as a thread scans
  int tile_steps, slots;
  int64_t chunk_steps, chunks;  // of a walk
  double part_power;            // of gamma * trace where they are numbers, over a part; those of steps count as 1

  int64_t workspace_bytes() const { return walks * chunks * sequences * kPieceBytes; }
};

inline int steps_of_part(int64_t wanted, int64_t most) {
  int64_t steps = 4;
  while (steps < most && steps < wanted) steps *= 2;
  return static_cast<int>(steps);
}

// Of a discount: where it is one a step it is a factor of each.
inline double number_of(const ReturnsDiscount& rate) { return rate.kind == GammaKind::kStep ? 1.0 : rate.value; }

inline bool is_contiguous(const ReturnsProblem& p) { return p.length > 1 && p.rewards.strides.time == 1; }

inline ReturnsPlan plan_returns(const ReturnsProblem& p, int64_t multiprocessors) {
  const int64_t bytes = p.dtype == ElementType::Double ? 8 : p.dtype == ElementType::Float ? 4 : 2;
  const int64_t rows = p.rows(), steps = scan_steps(bytes);
  ReturnsPlan plan{};
  plan.columns = !is_contiguous(p);
  plan.sequences = 1, plan.parts = kScanThreads, plan.part_steps = static_cast<int>(steps);
  if (plan.columns) {
    // Even spans of whole sectors.
    const int64_t even = ceil_div(rows, ceil_div(rows, kColumnsOfTile));
    plan.sequences =
        static_cast<int>(rows <= kColumnsOfTile ? rows : std::min<int64_t>(kColumnsOfTile, ceil_div(even, 16) * 16));
    plan.parts = static_cast<int>(std::min<int64_t>(kScanThreads / plan.sequences, ceil_div(p.length, steps)));
    plan.part_steps = steps_of_part(ceil_div(p.length, plan.parts), steps);
  }
  plan.walks = ceil_div(rows, plan.sequences);
  plan.tile_steps = plan.parts * plan.part_steps;
  plan.slots = plan.tile_steps * plan.sequences;
  const int64_t tiles = ceil_div(p.length, plan.tile_steps),
                chunks = std::min(tiles, ceil_div(kChunkBlocks * multiprocessors, plan.walks));
  plan.chunk_steps = ceil_div(tiles, chunks) * plan.tile_steps;
  plan.chunks = ceil_div(p.length, plan.chunk_steps);
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
  const bool rows = is_contiguous(p);
  if (p.steps || p.length < (rows ? kLeastDividedRow : kLeastDividedColumn)) return std::nullopt;
  if (p.rows() * 100 > multiprocessors * (rows ? kDividedRowsPercent : kDividedColumnsPercent)) return std::nullopt;
  if (!counts_in_32_bits(p)) return std::nullopt;
  const ReturnsPlan plan = plan_returns(p, multiprocessors);
  return plan.chunks > 1 ? std::optional<ReturnsPlan>(plan) : std::nullopt;
}

}  // namespace dcs
