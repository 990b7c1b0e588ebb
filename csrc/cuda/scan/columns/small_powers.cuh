// The carries into each thread's steps of columns/small_columns.cuh where all steps of a column have one gamma: from
// one thread, warp or block to the next it is a known power, so that only totals are folded, and whether they are
// closed where there are resets. What lies before a first segment is a total of 0: there a gamma that is no number or
// infinite may leave a NaN, but it makes one of every carry with the next step.
#pragma once

#include <climits>

#include "scan/columns/small_exchange.cuh"

namespace dcs {

// Powers of a gamma with even exponents, which are not negative, neither vanish nor become infinite but for a gamma
// that is 0 or infinite: bounds of their high words.
struct PowerRange {
  int least, most;
  __device__ __forceinline__ explicit PowerRange(double gamma)
      : least(gamma != 0.0 && is_finite(gamma) ? 0x00100000 : INT_MIN), most(is_finite(gamma) ? 0x7fefffff : INT_MAX) {}
  __device__ __forceinline__ double bounded(double power) const {
    return __hiloint2double(min(max(__double2hiint(power), least), most), __double2loint(power));
  }
};

// A gamma's powers over 1, 2, 4, ... times some steps. Those of a number come with the launch, a row's gamma makes them
// of the first one.
template <bool kRow>
struct GammaPowers {
  const SmallPowers& of_number;
  PowerRange range;
  int levels;  // of a warp's slots
  double first;

  // Visits `count` of them with their numbers. Returns the next one, of a row's gamma.
  template <typename Visit>
  __device__ __forceinline__ double each(int count, const Visit& visit) const {
    double power = first;
#pragma unroll
    for (int j = 0; j < kSmallLevels; ++j) {
      if (j >= count) break;
      visit(j, kRow ? power : of_number.each[j]);
      if constexpr (kRow) power = range.bounded(power * power);
    }
    return power;
  }
  // Over as many times the steps as a warp has slots.
  __device__ __forceinline__ double over_slots() const {
    if constexpr (!kRow) return of_number.far;
    return each(levels, [](int, double) {});
  }
  // Over `count` times the steps.
  __device__ __forceinline__ double over(int count) const {
    double product = 1.0;
    if constexpr (kRow) {
#pragma unroll 1
      for (double power = first; count; count >>= 1, power *= power)
        if (count & 1) product *= power;
    } else {
      each(kSmallLevels, [&](int j, double power) {
        if (count >> j & 1) product *= power;
      });
    }
    return range.bounded(product);
  }
};

// A total, and whether a cut stops what comes from before.
struct ColumnTotal {
  double total;
  bool closed;
  // With the carry from before, of a weight that is a power of gamma.
  __device__ __forceinline__ double after(double weight, double carry) const {
    return closed ? total : fold(total, weight, carry);
  }
};

// The first `count` of the segments, folded, in all lanes of a column: each slot takes every so many of them, the last
// slot the last one.
template <bool kRow, typename Index, int kRows>
__device__ __forceinline__ ColumnTotal fold_totals(const Index& at,
    const PackedSegment (&packed_segments)[kRows][kSmallSpan], int count, const GammaPowers<kRow>& powers) {
  constexpr int kAtOnce = 2;
  const SmallColumnsParams& p = at.p;
  const int levels = powers.levels, rounds = (count + at.slots - 1) >> levels;
  const uint32_t column_lanes = p.column_lanes << at.span_column;
  const double far = powers.over_slots();
  ColumnTotal folded{0.0, false};
#pragma unroll 1
  for (int first = at.slot + count - (rounds << levels); first < count; first += kAtOnce << levels) {
    ColumnTotal some[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int number = first + (j << levels);
      some[j] = {0.0, false};
      if (number < 0 || number >= count) continue;
      const PackedSegment& packed_segment = packed_segments[number][at.span_column];
      some[j] = {packed_segment.total, p.reset.data && packed_segment.closed()};
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + (j << levels) >= count) break;
      double total = fold(some[j].total, far, folded.total);
      if (p.reset.data) {
        const uint32_t cuts = __ballot_sync(0xffffffffu, some[j].closed) & column_lanes;
        if (cuts) total = at.lane >= 31 - __clz(static_cast<int>(cuts)) ? some[j].total : 0.0, folded.closed = true;
      }
      folded.total = total;
    }
  }
  powers.each(levels, [&](int j, double power) {
    const double other = shuffle_up(folded.total, 1 << (p.span_bits + j));
    folded.total = fold(folded.total, power, other);  // of the last slot: others' mean nothing
  });
  folded.total = shuffle(folded.total, 32 - (1 << p.span_bits) + at.span_column);
  return folded;
}

// The carry into a thread's steps, from their total and whether they are closed.
template <bool kRow, typename Index>
__device__ __forceinline__ double carry_by_powers(
    const Index& at, double total, bool closed, double gamma, ColumnExchange& exchange) {
  const SmallColumnsParams& p = at.p;
  const int stride = 1 << p.span_bits, levels = kSmallLevels - p.span_bits;
  uint32_t cuts_before = 0;
  int reach = at.lane;  // lanes back to the nearest closed one, or to all
  if (p.reset.data) {
    const uint32_t before = (p.column_lanes << at.span_column) & ((1u << at.lane) - 1);
    cuts_before = __ballot_sync(0xffffffffu, closed) & before;
    if (cuts_before) reach = at.lane - 31 + __clz(static_cast<int>(cuts_before));
    if (closed) reach = 0;
  }
  const PowerRange range(gamma);
  double over_own = 1.0;
  if constexpr (kRow) {
    static_assert(kSmallBatch == 4);
    const double square = gamma * gamma;
    over_own = GammaPowers<kRow>{p.lane_powers, range, levels, square * square}.over(p.steps / kSmallBatch);
  }
  const GammaPowers<kRow> lanes{p.lane_powers, range, levels, over_own};
  double slot_weight = 1.0;
  const double next = lanes.each(levels, [&](int j, double power) {
    const double other = shuffle_up(total, stride << j);
    if (reach >= stride << j) total = fold(total, power, other);
    if (at.slot >> j & 1) slot_weight *= power;
  });
  slot_weight = range.bounded(slot_weight);
  const double over_warp = kRow ? next : p.lane_powers.far;
  if (at.slot + 1 == at.slots)
    exchange.warps[at.warp][at.span_column] = Segment<double>{total, 1.0, closed || cuts_before};
  ColumnTotal before{shuffle_up(total, stride), cuts_before != 0};
  if (at.slot == 0) before.total = 0.0;
  __syncthreads();
  const GammaPowers<kRow> warps{p.warp_powers, range, levels, over_warp};
  const ColumnTotal warps_before = fold_totals(at, exchange.warps, at.warp, warps);
  if (p.cluster.divisor == 1) return before.after(slot_weight, warps_before.total);

  wait_for_cluster();  // until the others' barriers are initialized
  if (at.warp + 1 == at.warps) {
    const PackedSegment last = exchange.warps[at.warp][at.span_column];
    const ColumnTotal own{last.total, last.closed()};
    exchange.send(at, {own.after(over_warp, warps_before.total), 1.0, own.closed || warps_before.closed}, p.reset.data);
  }
  if (at.rank == 0) return before.after(slot_weight, warps_before.total);
  const double warp_weight = warps.over(at.warp);
  const GammaPowers<kRow> blocks{p.block_powers, range, levels, kRow ? warps.over(at.warps) : 1.0};
  mbarrier_wait(&exchange.arrivals, 0);
  const double entering = fold_totals(at, exchange.blocks, at.rank, blocks).total;
  return before.after(slot_weight, warps_before.after(warp_weight, entering));
}

}  // namespace dcs
