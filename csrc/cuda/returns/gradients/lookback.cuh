// The carry into a tile of gradients (tile.cuh) from what the tiles before it in its row leave in global memory
// (decoupled look-back: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", NVIDIA
// NVR-2016-002). A lane reads a tile of the group, another group of the group of groups; each group of groups leaves
// the carry behind it. Which words are folded depends on where rows begin alone, and their tree is the same every time.
// Blocks begin in the order of their tiles, and a tile's total needs its own elements only, so every word that is
// waited for will come.
#pragma once

#include "returns/gradients/tile_params.cuh"

namespace dcs {

// By a warp.
struct GradientLookback {
  const GradientTilesPlan& plan;
  GradientWords* const words;
  const uint64_t tag;
  const uint32_t tile;
  const int lane;

  __device__ __forceinline__ GradientWords& word(int level, uint32_t number) const {
    const uint32_t tiles = static_cast<uint32_t>(plan.tiles), groups = (tiles - 1 >> plan.fan_bits) + 1;
    return words[number + (level > 0 ? tiles : 0) + (level > 1 ? groups : 0)];
  }
  // The words of one level before `index` in its group, from `first` on, folded, and `own` behind them.
  struct Folded {
    Segment<double> before, all;
  };
  __device__ __forceinline__ Folded fold(int level, uint32_t index, uint32_t first, const Segment<double>& own) const {
    const uint32_t group = index >> plan.fan_bits << plan.fan_bits, mine = group + static_cast<uint32_t>(lane);
    const bool exists = mine >= first && mine < index;
    Segment<double> segment = identity<double>();
    GradientWords found{};
    bool is_there = !exists;
    do {
      found.load_if(!is_there, word(level, exists ? mine : index));
      is_there = is_there || found.get(segment, tag);
    } while (!__all_sync(0xffffffffu, is_there));
    const int own_lane = static_cast<int>(index - group);
    if (lane == own_lane) segment = own;
    fold_segments_up<32>(segment, lane);
    Folded folded{identity<double>(), segment_of_lane(segment, own_lane)};
    if (own_lane > 0) folded.before = segment_of_lane(segment, own_lane - 1);
    return folded;
  }
  // `from`: the tile with the first step of the row that the tile begins within; the tile itself: it needs no carry.
  __device__ __forceinline__ double carry(const Segment<double>& own, uint32_t from) const {
    const uint32_t fan = (1u << plan.fan_bits) - 1, group = tile >> plan.fan_bits, above = group >> plan.fan_bits;
    const bool publishes = lane == 0 && tile + 1 < static_cast<uint32_t>(plan.tiles), ends_group = (tile & fan) == fan,
               ends_above = ends_group && (group & fan) == fan;
    if (publishes && !ends_group) word(0, tile).publish(own, tag);
    if (from == tile && !ends_group) return 0.0;
    const Folded tiles = fold(0, tile, from, own);
    if (publishes && ends_group && !ends_above) word(1, group).publish(tiles.all, tag);
    double carry = 0.0;
    if (from >> plan.fan_bits != group) {
      if (from >> 2 * plan.fan_bits != above) {
        Segment<double> last;
        while (!word(2, above - 1).read(last, tag)) {
        }
        carry = last.total;
      }
      carry = after(fold(1, group, from >> plan.fan_bits, tiles.all).before, carry);
    }
    carry = after(tiles.before, carry);
    if (publishes && ends_above) word(2, above).publish(Segment<double>{after(own, carry), 1.0, true}, tag);
    return carry;
  }
};

}  // namespace dcs
