// The carries into each thread's steps of columns/small_columns.cuh where all steps of a column have a shared gamma:
// from one thread to the next it is a known power, so that only totals are folded, and whether they are closed where
// there are resets. What lies before a first segment is a total of 0: there a gamma that is no number or infinite may
// leave a NaN, but it makes one of every carry with the next step.
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

// A gamma's powers over 1, 2, 4, ... times a thread's steps. Those of a number come with the launch, a row's gamma
// makes them of the first one.
template <bool kRow>
struct SlotPowers {
  const SmallPowers& of_number;
  PowerRange range;
  double first;

  // Visits `count` of them with their numbers. Returns the next one.
  template <typename Visit>
  __device__ __forceinline__ double each(int count, const Visit& visit) const {
    double power = first;
#pragma unroll
    for (int j = 0; j < kSmallLevels; ++j) {
      if (j >= count) break;
      visit(j, kRow ? power : of_number.each[j]);
      if constexpr (kRow) power = range.bounded(power * power);
    }
    return kRow ? power : of_number.far;
  }
};

// The carry into a thread's steps, from their total and whether they are closed.
template <bool kRow, bool kShares, typename Index>
__device__ __forceinline__ double carry_by_powers(
    const Index& at, double total, bool closed, double gamma, ColumnSegments& segments) {
  const SmallColumnsParams& p = at.p;
  const int stride = 1 << p.span_bits, levels = kSmallLevels - p.span_bits;
  uint32_t cuts_before = 0;
  int reach = at.lane;
  if (p.reset.data) {
    const uint32_t before = (p.column_lanes << at.span_column) & ((1u << at.lane) - 1);
    cuts_before = __ballot_sync(0xffffffffu, closed) & before;
    reach = closed ? 0 : reach_of(cuts_before, at.lane);
  }
  const PowerRange range(gamma);
  double over_own = 1.0;
  if constexpr (kRow) {
    static_assert(kSmallBatch == 4);
    double power = gamma * gamma;
    power *= power;
    for (int batches = p.steps / kSmallBatch; batches; batches >>= 1, power *= power)
      if (batches & 1) over_own *= power;
    over_own = range.bounded(over_own);
  }
  double slot_weight = 1.0;
  const double over_warp = SlotPowers<kRow>{p.lane_powers, range, over_own}.each(levels, [&](int j, double power) {
    const double other = shuffle_up(total, stride << j);
    if (reach >= stride << j) total = fold(total, power, other);
    if (at.slot >> j & 1) slot_weight *= power;
  });
  if (at.slot + 1 == at.slots)
    segments.of_warps[at.warp][at.span_column] = Segment<double>{total, over_warp, closed || cuts_before};
  if (at.warp == 0 && at.slot + 1 == at.slots) {
    segments.over_warp[at.span_column] = over_warp;
    if constexpr (kShares)
      segments.over_block[at.span_column] = kRow ? whole_power(over_warp, at.warps) : p.lane_powers.block;
  }
  Segment<double> before{shuffle_up(total, stride), range.bounded(slot_weight), cuts_before != 0};
  if (at.slot == 0) before.total = 0.0;
  return carry_from_warps<kShares, false>(at, before, segments);
}

}  // namespace dcs
