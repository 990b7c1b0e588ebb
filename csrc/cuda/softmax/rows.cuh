// Softmax of short contiguous rows, one read and one write: a power of two of lanes takes a row, several rows a warp.
// Each thread loads all its vectors before it uses the first, and keeps them.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "softmax/lines.cuh"

namespace dcs {

constexpr int kLaneThreads = 128;  // of a block of short rows

template <typename T>
struct SoftmaxRows {
  const T* input;
  const T* saved;
  T* output;
  int64_t rows, columns;
  int lane_bits;  // lanes of a short row, as a power of two
  int share;      // vectors of a row that a block takes
  uint32_t zero;
  RunIndex runs;  // of an input that is a view
};

// What rows are: whole vectors; any number of elements, so that a vector at a row's end is another's, too; the same, of
// an input that is a view, whose rows begin at any element.
enum class RowKind { kWhole, kAny, kView };

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
template <typename T, RowKind kKind, int kVectors, int kRows, bool kBackward, int kLaneBits>
struct LaneRows {
  using Acc = typename Types<T>::Acc;
  static constexpr int kVec = 16 / sizeof(T);
  static constexpr bool kWhole = kKind == RowKind::kWhole;
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
    const T* from[kRows];  // of the input
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * groups, begin = row * params.columns;
      const int shift = kWhole ? 0 : static_cast<int>(begin % kVec);
      at[r] = begin - shift + lane * kVec;
      range[r] = {shift, row < params.rows ? shift + columns : 0};
      from[r] = params.input + at[r];
      if constexpr (kKind == RowKind::kView) from[r] += params.runs.beyond(row < params.rows ? begin : 0);
    }
    griddepcontrol_wait();
    if constexpr (kKind == RowKind::kView) {
      load_view(from, range, raw);
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          raw[r][k] = neutral<T, kVec, kBackward>();
          if constexpr (kBackward) saved[r][k] = raw[r][k];
          const int64_t later = k * lanes * kVec, left = kWhole ? kVec : params.rows * params.columns - at[r] - later;
          load_where(has(range[r], k), from[r] + later, left, raw[r][k]);
          if constexpr (kBackward) load_where(has(range[r], k), params.saved + at[r] + later, left, saved[r][k]);
        }
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
  __device__ __forceinline__ bool has(const Range& range, int k) const {
    return (lane + k * lanes) * kVec < range.high;
  }
  __device__ __forceinline__ void load_view(
      const T* const (&from)[kRows], const Range (&range)[kRows], Vec (&raw)[kRows][kVectors]) const {
    AnyVector<T> pieces[kRows][kVectors];
    const auto is_there = [&](int r, int k) {
      return has(range[r], k) && is_within(from[r] + k * lanes * kVec, params.input, params.runs.span);
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) pieces[r][k].ask(is_there(r, k), from[r] + k * lanes * kVec);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        raw[r][k] = pieces[r][k].get(from[r] + k * lanes * kVec);
        if (has(range[r], k) && !is_there(r, k))
          load_existing(from[r] + k * lanes * kVec, params.input, params.runs.span, raw[r][k]);
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
      else scale = inverse(total[r]);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[r][k][i] *= scale;
        store(at[r], range[r], k, x[r][k]);
      }
    }
  }
};

template <typename T, RowKind kKind, int kVectors, int kRows, bool kBackward, int kLaneBits>
__global__ void __launch_bounds__(kLaneThreads) softmax_lanes_kernel(const __grid_constant__ SoftmaxRows<T> params) {
  using Rows = LaneRows<T, kKind, kVectors, kRows, kBackward, kLaneBits>;
  launch_dependents();
  const Rows rows(params);
  typename Rows::Vec raw[kRows][kVectors], saved[Rows::kSavedRows][Rows::kSavedVectors];
  int64_t at[kRows];
  Range range[kRows];
  rows.load(raw, saved, at, range);
  if constexpr (kBackward) rows.differentiate(raw, saved, at, range);
  else rows.normalize(raw, at, range);
}

}  // namespace dcs
