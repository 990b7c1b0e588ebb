// What the lanes of small rows (small_rows.cuh) do with each other's segments.
#pragma once

#include <type_traits>

#include "scan/carry/segment.cuh"

namespace dcs {

// The product that neither leaves the range of double nor vanishes but for a gate of 0.
template <typename Acc, int kVec>
__device__ __forceinline__ double product_of(const Acc (&gates)[kVec]) {
  Acc product = gates[0];
#pragma unroll
  for (int i = 1; i < kVec; ++i) product *= gates[i];
  constexpr double kMost = std::is_same_v<Acc, float> ? 0x1p100 : 0x1p1000;
  if (fabs(product) < static_cast<Acc>(kMost) && fabs(product) > static_cast<Acc>(1.0 / kMost)) return product;
  double careful = gates[0];
#pragma unroll
  for (int i = 1; i < kVec; ++i) careful = power_mul(careful, static_cast<double>(gates[i]));
  return careful;
}

// Of what enters the warp in what enters the lane, by powers of `number` over 1, 2, 4, ... lanes.
__device__ __forceinline__ double weight_of_lane(const double (&powers)[6], double number) {
  const int lane = threadIdx.x % 32;
  double weight = 1.0;
#pragma unroll
  for (int j = 0; j < 5; ++j) weight *= lane >> j & 1 ? powers[j] : 1.0;
  return bounded_product(weight, number);
}

// Segments of the lanes up to the thread's own, as far back as the nearest of `closed` ones, in `segment`. Returns the
// total of those before it, and of kGates their `weight`. `times` multiplies gates.
template <bool kGates, typename Params, typename Times>
__device__ __forceinline__ double fold_small_lanes(
    const Params& p, uint32_t closed, const Times& times, Segment<double>& segment, double& weight) {
  const int lane = threadIdx.x % 32, reach = reach_of(closed & (0xffffffffu >> (31 - lane)), lane);
#pragma unroll
  for (int j = 0; j < 5; ++j) {
    const int d = 1 << j;
    if (j >= p.levels) break;
    const double other = shuffle_up(segment.total, d);
    if (reach >= d) segment.total = fold(segment.total, kGates ? segment.gates : p.powers[j], other);
    if constexpr (kGates) {
      const double other_gates = shuffle_up(segment.gates, d);
      if (reach >= d) segment.gates = times(segment.gates, other_gates);
    }
  }
  double before = shuffle_up(segment.total, 1);
  if constexpr (kGates) weight = shuffle_up(segment.gates, 1);
  else segment.gates = p.powers[5];
  if (lane == 0) before = 0.0, weight = 1.0;
  segment.closed = closed != 0;
  return before;
}

}  // namespace dcs
