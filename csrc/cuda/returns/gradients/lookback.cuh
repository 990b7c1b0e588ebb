// The carry into a tile of gradients (tile.cuh) from what the tiles before it in its row leave in global memory
// (carry/tile_groups.cuh), where the tiles of all rows are one sequence: which words are folded depends on where rows
// begin alone.
#pragma once

#include "returns/gradients/tile_params.cuh"
#include "scan/carry/tile_groups.cuh"

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
    const TileGroups<uint32_t> at(tile, plan.fan_bits);
    const bool publishes = lane == 0 && tile + 1 < static_cast<uint32_t>(plan.tiles);
    if (publishes && !at.ends_group) word(0, tile).publish(own, tag);
    if (from == tile && !at.ends_group) return 0.0;
    const Folded tiles = fold(0, tile, from, own);
    if (publishes && at.ends_group && !at.ends_above) word(1, at.group).publish(tiles.all, tag);
    double carry = 0.0;
    if (from >> plan.fan_bits != at.group) {
      if (from >> 2 * plan.fan_bits != at.above) {
        Segment<double> last;
        while (!word(2, at.above - 1).read(last, tag)) {
        }
        carry = last.total;
      }
      carry = after(fold(1, at.group, from >> plan.fan_bits, tiles.all).before, carry);
    }
    carry = after(tiles.before, carry);
    if (publishes && at.ends_above) word(2, at.above).publish(Segment<double>{after(own, carry), 1.0, true}, tag);
    return carry;
  }
};

}  // namespace dcs
