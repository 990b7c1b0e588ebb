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

// So few elements that the GPU has room for all of their threads, a vector each, whatever their alignment; of rows that
// fit into a block or a cluster. No gradients of gamma in double, which are rare.
inline std::optional<SmallRowsPlan> plan_small_rows(const ScanProblem& p, const DeviceLimits& device) {
  const RowSizes sizes(p, device);
  if (!sizes.takes() || !is_floating(p.dtype) || (bytes_of(p.dtype) > 4 && p.backward) ||
      (p.shifted && !p.backward && p.initial))
    return std::nullopt;
  // Offsets in operands are numbers of 31 bits, and rows equally far apart.
  const auto is_near = [&](const void* pointer, const Strides& s) {
    const int64_t last =
        (p.outer - 1) * std::abs(s.outer) + (p.inner - 1) * std::abs(s.inner) + (p.length - 1) * std::abs(s.time);
    return !pointer || last < int64_t{1} << 30;
  };
  bool padded = false;
  const bool all_near = is_near(p.initial, p.initial_strides) && is_near(p.gamma, p.gamma_strides) &&
      is_near(p.grad_gamma, p.grad_gamma_strides) &&
      all_operands(p, [&](const void* pointer, const Strides& s, int64_t) {
        const bool has_pitch = p.inner == 1 || p.outer == 1 || s.outer == p.inner * s.inner;
        padded = padded || (p.rows() > 1 && (p.inner > 1 ? s.inner : s.outer) != p.length);
        return has_pitch && is_near(pointer, s);
      });
  if (!all_near) return std::nullopt;
  const int64_t vec = 16 / bytes_of(p.dtype), spare = p.length % vec ? vec - 1 : 0;  // elements before the first row
  const auto warps_of = [&](int64_t rows) { return ceil_div(rows * p.length + spare, 32 * vec); };
  SmallRowsPlan plan{};
  plan.cluster = 1;
  plan.group_rows = 1;
  if (warps_of(1) <= kSmallBlockWarps) {
    const int64_t share = ceil_div(sizes.count(), 32 * vec * kSmallBlocks * device.multiprocessors),
                  warps = std::clamp<int64_t>(share, kFewestSmallWarps, kMostSmallTileWarps);
    plan.group_rows = std::clamp<int64_t>((warps * 32 * vec - spare) / p.length, 1, p.rows());
    plan.warps = static_cast<int>(warps_of(plan.group_rows));
  } else {
    const int64_t most = std::min(device.cluster, kMostRowCluster);
    plan.warps = kMostSmallTileWarps / 2;
    while (plan.warps < kSmallBlockWarps && warps_of(1) > plan.warps * most) plan.warps *= 2;
    if (warps_of(1) > plan.warps * most) return std::nullopt;
    plan.cluster = static_cast<int>(ceil_div(warps_of(1), plan.warps));
  }
  plan.blocks = ceil_div(p.rows(), plan.group_rows) * plan.cluster;
  plan.dependent = plan.blocks <= device.dependent_blocks(p);
  // All at once. But padded rows, which the other kernels read element by element, and floats forward with a number
  // gamma, for which threads have fewer registers, are as fast in half as many blocks again.
  const int64_t room = kSmallBlockWarps / plan.warps;  // of a multiprocessor, for blocks
  if (plan.cluster > 1) {
    const int64_t slots = device.multiprocessors / kClusterMultiprocessors;
    if (p.rows() > slots * (kMostRowCluster * room / plan.cluster)) return std::nullopt;
  } else {
    const bool is_light = bytes_of(p.dtype) == 4 && p.gamma_kind == GammaKind::kNumber && !p.backward;
    const bool more = room > 1 && (padded || is_light);
    if (2 * plan.blocks > (more ? 3 : 2) * room * device.multiprocessors) return std::nullopt;
  }
  return plan;
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

// Longer rows.
inline std::optional<LongRowsPlan> plan_long_rows(const ScanProblem& p, const DeviceLimits& device) {
  const RowSizes sizes(p, device);
  if (!sizes.takes() || wide_bytes_of(p.dtype) > kMostLongBytes) return std::nullopt;
  LongRowsPlan plan{};
  plan.blocks = std::min(device.multiprocessors, kLongBlocks);
  // As long a segment a lane as leaves enough tiles on their way, and no longer than gives every block one tile.
  for (const int vectors : {1, 3, 5, 7}) {
    const int64_t tile = kLongWarps * sizes.slice(vectors),
                  stages = (sizes.shared_room() - kLongSharedBytes) / (tile * sizes.element_bytes());
    if (stages < kFewestLongStages || (plan.tiles > 0 && plan.tiles <= plan.blocks)) break;
    plan.vectors = vectors;
    plan.tile = tile;
    plan.tiles = ceil_div(sizes.count() + kFlatGrain, tile);
    plan.stages = static_cast<int>(std::min<int64_t>(stages, kLongStages));
  }
  if (plan.tiles == 0 || p.length < sizes.slice(plan.vectors)) return std::nullopt;
  plan.blocks = std::min(plan.blocks, plan.tiles);
  plan.shared_bytes = kLongSharedBytes + plan.stages * plan.tile * sizes.element_bytes();
  plan.workspace_bytes = plan.tiles * 16 * (p.gamma_kind == GammaKind::kStep ? 2 : 1);
  plan.partials = (p.length - 1) / sizes.slice(plan.vectors) + 2;
  plan.dependent = plan.tiles == plan.blocks && plan.blocks <= device.dependent_blocks(p);
  return plan;
}

}  // namespace dcs
