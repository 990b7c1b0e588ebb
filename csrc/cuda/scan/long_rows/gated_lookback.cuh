// Totals with a per-step gamma: how blocks publish those of tiles, and how one warp folds up to 32 * kWindow of them in
// a fixed order. All blocks read the same few lines at the same time, and what a tile waits for is these reads: they
// take few requests, on one of four copies.
#pragma once

#include "scan/long_rows/params.cuh"
#include "common/word.cuh"
#include "common/element_types.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

// A tile's total and the product of its gates in one word, whose state is never 0: a finite product gives its last
// digit away. In two words, 1e8 floats took 354 us instead of 333.
__device__ __forceinline__ void store_total(Word* to, double total, double gates) {
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(gates));
  store_word(to, static_cast<uint64_t>(__double_as_longlong(total)), is_finite(gates) ? bits | 1 : bits);
}
__device__ __forceinline__ double gates_of(uint64_t state) {
  const double gates = __longlong_as_double(static_cast<long long>(state));
  return is_finite(gates) ? __longlong_as_double(static_cast<long long>(state & ~uint64_t{1})) : gates;
}

// Every total is published kStepCopies times, and a block reads one copy (327 us).
template <typename W>
__device__ __forceinline__ W* copy_of_totals(W* words, const StreamParams& params, uint32_t copy) {
  return words + static_cast<int64_t>(copy) * params.rows * params.tiles;
}

// Until every block has left its mark of this call; what it wrote before that is there.
__device__ __forceinline__ void wait_for_marks(const Word* marks, uint64_t tag) {
  for (uint32_t block = threadIdx.x % 32; block < gridDim.x; block += 32)
    while (load_word(marks + block).state != tag) {
    }
  __syncwarp();
  __threadfence();
}

// A total leaves no room in its word for a mark of the call, so no total may be there from before. Each block clears
// those of its own tiles while the first of them is on its way, and leaves a mark behind all totals.
__device__ __forceinline__ Word* marks_behind_totals(const StreamParams& params) {
  return copy_of_totals(static_cast<Word*>(params.statuses), params, kStepCopies);
}
__device__ __forceinline__ void clear_totals(const StreamParams& params) {
  const uint32_t lane = threadIdx.x % 32, count = params.rows * params.tiles;
  for (int64_t index = blockIdx.x + static_cast<int64_t>(lane) * gridDim.x; index < count; index += 32 * gridDim.x) {
#pragma unroll
    for (uint32_t copy = 0; copy < kStepCopies; ++copy)
      store_word(copy_of_totals(static_cast<Word*>(params.statuses), params, copy) + index, 0, 0);
  }
  __syncwarp();
  __threadfence();
  if (lane == 0) store_word(marks_behind_totals(params) + blockIdx.x, 0, params.tag);
}

// Lane l holds the totals and the products of gates of the tiles l, l + 32, ... before the nearest, so that a warp
// reads whole lines; those from `window` on do not exist. Every lane gets the total of all and the product of their
// gates.
template <int kWindow>
__device__ __forceinline__ void fold_totals(
    double (&totals)[kWindow], double (&gates)[kWindow], uint32_t window, double& sum, double& product) {
  const uint32_t lane = threadIdx.x % 32;
  sum = 0.0;
  product = 1.0;
  bool bounded = true;
#pragma unroll
  for (int j = 0; j < kWindow; ++j) bounded = bounded && fabs(gates[j]) <= 1.0;
  const auto fold_with = [&](const auto& times) {
#pragma unroll
    for (uint32_t d = 1; d < 32; d *= 2) {
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const double farther = __shfl_down_sync(0xffffffffu, totals[j], d),
                     farther_gates = __shfl_down_sync(0xffffffffu, gates[j], d);
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

// The words of the tiles before the one of this index, `window` of them, once `is_there` says so of their states: lane
// l reads the tiles l, l + 32, ... before the nearest.
template <int kWindow, typename IsThere>
__device__ __forceinline__ void read_window(
    const Word* words, uint32_t index, uint32_t window, Word (&read)[kWindow], const IsThere& is_there) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t missing = 0;
#pragma unroll
  for (int j = 0; j < kWindow; ++j) {
    read[j] = {0, 0};
    if (lane + 32 * j < window) missing |= 1u << j;
  }
  const Word* const nearest = words + (static_cast<int64_t>(index) - 1 - lane);
  while (__any_sync(0xffffffffu, missing != 0)) {  // all that is missing in one trip
#pragma unroll
    for (int j = 0; j < kWindow; ++j)
      if (missing >> j & 1) read[j] = load_word(nearest - 32 * j);
#pragma unroll
    for (int j = 0; j < kWindow; ++j)
      if (is_there(read[j].state)) missing &= ~(1u << j);
  }
}

// The totals of the tiles before the one of this index, `window` of them, on the copy at `words`.
template <int kWindow>
__device__ __forceinline__ void collect_totals(
    const Word* words, uint32_t index, uint32_t window, double& sum, double& product) {
  Word read[kWindow];
  read_window(words, index, window, read, [](uint64_t state) { return state != 0; });
  double totals[kWindow], gates[kWindow];
#pragma unroll
  for (int j = 0; j < kWindow; ++j) {
    totals[j] = __longlong_as_double(read[j].value);
    gates[j] = gates_of(read[j].state);
  }
  fold_totals(totals, gates, window, sum, product);
}

}  // namespace dcs
