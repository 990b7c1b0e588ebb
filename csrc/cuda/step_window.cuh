// The totals of tiles with a gamma a step: how blocks publish them, and how one warp folds up to 32 * kWindow of them in a fixed order.
// All blocks read the same few lines at the same time, and what a tile waits for is these reads: they take few requests, on one of four copies.
#pragma once

#include "lookback.cuh"
#include "stream.cuh"
#include "types.cuh"

namespace dcs {

// A tile's total and the product of its gates in one word, whose state is never 0: a finite product gives its last digit away. In two words, 1e8
// floats took 354 us instead of 333.
__device__ __forceinline__ void store_piece(Word* to, double total, double gates) {
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(gates));
  store_word(to, static_cast<uint64_t>(__double_as_longlong(total)), is_finite(gates) ? bits | 1 : bits);
}
__device__ __forceinline__ double gates_of(uint64_t state) {
  const double gates = __longlong_as_double(static_cast<long long>(state));
  return is_finite(gates) ? __longlong_as_double(static_cast<long long>(state & ~uint64_t{1})) : gates;
}

// Every piece is published kStepCopies times, and a block reads one copy (327 us).
template <typename W>
__device__ __forceinline__ W* copy_of_pieces(W* words, const StreamParams& params, uint32_t copy) {
  return words + static_cast<int64_t>(copy) * params.rows * params.tiles;
}

// Lane l holds the totals and the products of gates of the tiles l, l + 32, ... before the nearest, so that a warp reads whole lines; those
// from `window` on do not exist. Every lane gets the total of all and the product of their gates.
template <int kWindow>
__device__ __forceinline__ void fold_pieces(double (&totals)[kWindow], double (&gates)[kWindow], uint32_t window, double& sum, double& product) {
  const uint32_t lane = threadIdx.x % 32;
  bool bounded = true;
#pragma unroll
  for (int j = 0; j < kWindow; ++j) bounded = bounded && fabs(gates[j]) <= 1.0;
  const auto fold_with = [&](const auto& times) {
#pragma unroll
    for (uint32_t d = 1; d < 32; d *= 2) {
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const double farther = __shfl_down_sync(0xffffffffu, totals[j], d), farther_gates = __shfl_down_sync(0xffffffffu, gates[j], d);
        if (lane + d < 32 && lane + d + 32 * j < window) {
          totals[j] = fold(totals[j], gates[j], farther);
          gates[j] = times(gates[j], farther_gates);
        }
      }
    }
    // Lane 0 has those of every 32 tiles; now the farthest of them first.
#pragma unroll
    for (int j = kWindow - 1; j >= 0; --j) {
      if (32 * j < window) {
        sum = 32 * (j + 1) < window ? fold(totals[j], gates[j], sum) : totals[j];
        product = times(gates[j], product);
      }
    }
  };
  if (__all_sync(0xffffffffu, bounded)) fold_with([](double a, double b) { return a * b; });
  else fold_with([](double a, double b) { return clamped_mul(a, b); });
  sum = shuffle(sum, 0);
  product = shuffle(product, 0);
}

}  // namespace dcs
