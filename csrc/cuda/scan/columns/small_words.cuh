// The carries of columns/small_columns.cuh where more blocks share time than a cluster has: each leaves its columns'
// segments for all later ones in global memory, as decoupled look-back does (Merrill and Garland, "Single-pass parallel
// prefix scan with decoupled look-back", NVIDIA NVR-2016-002), but all blocks run at once, so that each reads those of
// all earlier blocks, without inclusive prefixes: one trip to memory. A block waits for earlier blocks alone, which
// publish before they wait: the first one waits for none, so none waits without end.
#pragma once

#include "scan/carry/segment_words.cuh"
#include "scan/columns/small_segments.cuh"

namespace dcs {

// At the start, once the launches before this one have ended: the call's tag, for the block's barrier to show.
__device__ __forceinline__ void find_small_tag(const SmallColumnsParams& p, ColumnSegments& segments) {
  if (threadIdx.x == 0) segments.tag = tag_of_launch(p.tag);
}

// kGates: with the product of each block's gates; else all have the same one, `segments.over_block`.
template <bool kGates>
struct SmallWords {
  using Words = SegmentWords<double, kGates>;
  static constexpr int kReads = 3;                           // words with gates that a lane asks for at once
  static constexpr int kMostReads = kMostSmallSharers / 32;  // words without, of a lane
  static_assert(kMostSmallSharers % 32 == 0);

  const SmallPlace& at;
  ColumnSegments& segments;
  const int blocks;

  __device__ __forceinline__ SmallWords(const SmallPlace& place, ColumnSegments& with)
      : at(place), segments(with), blocks(static_cast<int>(place.p.cluster.divisor)) {}

  // What enters the thread's warp, when each warp has stored its segments.
  template <typename Times>
  __device__ __forceinline__ double carry(const Times& times) {
    __syncthreads();
    segments.template fold_warps<!kGates>(1 << at.p.span_bits, times, [&](const WarpLane& own) {
      Segment<double> block = own.up_to_own;
      block.closed |= at.rank == 0;  // nothing enters it
      if (own.is_column && own.of_warp + 1 == own.warps && own.column < at.width && at.rank + 1 < blocks)
        words_of_column<Words>(at, own.column)[at.rank].publish(block, segments.tag);
      const Segment<double> before = own.before();
      if (own.exists) segments.of_warps[own.of_warp][own.column] = before;
    });
    // Who asks before the others have published asks twice, and all ask for the same lines.
    __syncthreads();
    if (at.rank > 0) {
#pragma unroll 1
      for (int column = at.warp; column < at.width; column += at.warps) {
        double entering;
        if constexpr (kGates) entering = entering_by_gates(column, times);
        else entering = entering_by_powers(column);
        if (at.lane == 31) segments.entering[column] = entering;
      }
    }
    __syncthreads();
    const double entering = at.rank > 0 ? segments.entering[min(at.span_column, at.width - 1)] : 0.0;
    return after(segments.of_warps[at.warp][at.span_column].segment(), entering);
  }

 private:
  // In the last lane what the blocks before leave, of which the last lanes have the nearest.
  template <typename Times>
  __device__ __forceinline__ double entering_by_gates(int column, const Times& times) const {
    const int each = (at.rank + 31) / 32;
    const Words* const words = words_of_column<Words>(at, column);
    Segment<double> own = identity<double>();
    bool is_first = true;  // as it is: a product of gates may be infinite
#pragma unroll 1
    for (int done = 0; done < each; done += kReads) {
      const int first = at.rank - (32 - at.lane) * each + done;  // may be less than 0
      uint32_t wanted = 0;
#pragma unroll
      for (int i = 0; i < kReads; ++i) wanted |= (done + i < each && first + i >= 0 ? 1u : 0u) << i;
      Segment<double> read[kReads];
      read_segments(words + first, 1, wanted, segments.tag, read);
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        if (!(wanted >> i & 1)) continue;
        if (is_first) own = read[i];
        else own = {after(read[i], own.total), times(read[i].gates, own.gates), own.closed || read[i].closed};
        is_first = false;
      }
    }
    fold_neighbors<false>(own, at.lane, 32, times);
    return own.total;
  }
  // The same in all lanes: each total counts with the power over the blocks behind it, as far back as the nearest
  // closed one. Neighboring lanes ask for neighboring words.
  __device__ __forceinline__ double entering_by_powers(int column) const {
    const double over_block = segments.over_block[column], over_lanes = whole_power(over_block, 32u);
    const int before = at.rank - 1 - at.lane;  // blocks behind the lane's first word
    double weight = before < 0 ? 0.0 : whole_power(over_block, static_cast<unsigned>(before % 32));
    uint32_t wanted = 0;
#pragma unroll
    for (int i = 0; i < kMostReads; ++i) wanted |= (32 * i <= before ? 1u : 0u) << i;
    Segment<double> read[kMostReads];
    read_segments(words_of_column<Words>(at, column) + at.lane, 32, wanted, segments.tag, read);
    int nearest = 0;  // closed one
    if (at.p.reset.data) {
#pragma unroll
      for (int i = 0; i < kMostReads; ++i) {
        const uint32_t closed = __ballot_sync(0xffffffffu, (wanted >> i & 1) && read[i].closed);
        if (closed) nearest = 32 * i + 31 - __clz(static_cast<int>(closed));
      }
    }
    double sum = 0.0;
#pragma unroll
    for (int i = kMostReads - 1; i >= 0; --i) {
      if (!(wanted >> i & 1)) continue;
      if (32 * i + at.lane >= nearest) sum = fold(sum, weight, read[i].total);
      weight = bounded_product(weight * over_lanes, over_block);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    return sum;
  }
};

}  // namespace dcs
