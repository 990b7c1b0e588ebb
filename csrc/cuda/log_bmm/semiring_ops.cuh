// What is done with the terms of an output, in their order: the passes of a tile of outputs, or of one alone.
#pragma once

#include "log_bmm/operands.cuh"

namespace dcs {

constexpr int kTileDepth = 16;  // the terms that are summed by themselves: rounding errors then grow with K / 16 + 16

// logsumexp: the maximum, then the sum.
template <typename A, int kCount>
struct LseOp {
  using Acc = A;
  static constexpr int kPasses = 2;
  static constexpr bool kMindsSpecial = false;  // whether a NaN or +inf needs steps of its own
  static constexpr int kBlocks = 2;             // a multiprocessor, of float
  Acc max[kCount], sum[kCount], part[kCount];

  static __device__ __forceinline__ Acc outside() { return -infinity<Acc>(); }
  __device__ __forceinline__ LseOp() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) max[e] = -infinity<Acc>(), sum[e] = Acc(0);
  }
  template <int kPass>
  __device__ __forceinline__ void begin() {
    if constexpr (kPass > 0) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) part[e] = Acc(0);
    }
  }
  template <int kPass, bool kExact>
  __device__ __forceinline__ void step(int e, Acc x, Acc y, int) {
    if constexpr (kPass == 0) max[e] = fmax(max[e], x + y);
    else part[e] += fast_exp(x + y - max[e]);
  }
  template <int kPass>
  __device__ __forceinline__ void end() {
    if constexpr (kPass > 0) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) sum[e] += part[e];
    }
  }
  __device__ __forceinline__ void between() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) max[e] = safe_shift(max[e]);
  }
};

// The maximum and where it is: of equal ones the first, and a NaN above all. There is none in a tile without a NaN or a
// +inf.
template <typename A, int kCount>
struct MaxOp {
  using Acc = A;
  static constexpr int kPasses = 1;
  static constexpr bool kMindsSpecial = true;
  static constexpr int kBlocks = 3;
  Acc max[kCount];
  int32_t index[kCount];

  static __device__ __forceinline__ Acc outside() { return -infinity<Acc>(); }
  __device__ __forceinline__ MaxOp() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) max[e] = -infinity<Acc>(), index[e] = 0;
  }
  template <int kPass>
  __device__ __forceinline__ void begin() {}
  template <int kPass, bool kExact>
  __device__ __forceinline__ void step(int e, Acc x, Acc y, int k) {
    const Acc value = x + y;
    if (value > max[e] || (kExact && value != value && max[e] == max[e])) max[e] = value, index[e] = k;
  }
  template <int kPass>
  __device__ __forceinline__ void end() {}
  // What another part of the terms has found.
  __device__ __forceinline__ void merge(int e, Acc value, int32_t at) {
    const bool equal = value == max[e] || (value != value && max[e] != max[e]);
    if (value > max[e] || (value != value && max[e] == max[e]) || (equal && at < index[e]))
      max[e] = value, index[e] = at;
  }
};

// What cumulative sums are compared with: u times the whole, and less than it, whatever u is.
template <typename Acc>
__device__ __forceinline__ Acc quantile(Acc u, Acc whole) {
  return fmin(u * whole, below(whole));
}

constexpr int32_t kNothing = -1, kSpecialTerm = -2;  // no term is possible; one is a NaN or +inf

// The first k at which the sum of weights passes the quantile: the number of those at which it does not. Both sums are
// the same additions, so that one passes, and at no weight of 0.
template <typename A, int kCount>
struct SampleOp {
  using Acc = A;
  static constexpr int kPasses = 3;
  static constexpr bool kMindsSpecial = false;
  static constexpr int kBlocks = 2;
  Acc max[kCount], sum[kCount], part[kCount], target[kCount];  // target: u until the whole sum is known
  int32_t index[kCount];

  static __device__ __forceinline__ Acc outside() { return -infinity<Acc>(); }
  __device__ __forceinline__ SampleOp() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) max[e] = -infinity<Acc>(), sum[e] = target[e] = Acc(0), index[e] = 0;
  }
  template <int kPass>
  __device__ __forceinline__ void begin() {
    if constexpr (kPass > 0) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) part[e] = Acc(0);
    }
  }
  template <int kPass, bool kExact>
  __device__ __forceinline__ void step(int e, Acc x, Acc y, int) {
    if constexpr (kPass == 0) {
      max[e] = fmax(max[e], x + y);
    } else {
      part[e] += fast_exp(x + y - max[e]);
      if constexpr (kPass == 2) index[e] += sum[e] + part[e] <= target[e];
    }
  }
  template <int kPass>
  __device__ __forceinline__ void end() {
    if constexpr (kPass > 0) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) sum[e] += part[e];
    }
  }
  // A +inf stays: it makes a NaN of the sum, as a NaN does.
  __device__ __forceinline__ void between() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) max[e] = max[e] == -infinity<Acc>() ? Acc(0) : max[e];
  }
  __device__ __forceinline__ void before_last() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) target[e] = quantile(target[e], sum[e]), sum[e] = Acc(0);
  }
  __device__ __forceinline__ int32_t drawn(int e) const {
    return sum[e] > Acc(0) ? index[e] : sum[e] == Acc(0) ? kNothing : kSpecialTerm;
  }
};

}  // namespace dcs
