// Powers of a gamma of at most 1 in size, and sums weighed by them, in float: for kernels whose time is latency. A
// power that leaves float's range stays above 0, so that what was infinite stays infinite. What is finite keeps 2^-149
// of its size then.
#pragma once

#include <cmath>

#include "common/element_types.cuh"

namespace dcs {

__host__ __device__ inline float rounded(double power) {
  const float nearest = static_cast<float>(power);
  return nearest != 0.f || power == 0.0 ? nearest : copysignf(0x1p-149f, nearest);
}
__device__ __forceinline__ float power_times(float a, float b) {
  const float product = a * b;
  return product == 0.f && a != 0.f && b != 0.f ? copysignf(0x1p-149f, product) : product;
}
// Of two powers of `gamma`, so that a product of three stays in range.
constexpr double kLeastPower = 1e-100;
inline double product_of_powers(double gamma, double a, double b) {
  const double product = a * b;
  return gamma == 0.0 || std::abs(product) >= kLeastPower ? product : std::copysign(kLeastPower, product);
}

// What a step of half precision needs of a gate, which is less.
template <typename T>
__device__ __forceinline__ Gate<float, sizeof(T) == 2> gate_of(const Gate<float>& gate) {
  if constexpr (sizeof(T) == 2) return {gate.value};
  else return gate;
}

template <int kCount>
__device__ __forceinline__ float sum_of(const float* from) {
  if constexpr (kCount == 1) return from[0];
  else return sum_of<kCount / 2>(from) + sum_of<kCount / 2>(from + kCount / 2);
}

// values[0] * power^(kCount - 1) + .. + values[kCount - 1], from the power's first, second, fourth ...
template <int kCount>
__device__ __forceinline__ float weighed(const float* values, const float* doubled) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    float pairs[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) pairs[i] = fmaf(doubled[0], values[2 * i], values[2 * i + 1]);
    return weighed<kCount / 2>(pairs, doubled + 1);
  }
}

}  // namespace dcs
