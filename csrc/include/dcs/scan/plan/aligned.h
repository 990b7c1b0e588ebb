// Scans of aligned operands without resets and initial values, of elements of up to four bytes: which of their kernels
// takes one, and with what tiles. They are made for what a GPU does best, and faster there than those for any shape
// (rows.h, columns.h). Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "dcs/scan/plan/columns.h"
#include "dcs/scan/plan/small_columns.h"
#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/rows.h"
#include "dcs/scan/plan/traits.h"

namespace dcs {

class AlignedPlanner {
 public:
  AlignedPlanner(const ScanProblem& problem, const DeviceLimits& device) : p_(problem), device_(device) {}

  std::optional<AlignedPlan> plan() const {
    const bool infinite = p_.gamma_kind == GammaKind::kNumber && std::isinf(p_.gamma_value);
    if (is_windowed(p_) || bytes_of(p_.dtype) > 4 || p_.reset || p_.initial || p_.length == 1 || infinite)
      return std::nullopt;
    AlignedPlan plan;
    plan.most_shared = device_.shared_bytes;
    plan.dependent_blocks = device_.dependent_blocks(p_);
    const bool taken = time_is_contiguous() ? plan_rows(plan) : plan_columns(plan);
    return taken ? std::optional<AlignedPlan>(plan) : std::nullopt;
  }

 private:
  bool time_is_contiguous() const {
    return all_operands(p_, [](const void*, const Strides& s, int64_t) { return s.time == 1; });
  }

  // Vectors of 16 bytes need aligned rows.
  bool rows_are_aligned(int64_t vec, bool one_segment) const {
    return all_operands(p_, [&](const void* pointer, const Strides& s, int64_t) {
      if (reinterpret_cast<uintptr_t>(pointer) % 16) return false;
      return one_segment || ((p_.inner == 1 || s.inner % vec == 0) && (p_.outer == 1 || s.outer % vec == 0));
    });
  }

  bool plan_rows(AlignedPlan& plan) const {
    const int64_t bytes = bytes_of(p_.dtype), rows = p_.rows(), length = p_.length;
    const int64_t vec = 16 / bytes, segment = warp_elements(bytes);
    const bool contiguous = rows_are_contiguous(p_), step = p_.gamma_kind == GammaKind::kStep;
    const bool gated_forward = step && !p_.backward;
    if (is_tiny()) {
      plan.kernel = AlignedKernel::kThreadRows;
      return true;
    }
    if (contiguous && rows > 1 && length < segment) {
      if (step || !rows_are_aligned(vec, true) || length % vec) return false;
      // As long as rows leave no more than a quarter of a warp's lanes idle.
      const int64_t span = length / vec;
      const bool packs = span <= 32 && 32 / span * span >= 24;
      plan.warp_chunks = warp_chunks(false);
      plan.kernel = plan.warp_chunks > 0 ? AlignedKernel::kWarpRows : AlignedKernel::kPackedRows;
      return plan.warp_chunks > 0 || packs;
    }
    // A short strided row would leave most of its warp idle.
    if (length < 64 || !rows_are_aligned(vec, rows == 1)) return false;
    if (length <= segment * kTileWarps) {
      // With per-step gammas segments in part are faster in flat rows, and few elements in small rows.
      if ((step && length % segment) || (gated_forward && plan_small_rows(p_, device_))) return false;
      plan.warps = static_cast<int>(ceil_div(length, segment));
      plan.tile_elements = segment * plan.warps;
      plan.warp_chunks = warp_chunks(true);
      if (plan.warp_chunks > 0) plan.kernel = AlignedKernel::kWarpRows;
      return step || plan.warp_chunks > 0 ||
          (!are_few_elements() && 100 * length >= kTilePercent * segment * plan.warps);
    }
    // Too few rows to fill the GPU: what counts is how soon a tile knows its carry. Elsewhere a cluster waits where the
    // stream does not.
    const bool few = rows * device_.cluster <= device_.multiprocessors;
    if (few && plan_few_rows(plan)) return true;
    const bool twice = few && length > segment * kTileWarps * device_.cluster && !step && !p_.backward;
    const int64_t cluster_tile = segment * kTileWarps * (twice ? 2 : 1);
    if (few && !gated_forward && length <= cluster_tile * device_.cluster) {
      if (are_few_elements()) return false;
      plan.cluster = true;
      plan.warps = kTileWarps * (twice ? 2 : 1);
      plan.tile_elements = cluster_tile;
      plan.tiles = ceil_div(length, cluster_tile);
      return true;
    }
    return plan_stream(plan);
  }

  // Whose bytes are asked for at once elsewhere (rows/small_rows.cuh).
  bool are_few_elements() const {
    return p_.rows() * p_.length * bytes_of(p_.dtype) < kFewTileBytes * device_.multiprocessors;
  }

  bool plan_stream(AlignedPlan& plan) const {
    const int64_t bytes = bytes_of(p_.dtype), rows = p_.rows(), length = p_.length;
    const bool step = p_.gamma_kind == GammaKind::kStep;
    const int tensors = tensors_of(p_);
    const int64_t vec = 16 / bytes;
    // Rows that a block holds wait for nobody there (rows/flat_rows.cuh), those of small problems only for a cluster.
    const auto flat = plan_flat_rows(p_, device_);
    if (flat && flat->cluster == 1 && (has_one_gamma(p_) || !p_.backward)) return false;
    if (p_.gamma_kind != GammaKind::kRow && plan_small_rows(p_, device_)) return false;
    plan.warps = kTileWarps;
    // Rows in nearly full waves of blocks need no block to wait for another.
    const auto fill = [rows](int64_t blocks) { return 10 * rows >= 9 * ceil_div(rows, blocks) * blocks; };
    const bool sums = p_.backward && !step;
    plan.row_per_block = fill((sums ? 1 : 2) * device_.multiprocessors);
    const bool has_bulk_stream = device_.cluster > 0 &&
        bulk_stream_shared_bytes(tensors, bytes, step) + kBulkStreamStaticBytes <= device_.shared_bytes;
    if (!has_bulk_stream || !powers_fold(p_)) return false;
    plan.kernel = AlignedKernel::kBulkStream;
    if (!plan.row_per_block && plan_resident(plan)) return true;
    const BulkStreamSize size = bulk_stream_size(tensors, bytes, step, plan.row_per_block && sums);
    plan.tile_elements = int64_t{32} * size.warps * size.vectors * vec;
    plan.tiles = ceil_div(length, plan.tile_elements);
    if (!plan.row_per_block)
      plan.workspace_bytes =
          16 * ((step ? kStepCopies : 1) * rows * plan.tiles + kMostBulkStreamBlocks * (step ? 2 : 1));
    return true;
  }

  // Rows of half precision that the bulk stream would take, where they fit on the chip and nearly fill their rounds,
  // which are as few as can be.
  bool plan_resident(AlignedPlan& plan) const {
    constexpr int kVec = 8;  // half-precision elements
    if (bytes_of(p_.dtype) != 2 || p_.gamma_kind == GammaKind::kStep || !has_one_gamma(p_) || p_.length % kVec)
      return false;
    const int64_t rows = p_.rows(), vectors = p_.length / kVec, parts = ceil_div(vectors, kResidentPart);
    const int64_t most = std::min<int64_t>(device_.multiprocessors, kMostBulkStreamBlocks);
    if (parts > kMostResidentParts || kResidentSharedBytes + kStaticBytes > device_.shared_bytes) return false;
    int64_t rounds = 1;
    while (rounds <= kResidentRounds && parts * ceil_div(rows, rounds) > most) ++rounds;
    if (rounds > kResidentRounds || 100 * rows * vectors < kResidentPercent * rounds * most * kResidentPart)
      return false;
    plan.resident_rounds = static_cast<int>(rounds);
    plan.kernel = AlignedKernel::kResidentRows;
    plan.tiles = parts;
    plan.tile_elements = kResidentPart * kVec;
    plan.workspace_bytes = 16 * (rows * parts + kMostBulkStreamBlocks);
    return true;
  }

  // Rows of a number gamma or a per-step gamma that fit a few clusters, a vector a thread. Not numbers above 1, whose
  // powers could leave float where their sums cancel; nor a per-row gamma, gammas that are shifted, and gradients,
  // which stay with a cluster a row.
  bool plan_few_rows(AlignedPlan& plan) const {
    const bool number = p_.gamma_kind == GammaKind::kNumber && std::abs(p_.gamma_value) <= 1.0;
    const bool steps = p_.gamma_kind == GammaKind::kStep && !p_.shifted;
    if (device_.cluster < kMaxCluster || !(number || steps) || p_.backward) return false;
    const int64_t vectors = ceil_div(p_.length, 16 / bytes_of(p_.dtype)),
                  most = std::min<int64_t>(kFewRowsClusters, device_.multiprocessors / (p_.rows() * kMaxCluster));
    // As few clusters as can be, for each has to read what lies before it.
    const int64_t clusters = ceil_div(vectors, kMaxCluster * 32 * kFewRowsWarps);
    if (clusters > most) return false;
    plan.row_clusters = static_cast<int>(clusters);
    plan.kernel = AlignedKernel::kFewRows;
    plan.warps = static_cast<int>(ceil_div(vectors, clusters * kMaxCluster * 32));
    return true;
  }

  // The chunks of a row that a warp or, in half precision, a block can hold: where the row fills them well.
  int warp_chunks(bool block) const {
    const int64_t bytes = bytes_of(p_.dtype), full = 16 / bytes, vectors = p_.length / full;
    if (p_.length % full || p_.gamma_kind == GammaKind::kStep || vectors <= 32) return 0;
    const int64_t chunks = ceil_div(vectors, 32);
    if (chunks <= 4 && p_.rows() > 1) return 10 * vectors >= 7 * 32 * chunks ? static_cast<int>(chunks) : 0;
    return block && bytes == 2 ? kBlockChunks : 0;
  }

  // A thread can take a whole row: rows of up to eight vectors, and no more of them than a few blocks hold.
  bool is_tiny() const {
    const int64_t bytes = bytes_of(p_.dtype), row_bytes = p_.length * bytes;
    const bool gamma = p_.gamma_kind == GammaKind::kNumber || (p_.gamma_kind == GammaKind::kStep && !p_.shifted);
    return row_bytes % 16 == 0 && row_bytes <= 128 && p_.rows() * row_bytes <= 65536 && gamma && !p_.backward &&
        rows_are_contiguous(p_) && rows_are_aligned(16 / bytes, true);
  }

  // Whether a row of columns can be copied in chunks of 16 bytes.
  bool has_wide_columns() const {
    const int64_t bytes = bytes_of(p_.dtype), vec = 16 / bytes;
    return p_.inner % vec == 0 && all_operands(p_, [vec](const void* pointer, const Strides& s, int64_t) {
      return s.time % vec == 0 && s.outer % vec == 0 && s.inner == 1 && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    });
  }

  // Groups of so many columns, 0 where more than an eighth of their lanes would be idle.
  int64_t column_groups(int64_t columns) const {
    const int64_t across = ceil_div(p_.inner, columns);
    return 8 * p_.inner >= 7 * across * columns ? p_.outer * across : 0;
  }

  // Columns of 16 bytes: leaves the plan as it is where no kernel takes them.
  bool plan_wide_columns(AlignedPlan& plan) const {
    if (!has_wide_columns()) return false;
    const int64_t bytes = bytes_of(p_.dtype);
    const bool step = p_.gamma_kind == GammaKind::kStep;
    // Two tensors of floats are as fast with blocks of pairs.
    if ((bytes == 4 || p_.length <= kLongestFloatCarry) && !(bytes == 4 && step && !p_.backward)) {
      for (const int lane_bytes : {8, 4}) {
        // A warp for each of a multiprocessor's four schedulers, or nearly.
        if (2 * column_groups(32 * lane_bytes / bytes) < 7 * device_.multiprocessors) continue;
        plan.kernel = AlignedKernel::kWarpColumns;
        plan.columns = static_cast<int>(lane_bytes / bytes);
        return true;
      }
    }
    const bool floats_back = p_.backward && bytes == 4;  // two tensors of floats do not fit
    if (step || floats_back || p_.length < 2 * kSplitSteps || column_groups(kSplitBlockColumns) == 0) return false;
    if (bytes == 4 && are_small_columns()) return false;
    // A block that goes on to another round of a column's steps waits 3 to 5 us for memory, which takes longer than
    // that round among all multiprocessors (columns/resident_columns.cuh); so do the blocks of a few columns.
    const bool one_round = p_.length <= kSplitSteps * kSplitSegments;
    const int64_t groups = column_groups(kSplitBlockColumns);
    if (!one_round && (bytes == 4 || 2 * groups < device_.multiprocessors)) return false;
    if (p_.length > kLongestFewSplit && kFewSplitShare * groups < device_.multiprocessors) return false;
    const int64_t segments = std::min<int64_t>(ceil_div(p_.length, kSplitSteps), kSplitSegments),
                  warps = ceil_div(segments * bytes, 4);
    if (split_shared_bytes(warps * 4 / bytes, (p_.backward ? 2 : 1) * bytes) + kStaticBytes > device_.shared_bytes)
      return false;
    plan.kernel = AlignedKernel::kSplitColumns;
    plan.in_turn = 2 * groups >= device_.multiprocessors;
    plan.warps = static_cast<int>(warps);
    return true;
  }

  bool plan_columns(AlignedPlan& plan) const {
    return !threads_outrun_warps() && (plan_wide_columns(plan) || plan_block_columns(plan));
  }

  // Few steps of a per-column gamma, which threads take faster than warps and blocks (columns/serial_columns.cuh): of
  // floats all, of half precision those that a thread holds (columns/few_steps.cuh), and those whose steps are neither
  // few bytes a multiprocessor nor many.
  bool threads_outrun_warps() const {
    if (p_.length > kFewWarpSteps || p_.gamma_kind == GammaKind::kStep) return false;
    if (p_.length <= kFewSteps) return true;
    const int64_t step_bytes = p_.rows() * bytes_of(p_.dtype) / device_.multiprocessors;
    return bytes_of(p_.dtype) == 4 || (step_bytes > kFewStepColumns && step_bytes <= kManyStepColumns);
  }

  // Scans whose threads are on the GPU at once (columns/small_columns.cuh): block columns take 1.2 times their time in
  // half precision and 1.6 times in single, split columns 0.76 and 1.2 (69 random problems).
  bool are_small_columns() const { return p_.length > kFewSerialSteps && plan_small_columns(p_, device_); }

  bool are_few_float_steps() const {
    return bytes_of(p_.dtype) == 4 && p_.gamma_kind != GammaKind::kStep && p_.length <= kFewBlockSteps;
  }

  // Columns side by side at any alignment, where every multiprocessor gets some or a block takes all steps at once.
  bool plan_block_columns(AlignedPlan& plan) const {
    const bool contiguous = all_operands(p_, [](const void*, const Strides& s, int64_t) { return s.inner == 1; });
    if (p_.inner < 2 || p_.length <= kFewColumnSteps || !contiguous || !powers_fold(p_) ||
        serial_columns_outrun_blocks(p_, device_) || are_few_float_steps() || are_small_columns())
      return false;
    plan.kernel = AlignedKernel::kBlockColumns;
    const int64_t bytes = bytes_of(p_.dtype);
    const bool step = p_.gamma_kind == GammaKind::kStep, forward = !p_.backward;
    if (p_.length > (bytes == 2 || step ? kLongestBlocks : kLongestFloatBlocks)) return false;
    // Pairs of columns halve the blocks: only where enough are left.
    const bool can_pair = (bytes == 2 || forward) && columns_pair(p_);
    const bool pairs = can_pair && p_.rows() >= 64 * 2 * device_.multiprocessors;
    plan.columns = pairs ? 2 : 1;
    int64_t steps = step ? 8 : 16, most = 32;  // of a warp; warps
    if (can_pair && !pairs && forward && step && bytes == 2 && p_.length >= 256) {
      // Few columns of half precision, where a warp would read 64 bytes of each tensor at a time. As many segments of
      // time as lanes can scan.
      plan.columns = 2;
      plan.half_warps = true;
      plan.warps = 8;
      steps = kHalfWarpSteps;
      while (plan.warps < most && plan.warps * steps < p_.length) plan.warps *= 2;
    } else {
      // A warp holds 8 or 16 steps, in long segments twice as many. Few columns: many warps share a column's time, in
      // as few rounds as they can; many: enough for the block to hide its own latency.
      const int64_t blocks = ceil_div(p_.rows(), 32 * plan.columns);
      if (pairs) most = forward ? kPairWarps : 2 * kPairWarps;
      else if (blocks >= 4 * device_.multiprocessors) most = 8;
      // Few steps in half precision are better shared out among more blocks.
      plan.long_segments = forward && p_.length >= (pairs && bytes == 2 ? 16 : 4) * steps;
      if (plan.long_segments) steps *= 2;
      const int64_t together = blocks > device_.multiprocessors ? std::min<int64_t>(most, kSharedBlockWarps) : most;
      plan.warps = 1;  // a power of two: lanes scan the warps' totals
      while (plan.warps < together && plan.warps * steps < p_.length) plan.warps *= 2;
    }
    const int64_t blocks = ceil_div(p_.rows(), (plan.half_warps ? 16 : 32) * plan.columns);
    // A block that could take all steps at once hardly waits; but long columns of few blocks leave most of a GPU idle.
    const bool at_once = p_.length <= most * steps;
    if (at_once && (p_.length <= kLongestBlockPass || 3 * blocks >= device_.multiprocessors)) return true;
    // Fewer blocks than multiprocessors: with per-step gammas, where columns are not long.
    if (blocks < device_.multiprocessors) return step && 10 * blocks >= 8 * device_.multiprocessors;
    // Many steps, and blocks that would leave the last round of multiprocessors mostly empty.
    const bool is_long = most == 32 && p_.length > most / 2 * steps;
    const int64_t rounds = is_long ? ceil_div(blocks, device_.multiprocessors) : 1;
    return rounds == 1 || 10 * blocks >= 8 * rounds * device_.multiprocessors;
  }

  const ScanProblem& p_;
  DeviceLimits device_;
};

}  // namespace dcs
