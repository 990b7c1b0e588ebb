// Single instructions of the arithmetic of exponentials, beside the same in double.
#pragma once

#include <cuda_runtime_api.h>

#include "common/exponential.cuh"

namespace dcs {

// Exponentials: powers of 2 in float (one instruction; results below the smallest normal number are 0), of e in double
// (exponential.cuh).
__device__ __forceinline__ float power(float exponent) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
  return result;
}
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// A NaN is the largest.
__device__ __forceinline__ float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ double maximum(double a, double b) { return a > b || a != a ? a : b; }

}  // namespace dcs
