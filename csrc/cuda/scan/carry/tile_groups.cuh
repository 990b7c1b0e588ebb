// Groups of tiles, through whose words in global memory a tile looks back.
#pragma once

#include <cuda_runtime_api.h>

namespace dcs {

// 2^fan_bits tiles, in the order of the scan, are a group, and as many groups a group of groups. There is a word for
// each of the three (decoupled look-back: Merrill and Garland, "Single-pass parallel prefix scan with decoupled
// look-back", NVIDIA NVR-2016-002). A tile publishes its segment; the last of a group the group's, from the segments
// before it there; the last of a group of groups what leaves it. So a tile reads the segments before it in its group,
// those of the groups before in theirs, and what enters these, a lane one of each. They are folded in a tree of lanes
// that is the same whenever they come.
//
// Blocks begin in the order of their tiles. A tile's segment needs its own elements only, that of a group and what
// leaves a group of groups only words of tiles before; so every word that is waited for will be written.
template <typename Index>
struct TileGroups {
  Index group, above;                 // of the tile, the number of its group and of its group of groups
  Index tiles_before, groups_before;  // in these
  bool ends_group, ends_above;        // the tile is their last one

  __device__ __forceinline__ TileGroups(Index tile, int fan_bits) {
    const Index last = (Index{1} << fan_bits) - 1;
    group = tile >> fan_bits, above = group >> fan_bits;
    tiles_before = tile & last, groups_before = group & last;
    ends_group = tiles_before == last, ends_above = ends_group && groups_before == last;
  }
};

}  // namespace dcs
