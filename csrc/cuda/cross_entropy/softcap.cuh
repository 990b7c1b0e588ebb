// A softcap of logits, and its slope.
#pragma once

#include <cfloat>

#include "common/row_statistics.cuh"

namespace dcs {

// z and dz/du for u = z without a softcap.
template <typename Acc>
struct Capped {
  Acc value, slope;
};

// softcap * tanh(u / softcap): with e = exp(-2 |v|), tanh |v| = 1 - 2 e / (1 + e) and 1 - tanh^2 = 4 e / (1 + e)^2.
// kExact: to the last digits of a small v too; without, z has an error of some 1e-7 softcap, which is nothing beside a
// half-precision logit's own.
template <bool kExact>
__device__ __forceinline__ Capped<float> cap(float u, float softcap, float inverse) {
  float v = u * inverse;
  if (kExact) v = fmaf(fmaf(-v, softcap, u), inverse, v);
  // inf - inf
  if (kExact && !(fabsf(u) <= FLT_MAX)) v = u;
  const float size = fabsf(v), e = power(size * -2.88539008f), r = reciprocal(1.f + e);
  float value = fmaf(-2.f * e, r, 1.f);
  if (kExact) {
    const float square = v * v;
    float tail = -5.70498872745e-3f;
    tail = fmaf(tail, square, 2.06390887954e-2f);
    tail = fmaf(tail, square, -5.37397155531e-2f);
    tail = fmaf(tail, square, 1.33314422036e-1f);
    tail = fmaf(tail, square, -3.33332819422e-1f);
    if (size < 0.625f) value = fmaf(tail * square, size, size);
  }
  return {copysignf(value, v) * softcap, 4.f * e * r * r};
}
template <bool kExact>
__device__ __forceinline__ Capped<double> cap(double u, double softcap) {
  const double v = u / softcap, e = exp(-2 * fabs(v));
  return {softcap * tanh(v), 4 * e / ((1 + e) * (1 + e))};
}

}  // namespace dcs
