// Carries between the tiles of a long row in one pass over memory: decoupled look-back (Merrill and Garland,
// "Single-pass parallel prefix scan with decoupled look-back", NVIDIA NVR-2016-002) with a fixed association, so that
// the bits of a result do not depend on timing. Tiles come in groups of 32. A tile folds the totals of the tiles before
// it in its group, always in the same tree, onto the prefix of the group before; the prefixes of groups are one
// sequential fold, P[m] = S[m] + A[m] * P[m - 1], whichever group's prefix a tile happens to find ready.
#pragma once

#include "scan/carry/tile_status.cuh"

namespace dcs {

constexpr int kGroup = 32;

// The row's pieces in global memory, zeroed before the launch. The tiles before a tile are in blocks that have started
// before its own: blocks of lower index.
template <typename Wide>
struct Chain {
  Status<Wide>* tiles;
  Status<Wide>* groups;
  int64_t tile;
  int64_t tile_count;

  __device__ __forceinline__ int64_t group() const { return tile / kGroup; }
  __device__ __forceinline__ int place() const { return static_cast<int>(tile % kGroup); }
  __device__ __forceinline__ bool closes_group() const { return place() == kGroup - 1 && tile + 1 < tile_count; }

  // One lane, as early as the total is known.
  __device__ __forceinline__ void publish(const Piece<Wide>& own) const {
    if (tile + 1 < tile_count) tiles[tile].publish(own, kTotal);
  }

  // One warp: the fold of the tiles before this one in its group. The group's last tile publishes the group's total and
  // leaves it in `whole`.
  __device__ Piece<Wide> fold_before(const Piece<Wide>& own, Piece<Wide>& whole, int lane) const {
    const Piece<Wide> piece = lane < place() ? wait_for_total(group() * kGroup + lane) : identity<Wide>();
    __syncwarp();
    if (closes_group()) {
      whole = fold_warp(lane == place() ? own : piece, lane);
      if (lane == 0) groups[group()].publish(whole, group() == 0 || whole.closed ? kPrefix : kTotal);
    }
    return fold_warp(piece, lane);
  }

  // One warp: the total of the group before, from its tiles: sooner known than the group's own word, and folded in the
  // same tree.
  __device__ Piece<Wide> group_before(int lane) const {
    if (group() == 0) return identity<Wide>();
    const Piece<Wide> piece = wait_for_total((group() - 1) * kGroup + lane);
    __syncwarp();
    return fold_warp(piece, lane);
  }

  // One warp: the carry after the groups before that, from the nearest published prefix folded forward group by group.
  __device__ Wide groups_before(int lane) const {
    if (group() < 2) return cast<Wide>(0.0);
    Piece<Wide> found = identity<Wide>();
    uint32_t state = kEmpty;
    int nearest;
    while (true) {
      const int64_t index = group() - 2 - lane;
      if (index >= 0 && state != kPrefix) state = groups[index].read(found);
      const uint32_t prefixes = __ballot_sync(0xffffffffu, state == kPrefix);
      const uint32_t ready = __ballot_sync(0xffffffffu, state != kEmpty);
      nearest = __ffs(prefixes) - 1;
      if (prefixes && (~ready & ((1u << nearest) - 1)) == 0) break;
      __nanosleep(100);
    }
    Wide prefix = shuffle(found.total, nearest);
    for (int i = nearest - 1; i >= 0; --i) {
      const Piece<Wide> next{shuffle(found.total, i), shuffle(found.gates, i),
          static_cast<bool>(__shfl_sync(0xffffffffu, found.closed, i))};
      prefix = after(next, prefix);
    }
    return prefix;
  }

  // One lane of a group's last tile.
  __device__ __forceinline__ void publish_prefix(const Piece<Wide>& whole, Wide prefix) const {
    if (group() > 0 && !whole.closed) groups[group()].publish({after(whole, prefix), whole.gates, false}, kPrefix);
  }

 private:
  __device__ __forceinline__ Piece<Wide> wait_for_total(int64_t index) const {
    Piece<Wide> piece;
    while (tiles[index].read(piece) == kEmpty) __nanosleep(100);
    return piece;
  }
};

}  // namespace dcs
