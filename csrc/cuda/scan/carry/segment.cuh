// The algebra of segments: what is known of a scanned piece of time without its carry, and how neighboring pieces fold
// into one, always in the same tree, so that the bits of a result do not depend on timing.
#pragma once

#include "common/element_types.cuh"

namespace dcs {

// A scanned piece: its total from a zero carry, the product of its gates, and whether a cut inside stops the carry.
template <typename Wide>
struct Piece {
  Wide total;
  Wide gates;
  bool closed;
};

// The carry after a piece.
template <typename Wide>
__device__ __forceinline__ Wide after(const Piece<Wide>& piece, Wide carry) {
  return piece.closed ? piece.total : fold(piece.total, piece.gates, carry);
}

template <typename Wide>
__device__ __forceinline__ Piece<Wide> identity() {
  return {cast<Wide>(0.0), cast<Wide>(1.0), false};
}

__device__ __forceinline__ Piece<double> piece_of_lane(const Piece<double>& piece, int lane) {
  return {shuffle(piece.total, lane), shuffle(piece.gates, lane),
      __shfl_sync(0xffffffffu, static_cast<int>(piece.closed), lane) != 0};
}

// The scan over pieces of the lanes up to each, of kCount lanes.
template <int kCount, typename Wide>
__device__ __forceinline__ void fold_pieces_up(Piece<Wide>& piece, int lane) {
#pragma unroll
  for (int d = 1; d < kCount; d *= 2) {
    const Wide total = shuffle_up(piece.total, d), gates = shuffle_up(piece.gates, d);
    const bool closed = __shfl_up_sync(0xffffffffu, static_cast<int>(piece.closed), d);
    if (lane >= d && !piece.closed) {
      piece.total = fold(piece.total, piece.gates, total);
      piece.gates = clamped_mul(piece.gates, gates);
      piece.closed = closed;
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
