// Into what tiles scans of contiguous time are cut. Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/traits.h"

namespace dcs {

// What the plans of contiguous time have in common.
class RowSizes {
 public:
  RowSizes(const ScanProblem& problem, const DeviceLimits& device) : p_(problem), device_(device) {}

  bool takes() const {
    const bool contiguous = p_.length == 1 || (p_.output_strides.time == 1 && p_.input_strides.time <= 1);
    return !is_windowed(p_) && powers_fold(p_) && contiguous;
  }
  int64_t count() const { return p_.rows() * p_.length; }
  // Elements of a warp's slice of so many vectors a lane, and bytes of all operands of an element.
  int64_t slice(int vectors) const { return 32 * vectors * (16 / bytes_of(p_.dtype)); }
  int64_t element_bytes() const { return tensors_of(p_) * bytes_of(p_.dtype) + (p_.reset ? 1 : 0); }
  int64_t shared_room() const { return device_.shared_bytes - kStaticBytes; }

 private:
  const ScanProblem& p_;
  const DeviceLimits& device_;
};

// Of blocks that take small rows: warps where it takes several rows, at least and at most; warps at most, for which a
// multiprocessor has registers, and in a cluster; blocks of one that several rows are shared out over, if there are
// enough.
struct SmallRowsLimits {
  int64_t fewest_warps, tile_warps, block_warps, cluster_warps, blocks = 1;
};

// Small rows, `vec` elements a thread: a block takes some, or a cluster of blocks takes one, if it can.
inline std::optional<SmallRowsPlan> share_small_rows(
    int64_t rows, int64_t length, int64_t vec, const SmallRowsLimits& limits, const DeviceLimits& device) {
  const int64_t spare = length % vec ? vec - 1 : 0;  // elements before the first row
  const auto warps_of = [&](int64_t count) { return ceil_div(count * length + spare, 32 * vec); };
  SmallRowsPlan plan{};
  plan.cluster = 1;
  plan.group_rows = 1;
  // Of few rows a cluster has a long one on several multiprocessors, whose warps would wait for each other on one.
  const bool are_few =
      2 * rows <= device.multiprocessors && device.multiprocessors >= kClusterMultiprocessors && device.cluster > 1;
  if (warps_of(1) <= (are_few ? limits.tile_warps : limits.block_warps)) {
    const int64_t share = ceil_div(rows * length, 32 * vec * limits.blocks * device.multiprocessors),
                  warps = std::clamp(share, limits.fewest_warps, limits.tile_warps);
    plan.group_rows = std::clamp<int64_t>((warps * 32 * vec - spare) / length, 1, rows);
    plan.warps = static_cast<int>(warps_of(plan.group_rows));
  } else {
    const int64_t most = std::min(device.cluster, kMostRowCluster);
    plan.warps = static_cast<int>(limits.fewest_warps);
    while (plan.warps < limits.cluster_warps && warps_of(1) > plan.warps * most) plan.warps *= 2;
    if (warps_of(1) > plan.warps * most) return std::nullopt;
    plan.cluster = static_cast<int>(ceil_div(warps_of(1), plan.warps));
  }
  plan.blocks = ceil_div(rows, plan.group_rows) * plan.cluster;
  return plan;
}

// Whether the plan's blocks are on the GPU all at once, or those of so many halves of it.
inline bool are_at_once(const SmallRowsPlan& plan, int64_t rows, const SmallRowsLimits& limits,
    const DeviceLimits& device, int64_t halves = 2) {
  const int64_t room = limits.block_warps / plan.warps;  // of a multiprocessor, for blocks
  if (plan.cluster == 1) return 2 * plan.blocks <= halves * room * device.multiprocessors;
  const int64_t slots = device.multiprocessors / kClusterMultiprocessors;
  return rows <= slots * (kMostRowCluster * room / plan.cluster);
}

// Whether rows lie equally far apart in an operand that has an element for every step.
template <typename Problem>
bool has_pitch(const Problem& p, const Strides& s) {
  return p.inner == 1 || p.outer == 1 || s.outer == p.inner * s.inner;
}

constexpr SmallRowsLimits kSmallRowsLimits{
    kFewestSmallWarps, kMostSmallTileWarps, kSmallBlockWarps, kSmallBlockWarps, kSmallBlocks};

// So few elements that the GPU has room for all of their threads, a vector each, whatever their alignment; of rows that
// fit into a block or a cluster. No gradients of gamma in double, which are rare.
inline std::optional<SmallRowsPlan> plan_small_rows(const ScanProblem& p, const DeviceLimits& device) {
  const RowSizes sizes(p, device);
  if (!sizes.takes() || !is_floating(p.dtype) || (bytes_of(p.dtype) > 4 && p.backward) ||
      (p.shifted && !p.backward && p.initial))
    return std::nullopt;
  const auto lies_near = [&](const void* pointer, const Strides& s) { return !pointer || is_near(p, s); };
  bool padded = false;
  const bool all_near = lies_near(p.initial, p.initial_strides) && lies_near(p.gamma, p.gamma_strides) &&
      lies_near(p.grad_gamma, p.grad_gamma_strides) && all_operands(p, [&](const void*, const Strides& s, int64_t) {
        padded = padded || (p.rows() > 1 && (p.inner > 1 ? s.inner : s.outer) != p.length);
        return has_pitch(p, s) && is_near(p, s);
      });
  if (!all_near) return std::nullopt;
  std::optional<SmallRowsPlan> plan =
      share_small_rows(p.rows(), p.length, 16 / bytes_of(p.dtype), kSmallRowsLimits, device);
  if (!plan) return std::nullopt;
  plan->dependent = plan->blocks <= device.dependent_blocks(p);
  // Not where all steps are one element. Of more blocks most would first have to get ready.
  plan->in_float = scans_in_float(p) && p.input_strides.time == 1 && plan->group_rows == 1 &&
      (!p.initial || has_pitch(p, p.initial_strides)) &&
      (plan->cluster == 1 || plan->blocks <= kMostFloatBlocks * device.multiprocessors);
  // All at once. But padded rows, which the other kernels read element by element, and floats forward with a number
  // gamma, for which threads have fewer registers, are as fast in half as many blocks again.
  const bool is_light = bytes_of(p.dtype) == 4 && p.gamma_kind == GammaKind::kNumber && !p.backward,
             more = 2 * plan->warps <= kSmallBlockWarps && (padded || is_light);
  return are_at_once(*plan, p.rows(), kSmallRowsLimits, device, more ? 3 : 2) ? plan : std::nullopt;
}

// Rows of which one fits into a cluster of blocks, where they are few: each lane has as few elements as gives a row no
// more blocks than every device puts into a cluster, or as many as it can have.
inline std::optional<FlatRowsPlan> plan_clustered_rows(const ScanProblem& p, const DeviceLimits& device) {
  const RowSizes sizes(p, device);
  if (!sizes.takes() || device.cluster == 0) return std::nullopt;
  FlatRowsPlan plan{};
  plan.warps = kFlatWarps;
  for (const int vectors : {1, 3, 5, 7}) {
    plan.vectors = vectors;
    plan.tile = plan.warps * sizes.slice(vectors);
    if (p.length + kFlatGrain <= plan.tile * kMostFlatCluster) break;
  }
  const int64_t blocks = ceil_div(p.length + kFlatGrain, plan.tile);
  plan.cluster = static_cast<int>(std::min<int64_t>(blocks, device.cluster + 1));
  plan.tiles = p.rows() * blocks;
  plan.shared_bytes = plan.tile * sizes.element_bytes();
  plan.dependent = plan.tiles <= device.dependent_blocks(p);
  const int64_t resident = tensors_of(p) == 1 ? kFlatBlocks : kFlatBlocks / 2;
  const bool takes = blocks <= std::min(device.cluster, kMostRowCluster) &&
      plan.tiles <= resident * device.multiprocessors && plan.shared_bytes <= sizes.shared_room();
  return takes ? std::optional<FlatRowsPlan>(plan) : std::nullopt;
}

// Rows of which one fits into a block or a cluster, whatever its length and alignment.
inline std::optional<FlatRowsPlan> plan_flat_rows(const ScanProblem& p, const DeviceLimits& device) {
  const RowSizes sizes(p, device);
  const int64_t room = kFlatGrain;  // before a tile's first row; one element behind its last
  if (!sizes.takes() || has_tiny_rows(p)) return std::nullopt;
  if (p.length + room > kFlatWarps * sizes.slice(kFlatVectors)) return plan_clustered_rows(p, device);
  const int64_t most = std::max<int64_t>((kFlatTileWarps * sizes.slice(kFlatTileVectors) - room) / p.length, 1);
  const int64_t rows = std::clamp<int64_t>(p.rows() / (kFlatBlocks * device.multiprocessors), 1, most);
  FlatRowsPlan plan{};
  plan.cluster = 1;
  plan.tile = rows * p.length;
  plan.tiles = ceil_div(p.rows(), rows);
  // Lanes with few elements where a tile is small, unless tiles wait for others: passes are unrolled for five vectors.
  const bool all_at_once = plan.tiles <= 2 * kFlatBlocks * device.multiprocessors;
  for (const int vectors : {1, 3, 5, 7}) {
    if (vectors < kFlatTileVectors && !all_at_once) continue;
    plan.vectors = vectors;
    const int warps = vectors < kFlatTileVectors ? kFlatTileWarps : kFlatWarps;
    if (plan.tile + room <= warps * sizes.slice(vectors)) break;
  }
  plan.warps = static_cast<int>(ceil_div(plan.tile + room, sizes.slice(plan.vectors)));
  plan.shared_bytes = plan.warps * sizes.slice(plan.vectors) * sizes.element_bytes();
  if (plan.shared_bytes > sizes.shared_room()) return std::nullopt;
  plan.dependent = plan.tiles <= device.dependent_blocks(p);
  return plan;
}

// Whether of the one tensor that is read, of at most four bytes an element, rows lie apart or begin anywhere, so that
// bulk copies land them before their place (rows/apart_slice.cuh); all else is flat.
inline bool rows_land_apart(const ScanProblem& p, const DeviceLimits& device) {
  return device.cluster > 0 && is_floating(p.dtype) && bytes_of(p.dtype) <= 4 && tensors_of(p) == 1 &&
      p.input_strides.time == 1 && !is_flat(p, p.input, p.input_strides) && is_flat(p, p.output, p.output_strides) &&
      (!p.reset || is_flat(p, p.reset, p.reset_strides));
}

// Longer rows.
inline std::optional<LongRowsPlan> plan_long_rows(const ScanProblem& p, const DeviceLimits& device) {
  const RowSizes sizes(p, device);
  if (!sizes.takes() || wide_bytes_of(p.dtype) > kMostLongBytes) return std::nullopt;
  LongRowsPlan plan{};
  plan.apart = rows_land_apart(p, device);
  plan.blocks = std::min(device.multiprocessors, kLongBlocks);
  const auto bytes_of_tile = [&](int vectors) {
    return kLongWarps * (sizes.slice(vectors) * sizes.element_bytes() + (plan.apart ? kLandingBytes : 0));
  };
  // As long a segment a lane as leaves enough tiles on their way, and no longer than gives every block one tile.
  for (const int vectors : {1, 3, 5, 7}) {
    const int64_t tile = kLongWarps * sizes.slice(vectors),
                  stages = (sizes.shared_room() - kLongSharedBytes) / bytes_of_tile(vectors);
    if (stages < kFewestLongStages || (plan.tiles > 0 && plan.tiles <= plan.blocks)) break;
    plan.vectors = vectors;
    plan.tile = tile;
    plan.tiles = ceil_div(sizes.count() + kFlatGrain, tile);
    plan.stages = static_cast<int>(std::min<int64_t>(stages, kLongStages));
  }
  if (plan.tiles == 0 || p.length < sizes.slice(plan.vectors)) return std::nullopt;
  plan.blocks = std::min(plan.blocks, plan.tiles);
  plan.shared_bytes = kLongSharedBytes + plan.stages * bytes_of_tile(plan.vectors);
  plan.workspace_bytes = plan.tiles * 16 * (p.gamma_kind == GammaKind::kStep ? 2 : 1);
  plan.partials = (p.length - 1) / sizes.slice(plan.vectors) + 2;
  plan.dependent = plan.tiles == plan.blocks && plan.blocks <= device.dependent_blocks(p);
  return plan;
}

}  // namespace dcs
