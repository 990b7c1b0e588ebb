// What warps and blocks tell each other in columns/small_columns.cuh, and the carries into each thread's steps of
// per-step gates: segments are folded in a warp by shuffles, between warps in shared memory, and between the blocks of
// a cluster in that of all later ones.
#pragma once

#include "common/ptx/cluster.cuh"
#include "scan/carry/segment.cuh"
#include "scan/columns/small_index.cuh"

namespace dcs {

// A segment as 16 bytes of shared memory, this block's or another one's. Gates with all bits set say that it is closed:
// NaNs are given other bits. Where all gates are one power of gamma (columns/small_powers.cuh) they say only that.
struct alignas(16) PackedSegment {
  double total, gates;
  static __device__ __forceinline__ double closed_gates() { return __hiloint2double(-1, -1); }

  __device__ __forceinline__ PackedSegment& operator=(const Segment<double>& segment) {
    total = segment.total;
    const double open_gates = segment.gates == segment.gates ? segment.gates : __hiloint2double(0x7ff80000, 0);
    gates = segment.closed ? closed_gates() : open_gates;
    return *this;
  }
  __device__ __forceinline__ bool closed() const { return __double2hiint(gates) == -1; }
  __device__ __forceinline__ Segment<double> segment() const { return {total, gates, closed()}; }
};

// What warps store for each other, and blocks of a cluster, by remote stores, for the later ones. The transaction
// barrier `arrivals` completes when the segments of all earlier blocks have come.
struct ColumnExchange {
  PackedSegment warps[kSmallColumnWarps][kSmallSpan], blocks[kMostRowCluster][kSmallSpan];
  uint64_t arrivals;

  // `whole`: segments come with their gates, or whether they are closed.
  __device__ __forceinline__ void init_barrier(int rank, int columns, bool whole) {
    const int bytes = static_cast<int>(whole ? sizeof(PackedSegment) : sizeof(double));
    if (threadIdx.x == 0) init_transaction_barrier(&arrivals, rank * columns * bytes);
    __syncthreads();
    arrive_in_cluster_relaxed();
  }
  // To all later blocks, some from each slot.
  template <typename Index>
  __device__ __forceinline__ void send(const Index& at, const Segment<double>& segment, bool whole) {
    PackedSegment packed_segment;
    packed_segment = segment;
    PackedSegment& remote = blocks[at.rank][at.span_column];
    for (int to = at.rank + 1 + at.slot; to < static_cast<int>(at.p.cluster.divisor); to += at.slots) {
      store_async_in_cluster(&remote.total, &arrivals, static_cast<uint32_t>(to), packed_segment.total);
      if (whole) store_async_in_cluster(&remote.gates, &arrivals, static_cast<uint32_t>(to), packed_segment.gates);
    }
  }
};

__device__ __forceinline__ Segment<double> joined(const Segment<double>& first, const Segment<double>& then) {
  return {after(then, first.total), power_mul(then.gates, first.gates), first.closed || then.closed};
}
// Each slot's segment with those of the slots before it, of the same column.
__device__ __forceinline__ void fold_slots(Segment<double>& segment, const SmallColumnsParams& p) {
  const int lane = static_cast<int>(threadIdx.x) % 32, stride = 1 << p.span_bits;
  const uint32_t up_to_own = p.column_lanes << (lane & (stride - 1)) & (0xffffffffu >> (31 - lane));
  const uint32_t closed = __ballot_sync(0xffffffffu, segment.closed) & up_to_own;
  // Lanes back to the nearest closed one, or to all.
  const int reach = closed ? lane - 31 + __clz(static_cast<int>(closed)) : lane;
  segment.closed = closed != 0;
#pragma unroll 1
  for (int d = stride; d < 32; d *= 2) {
    const double other = shuffle_up(segment.total, d), other_gates = shuffle_up(segment.gates, d);
    if (reach < d) continue;
    segment.total = fold(segment.total, segment.gates, other);
    segment.gates = power_mul(segment.gates, other_gates);
  }
}
// The first `count` of the segments, folded, in all lanes of a column. Each slot takes as many neighbors, the last slot
// the last ones.
template <typename Index, int kRows>
__device__ __forceinline__ Segment<double> fold_packed(
    const Index& at, const PackedSegment (&packed_segments)[kRows][kSmallSpan], int count) {
  constexpr int kAtOnce = 2;
  const SmallColumnsParams& p = at.p;
  const int each = (count + at.slots - 1) >> (kSmallLevels - p.span_bits), first = count - (at.slots - at.slot) * each;
  Segment<double> folded = identity<double>();
#pragma unroll 1
  for (int i = 0; i < each; i += kAtOnce) {
    PackedSegment some[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) some[j] = packed_segments[min(max(first + i + j, 0), kRows - 1)][at.span_column];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j >= each) break;
      if (first + i + j >= 0) folded = joined(folded, some[j].segment());
    }
  }
  fold_slots(folded, p);
  return segment_of_lane(folded, 32 - (1 << p.span_bits) + at.span_column);
}

// The carry into a thread's steps, from its segment, where each step has a gate of its own.
template <typename Index>
__device__ __forceinline__ double carry_into(const Index& at, Segment<double>& segment, ColumnExchange& exchange) {
  const SmallColumnsParams& p = at.p;
  const int stride = 1 << p.span_bits;
  fold_slots(segment, p);
  if (at.slot + 1 == at.slots) exchange.warps[at.warp][at.span_column] = segment;
  Segment<double> before = segment_of_lane(segment, max(at.lane - stride, 0));
  if (at.slot == 0) before = identity<double>();
  __syncthreads();
  const Segment<double> warps_before = fold_packed(at, exchange.warps, at.warp);
  if (p.cluster.divisor > 1) {
    wait_for_cluster();  // until the others' barriers are initialized
    if (at.warp + 1 == at.warps)
      exchange.send(at, joined(warps_before, exchange.warps[at.warp][at.span_column].segment()), true);
  }
  before = joined(warps_before, before);
  if (at.rank == 0) return before.total;
  mbarrier_wait(&exchange.arrivals, 0);
  return after(before, fold_packed(at, exchange.blocks, at.rank).total);
}

}  // namespace dcs
