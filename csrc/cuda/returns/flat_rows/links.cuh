// What enters a tile of a row that no cluster holds, from the tiles behind it in time: through global memory.
#pragma once

#include "common/divisor.cuh"
#include "scan/carry/segment_words.cuh"
#include "scan/carry/tile_groups.cuh"

namespace dcs {

// A row has the words of carry/tile_groups.cuh, all of which are on their way at once. Nothing is waited for beyond the
// nearest closed one, which a tile that an episode ends in leaves at once. Of the tiles of a row the last in time has
// the first number.
struct FlatLinks {
  using Words = SegmentWords<double, true>;

  Words* words;
  CallTag call;
  Divisor rows;
  int row_tiles, row_groups, row_segments;
  int fan_bits;

  // From a tile's own segment, the `number`th of its row in the order of the scan, what enters it; by a whole warp.
  __device__ __forceinline__ double enter(const Segment<double>& own, int64_t row, int number, uint64_t tag) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const TileGroups<int> at(number, fan_bits);
    Words* const of_row = words + row * row_segments;
    Words *const groups = of_row + row_tiles, *const aboves = groups + row_groups;
    // Who waits for the tile waits for this word alone.
    Words* const to = at.ends_above ? aboves + at.above : at.ends_group ? groups + at.group : of_row + number;
    bool is_published = !at.ends_group || own.closed;
    const auto publish = [&](const Segment<double>& segment) {
      if (lane == 0 && !is_published) to->publish(segment, tag);
      is_published = true;
    };
    if (lane == 0 && is_published) to->publish(own, tag);
    const Words *const tile = of_row + (number - 1 - lane),
                       *const farther =
                           lane < at.groups_before ? groups + (at.group - 1 - lane) : aboves + (at.above - 1);
    const int count = at.groups_before + (at.above > 0 ? 1 : 0);
    Words found{}, of_farther{};
    found.load_if(lane < at.tiles_before, *tile);
    of_farther.load_if(lane < count, *farther);
    // The nearer ones and, where none of them is closed, the farther ones, by the same code.
    const Words* from = tile;
    int asked = at.tiles_before;
    Segment<double> near{};
    double carry = 0.0;
#pragma unroll 1
    for (bool is_near = true;; is_near = false) {
      const Segment<double> some = collect(found, from, asked, tag);
      carry = is_near ? some.total : after(near, some.total);
      if (!is_near) break;
      if (!at.ends_above) publish(before(own, some));
      if (some.closed) break;
      near = some, found = of_farther, from = farther, asked = count;
    }
    publish({after(own, carry), 1.0, true});
    return carry;
  }

 private:
  // A segment with the one behind it.
  static __device__ __forceinline__ Segment<double> before(const Segment<double>& own, const Segment<double>& behind) {
    return {after(own, behind.total), power_mul(own.gates, behind.gates), own.closed || behind.closed};
  }
  // The segments of so many lanes as one, the first lane's first in time, up to the first that is closed. `loaded`:
  // what has been found at `from` so far.
  static __device__ __forceinline__ Segment<double> collect(Words& loaded, const Words* from, int count, uint64_t tag) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    Segment<double> segment = identity<double>();
    bool missing = lane < count, closed = false;
    int reach = count;
    while (true) {
      if (missing && loaded.get(segment, tag)) missing = false, closed = segment.closed;
      const uint32_t all = __ballot_sync(0xffffffffu, closed);
      if (all) reach = __ffs(static_cast<int>(all));
      if (!__any_sync(0xffffffffu, missing && lane < reach)) break;
      loaded.load_if(missing, *from);
    }
#pragma unroll 1
    for (int d = 1; d < 32; d *= 2) {
      const double total = shuffle_down(segment.total, d), gates = shuffle_down(segment.gates, d);
      if (lane + d >= reach) continue;
      segment.total = fold(segment.total, segment.gates, total);
      segment.gates = power_mul(segment.gates, gates);
    }
    return {shuffle(segment.total, 0), shuffle(segment.gates, 0), __ballot_sync(0xffffffffu, closed) != 0};
  }
};

}  // namespace dcs
