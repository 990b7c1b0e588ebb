// Which kernel a scan takes and in what pieces. Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "dcs/scan/problem.h"
#include "common/device.h"
#include "scan/plan/tuning.h"

namespace dcs {

enum class Path { kRows, kTiny, kColumns, kWindowDirect, kWindowComposed };

struct Plan {
  Path path = Path::kColumns;
  int vec = 1;                  // elements of a vector
  int warps = 1;                // of a block
  int columns = 1;              // a lane's neighbouring columns in the column kernel
  bool long_stretches = false;  // of the column kernel: twice the steps a thread
  int64_t tile_elements = 0;
  int64_t tiles = 1;
  int64_t groups = 0;
  int64_t packed_rows = 0;
  bool cluster = false;     // the tiles of a row are the blocks of a cluster
  bool stream = false;      // long rows take the streaming kernel
  bool alone = false;       // of which a block takes whole rows
  int64_t window_rows = 0;  // rows composed at a time
  int64_t workspace_bytes = 0;
  int64_t zeroed_bytes = 0;  // of the workspace, at its start
  bool ring = false;  // of the streaming kernel: the form for devices with bulk copies (long_rows/bulk_stream.cuh)
  bool short_rows = false;  // packed rows that lie within a warp's vectors
  int whole_chunks =
      0;  // rows that a warp holds whole, 32 vectors a chunk; kBlockChunks: a block does (rows/warp_rows.cuh)
  bool walk = false;        // columns that warps walk along alone (columns/warp_columns.cuh), `columns` a lane
  bool few = false;         // columns whose stretches of time the warps of a block share (columns/split_columns.cuh)
  bool in_turn = false;     // of these: enough blocks that their requests delay each other
  bool half_warps = false;  // of the column kernel: pairs of columns, half a warp a stretch of time
  int reread = 0;           // clusters of a row whose blocks read again what lies before them (long_rows/few_rows.cuh,
                            // long_rows/few_rows_gated.cuh)
  int most_shared = 0;      // bytes that one block can have
  bool row_sums = false;    // gamma's gradient is summed over whole rows
  int held = 0;             // rounds in which all blocks together hold all rows on the chip (long_rows/resident.cuh)

  bool needs_room() const { return cluster || reread > 0 || (stream && !alone); }  // for blocks that run together
  int64_t partials() const {
    return row_sums ? 1 : held ? kHeldWarps * tiles : tiles;
  }  // of a row's part of gamma's gradient
};

inline int64_t bytes_of(ElementType dtype) {
  switch (dtype) {
    case ElementType::Half:
    case ElementType::BFloat16: return 2;
    case ElementType::Float: return 4;
    case ElementType::ComplexDouble: return 16;
    default: return 8;
  }
}

inline int64_t wide_bytes_of(ElementType dtype) {
  return dtype == ElementType::ComplexFloat || dtype == ElementType::ComplexDouble ? 16 : 8;
}

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes;  // that one block can have
  int cluster;       // blocks that a cluster can have; 0: there are none
};

// All rows have the same gamma, or one for each step.
inline bool has_one_gamma(const ScanProblem& problem) {
  return problem.gamma_kind != GammaKind::kRow ||
      (problem.gamma_strides.outer == 0 && problem.gamma_strides.inner == 0);
}

// Whether pieces can be folded by powers of gamma: those of larger numbers could leave float64 where their sums cancel.
inline bool powers_fold(const ScanProblem& problem) {
  return problem.gamma_kind != GammaKind::kNumber || std::abs(problem.gamma_value) <= kMostRingGamma;
}

class Planner {
 public:
  Planner(const ScanProblem& problem, const DeviceLimits& device) : p_(problem), device_(device) {}

  Plan plan() const {
    Plan plan = fresh();
    const int64_t beyond = p_.initial && !p_.backward ? 1 : 0;
    if (p_.window > 0 && p_.window < p_.length + beyond) {
      plan_window(plan);
    } else if (p_.gamma_kind == GammaKind::kNumber && std::isinf(p_.gamma_value)) {
      plan.path = Path::kColumns;  // step after step: the powers of such a gamma times a carry of 0, which stands for
                                   // none, would be NaNs
    } else if (time_is_contiguous() && plan_rows(plan) && !too_many_partials(plan)) {
      plan.path = is_tiny() ? Path::kTiny : Path::kRows;
    } else {
      plan = fresh();
      plan_columns(plan);
    }
    return plan;
  }

  // Where the device has no room for blocks that have to run together: the column kernel's ask nothing of each other.
  Plan plan_apart() const {
    Plan plan = fresh();
    plan_narrow_columns(plan);
    return plan;
  }

 private:
  // The partial sums of gamma's gradient were counted before it had an address: should its layout change the plan, the
  // column kernel needs one.
  bool too_many_partials(const Plan& plan) const {
    return p_.backward && p_.grad_gamma && p_.gamma_kind != GammaKind::kStep && plan.partials() > p_.partials;
  }

  Plan fresh() const {
    Plan plan;
    plan.most_shared = device_.shared_bytes;
    return plan;
  }

  struct Full {
    const void* pointer;
    const Strides* strides;
    int64_t bytes;
  };

  // The operands with a value for every step.
  int full_operands(Full (&out)[6]) const {
    const int64_t bytes = bytes_of(p_.dtype);
    int n = 0;
    out[n++] = {p_.input, &p_.input_strides, bytes};
    out[n++] = {p_.output, &p_.output_strides, bytes};
    if (p_.gamma_kind == GammaKind::kStep) out[n++] = {p_.gamma, &p_.gamma_strides, bytes};
    if (p_.reset) out[n++] = {p_.reset, &p_.reset_strides, 1};
    if (p_.backward) out[n++] = {p_.saved, &p_.saved_strides, bytes};
    if (p_.backward && p_.gamma_kind == GammaKind::kStep) out[n++] = {p_.grad_gamma, &p_.grad_gamma_strides, bytes};
    return n;
  }

  template <typename Test>
  bool all_operands(const Test& test) const {
    Full operands[6];
    const int n = full_operands(operands);
    return std::all_of(operands, operands + n, test);
  }

  bool time_is_contiguous() const {
    return p_.length > 1 && all_operands([](const Full& f) { return f.strides->time == 1; });
  }

  // Whether all rows of every operand lie one behind the other.
  bool rows_are_contiguous() const {
    return all_operands([this](const Full& f) {
      const bool inner = p_.inner == 1 || f.strides->inner == p_.length;
      const bool outer = p_.outer == 1 || f.strides->outer == p_.inner * p_.length;
      return inner && outer;
    });
  }

  // Vectors of 16 bytes need aligned rows. Flags are read one by one.
  bool rows_are_aligned(int64_t vec, bool one_stretch) const {
    return all_operands([&](const Full& f) {
      if (f.bytes == 1) return true;
      if (reinterpret_cast<uintptr_t>(f.pointer) % 16) return false;
      if (one_stretch) return true;
      return (p_.inner == 1 || f.strides->inner % vec == 0) && (p_.outer == 1 || f.strides->outer % vec == 0);
    });
  }

  bool plan_rows(Plan& plan) const {
    const int64_t bytes = bytes_of(p_.dtype), rows = p_.rows(), length = p_.length;
    const int full = static_cast<int>(16 / bytes);
    const bool contiguous = rows_are_contiguous(), step = p_.gamma_kind == GammaKind::kStep;
    if (contiguous && rows > 1 && length < warp_elements(bytes, full)) {
      const bool row_by_row = !has_one_gamma(p_) || (p_.backward && !step);
      plan.vec = rows_are_aligned(full, true) && !(row_by_row && length % full) ? full : 1;
      const int64_t stretch = warp_elements(bytes, plan.vec);
      plan.warps = kPackedWarps;
      while (plan.warps > 1 && rows * length < stretch * plan.warps * device_.multiprocessors * 2) plan.warps /= 2;
      const int64_t multiple = plan.vec / std::gcd(static_cast<int64_t>(plan.vec), length);
      plan.packed_rows = stretch * plan.warps / length / multiple * multiple;
      while (plan.packed_rows == 0) {  // a warp holds fewer rows than whole vectors need
        plan.warps *= 2;
        plan.packed_rows = stretch * plan.warps / length / multiple * multiple;
        if (plan.warps > kTileWarps) return false;
      }
      plan.tile_elements = stretch * plan.warps;
      // As long as rows leave no more than a quarter of a warp's lanes idle.
      const int64_t span = length / full;
      plan.whole_chunks = plan.vec == full ? whole_chunks(false) : 0;
      plan.short_rows = bytes <= 4 && plan.vec == full && length % full == 0 && span <= 32 && 32 / span * span >= 24 &&
          !step && !p_.reset && !p_.initial;
      return true;
    }
    // A short strided row would leave most of its warp idle.
    if (length < 64) return false;
    plan.vec = rows_are_aligned(full, rows == 1) ? full : 1;
    const int64_t stretch = warp_elements(bytes, plan.vec);
    if (length <= stretch * kTileWarps) {
      plan.warps = static_cast<int>(ceil_div(length, stretch));
      plan.tile_elements = stretch * plan.warps;
      plan.whole_chunks = plan.vec == full ? whole_chunks(true) : 0;
      return true;
    }
    const bool plain = plan.vec > 1 && bytes <= 4 && !p_.reset && !p_.initial;
    // Too few rows to fill the GPU: what counts is how soon a tile knows its carry. Elsewhere a cluster waits where the
    // stream does not.
    const bool few = rows * device_.cluster <= device_.multiprocessors;
    if (plain && few && plan_reread(plan)) return true;
    const bool twice = few && length > stretch * kTileWarps * device_.cluster && !step && !p_.backward;
    const int64_t cluster_tile = stretch * kTileWarps * (twice ? 2 : 1);
    if (plain && few && length <= cluster_tile * device_.cluster) {
      plan.cluster = true;
      plan.warps = kTileWarps * (twice ? 2 : 1);
      plan.tile_elements = cluster_tile;
      plan.tiles = ceil_div(length, cluster_tile);
      return true;
    }
    const int tensors = 1 + (step ? 1 : 0) + (p_.backward ? 1 : 0);
    plan.stream = plain && kStreamBytes <= device_.shared_bytes;
    plan.warps = kTileWarps;
    plan.tile_elements =
        plan.stream ? int64_t{kStreamThreads} * stream_chunks(tensors) * plan.vec : stretch * kTileWarps;
    if (plan.stream) {
      // Rows in nearly full waves of blocks need no block to wait for another.
      const auto fill = [rows](int64_t blocks) { return 10 * rows >= 9 * ceil_div(rows, blocks) * blocks; };
      plan.alone = fill(2 * device_.multiprocessors);
      const bool has_ring =
          device_.cluster > 0 && ring_shared_bytes(tensors, bytes, step) + kRingStaticBytes <= device_.shared_bytes;
      // Rows that blocks take alone stay with the stream where its tiles fill them: a tile that is not whole is slow
      // there (1056 rows of 20480 halves take 52 us, 27 in rings of single blocks). But a backward with one gamma does
      // not (256 rows of 65536 halves: 46 us, 39).
      const bool sums = p_.backward && !step;
      const bool streams_well = length % plan.tile_elements == 0 && !sums;
      plan.ring = has_ring && powers_fold(p_) && !(plan.alone && streams_well);
      if (plan.ring) {
        if (sums) plan.alone = fill(device_.multiprocessors);
        plan.row_sums = plan.alone && sums;
        if (!plan.alone && plan_held(plan)) return true;
        const RingSize size = ring_size(tensors, bytes, step, plan.row_sums);
        plan.tile_elements = int64_t{32} * size.warps * size.vectors * plan.vec;
      }
      plan.tiles = ceil_div(length, plan.tile_elements);
      if (!plan.alone) plan.workspace_bytes = (!step ? 16 : plan.ring ? 16 * kStepCopies : 32) * rows * plan.tiles;
      if (!plan.ring) plan.zeroed_bytes = plan.workspace_bytes;
      else if (!plan.alone) plan.workspace_bytes += 16 * kMostRingBlocks * (step ? 2 : 1);
      return true;
    }
    plan.tiles = ceil_div(length, plan.tile_elements);
    plan.groups = ceil_div(plan.tiles, 32);
    const int64_t status_bytes = wide_bytes_of(p_.dtype) / 8 * 32;
    plan.zeroed_bytes = plan.workspace_bytes = status_bytes * rows * (plan.tiles + plan.groups);
    return true;
  }

  // Rows of halves that the ring would take, where they fit on the chip and nearly fill their rounds, which are as few
  // as can be.
  bool plan_held(Plan& plan) const {
    if (bytes_of(p_.dtype) != 2 || p_.gamma_kind == GammaKind::kStep || !has_one_gamma(p_) || p_.length % plan.vec)
      return false;
    const int64_t rows = p_.rows(), vectors = p_.length / plan.vec, parts = ceil_div(vectors, kHeldPart);
    const int64_t most = std::min<int64_t>(device_.multiprocessors, kMostRingBlocks);
    if (parts > kMostHeldParts || kHeldSharedBytes + kStaticBytes > device_.shared_bytes) return false;
    int64_t rounds = 1;
    while (rounds <= kHeldRounds && parts * ceil_div(rows, rounds) > most) ++rounds;
    if (rounds > kHeldRounds || 100 * rows * vectors < kHeldPercent * rounds * most * kHeldPart) return false;
    plan.held = static_cast<int>(rounds);
    plan.stream = plan.ring = false;
    plan.tiles = parts;
    plan.tile_elements = kHeldPart * plan.vec;
    plan.workspace_bytes = 16 * (rows * parts + kMostRingBlocks);
    return true;
  }

  // Rows of one number gamma or one gamma a step that fit a few clusters, a vector a thread. Not numbers above 1, whose
  // powers could leave float where their sums cancel; nor a gamma a row, gammas that are shifted, and gradients, which
  // stay with a cluster a row.
  bool plan_reread(Plan& plan) const {
    const bool number = p_.gamma_kind == GammaKind::kNumber && std::abs(p_.gamma_value) <= 1.0;
    const bool steps = p_.gamma_kind == GammaKind::kStep && !p_.shifted;
    if (device_.cluster < kMaxCluster || !(number || steps) || p_.backward) return false;
    const int64_t vectors = ceil_div(p_.length, plan.vec),
                  most = std::min<int64_t>(kRereadClusters, device_.multiprocessors / (p_.rows() * kMaxCluster));
    // As few clusters as can be, for each has to read what lies before it.
    const int64_t clusters = ceil_div(vectors, kMaxCluster * 32 * kRereadWarps);
    if (clusters > most) return false;
    plan.reread = static_cast<int>(clusters);
    plan.warps = static_cast<int>(ceil_div(vectors, clusters * kMaxCluster * 32));
    return true;
  }

  // The chunks of a row that a warp or, of halves, a block can hold: where the row fills them well.
  int whole_chunks(bool block) const {
    const int64_t bytes = bytes_of(p_.dtype), full = 16 / bytes, vectors = p_.length / full;
    if (bytes > 4 || p_.length % full || p_.gamma_kind == GammaKind::kStep || p_.reset || p_.initial || vectors <= 32)
      return 0;
    const int64_t chunks = ceil_div(vectors, 32);
    if (chunks <= 4 && p_.rows() > 1) return 10 * vectors >= 7 * 32 * chunks ? static_cast<int>(chunks) : 0;
    return block && bytes == 2 ? kBlockChunks : 0;
  }

  // A thread can take a whole row: rows of up to eight vectors, and no more of them than a few blocks hold.
  bool is_tiny() const {
    const int64_t bytes = bytes_of(p_.dtype), row_bytes = p_.length * bytes;
    const bool gamma = p_.gamma_kind == GammaKind::kNumber || (p_.gamma_kind == GammaKind::kStep && !p_.shifted);
    return bytes <= 4 && row_bytes % 16 == 0 && row_bytes <= 128 && p_.rows() * row_bytes <= 65536 && gamma &&
        !p_.reset && !p_.initial && !p_.backward && rows_are_contiguous() && rows_are_aligned(16 / bytes, true);
  }

  // Whether a row of columns can be copied in pieces of 16 bytes.
  bool has_wide_columns() const {
    const int64_t bytes = bytes_of(p_.dtype), vec = 16 / bytes;
    return bytes <= 4 && !p_.reset && !p_.initial && p_.inner % vec == 0 && all_operands([vec](const Full& f) {
      const bool row = f.strides->time % vec == 0 && f.strides->outer % vec == 0 && f.strides->inner == 1;
      return row && reinterpret_cast<uintptr_t>(f.pointer) % 16 == 0;
    });
  }

  // Groups of so many columns, 0 where more than an eighth of their lanes would be idle.
  int64_t column_groups(int64_t columns) const {
    const int64_t across = ceil_div(p_.inner, columns);
    return 8 * p_.inner >= 7 * across * columns ? p_.outer * across : 0;
  }

  // Columns of 16 bytes: leaves the plan as it is where no kernel takes them.
  bool plan_wide_columns(Plan& plan) const {
    if (!has_wide_columns()) return false;
    const int64_t bytes = bytes_of(p_.dtype);
    const bool step = p_.gamma_kind == GammaKind::kStep;
    // Two tensors of floats are as fast with blocks of pairs.
    if ((bytes == 4 || p_.length <= kLongestFloatWalk) && !(bytes == 4 && step && !p_.backward)) {
      for (const int lane_bytes : {8, 4}) {
        // A warp for each of a multiprocessor's four schedulers, or nearly.
        if (2 * column_groups(32 * lane_bytes / bytes) < 7 * device_.multiprocessors) continue;
        plan.walk = true;
        plan.columns = static_cast<int>(lane_bytes / bytes);
        return true;
      }
    }
    const bool floats_back = p_.backward && bytes == 4;  // two tensors of floats do not fit
    if (step || floats_back || p_.length < 2 * kFewCount || !column_groups(kFewColumns)) return false;
    const int64_t stretches = std::min<int64_t>(ceil_div(p_.length, kFewCount), kFewStretches),
                  warps = ceil_div(stretches * bytes, 4);
    if (few_shared_bytes(warps * 4 / bytes, (p_.backward ? 2 : 1) * bytes) + kStaticBytes > device_.shared_bytes)
      return false;
    plan.few = true;
    plan.in_turn = 2 * column_groups(kFewColumns) >= device_.multiprocessors;
    plan.warps = static_cast<int>(warps);
    return true;
  }

  void plan_columns(Plan& plan) const {
    plan.path = Path::kColumns;
    if (!plan_wide_columns(plan)) plan_narrow_columns(plan);
  }

  // Any columns.
  void plan_narrow_columns(Plan& plan) const {
    plan.path = Path::kColumns;
    const int64_t bytes = bytes_of(p_.dtype);
    const bool step = p_.gamma_kind == GammaKind::kStep, plain = bytes <= 4 && !p_.reset && !p_.initial && !p_.backward;
    // Pairs of columns halve the blocks: only where enough are left.
    const bool can_pair = (bytes == 2 || plain) && columns_pair(bytes);
    const bool pairs = can_pair && p_.rows() >= 64 * 2 * device_.multiprocessors;
    plan.columns = pairs ? 2 : 1;
    if (can_pair && !pairs && plain && step && bytes == 2 && p_.length >= 256) {
      // Few columns of halves, where a warp would read 64 bytes of each tensor at a time. As many stretches of time as
      // lanes can scan.
      plan.columns = 2;
      plan.half_warps = true;
      plan.warps = 8;
      while (plan.warps < 32 && plan.warps * kHalfWarpSteps < p_.length) plan.warps *= 2;
      return;
    }
    const int64_t blocks = ceil_div(p_.rows(), 32 * plan.columns);
    // A warp holds 8 or 16 steps, in long stretches twice as many. Few columns: many warps share a column's time, in as
    // few rounds as they can; many: enough for the block to hide its own latency.
    const int64_t most = wide_bytes_of(p_.dtype) > 8 ? 16 : 32;
    const int64_t wanted = pairs                ? (plain ? kPairWarps : 2 * kPairWarps)
        : blocks >= 4 * device_.multiprocessors ? 8
                                                : most;
    int64_t steps = bytes > 8 ? 4 : bytes > 4 || step ? 8 : 16;
    // Few steps of halves are better shared out among more blocks.
    plan.long_stretches = plain && p_.length >= (pairs && bytes == 2 ? 16 : 4) * steps;
    if (plan.long_stretches) steps *= 2;
    plan.warps = 1;  // a power of two: lanes scan the warps' totals
    while (plan.warps < wanted && plan.warps * steps < p_.length) plan.warps *= 2;
  }

  // Two neighbouring columns make a word.
  bool columns_pair(int64_t bytes) const {
    return p_.inner % 2 == 0 && all_operands([bytes](const Full& f) {
      const bool aligned = reinterpret_cast<uintptr_t>(f.pointer) % (2 * bytes) == 0 && f.strides->time % 2 == 0 &&
          f.strides->outer % 2 == 0;
      return f.bytes == 1 || (f.strides->inner == 1 && aligned);
    });
  }

  void plan_window(Plan& plan) const {
    if (p_.window <= kDirectWindowLimit) {
      plan.path = Path::kWindowDirect;
      return;
    }
    plan.path = Path::kWindowComposed;
    const int64_t positions = p_.length + (p_.initial ? 1 : 0);
    const int64_t row_bytes = 4 * positions * (2 * wide_bytes_of(p_.dtype) + 1);
    plan.window_rows = std::clamp<int64_t>(kWindowWorkspace / row_bytes, 1, p_.rows());
    plan.workspace_bytes = plan.window_rows * row_bytes + 64;
  }

  const ScanProblem& p_;
  DeviceLimits device_;
};

}  // namespace dcs
