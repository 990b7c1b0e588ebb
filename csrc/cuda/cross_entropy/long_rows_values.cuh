// What the kernel for long rows makes of its elements: exponents relative to a row's largest, tanh for a softcap, and
// sums over a row.
#pragma once

#include <cfloat>

#include "common/row_statistics.cuh"

namespace dcs {

// What a row's exponents are relative to. A half-precision logit's exponent is one rounding of factor * value -
// reference, with a reference that is the rounded factor * largest. For float logits, and far away (kFarReference),
// where that rounding is no longer small, it is factor * (value - largest).
constexpr float kFarReference = 1 << 20;

// With a softcap a logit's value is tanh(logit * logit_scale / softcap), else the logit itself; z = scale * value.
template <typename T, bool kSoftcap>
struct Exponents {
  static constexpr bool kExact = sizeof(T) == 4;
  float factor;  // scale / log(2)
  float squash;  // -2 logit_scale / (softcap log(2)), for e = exp(-2 |x|), with which tanh(|x|) = (1 - e) / (1 + e): to
                 // 1e-7

  __device__ __forceinline__ float value(float logit) const {
    if constexpr (!kSoftcap) return logit;
    const float e = power(fabsf(logit) * squash);
    return copysignf((1.f - e) * reciprocal(1.f + e), logit);
  }
  // Of four logits, with one reciprocal: special functions are what this waits for.
  __device__ __forceinline__ void values(float* logits) const {
    if constexpr (kSoftcap) {
      float e[4], d[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        e[i] = power(fabsf(logits[i]) * squash);
        d[i] = 1.f + e[i];
      }
      const float low = d[0] * d[1], high = d[2] * d[3], all = reciprocal(low * high), of_low = all * high,
                  of_high = all * low;
      const float inverse[4] = {of_low * d[1], of_low * d[0], of_high * d[3], of_high * d[2]};
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[i] = copysignf((1.f - e[i]) * inverse[i], logits[i]);
    }
  }
  __device__ __forceinline__ float reference(float largest) const {
    if constexpr (kExact) return value(largest);
    else return fmaxf(value(largest) * factor, -FLT_MAX);
  }
  __device__ __forceinline__ float exponent(float value, float reference) const {
    if constexpr (kExact) return (value - reference) * factor;
    else return fmaf(value, factor, -reference);
  }
  __device__ __forceinline__ float rise(float from, float to) const {
    if constexpr (kExact) return (from - to) * factor;
    else return from - to;
  }
};

// Values of tanh in the place of half-precision logits, as numbers of 16 bits, to 1.5e-5: the second pass then needs no
// special function for them.
constexpr float kFixedOne = 32767.f, kFixedZero = 8388608.f + 32768.f;
template <typename Vec, int kVec>
__device__ __forceinline__ Vec pack_fixed(const float (&values)[kVec]) {
  Vec to;
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) {
    const uint32_t low = __float_as_uint(fmaf(values[2 * i], kFixedOne, kFixedZero)),
                   high = __float_as_uint(fmaf(values[2 * i + 1], kFixedOne, kFixedZero));
    to.words[i] = __byte_perm(low, high, 0x5410);
  }
  return to;
}
// kFixedOne times them.
template <typename Vec, int kVec>
__device__ __forceinline__ void unpack_fixed(const Vec& from, float (&values)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) {
    values[2 * i] = __uint_as_float(__byte_perm(from.words[i], 0x4b000000u, 0x7610)) - kFixedZero;
    values[2 * i + 1] = __uint_as_float(__byte_perm(from.words[i], 0x4b000000u, 0x7632)) - kFixedZero;
  }
}

__device__ __forceinline__ bool is_same(float a, float b) { return a == b || (a != a && b != b); }

// The largest element of a vector, a NaN before all others.
template <typename T, int kVec>
__device__ __forceinline__ float largest_of(const Vector<T, kVec>& raw) {
  if constexpr (sizeof(T) == 2) {
    return largest_half(raw);
  } else {
    float largest = raw.get(0);
#pragma unroll
    for (int i = 1; i < kVec; ++i) largest = maximum(largest, raw.get(i));
    return largest;
  }
}

// Sums over a part of a row.
template <bool kEntropy>
struct LongSums {
  float largest;        // logit
  float total;          // of base^exponent
  uint32_t largest_at;  // the first that has the largest; where predictions are wanted
};
// Apart, as four words spill registers where three do not.
template <>
struct LongSums<true> {
  float largest, total;
  uint32_t largest_at;
  float weighted;  // of exponent * base^exponent
};

// The sums relative to another reference, exponents being `rise` more than they were. `largest` and `largest_at` stay.
template <bool kEntropy>
__device__ __forceinline__ void shift(LongSums<kEntropy>& sums, float rise) {
  const float scale = power(rise);
  if constexpr (kEntropy) sums.weighted = scale * fmaf(bounded(rise), sums.total, sums.weighted);
  sums.total *= scale;
}

template <bool kEntropy>
__device__ __forceinline__ void add_power(LongSums<kEntropy>& sums, float exponent) {
  const float p = power(exponent);
  sums.total += p;
  if constexpr (kEntropy) sums.weighted = fmaf(p, bounded(exponent), sums.weighted);
}

__device__ __forceinline__ float warp_maximum(float value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value = maximum(value, __shfl_xor_sync(0xffffffffu, value, d));
  return value;
}
__device__ __forceinline__ uint32_t warp_minimum(uint32_t value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value = min(value, __shfl_xor_sync(0xffffffffu, value, d));
  return value;
}

// The sums of all threads of a row, in all of them. `shared` has room for those of every warp of the cluster, and is
// used by every other row alike.
template <bool kCluster, bool kEntropy, typename E>
__device__ __forceinline__ LongSums<kEntropy> join_row(
    const E& exponents, LongSums<kEntropy> sums, LongSums<kEntropy>* shared, bool with_indices) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int blocks = kCluster ? static_cast<int>(cluster_blocks()) : 1;
  const float largest = warp_maximum(sums.largest), reference = exponents.reference(largest);
  if (with_indices) sums.largest_at = warp_minimum(is_same(sums.largest, largest) ? sums.largest_at : ~0u);
  shift(sums, exponents.rise(exponents.reference(sums.largest), reference));
  sums.largest = largest;
  sums.total = warp_sum(sums.total);
  if constexpr (kEntropy) sums.weighted = warp_sum(sums.weighted);
  if constexpr (kCluster) {
    if (lane < blocks) {
      uint32_t* const words = reinterpret_cast<uint32_t*>(shared + static_cast<int>(cluster_rank()) * warps + warp);
      store_in_cluster(words, lane, __float_as_uint(largest));
      store_in_cluster(words + 1, lane, __float_as_uint(sums.total));
      store_in_cluster(words + 2, lane, sums.largest_at);
      if constexpr (kEntropy) store_in_cluster(words + 3, lane, __float_as_uint(sums.weighted));
    }
    arrive_in_cluster_unaligned();
    wait_for_cluster_unaligned();
  } else {
    if (lane == 0) shared[warp] = sums;
    __syncthreads();
  }
  LongSums<kEntropy> all{-FLT_MAX, 0.f, ~0u};
  for (int i = lane; i < blocks * warps; i += 32) all.largest = maximum(all.largest, shared[i].largest);
  all.largest = warp_maximum(all.largest);
  const float to = exponents.reference(all.largest);
  for (int i = lane; i < blocks * warps; i += 32) {
    LongSums<kEntropy> other = shared[i];
    shift(other, exponents.rise(exponents.reference(other.largest), to));
    all.total += other.total;
    if constexpr (kEntropy) all.weighted += other.weighted;
    if (is_same(other.largest, all.largest)) all.largest_at = min(all.largest_at, other.largest_at);
  }
  all.total = warp_sum(all.total);
  if constexpr (kEntropy) all.weighted = warp_sum(all.weighted);
  if (with_indices) all.largest_at = warp_minimum(all.largest_at);
  return all;
}

}  // namespace dcs
