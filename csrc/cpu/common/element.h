// Elements as they lie in memory and as they are summed: half, bfloat16 and float in double, complex64 in pairs of
// double.
//
// The kernel headers are compiled once for each instruction set. All they define lives in an unnamed namespace, and
// they call no inline function of the standard library: the linker keeps one copy of such a function, and must not keep
// one that needs AVX for all callers.
#pragma once

#include <cstdint>
#include <cstring>

#define DCS_INLINE inline __attribute__((always_inline))
// What many instances share, and would each have a copy of.
#define DCS_SHARED __attribute__((noinline))

namespace dcs::cpu {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct ComplexFloat {
  float re, im;
};
struct Complex {
  double re, im;
};
// The gate of integer sums.
struct One {};

DCS_INLINE float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

DCS_INLINE uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Branch-free, so that loops over them vectorize. A subnormal half is a difference of two normal floats.
DCS_INLINE float to_float(Half half) {
  const uint32_t magnitude = half.bits & 0x7fffu, sign = (half.bits & 0x8000u) << 16;
  const uint32_t shifted = magnitude << 13, offset = 112u << 23;
  const uint32_t normal = shifted + offset + (magnitude >= 0x7c00u ? offset : 0u);
  const uint32_t subnormal = as_bits(as_float(shifted + (113u << 23)) - as_float(113u << 23));
  return as_float((magnitude < 0x400u ? subnormal : normal) | sign);
}

DCS_INLINE float to_float(BFloat16 value) { return as_float(static_cast<uint32_t>(value.bits) << 16); }

// Rounds to nearest even. Adding 0.5 aligns a result that is subnormal in half to half's last place.
DCS_INLINE Half to_half(float value) {
  const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return {static_cast<uint16_t>((magnitude >= 0x47800000u ? special : finite) | ((bits >> 16) & 0x8000u))};
}

DCS_INLINE BFloat16 to_bfloat16(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

// Element<T>: Sum is what T is summed in, Partial the type that a sum over time is written in.
template <typename T>
struct Element;

template <>
struct Element<float> {
  using Sum = double;
  using Partial = float;
  static DCS_INLINE double load(float value) { return value; }
  static DCS_INLINE float store(double value) { return static_cast<float>(value); }
};

template <>
struct Element<double> {
  using Sum = double;
  using Partial = double;
  static DCS_INLINE double load(double value) { return value; }
  static DCS_INLINE double store(double value) { return value; }
};

template <>
struct Element<Half> {
  using Sum = double;
  using Partial = float;
  static DCS_INLINE double load(Half value) { return to_float(value); }
  static DCS_INLINE Half store(double value) { return to_half(static_cast<float>(value)); }
};

template <>
struct Element<BFloat16> {
  using Sum = double;
  using Partial = float;
  static DCS_INLINE double load(BFloat16 value) { return to_float(value); }
  static DCS_INLINE BFloat16 store(double value) { return to_bfloat16(static_cast<float>(value)); }
};

template <>
struct Element<ComplexFloat> {
  using Sum = Complex;
  using Partial = ComplexFloat;
  static DCS_INLINE Complex load(ComplexFloat value) { return {value.re, value.im}; }
  static DCS_INLINE ComplexFloat store(Complex value) {
    return {static_cast<float>(value.re), static_cast<float>(value.im)};
  }
};

template <>
struct Element<Complex> {
  using Sum = Complex;
  using Partial = Complex;
  static DCS_INLINE Complex load(Complex value) { return value; }
  static DCS_INLINE Complex store(Complex value) { return value; }
};

// Unsigned, so that sums wrap.
template <>
struct Element<int64_t> {
  using Sum = uint64_t;
  using Partial = int64_t;
  static DCS_INLINE uint64_t load(int64_t value) { return static_cast<uint64_t>(value); }
  static DCS_INLINE int64_t store(uint64_t value) { return static_cast<int64_t>(value); }
};

template <typename T>
struct IsReal {
  static constexpr bool value = true;
};
template <>
struct IsReal<ComplexFloat> {
  static constexpr bool value = false;
};
template <>
struct IsReal<Complex> {
  static constexpr bool value = false;
};
template <>
struct IsReal<int64_t> {
  static constexpr bool value = false;
};

// a * b + c, fused by name where the instruction set has it and never left to the compiler's choice: a loop's vector
// body and its tail, rows abreast and a row alone, all round alike.
DCS_INLINE double multiply_add(double a, double b, double c) {
#ifdef __FMA__
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

DCS_INLINE Complex multiply_add(double a, Complex b, Complex c) {
  return {multiply_add(a, b.re, c.re), multiply_add(a, b.im, c.im)};
}

DCS_INLINE Complex multiply_add(Complex a, Complex b, Complex c) {
  return {multiply_add(-a.im, b.im, multiply_add(a.re, b.re, c.re)),
      multiply_add(a.im, b.re, multiply_add(a.re, b.im, c.im))};
}

DCS_INLINE uint64_t multiply_add(One, uint64_t b, uint64_t c) { return b + c; }

DCS_INLINE double multiply(double a, double b) { return a * b; }
DCS_INLINE Complex multiply(Complex a, Complex b) { return multiply_add(a, b, Complex{-0.0, -0.0}); }
DCS_INLINE One multiply(One, One) { return {}; }

// y * conj(saved), the term of gamma's gradient, added to `sum`.
DCS_INLINE double gradient_term(double y, double saved, double sum) { return multiply_add(y, saved, sum); }
DCS_INLINE Complex gradient_term(Complex y, Complex saved, Complex sum) {
  return multiply_add(y, Complex{saved.re, -saved.im}, sum);
}
DCS_INLINE uint64_t gradient_term(uint64_t, uint64_t, uint64_t) { return 0; }

DCS_INLINE double add(double a, double b) { return a + b; }
DCS_INLINE Complex add(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
DCS_INLINE uint64_t add(uint64_t a, uint64_t b) { return a + b; }

DCS_INLINE double conjugate_if(bool, double value) { return value; }
DCS_INLINE Complex conjugate_if(bool conjugate, Complex value) { return {value.re, conjugate ? -value.im : value.im}; }

constexpr double kLargest = 1.7976931348623157e308;
DCS_INLINE bool is_finite(double value) { return value >= -kLargest && value <= kLargest; }
DCS_INLINE bool is_finite(Complex value) { return is_finite(value.re) && is_finite(value.im); }
DCS_INLINE bool is_finite(One) { return true; }
DCS_INLINE bool is_finite(uint64_t) { return true; }

DCS_INLINE bool is_zero(double value) { return value == 0; }
DCS_INLINE bool is_zero(Complex value) { return is_zero(value.re) && is_zero(value.im); }
DCS_INLINE bool is_zero(One) { return false; }
DCS_INLINE bool is_infinite(double value) { return value > kLargest || value < -kLargest; }
DCS_INLINE bool is_infinite(Complex value) { return is_infinite(value.re) || is_infinite(value.im); }
DCS_INLINE bool is_infinite(One) { return false; }

DCS_INLINE double select(bool condition, double a, double b) { return condition ? a : b; }
DCS_INLINE Complex select(bool condition, Complex a, Complex b) {
  return {condition ? a.re : b.re, condition ? a.im : b.im};
}
DCS_INLINE uint64_t select(bool condition, uint64_t a, uint64_t b) { return condition ? a : b; }

// A gate in the type Gate, from a gamma tensor's element.
template <typename Gate>
struct GateFrom;
template <>
struct GateFrom<double> {
  static DCS_INLINE double real(double value) { return value; }
  template <typename T>
  static DCS_INLINE double element(T value) {
    return Element<T>::load(value);
  }
};
template <>
struct GateFrom<Complex> {
  static DCS_INLINE Complex real(double value) { return {value, 0.0}; }
  template <typename T>
  static DCS_INLINE Complex element(T value) {
    return Element<T>::load(value);
  }
};
template <>
struct GateFrom<One> {
  static DCS_INLINE One real(double) { return {}; }
};

}  // namespace
}  // namespace dcs::cpu
