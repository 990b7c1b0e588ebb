// The sums over a row of logits, and how a warp's, a block's or a cluster's threads join theirs: in an order that
// depends on nothing but the launch.
#pragma once

#include <cfloat>
#include <type_traits>

#include "common/arithmetic.cuh"
#include "common/ptx/cluster.cuh"
#include "common/vector.cuh"

namespace dcs {

enum class Scope { kWarp, kBlock, kCluster };

constexpr int kRowThreads =
    384;  // at most, of a block; three such blocks of 56 registers a thread fill a multiprocessor

template <typename Acc>
constexpr Acc kLogOfBase = std::is_same_v<Acc, float> ? 0.693147180559945309 : 1.0;
template <typename Acc>
constexpr Acc kLowest = std::is_same_v<Acc, float> ? -FLT_MAX : -DBL_MAX;

template <typename Acc>
__device__ __forceinline__ bool is_larger(Acc a, Acc b) {
  return !(a <= b) && b == b;
}

// Of half precision two at a time.
template <typename T, int kVec>
__device__ __forceinline__ float largest_half(const Vector<T, kVec>& raw) {
  HalfPair<T> pairs[kVec / 2];
  memcpy(pairs, raw.words, sizeof pairs);
#pragma unroll
  for (int i = 1; i < kVec / 2; ++i) pairs[0] = __hmax2_nan(pairs[0], pairs[i]);
  return maximum(cast<float>(pairs[0].x), cast<float>(pairs[0].y));
}

// Where e^x is 0, for factors that may be infinite. Drops a NaN: the sum of powers has it.
__device__ __forceinline__ float bounded(float exponent) { return fmaxf(exponent, -1000.f); }
__device__ __forceinline__ double bounded(double exponent) { return fmax(exponent, -1000.0); }

// Sums over a part of a row, relative to its largest y. Which of the optional ones there are is the same for all rows.
template <typename Acc>
struct RowSums {
  Acc largest;
  Acc total;        // sum base^d, d = factor * (y - largest)
  Acc weighted;     // sum d base^d; for the entropy
  Acc distance;     // sum w (largest - y), for label smoothing
  Acc weight;       // sum w
  uint32_t vector;  // the first that has the largest y
};

template <typename Acc>
__device__ __forceinline__ RowSums<Acc> no_sums() {
  return {kLowest<Acc>, Acc(0), Acc(0), Acc(0), Acc(0), ~0u};
}

struct OptionalSums {
  bool weighted, distance;
};

template <typename Acc>
__device__ __forceinline__ void raise(RowSums<Acc>& sums, Acc largest, Acc factor, OptionalSums optional) {
  const Acc rise = bounded((sums.largest - largest) * factor), scale = power(rise);
  if (optional.weighted) sums.weighted = scale * (sums.weighted + rise * sums.total);
  sums.total *= scale;
  if (optional.distance && sums.weight != Acc(0)) sums.distance += (largest - sums.largest) * sums.weight;
  sums.largest = largest;
}

template <typename Acc>
__device__ __forceinline__ void join(RowSums<Acc>& sums, RowSums<Acc> other, Acc factor, OptionalSums optional) {
  const bool other_is_larger = is_larger(other.largest, sums.largest), larger = is_larger(sums.largest, other.largest);
  const Acc largest = other_is_larger ? other.largest : sums.largest;
  sums.vector = larger ? sums.vector : other_is_larger ? other.vector : min(sums.vector, other.vector);
  raise(sums, largest, factor, optional);
  raise(other, largest, factor, optional);
  sums.total += other.total;
  if (optional.weighted) sums.weighted += other.weighted;
  if (optional.distance) {
    sums.distance += other.distance;
    sums.weight += other.weight;
  }
}

// Lane 0's sums become those of the first `width` lanes, in a fixed order, and all lanes get them.
template <typename Acc>
__device__ __forceinline__ void join_lanes(RowSums<Acc>& sums, Acc factor, OptionalSums optional, int width) {
  const unsigned all = 0xffffffffu;
  for (int d = width / 2; d > 0; d /= 2) {
    RowSums<Acc> other = no_sums<Acc>();
    other.largest = __shfl_down_sync(all, sums.largest, d);
    other.total = __shfl_down_sync(all, sums.total, d);
    other.vector = __shfl_down_sync(all, sums.vector, d);
    if (optional.weighted) other.weighted = __shfl_down_sync(all, sums.weighted, d);
    if (optional.distance) {
      other.distance = __shfl_down_sync(all, sums.distance, d);
      other.weight = __shfl_down_sync(all, sums.weight, d);
    }
    join(sums, other, factor, optional);
  }
  sums.largest = __shfl_sync(all, sums.largest, 0);
  sums.total = __shfl_sync(all, sums.total, 0);
  sums.vector = __shfl_sync(all, sums.vector, 0);
  if (optional.weighted) sums.weighted = __shfl_sync(all, sums.weighted, 0);
  if (optional.distance) {
    sums.distance = __shfl_sync(all, sums.distance, 0);
    sums.weight = __shfl_sync(all, sums.weight, 0);
  }
}

// Joins the sums of all threads of a row.
template <Scope kScope, typename Acc>
__device__ __forceinline__ void join_threads(RowSums<Acc>& sums, Acc factor, OptionalSums optional) {
  join_lanes(sums, factor, optional, 32);
  if constexpr (kScope == Scope::kWarp) {
    // The row's logits have been read by all lanes before one writes.
    __syncwarp();
    return;
  }
  constexpr int kMostWarps = 16;
  static_assert(kRowThreads <= 32 * kMostWarps);
  __shared__ RowSums<Acc> of_warps[kMostWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (lane == 0) of_warps[warp] = sums;
  __syncthreads();
  sums = lane < warps ? of_warps[lane] : no_sums<Acc>();
  join_lanes(sums, factor, optional, kMostWarps);
  if constexpr (kScope == Scope::kCluster) {
    __shared__ RowSums<Acc> of_block;
    if (threadIdx.x == 0) of_block = sums;
    arrive_in_cluster_unaligned();
    wait_for_cluster_unaligned();
    sums = no_sums<Acc>();
    if (lane < static_cast<int>(cluster_blocks())) {
      constexpr int kWords = sizeof(RowSums<Acc>) / 4;
      uint32_t words[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        words[i] = load_in_cluster(reinterpret_cast<const uint32_t*>(&of_block) + i, lane);
      memcpy(&sums, words, sizeof sums);
    }
    join_lanes(sums, factor, optional, 8);
    // A block may end once the others have read its sums: the kernel waits for them at its end.
    arrive_in_cluster_unaligned();
  }
}

}  // namespace dcs
