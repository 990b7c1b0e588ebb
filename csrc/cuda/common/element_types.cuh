// Element types of the CUDA scans: what a dtype is accumulated in, what its carries and powers of gamma are kept in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "dcs/types.h"

namespace dcs {

template <typename T>
struct alignas(2 * sizeof(T)) Complex {
  T re, im;
};

template <typename T>
__device__ __forceinline__ Complex<T> operator+(Complex<T> a, Complex<T> b) {
  return {a.re + b.re, a.im + b.im};
}
template <typename T>
__device__ __forceinline__ Complex<T> operator*(Complex<T> a, Complex<T> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

// Storage type -> accumulator (a value of y), wide type (carries between lanes, warps and tiles, and products of
// gammas). Float data has double carries: the powers of gamma then neither lose gamma's digits nor leave the range in
// which float data is finite.
template <typename T>
struct Types;
template <>
struct Types<float> {
  using Acc = float;
  using Wide = double;
};
template <>
struct Types<__half> : Types<float> {};
template <>
struct Types<__nv_bfloat16> : Types<float> {};
template <>
struct Types<double> {
  using Acc = double;
  using Wide = double;
};
template <>
struct Types<Complex<float>> {
  using Acc = Complex<float>;
  using Wide = Complex<double>;
};
template <>
struct Types<Complex<double>> {
  using Acc = Complex<double>;
  using Wide = Complex<double>;
};
template <>
struct Types<int64_t> {
  using Acc = int64_t;
  using Wide = int64_t;
};

template <typename To, typename From>
__device__ __forceinline__ To cast(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<From, __half>) {
    return static_cast<To>(__half2float(x));
  } else if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return static_cast<To>(__bfloat162float(x));
  } else if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<From, Complex<float>> || std::is_same_v<From, Complex<double>>) {
    using Part = decltype(To{}.re);
    return {static_cast<Part>(x.re), static_cast<Part>(x.im)};
  } else if constexpr (std::is_same_v<To, Complex<float>> || std::is_same_v<To, Complex<double>>) {
    using Part = decltype(To{}.re);
    return {static_cast<Part>(x), Part(0)};
  } else {
    return static_cast<To>(x);
  }
}

template <typename T>
__device__ __forceinline__ T conj_if(bool conjugate, T x) {
  if constexpr (std::is_same_v<T, Complex<float>> || std::is_same_v<T, Complex<double>>) {
    if (conjugate) x.im = -x.im;
  }
  return x;
}

// a * b for finite factors stays finite: past the range it is the largest finite number, so that a carry of 0 stays 0
// as in the recurrence. The tests are on the exponents' bits, off the double pipe.
__device__ __forceinline__ bool is_finite(double a) { return (__double2hiint(a) & 0x7ff00000) != 0x7ff00000; }
__device__ __forceinline__ double clamped_mul(double a, double b) {
  const double r = a * b;
  if (is_finite(r) || !is_finite(a) || !is_finite(b)) return r;
  return __hiloint2double((__double2hiint(r) & 0x80000000) | 0x7fefffff, 0xffffffff);
}
__device__ __forceinline__ Complex<double> clamped_mul(Complex<double> a, Complex<double> b) {
  const Complex<double> r = a * b;
  const bool finite = is_finite(a.re) && is_finite(a.im) && is_finite(b.re) && is_finite(b.im);
  if (!finite || (is_finite(r.re) && is_finite(r.im))) return r;
  return {fmax(-DBL_MAX, fmin(DBL_MAX, r.re)), fmax(-DBL_MAX, fmin(DBL_MAX, r.im))};
}
__device__ __forceinline__ int64_t clamped_mul(int64_t, int64_t) { return 1; }

// The same for powers of a shared gamma, which are made once, and of any gates where time allows: not 0 either but for
// a factor that is, so that an infinite carry stays infinite. What has left double's range at its lower end is the
// number next to 0 from there on: later gates above 1 do not bring it back.
template <typename Wide>
__device__ __forceinline__ Wide power_mul(Wide a, Wide b) {
  const Wide r = clamped_mul(a, b);
  if constexpr (std::is_same_v<Wide, double>) {
    const auto size = [](double value) { return __double2hiint(value) & 0x7ff00000; };
    if (min(size(r), min(size(a), size(b))) == 0 && is_finite(r) && a != 0.0 && b != 0.0)
      return __hiloint2double(__double2hiint(r) & 0x80000000, 1);
  }
  return r;
}

// s + power * carry.
__device__ __forceinline__ float fold(float s, float power, float carry) { return fmaf(power, carry, s); }
__device__ __forceinline__ double fold(double s, double power, double carry) { return fma(power, carry, s); }
__device__ __forceinline__ Complex<double> fold(Complex<double> s, Complex<double> power, Complex<double> carry) {
  return {
      fma(power.re, carry.re, fma(-power.im, carry.im, s.re)), fma(power.re, carry.im, fma(power.im, carry.re, s.im))};
}
__device__ __forceinline__ int64_t fold(int64_t s, int64_t, int64_t carry) { return s + carry; }

// The gate of one step: for float data a float and the rest of gamma's digits, so that y = x + gamma * y sees more of
// gamma than float's 24 bits. `kShort` leaves the rest out: within a few steps it is far below what half precision
// keeps.
template <typename Acc, bool kShort = false>
struct Gate {
  Acc value;
  __device__ __forceinline__ Acc step(Acc x, Acc y) const { return fold(x, value, y); }
};
template <>
struct Gate<float, false> {
  float value, rest;
  __device__ __forceinline__ float step(float x, float y) const { return fmaf(value, y, fmaf(rest, y, x)); }
};
template <>
struct Gate<Complex<float>, false> {
  Complex<float> value;
  __device__ __forceinline__ Complex<float> step(Complex<float> x, Complex<float> y) const { return x + value * y; }
};
template <>
struct Gate<int64_t, false> {
  __device__ __forceinline__ int64_t step(int64_t x, int64_t y) const { return x + y; }
};

// gamma as a float toward zero and the rest, which then has gamma's sign: an infinite y stays infinite in both
// products. The rest of a gamma that is a float is far below its digits, for a 0 there would make a NaN of it.
__host__ __device__ __forceinline__ Gate<float> split_gamma(double gamma) {
  float value = static_cast<float>(gamma);
  if (fabs(static_cast<double>(value)) > fabs(gamma)) value = nextafterf(value, 0.f);
  const double rest = gamma - static_cast<double>(value);
  if (!(fabs(rest) <= FLT_MAX)) {
    // Beyond float's range: a y of 0 stays 0, any other goes to infinity within a step or two.
    if (fabs(gamma) <= DBL_MAX) return {copysignf(FLT_MAX, value), copysignf(FLT_MAX, value)};
    return {static_cast<float>(gamma), static_cast<float>(gamma)};  // 0 would make a NaN of an infinite y
  }
  return {value, rest == 0.0 ? value * 0x1p-60f : static_cast<float>(rest)};
}

// The gate of a number or row gamma.
template <typename Acc, bool kShort = false, typename Wide>
__device__ __forceinline__ Gate<Acc, kShort> make_gate(Wide gamma) {
  if constexpr (std::is_same_v<Acc, float> && kShort) {
    // A finite gamma stays finite; a clamp in double takes 20 instructions.
    const float value = static_cast<float>(gamma);
    return {fabsf(value) > FLT_MAX && is_finite(gamma) ? copysignf(FLT_MAX, value) : value};
  } else if constexpr (std::is_same_v<Acc, float>) {
    return split_gamma(gamma);
  } else if constexpr (std::is_same_v<Acc, int64_t>) {
    return {};
  } else {
    return {cast<Acc>(gamma)};
  }
}

// The gamma of a gate again.
__device__ __forceinline__ double whole_gamma(Gate<float, true> gate) { return static_cast<double>(gate.value); }
__device__ __forceinline__ double whole_gamma(Gate<float, false> gate) {
  return static_cast<double>(gate.value) + static_cast<double>(gate.rest);
}

// The step of a gate read from memory: it has no more digits than the accumulator.
__device__ __forceinline__ float plain_step(float x, float gate, float y) { return fmaf(gate, y, x); }
__device__ __forceinline__ double plain_step(double x, double gate, double y) { return fma(gate, y, x); }
template <typename T>
__device__ __forceinline__ Complex<T> plain_step(Complex<T> x, Complex<T> gate, Complex<T> y) {
  return x + gate * y;
}
__device__ __forceinline__ int64_t plain_step(int64_t x, int64_t, int64_t y) { return x + y; }

// The same step of a float y of which rounding has taken `lost`: that goes along, and what this step's rounding takes
// is left there.
__device__ __forceinline__ float careful_step(float x, float gate, float y, float& lost) {
  const float small = lost == 0.f ? x : fmaf(gate, lost, x);  // inf * 0 is a NaN
  const float next = fmaf(gate, y, small);
  lost = fabsf(next) <= FLT_MAX ? small + fmaf(gate, y, -next) : 0.f;
  return next;
}
__device__ __forceinline__ float lost_in(double whole, float rounded) {
  return fabsf(rounded) <= FLT_MAX ? static_cast<float>(whole - static_cast<double>(rounded)) : 0.f;
}

// A row gamma of any floating dtype.
template <typename Wide>
__device__ __forceinline__ Wide load_gamma(const void* gamma, ElementType dtype, int64_t index, bool conjugate) {
  switch (dtype) {
    case ElementType::Half:
      return cast<Wide>(static_cast<double>(__half2float(static_cast<const __half*>(gamma)[index])));
    case ElementType::BFloat16:
      return cast<Wide>(static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16*>(gamma)[index])));
    case ElementType::Float: return cast<Wide>(static_cast<double>(static_cast<const float*>(gamma)[index]));
    case ElementType::Double: return cast<Wide>(static_cast<const double*>(gamma)[index]);
    default: break;
  }
  if constexpr (std::is_same_v<Wide, Complex<double>>) {
    if (dtype == ElementType::ComplexFloat)
      return conj_if(conjugate, cast<Wide>(static_cast<const Complex<float>*>(gamma)[index]));
    if (dtype == ElementType::ComplexDouble)
      return conj_if(conjugate, static_cast<const Complex<double>*>(gamma)[index]);
  }
  return cast<Wide>(1.0);
}

// `move` takes a number to another lane; a complex value goes in two parts.
template <typename T, typename Move>
__device__ __forceinline__ T move_parts(T value, const Move& move) {
  if constexpr (std::is_same_v<T, Complex<float>> || std::is_same_v<T, Complex<double>>)
    return {move(value.re), move(value.im)};
  else return move(value);
}
template <typename T>
__device__ __forceinline__ T shuffle_up(T value, int delta, int width = 32) {
  return move_parts(value, [&](auto part) { return __shfl_up_sync(0xffffffffu, part, delta, width); });
}
template <typename T>
__device__ __forceinline__ T shuffle_down(T value, int delta) {
  return move_parts(value, [&](auto part) { return __shfl_down_sync(0xffffffffu, part, delta); });
}
template <typename T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return move_parts(value, [&](auto part) { return __shfl_sync(0xffffffffu, part, lane); });
}

// The sum over the warp, in all lanes.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
    value = value + move_parts(value, [d](auto part) { return __shfl_xor_sync(0xffffffffu, part, d); });
  return value;
}

// The sum over the block in a fixed order.
template <typename Acc>
__device__ __forceinline__ Acc block_sum(Acc value, Acc* shared, int lane, int warp, int warps) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value = value + shuffle(value, (lane + d) % 32);
  if (warps == 1) return value;
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  Acc sum = shared[0];
  for (int w = 1; w < warps; ++w) sum = sum + shared[w];
  return sum;
}

// base^kExponent for a power of two, clamped.
template <int kExponent, typename Wide>
__device__ __forceinline__ Wide power_of(Wide base) {
#pragma unroll
  for (int e = 1; e < kExponent; e *= 2) base = power_mul(base, base);
  return base;
}

// A plain product of powers of one base, clamped as products of power_mul are: its sign and the side on which it left
// the range say to what.
__device__ __forceinline__ double bounded_product(double product, double base) {
  const int sign = __double2hiint(product) & 0x80000000, size = __double2hiint(product) & 0x7ff00000;
  if (size == 0 && base != 0.0) return __hiloint2double(sign | 0x00100000, 0);
  if (size == 0x7ff00000 && is_finite(base)) return __hiloint2double(sign | 0x7fefffff, 0xffffffff);
  return product;
}

// base^exponent, clamped.
__device__ inline double whole_power(double base, unsigned exponent) {
  double power = 1.0, square = base;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) power *= square;
    square *= square;
  }
  return bounded_product(power, base);
}
template <typename Wide>
__device__ inline Wide whole_power(Wide base, unsigned exponent) {
  Wide power = cast<Wide>(1.0);
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) power = power_mul(power, base);
    base = power_mul(base, base);
  }
  return power;
}

}  // namespace dcs
