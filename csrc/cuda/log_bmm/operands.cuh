// What the kernels of the log-semiring products share: operands, their maxima, and the exponential.
#pragma once

#include <cstdint>

#include "common/arithmetic.cuh"
#include "common/element_types.cuh"

namespace dcs {

// An operand of a batched product as vectors over the summed index k: the rows of a, the columns of b. Any strides.
template <typename T>
struct Vectors {
  const T* data;
  int64_t batch_stride, stride, step;  // to the next batch, the next vector, the next k
  int64_t count;                       // vectors in a batch

  __device__ __forceinline__ Vectors of_batch(int64_t batch) const {
    return {data + batch * batch_stride, batch_stride, stride, step, count};
  }
  template <typename Acc>
  __device__ __forceinline__ Acc at(int64_t vector, int64_t k) const {
    return cast<Acc>(data[vector * stride + k * step]);
  }
};

enum : int { kHasMasked = 1, kAllMasked = 2, kSpecial = 4 };  // some -inf; nothing but -inf; a NaN or a +inf

// The largest element of a vector, 0 where that is no finite number.
template <typename Acc>
struct Peak {
  Acc shift;
  int flags;
};

template <typename Acc>
__device__ __forceinline__ Acc infinity();
template <>
__device__ __forceinline__ float infinity<float>() {
  return __int_as_float(0x7f800000);
}
template <>
__device__ __forceinline__ double infinity<double>() {
  return __longlong_as_double(0x7ff0000000000000ll);
}

// The number before a positive one.
__device__ __forceinline__ float below(float x) { return __int_as_float(__float_as_int(x) - 1); }
__device__ __forceinline__ double below(double x) { return __longlong_as_double(__double_as_longlong(x) - 1); }

template <typename Acc>
__device__ __forceinline__ bool finite(Acc x) {
  return x - x == Acc(0);
}

// exp for the sums over k. For float one instruction behind a product: an error of |x| 2^-24 in a term that weighs e^x.
__device__ __forceinline__ float fast_exp(float x) { return power(x * 1.44269504f); }
__device__ __forceinline__ double fast_exp(double x) { return power(x); }

// What the maximum `m` of a vector of sums is subtracted as: torch.logsumexp's rule.
template <typename Acc>
__device__ __forceinline__ Acc safe_shift(Acc m) {
  return finite(m) ? m : Acc(0);
}

// log(sum) relative to the two shifts, from a direct sum of exp(term - m); torch.logsumexp's own value where that is
// not finite.
template <typename Acc>
__device__ __forceinline__ void finish_lse(Acc m, Acc sum, Acc shift_a, Acc shift_b, Acc& out, Acc& log_s) {
  const Acc base = safe_shift(m), rest = log(sum);
  out = base + rest;
  log_s = finite(out) ? ((base - shift_a) - shift_b) + rest : out;
}

}  // namespace dcs
