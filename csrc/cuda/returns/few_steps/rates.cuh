// The rates of rows whose discounts are floats: in float, for a thread has a column's after few steps.
#pragma once

#include "returns/step.cuh"

namespace dcs {

// A number, and what its type lacks of it.
template <typename Acc>
struct SplitRate {
  Acc value, rest;
};

// The product as split_gamma(...) has it: toward zero, and a rest of its sign.
__device__ __forceinline__ Rates<float> rates_of_row(SplitRate<float> gamma, SplitRate<float> trace) {
  Rates<float> rates;
  rates.gamma = gamma.value;
  rates.trace = trace.value;
  const float product = gamma.value * trace.value;
  const bool is_finite = fabsf(product) <= FLT_MAX;
  const float lacks = is_finite ? fmaf(gamma.value, trace.rest, gamma.rest * trace.value) : 0.f;
  rates.rest = fmaf(-gamma.value, trace.value, gamma.value) + (gamma.rest - lacks);
  const float error = fmaf(gamma.value, trace.value, -product) + lacks;
  float value = product + error, rest = error - (value - product);
  if (rest != 0.f && (value < 0.f) != (rest < 0.f)) {
    const float nearer = __uint_as_float(__float_as_uint(value) - 1);
    rest += value - nearer;
    value = nearer;
  }
  if (rest == 0.f) rest = value * 0x1p-60f;
  if (!is_finite) {
    const bool is_large = fabsf(gamma.value) <= FLT_MAX && fabsf(trace.value) <= FLT_MAX;
    value = rest = is_large ? copysignf(FLT_MAX, product) : product;
  }
  rates.gate = {value, rest};
  return rates;
}

}  // namespace dcs
