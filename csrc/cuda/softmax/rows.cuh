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
#include "softmax/lines.cuh"

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

// The rows that a group of lanes takes. kLaneBits: lanes of a row, as a power of two; -1: known as it runs.
template <typename T, bool kWhole, int kVectors, int kRows, bool kBackward, int kLaneBits>
struct LaneRows {
  using Acc = typename Types<T>::Acc;
  static constexpr int kVec = 16 / sizeof(T);
  using Vec = Vector<T, kVec>;
  // Of half precision: a sum in fixed point is 2^-19 of itself off at most, the largest power being 1.
  static constexpr bool kFixed = sizeof(T) == 2 && kVectors == 1 && kLaneBits == 5;
  static constexpr int kSavedRows = kBackward ? kRows : 1, kSavedVectors = kBackward ? kVectors : 1;

  const SoftmaxRows<T>& params;
  const int lane_bits = kLaneBits < 0 ? params.lane_bits : kLaneBits, lanes = 1 << lane_bits,
            lane = threadIdx.x & (lanes - 1);

  __device__ __forceinline__ explicit LaneRows(const SoftmaxRows<T>& of) : params(of) {}

  // `at`: the lane's first vector of each row.
  __device__ __forceinline__ void load(Vec (&raw)[kRows][kVectors], Vec (&saved)[kSavedRows][kSavedVectors],
      int64_t (&at)[kRows], Range (&range)[kRows]) const {
    const int groups = kLaneThreads >> lane_bits, columns = static_cast<int>(params.columns);
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (groups * kRows) + (threadIdx.x >> lane_bits);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * groups, begin = row * params.columns;
      const int shift = kWhole ? 0 : static_cast<int>(begin % kVec);
      at[r] = begin - shift + lane * kVec;
      range[r] = {shift, row < params.rows ? shift + columns : 0};
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const bool inside = (lane + k * lanes) * kVec < range[r].high;
        raw[r][k] = neutral<T, kVec, kBackward>();
        if constexpr (kBackward) saved[r][k] = raw[r][k];
        const int64_t from = at[r] + k * lanes * kVec, left = kWhole ? kVec : params.rows * params.columns - from;
        load_where(inside, params.input + from, left, raw[r][k]);
        if constexpr (kBackward) load_where(inside, params.saved + from, left, saved[r][k]);
      }
    }
    if constexpr (!kWhole) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          mask<kBackward>(raw[r][k], (lane + k * lanes) * kVec, range[r]);
          if constexpr (kBackward) mask<true>(saved[r][k], (lane + k * lanes) * kVec, range[r]);
        }
      }
    }
  }

  __device__ __forceinline__ void store(int64_t at, const Range& range, int k, const Acc (&values)[kVec]) const {
    const int element = (lane + k * lanes) * kVec;
    T* const to = params.output + at + k * lanes * kVec;
    if (kWhole && element < range.high) *reinterpret_cast<Vec*>(to) = pack<Acc, T, kVec>(values);
    if (!kWhole && element < range.high) store_in(to, element, range, pack<Acc, T, kVec>(values));
  }

  __device__ __forceinline__ void differentiate(const Vec (&raw)[kRows][kVectors],
      const Vec (&saved)[kSavedRows][kSavedVectors], const int64_t (&at)[kRows], const Range (&range)[kRows]) const {
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
        store(at[r], range[r], k, g);
      }
    }
  }

  // The values of the rows, and every row's largest over its lanes.
  __device__ __forceinline__ void find_largest(
      const Vec (&raw)[kRows][kVectors], Acc (&x)[kRows][kVectors][kVec], Acc (&largest)[kRows]) const {
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
  }

  __device__ __forceinline__ void normalize(
      const Vec (&raw)[kRows][kVectors], const int64_t (&at)[kRows], const Range (&range)[kRows]) const {
    Acc x[kRows][kVectors][kVec], largest[kRows], total[kRows] = {};
    find_largest(raw, x, largest);
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
        store(at[r], range[r], k, x[r][k]);
      }
    }
  }
};

template <typename T, bool kWhole, int kVectors, int kRows, bool kBackward, int kLaneBits>
__global__ void __launch_bounds__(kLaneThreads) softmax_lanes_kernel(const __grid_constant__ SoftmaxRows<T> params) {
  using Rows = LaneRows<T, kWhole, kVectors, kRows, kBackward, kLaneBits>;
  const Rows rows(params);
  typename Rows::Vec raw[kRows][kVectors], saved[Rows::kSavedRows][Rows::kSavedVectors];
  int64_t at[kRows];
  Range range[kRows];
  rows.load(raw, saved, at, range);
  if constexpr (kBackward) rows.differentiate(raw, saved, at, range);
  else rows.normalize(raw, at, range);
}

// A thread's vectors of the row that its block, or its cluster, takes: 32 apart, so that their distances are constants.
// kWhole: all of a row's vectors are its own; else those at its ends are not.
template <typename T, int kVectors, bool kWhole>
struct RowVectors {
  static constexpr int kVec = 16 / sizeof(T), kApart = 32 * kVec;
  using Vec = Vector<T, kVec>;
  int64_t at;   // of the first vector, in elements
  int left;     // vectors from there to the end of the block's share
  Range range;  // the row's elements, relative to the first vector
  int end;      // the tensor's, likewise

  // A block takes the row's vectors begin ... begin + share - 1.
  __device__ __forceinline__ RowVectors(const SoftmaxRows<T>& params, int64_t row, int64_t begin, int share) {
    constexpr int64_t kFar = 1 << 30;  // beyond all of a block's elements
    const int shift = kWhole ? 0 : static_cast<int>(row * params.columns % kVec);
    const int64_t vectors = (shift + params.columns + kVec - 1) / kVec;
    const int64_t first =
        begin + static_cast<int>(threadIdx.x / 32) * (32 * kVectors) + static_cast<int>(threadIdx.x % 32);
    left = static_cast<int>(min(min(begin + share, vectors) - first, kFar));
    at = row * params.columns - shift + first * kVec;
    range.low = static_cast<int>(max(shift - first * kVec, -kFar));
    range.high = static_cast<int>(min(shift + params.columns - first * kVec, kFar));
    end = static_cast<int>(min(params.rows * params.columns - at, kFar));
  }

  __device__ __forceinline__ bool has(int k) const { return k * 32 < left; }
  template <bool kBackward>
  __device__ __forceinline__ void load(const T* tensor, Vec (&raw)[kVectors]) const {
    // As nearly all threads' are: without a test for each, and without the values of those that are not there.
    constexpr int kLast = kVectors - 1;
    if (has(kLast) && (kWhole || (range.has_all<kVec>(0) && range.has_all<kVec>(kLast * kApart)))) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) raw[k] = load_now(reinterpret_cast<const Vec*>(tensor + at) + k * 32);
      return;
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      raw[k] = neutral<T, kVec, kBackward>();
      load_where(has(k), tensor + at + k * kApart, kWhole ? kVec : end - k * kApart, raw[k]);
    }
    if constexpr (!kWhole) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) mask<kBackward>(raw[k], k * kApart, range);
    }
  }
  __device__ __forceinline__ void store(T* tensor, int k, const Vec& raw) const {
    if (!has(k)) return;
    if constexpr (kWhole) reinterpret_cast<Vec*>(tensor + at)[k * 32] = raw;
    else store_in(tensor + at + k * kApart, k * kApart, range, raw);
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
  if (blocks > 1) meet_cluster(exchange.arrivals, blocks * static_cast<int>(sizeof(Part<Acc>)));
  const int64_t row = blocks > 1 ? cluster_index() : blockIdx.x,
                begin = blocks > 1 ? static_cast<int64_t>(cluster_rank()) * params.share : 0;
  const RowVectors<T, kVectors, kWhole> mine(params, row, begin, params.share);

  Vec raw[kVectors];
  mine.template load<false>(params.input, raw);
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
    mine.store(params.output, k, pack<Acc, T, kVec>(to));
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
  if (blocks > 1) meet_cluster(exchange.arrivals, blocks * static_cast<int>(sizeof(Part<Acc>)));
  const int64_t row = blocks > 1 ? cluster_index() : blockIdx.x,
                begin = blocks > 1 ? static_cast<int64_t>(cluster_rank()) * params.share : 0;
  const RowVectors<T, kVectors, kWhole> mine(params, row, begin, params.share);
  Vec* const saved = reinterpret_cast<Vec*>(softmax_shared) + threadIdx.x / 32 * (32 * kVectors) + threadIdx.x % 32;

#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int left = kWhole ? kVec : min(kVec, mine.end - k * mine.kApart);
    if (mine.has(k))
      copy_existing<16, sizeof(T)>(
          &saved[k * 32], params.saved + mine.at + k * mine.kApart, left * static_cast<int>(sizeof(T)));
    else saved[k * 32] = neutral<T, kVec, true>();
  }
  Vec raw[kVectors];
  mine.template load<true>(params.input, raw);
  commit_copies();
  wait_for_copies<0>();
  if constexpr (!kWhole) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (!mine.range.template has_all<kVec>(k * mine.kApart)) mask<true>(saved[k * 32], k * mine.kApart, mine.range);
  }
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
    mine.store(params.output, k, pack<Acc, T, kVec>(g));
  }
}

}  // namespace dcs
