// Softmax of contiguous rows, one read and one write.
//
// Short rows: a power of two of lanes takes a row, several rows a warp. Others: a block, or a cluster of blocks, takes
// a row; each thread loads all its vectors before it uses the first, and keeps them. Forward they stay in registers, in
// float as their powers, or, eight vectors of half precision, as they came (64 registers of powers would leave room for
// half as many threads; the powers are then made twice, and the exponential unit is busy for 0.6 of the time that the
// traffic takes on an H200). Backward the gradient stays in registers, and the output goes to shared memory behind the
// registers' back: each thread reads there what it has itself asked for, so this takes no barrier.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "softmax/values.cuh"

namespace dcs {

constexpr int kLaneThreads = 128;    // of a block of short rows
constexpr int kBlockVectors = 8;     // a thread's, at most
constexpr int kBlockThreads = 1024;  // at most

template <typename T>
struct SoftmaxRows {
  const T* input;
  const T* saved;
  T* output;
  int64_t rows, columns;
  int lane_bits;  // lanes of a short row, as a power of two
  int share;      // vectors of a row that a block takes
  uint32_t zero;
};

// The largest of a warp's numbers, a NaN if there is one, in one instruction: as integers of the same order. A NaN must
// not have its sign set.
__device__ __forceinline__ float warp_largest(float value) {
  const auto turned = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(turned(__reduce_max_sync(kAllLanes, turned(__float_as_int(value)))));
}
// The sum of a warp's numbers that are 0 to `kMost` each, in one instruction: in fixed point, of which 32 * kMost is 31
// bits.
template <int kMost>
__device__ __forceinline__ float fixed_warp_sum(float value) {
  constexpr float kOne = (1u << 26) / kMost;
  return static_cast<float>(__reduce_add_sync(kAllLanes, __float2uint_rn(value * kOne))) * (1.f / kOne);
}

// In pairs: fewer steps one after the other.
template <typename Acc, int kCount>
__device__ __forceinline__ Acc sum_of(const Acc (&values)[kCount]) {
  Acc sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = values[i];
#pragma unroll
  for (int apart = kCount / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int i = 0; i < apart; ++i) sums[i] += sums[i + apart];
  }
  return sums[0];
}

// Every row's sum over its lanes.
template <typename Acc, int kRows>
__device__ __forceinline__ void sum_lanes(Acc (&total)[kRows], int lanes) {
  for (int d = lanes / 2; d > 0; d /= 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) total[r] += __shfl_xor_sync(kAllLanes, total[r], d);
  }
}
template <typename Acc, typename T, int kVec>
__device__ __forceinline__ void add_products(Acc& total, const Vector<T, kVec>& raw, const Vector<T, kVec>& saved) {
  Acc g[kVec], y[kVec];
  unpack(raw, g);
  unpack(saved, y);
#pragma unroll
  for (int i = 0; i < kVec; ++i) total += g[i] * y[i];
}

// Vectors of 16 bytes where all rows begin at one; else of one element, for rows of up to 32 * kBlockVectors elements.
// kLaneBits: lanes of a row, as a power of two; -1: known as it runs.
template <typename T, int kVec, int kVectors, int kRows, bool kBackward, int kLaneBits>
__global__ void __launch_bounds__(kLaneThreads) softmax_lanes_kernel(const __grid_constant__ SoftmaxRows<T> params) {
  using Acc = typename Types<T>::Acc;
  using Vec = Vector<T, kVec>;
  // Of half precision: a sum in fixed point is 2^-19 of itself off at most, the largest power being 1.
  constexpr bool kFixed = sizeof(T) == 2 && kVec > 1 && kVectors == 1 && kLaneBits == 5;
  const int lane_bits = kLaneBits < 0 ? params.lane_bits : kLaneBits, lanes = 1 << lane_bits,
            lane = threadIdx.x & (lanes - 1);
  const int groups = kLaneThreads >> lane_bits, vectors = static_cast<int>(params.columns) / kVec;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (groups * kRows) + (threadIdx.x >> lane_bits);
  const int64_t offset = first * params.columns + lane * kVec;
  const int64_t apart = groups * params.columns;

  Vec raw[kRows][kVectors], saved[kBackward ? kRows : 1][kBackward ? kVectors : 1];
  bool has[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    has[r] = first + r * groups < params.rows;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const bool inside = has[r] && lane + k * lanes < vectors;
      const int64_t at = offset + r * apart + k * lanes * kVec;
      raw[r][k] = neutral<T, kVec, kBackward>();
      if constexpr (kBackward) saved[r][k] = raw[r][k];
      if (inside) {
        raw[r][k] = load_soon(reinterpret_cast<const Vec*>(params.input + at));
        if constexpr (kBackward) saved[r][k] = load_soon(reinterpret_cast<const Vec*>(params.saved + at));
      }
    }
  }
  if constexpr (kBackward) {
    Acc total[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) add_products(total[r], raw[r][k], saved[r][k]);
    }
    sum_lanes(total, lanes);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        Acc g[kVec], y[kVec];
        unpack(raw[r][k], g);
        unpack(saved[r][k], y);
#pragma unroll
        for (int i = 0; i < kVec; ++i) g[i] = (g[i] - total[r]) * y[i];
        if (has[r] && lane + k * lanes < vectors)
          *reinterpret_cast<Vec*>(params.output + (offset + r * apart + k * lanes * kVec)) = pack<Acc, T, kVec>(g);
      }
    }
  } else {
    Acc x[kRows][kVectors][kVec], largest[kRows], total[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest[r] = kLowest<Acc>;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if constexpr (kFixed) largest[r] = maximum(largest[r], largest_half(raw[r][k]));
        else largest[r] = largest_of(raw[r][k], largest[r]);
        unpack(raw[r][k], x[r][k]);
      }
      if constexpr (kFixed) largest[r] = warp_largest(largest[r]);
    }
    if constexpr (!kFixed) {
      for (int d = lanes / 2; d > 0; d /= 2) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) largest[r] = larger(largest[r], __shfl_xor_sync(kAllLanes, largest[r], d));
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[r][k][i] = shifted_power(x[r][k][i], largest[r]);
        total[r] += sum_of(x[r][k]);
      }
    }
    if constexpr (!kFixed) sum_lanes(total, lanes);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Acc scale;
      if constexpr (kFixed) scale = largest[r] < INFINITY ? reciprocal(fixed_warp_sum<kVec>(total[r])) : NAN;
      else if constexpr (std::is_same_v<Acc, float>) scale = reciprocal(total[r]);
      else scale = Acc(1) / total[r];
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[r][k][i] *= scale;
        if (has[r] && lane + k * lanes < vectors)
          *reinterpret_cast<Vec*>(params.output + (offset + r * apart + k * lanes * kVec)) =
              pack<Acc, T, kVec>(x[r][k]);
      }
    }
  }
}

// A thread's vectors of the row that its block, or its cluster, takes: 32 apart, so that their distances are constants.
// kWhole: all of a row's vectors are its own; else those at its ends are not.
template <typename T, int kVectors, bool kWhole>
struct Place {
  static constexpr int kVec = 16 / sizeof(T), kApart = 32 * kVec;
  using Vec = Vector<T, kVec>;
  int64_t at;     // of the first vector, in elements
  int left;       // vectors from there to the end of the block's share
  int low, high;  // the row's elements, relative to the first vector

  // A block takes the row's vectors begin ... begin + share - 1.
  __device__ __forceinline__ Place(const SoftmaxRows<T>& params, int64_t row, int64_t begin, int share) {
    constexpr int64_t kFar = 1 << 30;  // beyond all of a block's elements
    int64_t vectors = params.columns / kVec;
    int shift = 0;
    at = row * params.columns;
    if constexpr (!kWhole) {
      // All tensors are equally far from the begin of a vector.
      shift = static_cast<int>(reinterpret_cast<uintptr_t>(params.input + at) % 16 / sizeof(T));
      at -= shift;
      vectors = (shift + params.columns + kVec - 1) / kVec;
    }
    const int64_t first =
        begin + static_cast<int>(threadIdx.x / 32) * (32 * kVectors) + static_cast<int>(threadIdx.x % 32);
    left = static_cast<int>(min(min(begin + share, vectors) - first, kFar));
    at += first * kVec;
    low = static_cast<int>(max(shift - first * kVec, -kFar));
    high = static_cast<int>(min(shift + params.columns - first * kVec, kFar));
  }

  __device__ __forceinline__ bool has(int k) const { return k * 32 < left; }
  __device__ __forceinline__ bool is_own(int k) const {
    return kWhole || (k * kApart >= low && k * kApart + kVec <= high);
  }
  __device__ __forceinline__ bool is_plain(int k) const { return has(k) && is_own(k); }
  // As nearly all threads' are: without a test for each, and without the values of those that are not there.
  __device__ __forceinline__ bool all_plain() const { return is_plain(0) && is_plain(kVectors - 1); }

  __device__ __forceinline__ Vec load_plain(const T* tensor, int k) const {
    return load_now(reinterpret_cast<const Vec*>(tensor + at) + k * 32);
  }
  template <bool kBackward>
  __device__ __forceinline__ Vec load_any(const T* tensor, int k) const {
    if (!has(k)) return neutral<T, kVec, kBackward>();
    return is_own(k) ? load_plain(tensor, k) : load_end<T, kVec, kBackward>(tensor + at, k * kApart, low, high);
  }
  __device__ __forceinline__ void store(T* tensor, int k, const Vec& raw) const {
    if (!has(k)) return;
    if (is_own(k)) reinterpret_cast<Vec*>(tensor + at)[k * 32] = raw;
    else store_end<T, kVec>(tensor + at, k * kApart, low, high, raw);
  }
};

template <typename T, int kVectors, bool kWhole>
__global__ void __launch_bounds__(kBlockThreads) softmax_block_kernel(const __grid_constant__ SoftmaxRows<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  constexpr bool kTwice = sizeof(T) == 2 && kVectors > 4;  // the powers are made twice
  using Vec = Vector<T, kVec>;
  __shared__ ClusterExchange<Acc> exchange;
  const int blocks = static_cast<int>(cluster_blocks());
  if (blocks > 1) meet_cluster(blocks, exchange);
  const int64_t row = blocks > 1 ? cluster_index() : blockIdx.x,
                begin = blocks > 1 ? static_cast<int64_t>(cluster_rank()) * params.share : 0;
  const Place<T, kVectors, kWhole> place(params, row, begin, params.share);

  Vec raw[kVectors];
  if (place.all_plain()) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) raw[k] = place.load_plain(params.input, k);
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) raw[k] = place.template load_any<false>(params.input, k);
  }
  Part<Acc> part;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) part.largest = largest_of(raw[k], part.largest);
  part.largest = lanes_largest(part.largest, 32);
  const Acc own_largest = part.largest;
  Acc x[kTwice ? 1 : kVectors][kVec];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Acc(&to)[kVec] = x[kTwice ? 0 : k];
    unpack(raw[k], to);
    Acc total = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) total += to[i] = shifted_power(to[i], own_largest);
    part.total += total;
  }
  part.total = lanes_total(part.total, 32);
  part = join_cluster<false>(join_warps<false>(part), blocks, exchange);
  const Acc scale = kTwice ? Acc(1) / part.total : shifted_power(own_largest, part.largest) / part.total;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Acc(&to)[kVec] = x[kTwice ? 0 : k];
    if constexpr (kTwice) {
      unpack(renewed(raw[k], params.zero), to);
#pragma unroll
      for (int i = 0; i < kVec; ++i) to[i] = shifted_power(to[i], part.largest);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] *= scale;
    place.store(params.output, k, pack<Acc, T, kVec>(to));
  }
}

template <typename T, int kVectors, bool kWhole>
__global__ void __launch_bounds__(kBlockThreads)
    softmax_backward_block_kernel(const __grid_constant__ SoftmaxRows<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  using Vec = Vector<T, kVec>;
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  __shared__ ClusterExchange<Acc> exchange;
  const int blocks = static_cast<int>(cluster_blocks());
  if (blocks > 1) meet_cluster(blocks, exchange);
  const int64_t row = blocks > 1 ? cluster_index() : blockIdx.x,
                begin = blocks > 1 ? static_cast<int64_t>(cluster_rank()) * params.share : 0;
  const Place<T, kVectors, kWhole> place(params, row, begin, params.share);
  Vec* const saved = reinterpret_cast<Vec*>(softmax_shared) + threadIdx.x / 32 * (32 * kVectors) + threadIdx.x % 32;

  Vec raw[kVectors];
  if (place.all_plain()) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) copy_async(&saved[k * 32], params.saved + place.at + k * place.kApart);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) raw[k] = place.load_plain(params.input, k);
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (place.is_plain(k)) copy_async(&saved[k * 32], params.saved + place.at + k * place.kApart);
      else saved[k * 32] = place.template load_any<true>(params.saved, k);
      raw[k] = place.template load_any<true>(params.input, k);
    }
  }
  commit_copies();
  wait_for_copies<0>();
  Part<Acc> part;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Acc g[kVec], y[kVec];
    unpack(raw[k], g);
    unpack(saved[k * 32], y);
    Acc total = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) total += g[i] * y[i];
    part.total += total;
  }
  part.total = lanes_total(part.total, 32);
  part = join_cluster<true>(join_warps<true>(part), blocks, exchange);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Acc g[kVec], y[kVec];
    unpack(renewed(raw[k], params.zero), g);
    unpack(saved[k * 32], y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) g[i] = (g[i] - part.total) * y[i];
    place.store(params.output, k, pack<Acc, T, kVec>(g));
  }
}

}  // namespace dcs
