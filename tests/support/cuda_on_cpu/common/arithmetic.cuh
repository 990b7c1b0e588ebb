// csrc/cuda/common/arithmetic.cuh on a CPU.
#pragma once

#include <cmath>

#include "common/exponential.cuh"

namespace dcs {

inline float power(float exponent) {
  const float result = std::exp2(exponent);
  return std::abs(result) < 0x1p-126f ? 0.f : result;
}
inline float reciprocal(float x) { return 1.f / x; }
inline float maximum(float a, float b) { return a > b || a != a ? a : b; }
inline double maximum(double a, double b) { return a > b || a != a ? a : b; }

}  // namespace dcs
