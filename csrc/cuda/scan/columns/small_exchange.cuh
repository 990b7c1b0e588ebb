// The carries into each thread's steps of columns/small_columns.cuh: segments are folded in a warp by shuffles, those
// of warps and blocks in shared memory (carry/warp_segments.cuh) or, of blocks that are no cluster, in global memory.
#pragma once

#include "scan/columns/small_words.cuh"

namespace dcs {

// Each slot's segment with those of the slots before it, of the same column.
__device__ __forceinline__ void fold_slots(Segment<double>& segment, const SmallColumnsParams& p) {
  const int lane = static_cast<int>(threadIdx.x) % 32, stride = 1 << p.span_bits;
  const uint32_t up_to_own = p.column_lanes << (lane & (stride - 1)) & (0xffffffffu >> (31 - lane));
  const uint32_t closed = __ballot_sync(0xffffffffu, segment.closed) & up_to_own;
  const int reach = reach_of(closed, lane);
  segment.closed = closed != 0;
#pragma unroll 1
  for (int d = stride; d < 32; d *= 2) {
    const double other = shuffle_up(segment.total, d), other_gates = shuffle_up(segment.gates, d);
    if (reach < d) continue;
    segment.total = fold(segment.total, segment.gates, other);
    segment.gates = power_mul(segment.gates, other_gates);
  }
}
// The carry into a thread's steps from what is before them in the warp, when each warp has stored its segments.
// kShares: blocks are no cluster; kGates: their gates are no powers of one.
template <bool kShares, bool kGates, typename Index>
__device__ __forceinline__ double carry_from_warps(
    const Index& at, const Segment<double>& before, ColumnSegments& segments) {
  const SmallColumnsParams& p = at.p;
  const auto times = [](double a, double b) { return power_mul(a, b); };
  double carry;
  if constexpr (kShares) carry = SmallWords<kGates>(at, segments).carry(times);
  else
    carry = segments.template carry<!kGates>(
        at.span_column, 1 << p.span_bits, at.rank, static_cast<int>(p.cluster.divisor), times);
  return after(before, carry);
}

// The carry into a thread's steps, from its segment, where each step has a gate of its own.
template <bool kShares, typename Index>
__device__ __forceinline__ double carry_into(const Index& at, Segment<double>& segment, ColumnSegments& segments) {
  const int stride = 1 << at.p.span_bits;
  fold_slots(segment, at.p);
  if (at.slot + 1 == at.slots) segments.of_warps[at.warp][at.span_column] = segment;
  Segment<double> before = segment_of_lane(segment, max(at.lane - stride, 0));
  if (at.slot == 0) before = identity<double>();
  return carry_from_warps<kShares, true>(at, before, segments);
}

}  // namespace dcs
