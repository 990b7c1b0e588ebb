// Into what pieces a temporal difference scan of any shape is cut (cuda/returns/chunks). Host code without CUDA or
// torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "dcs/limits.h"
#include "dcs/returns/forms.h"
#include "dcs/scan/plan/powers.h"
#include "dcs/scan/plan/traits.h"

namespace dcs {

// Threads of a block; steps that one of them scans, at most: a tile is in shared memory. Except in rows that are one
// piece of memory they are odd, so that neighboring parts are in different banks.
constexpr int kChunkThreads = 256;
constexpr int scan_steps(int64_t element_bytes) { return element_bytes > 4 ? 8 : 16; }
constexpr int column_steps(int64_t element_bytes) { return element_bytes > 4 ? 7 : 15; }
constexpr int column_unit(int64_t element_bytes) { return element_bytes > 4 ? 7 : 5; }
constexpr int tile_slots(int64_t element_bytes) { return kChunkThreads * scan_steps(element_bytes); }
constexpr int kColumnsOfTile = 64;   // at most
constexpr int kChunkBlocks = 8;      // a multiprocessor, over which time is spread
constexpr int64_t kPieceBytes = 24;  // of a sequence in a chunk

// Lines are the steps of all rows of a column one after the other, `outer` times `length`, or where long rows have
// rates of their own those of one row. A walk is all lines of some neighboring columns, the sequences of a tile.
// Several blocks go through it, one after the other in time: each has a chunk, of whole rows or of whole tiles.
struct ReturnsPlan {
  bool linear;      // a tile is one piece of memory
  bool rows_apart;  // a walk is in one row
  bool row_gates;   // rates of rows are read for every step
  int64_t spans, walks, lines;
  int sequences, parts;  // of a tile; threads of a sequence
  int part_steps;        // of a thread
  int tile_steps, slots;
  int64_t chunk_steps, chunks;   // of a walk
  bool whole;                    // chunks begin and end where rows do
  double powers[8], tile_power;  // of gamma * trace, where they are numbers, over 1, 2, 4, ... parts, and over a tile

  // What a discount is besides the factors of steps.
  double rate_of(const ReturnsDiscount& rate) const {
    return rate.kind == GammaKind::kStep || (row_gates && rate.kind == GammaKind::kRow) ? 1.0 : rate.value;
  }
  // Rows without anything between them.
  constexpr bool is_one_piece() const { return linear && sequences == 1; }
  int64_t workspace_bytes() const { return whole ? 0 : walks * chunks * sequences * kPieceBytes; }
};

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
  for (auto* rate : {&p.gamma, &p.trace})
    if (rate->kind == GammaKind::kRow) visit(rate->tensor.strides);
}

inline bool is_contiguous(const ReturnsProblem& p) { return p.length > 1 && p.rewards.strides.time == 1; }

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

inline bool lies_linear(const ReturnsProblem& p) {
  bool is_linear = p.inner <= kColumnsOfTile;
  each_step_strides(p, [&](const Strides& s) {
    is_linear = is_linear && (p.inner == 1 || s.inner == 1) && (p.length == 1 || s.time == p.inner) &&
        (p.outer == 1 || s.outer == p.length * p.inner);
  });
  return is_linear;
}

// Sequences of tiles that are no pieces of memory, a power of two: those that leave the fewest without a column.
inline int even_sequences(int64_t columns) {
  int best = kColumnsOfTile;
  const auto lanes = [&](int64_t sequences) { return ceil_div(columns, sequences) * sequences; };
  for (int sequences = kColumnsOfTile / 2; sequences >= 1; sequences /= 2) {
    // Fewer than 16 read less than a sector at a time.
    const bool holds_all = columns <= sequences, is_better = sequences >= 16 && lanes(sequences) < lanes(best);
    if (holds_all || is_better) best = sequences;
  }
  return best;
}

// Tiles of so many sequences.
inline void set_tile(ReturnsPlan& plan, int64_t columns, int sequences, int64_t bytes) {
  const int unit = column_unit(bytes);
  plan.sequences = sequences;
  plan.spans = ceil_div(columns, sequences);
  plan.parts = kChunkThreads / sequences;
  plan.part_steps = plan.is_one_piece() ? scan_steps(bytes)
                                        : static_cast<int>(std::min<int64_t>(column_steps(bytes),
                                              ceil_div(plan.lines, int64_t{plan.parts} * unit) * unit));
  plan.tile_steps = plan.parts * plan.part_steps;
  plan.slots = plan.tile_steps * plan.sequences;
}

// Rates of so many steps at most are read for every step: their products are rounded to floats, and an error of 3e-8 in
// each must not add up.
constexpr int64_t kMostRowGates = 512;

// `p`: with_rows_together(...).
inline ReturnsPlan plan_returns(const ReturnsProblem& p, int64_t multiprocessors) {
  const int64_t bytes = bytes_of(p.dtype);
  ReturnsPlan plan{};
  plan.linear = lies_linear(p);
  plan.row_gates = p.outer > 1 && has_row_rates(p) && p.length <= kMostRowGates;
  plan.rows_apart = p.outer > 1 && has_row_rates(p) && !plan.row_gates;
  plan.lines = plan.rows_apart ? p.length : p.outer * p.length;
  const int64_t rows_apart = plan.rows_apart ? p.outer : 1;
  set_tile(plan, p.inner, plan.linear ? static_cast<int>(p.inner) : even_sequences(p.inner), bytes);
  // Narrower tiles where there are fewer than multiprocessors.
  while (!plan.linear && plan.sequences > 16 &&
      ceil_div(plan.lines, plan.tile_steps) * plan.spans * rows_apart < multiprocessors)
    set_tile(plan, p.inner, plan.sequences / 2, bytes);
  plan.walks = plan.spans * rows_apart;
  // Rows are divided only where whole ones are too long for so many blocks.
  const int64_t share =
      std::max<int64_t>(plan.tile_steps, ceil_div(plan.lines * plan.walks, kChunkBlocks * multiprocessors));
  plan.whole = p.length * 2 <= share * 3;
  const int64_t chunk = ceil_div(share, plan.tile_steps) * plan.tile_steps;
  plan.chunk_steps = plan.whole ? std::max<int64_t>(1, chunk / p.length) * p.length : chunk;
  plan.chunks = ceil_div(plan.lines, plan.chunk_steps);
  plan.whole = plan.whole || plan.chunks == 1;
  const double carried = plan.rate_of(p.gamma) * plan.rate_of(p.trace);
  plan.powers[0] = bounded_power(carried, plan.part_steps);
  plan.tile_power = bounded_power(carried, plan.tile_steps);
  for (int k = 1; k < 8; ++k) plan.powers[k] = bounded_power(plan.powers[k - 1], 2);
  return plan;
}

// Whether sizes and strides are 32-bit numbers, as the kernels count.
inline bool counts_in_32_bits(const ReturnsProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  bool fits = p.outer * p.length <= kMost && p.length * p.inner <= kMost && p.inner <= kMost;
  const auto is_near = [&](const Strides& s) { fits = fits && s.time < kMost / 8 && s.inner < kMost / 8; };
  each_step_strides(p, is_near);
  each_row_strides(p, is_near);
  return fits;
}

// Whether 256 slots of a tile are less than 2^31 bytes apart in every tensor, as the kernels count.
inline bool slots_are_near(const ReturnsProblem& p, const ReturnsPlan& plan) {
  const int64_t lines = kChunkThreads / plan.sequences;
  bool are_near = true;
  each_step_strides(p, [&](const Strides& s) {
    are_near = are_near && (p.length == 1 || s.time <= ((int64_t{1} << 31) - 1) / (8 * lines));
  });
  return are_near;
}

// Columns that fill the GPU, so many for each multiprocessor, or few steps: a thread may walk along each. Neighboring
// ones that are a sector of memory at least, for all that a longer column reads is to be used.
// Blocks share out the steps of float columns of the common forms, and tiles those of other columns with as many steps
// as kLeastTiledColumn, which is faster as long as columns are fewer.
constexpr int64_t kWalkedColumns = 64, kWalkedLongColumns = 160, kWalkedFloatColumns = 256, kFewWalkedSteps = 16,
                  kWalkedSector = 32;
constexpr int64_t kLeastTiledColumn = 64;

inline bool takes_walk(const ReturnsProblem& p, int64_t multiprocessors) {
  if (p.steps || is_contiguous(p) || !counts_in_32_bits(p) || p.rows() >= int64_t{1} << 31) return false;
  if (p.length <= kFewWalkedSteps) return true;
  const bool blocks_share = p.dtype == ElementType::Float && form_of(p) != kAnyForm;
  const int64_t least = blocks_share  ? kWalkedFloatColumns
      : p.length >= kLeastTiledColumn ? kWalkedLongColumns
                                      : kWalkedColumns;
  return p.rows() >= least * multiprocessors && p.inner * bytes_of(p.dtype) >= kWalkedSector;
}

// Rows, and columns, that are divided: of so many steps at least, and so many at most for 100 multiprocessors. On an
// H200 they then take less time than by kernels that give each a warp or a block.
constexpr int64_t kLeastDividedRow = 12000, kLeastDividedColumn = 300, kLeastSmallColumn = 1000;
constexpr int64_t kDividedRowsPercent = 30, kDividedColumnsPercent = 800;
// Rows of one behind the other that other kernels put into packs, which are aligned.
constexpr int64_t kMostPackedSteps = 256;
// Steps of a row that has tiles of its own.
constexpr int64_t kLeastRowApart = 2000;
// Lines of an odd number of columns, which other kernels read one by one in half precision.
constexpr int64_t kFewestOddLines = 15;
// Fewer elements are read in less time than a block's phases take.
constexpr int64_t kFewestChunkElements = 1 << 18;

// Rows that are divided, as they are too few to have a warp or a block each.
inline bool are_few_long_rows(const ReturnsProblem& p, int64_t multiprocessors) {
  return p.rows() * 100 <= multiprocessors * kDividedRowsPercent && p.length >= kLeastDividedRow;
}

// All rows of all tensors begin at whole vectors.
inline bool rows_are_aligned(const ReturnsProblem& p) {
  const int64_t bytes = bytes_of(p.dtype);
  bool are_aligned = reinterpret_cast<uintptr_t>(p.rewards.data) % 16 == 0;
  each_step_strides(p, [&](const Strides& s) {
    are_aligned =
        are_aligned && (p.outer == 1 || s.outer * bytes % 16 == 0) && (p.inner == 1 || s.inner * bytes % 16 == 0);
  });
  return are_aligned;
}

// Where they take less time than the kernels that are made for aligned tensors of common forms, each row or column in
// one block. `p`: with_rows_together(...).
inline std::optional<ReturnsPlan> plan_chunks(const ReturnsProblem& p, int64_t multiprocessors) {
  if (p.steps || takes_walk(p, multiprocessors) || !counts_in_32_bits(p)) return std::nullopt;
  if (p.outer > 1 && has_row_rates(p) && p.length > kMostRowGates && p.length < kLeastRowApart) return std::nullopt;
  const bool rows = is_contiguous(p), is_large = p.rows() * p.length >= kFewestChunkElements;
  const bool are_few_columns = p.rows() * 100 <= multiprocessors * kDividedColumnsPercent &&
      p.length >= (is_large ? kLeastDividedColumn : kLeastSmallColumn);
  bool takes = rows ? are_few_long_rows(p, multiprocessors) : are_few_columns;
  const bool is_common = form_of(p) != kAnyForm;
  if (is_large && rows) {
    const bool has_factors = p.rhos.data || p.gamma.kind == GammaKind::kStep || p.trace.kind == GammaKind::kStep;
    if (p.length <= kMostPackedSteps && lies_linear(p)) takes = takes || !is_common;
    else takes = takes || !rows_are_aligned(p) || (!is_common && !has_factors);
  } else if (is_large && !is_common && !p.rhos.data) {
    const bool are_odd_halves = (p.dtype == ElementType::Half || p.dtype == ElementType::BFloat16) && p.inner % 2 != 0;
    takes = takes || lies_linear(p) || (are_odd_halves && p.outer * p.length >= kFewestOddLines);
  }
  if (!takes) return std::nullopt;
  const ReturnsPlan plan = plan_returns(p, multiprocessors);
  return slots_are_near(p, plan) ? std::optional<ReturnsPlan>(plan) : std::nullopt;
}

}  // namespace dcs
