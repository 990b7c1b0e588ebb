// The algebra of segments: what is known of a scanned segment of time without its carry, and how neighboring segments
// fold into one, always in the same tree, so that the bits of a result do not depend on timing.
#pragma once

#include "common/element_types.cuh"

namespace dcs {

// A scanned segment: its total from a zero carry, the product of its gates, and whether a cut inside stops the carry.
template <typename Wide>
struct Segment {
  Wide total;
  Wide gates;
  bool closed;
};

// The carry after a segment.
template <typename Wide>
__device__ __forceinline__ Wide after(const Segment<Wide>& segment, Wide carry) {
  return segment.closed ? segment.total : fold(segment.total, segment.gates, carry);
}

template <typename Wide>
__device__ __forceinline__ Segment<Wide> identity() {
  return {cast<Wide>(0.0), cast<Wide>(1.0), false};
}

// How many lanes back what enters a lane comes from: as far as the nearest closed one of `closed`, which are lanes up
// to its own, or from all `before`.
__device__ __forceinline__ int reach_of(uint32_t closed, int before) {
  return closed ? static_cast<int>(threadIdx.x) % 32 - 31 + __clz(static_cast<int>(closed)) : before;
}

__device__ __forceinline__ Segment<double> segment_of_lane(const Segment<double>& segment, int lane) {
  return {shuffle(segment.total, lane), shuffle(segment.gates, lane),
      __shfl_sync(0xffffffffu, static_cast<int>(segment.closed), lane) != 0};
}

// The scan over segments of the lanes up to each, of kCount lanes.
template <int kCount, typename Wide>
__device__ __forceinline__ void fold_segments_up(Segment<Wide>& segment, int lane) {
#pragma unroll
  for (int d = 1; d < kCount; d *= 2) {
    const Wide total = shuffle_up(segment.total, d), gates = shuffle_up(segment.gates, d);
    const bool closed = __shfl_up_sync(0xffffffffu, static_cast<int>(segment.closed), d);
    if (lane >= d && !segment.closed) {
      segment.total = fold(segment.total, segment.gates, total);
      segment.gates = clamped_mul(segment.gates, gates);
      segment.closed = closed;
    }
  }
}

// A product of gates in float. Of floats it knows what rounding took of it: 1 is nearer to the number below than to the
// one above, so that gates which take each other back would lose 1e-8 a step, all in the same direction.
template <typename T>
struct GateProduct {
  float rounded = 1.f, rest = 0.f;

  __device__ __forceinline__ void take(float gate) {
    const float before = rounded;
    rounded *= gate;
    if constexpr (sizeof(T) > 2) rest = fmaf(rest, gate, fmaf(before, gate, -rounded));
  }
  __device__ __forceinline__ double whole() const {
    return rounded + (sizeof(T) > 2 && is_finite(rest) ? static_cast<double>(rest) : 0.0);
  }
};

// All lanes' totals and products of gates up to their own, of kLanes of them.
template <int kLanes>
__device__ __forceinline__ void fold_lanes(double& total, double& gates, int lane) {
  const auto fold_with = [&](const auto& times) {
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
      const double other = shuffle_up(total, d), other_gates = shuffle_up(gates, d);
      if (lane >= d) {
        total = fold(total, gates, other);
        gates = times(gates, other_gates);
      }
    }
  };
  if (__all_sync(0xffffffffu, fabs(gates) <= 1.0)) fold_with([](double a, double b) { return a * b; });
  else fold_with([](double a, double b) { return clamped_mul(a, b); });
}

}  // namespace dcs
