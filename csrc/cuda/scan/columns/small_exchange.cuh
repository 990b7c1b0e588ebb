// The carries into each thread's steps of columns/small_columns.cuh: totals are folded in a warp by shuffles, between
// warps in shared memory, and between the blocks of a cluster in that of all later ones.
#pragma once

#include "common/ptx/cluster.cuh"
#include "scan/carry/segment.cuh"
#include "scan/columns/small_index.cuh"

namespace dcs {

// A segment as 16 bytes of shared memory, this block's or another one's. Gates with all bits set say that it is closed:
// NaNs are given other bits.
struct alignas(16) PackedSegment {
  double total, gates;
  static __device__ __forceinline__ double closed_gates() { return __hiloint2double(-1, -1); }

  __device__ __forceinline__ PackedSegment& operator=(const Segment<double>& segment) {
    total = segment.total;
    const double open_gates = segment.gates == segment.gates ? segment.gates : __hiloint2double(0x7ff80000, 0);
    gates = segment.closed ? closed_gates() : open_gates;
    return *this;
  }
  __device__ __forceinline__ Segment<double> segment() const { return {total, gates, __double2hiint(gates) == -1}; }
};

// What warps store for each other, and blocks of a cluster, by remote stores, for the later ones. The transaction
// barrier `arrivals` completes when the segments of all earlier blocks have come.
template <int kUnit>
struct ColumnExchange {
  static constexpr int kColumns = kSmallSpan * kUnit;
  PackedSegment warps[kSmallColumnWarps][kColumns], blocks[kMostRowCluster][kColumns];
  uint64_t arrivals;

  __device__ __forceinline__ void init_barrier(int rank, int columns) {
    if (threadIdx.x == 0) init_transaction_barrier(&arrivals, rank * columns * static_cast<int>(sizeof(PackedSegment)));
    __syncthreads();
    arrive_in_cluster_relaxed();
  }
  __device__ __forceinline__ void send(const Segment<double>& segment, int rank, int column, uint32_t to) {
    PackedSegment packed_segment;
    packed_segment = segment;
    PackedSegment& remote = blocks[rank][column];
    store_async_in_cluster(&remote.total, &arrivals, to, packed_segment.total);
    store_async_in_cluster(&remote.gates, &arrivals, to, packed_segment.gates);
  }
};

__device__ __forceinline__ Segment<double> joined(const Segment<double>& first, const Segment<double>& then) {
  return {after(then, first.total), power_mul(then.gates, first.gates), first.closed || then.closed};
}
// Each slot's segments with those of the slots before it, of the same cell.
template <int kUnit>
__device__ __forceinline__ void fold_slots(Segment<double> (&segments)[kUnit], const SmallColumnsParams& p) {
  const int lane = static_cast<int>(threadIdx.x) % 32, stride = 1 << p.cell_bits;
  const uint32_t up_to_own = p.cell_lanes << (lane & (stride - 1)) & (0xffffffffu >> (31 - lane));
  int reach[kUnit];  // lanes back to the nearest closed one, or to all
#pragma unroll
  for (int u = 0; u < kUnit; ++u) {
    const uint32_t closed = __ballot_sync(0xffffffffu, segments[u].closed) & up_to_own;
    reach[u] = closed ? lane - 31 + __clz(static_cast<int>(closed)) : lane;
    segments[u].closed = closed != 0;
  }
#pragma unroll 1
  for (int d = stride; d < 32; d *= 2) {
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      const double other = shuffle_up(segments[u].total, d), other_gates = shuffle_up(segments[u].gates, d);
      if (reach[u] < d) continue;
      segments[u].total = fold(segments[u].total, segments[u].gates, other);
      segments[u].gates = power_mul(segments[u].gates, other_gates);
    }
  }
}
// The first `count` of the segments, folded, in all lanes of a cell. Each slot takes `each` of them: some at once, in a
// tree.
template <int kUnit, int kRows>
__device__ __forceinline__ void fold_packed(const PackedSegment (&packed_segments)[kRows][kSmallSpan * kUnit],
    int count, int each, int slot, int column, const SmallColumnsParams& p, Segment<double> (&folded)[kUnit]) {
  constexpr int kAtOnce = kUnit == 1 ? 4 : 2;  // with the other column's
#pragma unroll
  for (int u = 0; u < kUnit; ++u) folded[u] = identity<double>();
#pragma unroll 1
  for (int i = 0; i < each; i += kAtOnce) {
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      Segment<double> some[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int number = slot * each + i + j;
        some[j] = packed_segments[min(number, kRows - 1)][column + u].segment();
        if (i + j >= each || number >= count) some[j] = identity<double>();
      }
#pragma unroll
      for (int d = 1; d < kAtOnce; d *= 2) {
#pragma unroll
        for (int j = 0; j < kAtOnce; j += 2 * d) some[j] = joined(some[j], some[j + d]);
      }
      folded[u] = joined(folded[u], some[0]);
    }
  }
  fold_slots(folded, p);
  const int last = 32 - (1 << p.cell_bits) + column / kUnit;
#pragma unroll
  for (int u = 0; u < kUnit; ++u) folded[u] = segment_of_lane(folded[u], last);
}

// The carries into each thread's steps, from its segments.
template <int kUnit, typename Index>
__device__ __forceinline__ void enter(
    const Index& at, Segment<double> (&segments)[kUnit], ColumnExchange<kUnit>& exchange, double (&carries)[kUnit]) {
  const SmallColumnsParams& p = at.p;
  const int stride = 1 << p.cell_bits, column = at.cell * kUnit;
  fold_slots(segments, p);
  if (at.slot + 1 == at.slots) {
#pragma unroll
    for (int u = 0; u < kUnit; ++u) exchange.warps[at.warp][column + u] = segments[u];
  }
  Segment<double> before[kUnit], warps_before[kUnit];
#pragma unroll
  for (int u = 0; u < kUnit; ++u) {
    const int other = max(at.lane - stride, 0);
    before[u] = segment_of_lane(segments[u], other);
    if (at.slot == 0) before[u] = identity<double>();
  }
  __syncthreads();
  fold_packed(exchange.warps, at.warp, p.slot_warps, at.slot, column, p, warps_before);
  if (p.cluster.divisor > 1) {
    wait_for_cluster();  // until the others' barriers are initialized
    if (at.warp + 1 == at.warps) {
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        const Segment<double> block = joined(warps_before[u], exchange.warps[at.warp][column + u].segment());
        for (int to = at.rank + 1 + at.slot; to < static_cast<int>(p.cluster.divisor); to += at.slots)
          exchange.send(block, at.rank, column + u, static_cast<uint32_t>(to));
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kUnit; ++u) {
    before[u] = joined(warps_before[u], before[u]);
    carries[u] = before[u].total;
  }
  if (at.rank == 0) return;
  Segment<double> blocks_before[kUnit];
  mbarrier_wait(&exchange.arrivals, 0);
  fold_packed(exchange.blocks, at.rank, p.slot_blocks, at.slot, column, p, blocks_before);
#pragma unroll
  for (int u = 0; u < kUnit; ++u) carries[u] = after(before[u], blocks_before[u].total);
}

}  // namespace dcs
