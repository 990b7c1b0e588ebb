// Vectors of floats and of doubles, as wide as the file's instruction set has them, with exp and tanh.
//
// As in element.h, all lives in an unnamed namespace and calls no inline function of the standard library.
#pragma once

#include <immintrin.h>

#include "common/element.h"

namespace dcs::cpu {
namespace {

template <typename C>
struct Simd;

#if defined(__AVX512F__)

template <>
struct Simd<float> {
  using Reg = __m512;
  static constexpr int kWidth = 16;
  static DCS_INLINE Reg splat(float value) { return _mm512_set1_ps(value); }
  static DCS_INLINE Reg load(const float* from) { return _mm512_loadu_ps(from); }
  static DCS_INLINE void store(float* to, Reg v) { _mm512_storeu_ps(to, v); }
  static DCS_INLINE Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static DCS_INLINE Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  static DCS_INLINE Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static DCS_INLINE Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
  static DCS_INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static DCS_INLINE Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static DCS_INLINE Reg magnitude(Reg v) { return _mm512_abs_ps(v); }
  static DCS_INLINE Reg with_sign(Reg v, Reg sign) {
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_set1_epi32(0x7fffffff), _mm512_castps_si512(v), _mm512_castps_si512(sign), 0xca));
  }
  static DCS_INLINE Reg where_less(Reg a, Reg b, Reg yes, Reg no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes);
  }
  static DCS_INLINE unsigned equal_lanes(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  // 2^n from kMagic + n.
  static DCS_INLINE Reg power_of_two(Reg shifted) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23), _mm512_set1_epi32(127 << 23)));
  }
};

template <>
struct Simd<double> {
  using Reg = __m512d;
  static constexpr int kWidth = 8;
  static DCS_INLINE Reg splat(double value) { return _mm512_set1_pd(value); }
  static DCS_INLINE Reg load(const double* from) { return _mm512_loadu_pd(from); }
  static DCS_INLINE void store(double* to, Reg v) { _mm512_storeu_pd(to, v); }
  static DCS_INLINE Reg add(Reg a, Reg b) { return _mm512_add_pd(a, b); }
  static DCS_INLINE Reg sub(Reg a, Reg b) { return _mm512_sub_pd(a, b); }
  static DCS_INLINE Reg mul(Reg a, Reg b) { return _mm512_mul_pd(a, b); }
  static DCS_INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_pd(a, b, c); }
  static DCS_INLINE Reg max(Reg a, Reg b) { return _mm512_max_pd(a, b); }
  static DCS_INLINE Reg where_less(Reg a, Reg b, Reg yes, Reg no) {
    return _mm512_mask_mov_pd(no, _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), yes);
  }
  static DCS_INLINE unsigned equal_lanes(Reg a, Reg b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
  static DCS_INLINE Reg power_of_two(Reg shifted) {
    return _mm512_castsi512_pd(
        _mm512_add_epi64(_mm512_slli_epi64(_mm512_castpd_si512(shifted), 52), _mm512_set1_epi64(int64_t{1023} << 52)));
  }
};

#elif defined(__AVX2__)

template <>
struct Simd<float> {
  using Reg = __m256;
  static constexpr int kWidth = 8;
  static DCS_INLINE Reg splat(float value) { return _mm256_set1_ps(value); }
  static DCS_INLINE Reg load(const float* from) { return _mm256_loadu_ps(from); }
  static DCS_INLINE void store(float* to, Reg v) { _mm256_storeu_ps(to, v); }
  static DCS_INLINE Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static DCS_INLINE Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  static DCS_INLINE Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static DCS_INLINE Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
  static DCS_INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static DCS_INLINE Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  static DCS_INLINE Reg magnitude(Reg v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), v); }
  static DCS_INLINE Reg with_sign(Reg v, Reg sign) {
    return _mm256_or_ps(v, _mm256_and_ps(_mm256_set1_ps(-0.f), sign));
  }
  static DCS_INLINE Reg where_less(Reg a, Reg b, Reg yes, Reg no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static DCS_INLINE unsigned equal_lanes(Reg a, Reg b) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
  }
  static DCS_INLINE Reg power_of_two(Reg shifted) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23), _mm256_set1_epi32(127 << 23)));
  }
};

template <>
struct Simd<double> {
  using Reg = __m256d;
  static constexpr int kWidth = 4;
  static DCS_INLINE Reg splat(double value) { return _mm256_set1_pd(value); }
  static DCS_INLINE Reg load(const double* from) { return _mm256_loadu_pd(from); }
  static DCS_INLINE void store(double* to, Reg v) { _mm256_storeu_pd(to, v); }
  static DCS_INLINE Reg add(Reg a, Reg b) { return _mm256_add_pd(a, b); }
  static DCS_INLINE Reg sub(Reg a, Reg b) { return _mm256_sub_pd(a, b); }
  static DCS_INLINE Reg mul(Reg a, Reg b) { return _mm256_mul_pd(a, b); }
  static DCS_INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_pd(a, b, c); }
  static DCS_INLINE Reg max(Reg a, Reg b) { return _mm256_max_pd(a, b); }
  static DCS_INLINE Reg where_less(Reg a, Reg b, Reg yes, Reg no) {
    return _mm256_blendv_pd(no, yes, _mm256_cmp_pd(a, b, _CMP_LT_OQ));
  }
  static DCS_INLINE unsigned equal_lanes(Reg a, Reg b) {
    return static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_EQ_OQ)));
  }
  static DCS_INLINE Reg power_of_two(Reg shifted) {
    return _mm256_castsi256_pd(
        _mm256_add_epi64(_mm256_slli_epi64(_mm256_castpd_si256(shifted), 52), _mm256_set1_epi64x(int64_t{1023} << 52)));
  }
};

#else

template <>
struct Simd<float> {
  using Reg = __m128;
  static constexpr int kWidth = 4;
  static DCS_INLINE Reg splat(float value) { return _mm_set1_ps(value); }
  static DCS_INLINE Reg load(const float* from) { return _mm_loadu_ps(from); }
  static DCS_INLINE void store(float* to, Reg v) { _mm_storeu_ps(to, v); }
  static DCS_INLINE Reg add(Reg a, Reg b) { return _mm_add_ps(a, b); }
  static DCS_INLINE Reg sub(Reg a, Reg b) { return _mm_sub_ps(a, b); }
  static DCS_INLINE Reg mul(Reg a, Reg b) { return _mm_mul_ps(a, b); }
  static DCS_INLINE Reg div(Reg a, Reg b) { return _mm_div_ps(a, b); }
  static DCS_INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
  static DCS_INLINE Reg max(Reg a, Reg b) { return _mm_max_ps(a, b); }
  static DCS_INLINE Reg magnitude(Reg v) { return _mm_andnot_ps(_mm_set1_ps(-0.f), v); }
  static DCS_INLINE Reg with_sign(Reg v, Reg sign) { return _mm_or_ps(v, _mm_and_ps(_mm_set1_ps(-0.f), sign)); }
  static DCS_INLINE Reg where_less(Reg a, Reg b, Reg yes, Reg no) {
    const __m128 mask = _mm_cmplt_ps(a, b);
    return _mm_or_ps(_mm_and_ps(mask, yes), _mm_andnot_ps(mask, no));
  }
  static DCS_INLINE unsigned equal_lanes(Reg a, Reg b) {
    return static_cast<unsigned>(_mm_movemask_ps(_mm_cmpeq_ps(a, b)));
  }
  static DCS_INLINE Reg power_of_two(Reg shifted) {
    return _mm_castsi128_ps(_mm_add_epi32(_mm_slli_epi32(_mm_castps_si128(shifted), 23), _mm_set1_epi32(127 << 23)));
  }
};

template <>
struct Simd<double> {
  using Reg = __m128d;
  static constexpr int kWidth = 2;
  static DCS_INLINE Reg splat(double value) { return _mm_set1_pd(value); }
  static DCS_INLINE Reg load(const double* from) { return _mm_loadu_pd(from); }
  static DCS_INLINE void store(double* to, Reg v) { _mm_storeu_pd(to, v); }
  static DCS_INLINE Reg add(Reg a, Reg b) { return _mm_add_pd(a, b); }
  static DCS_INLINE Reg sub(Reg a, Reg b) { return _mm_sub_pd(a, b); }
  static DCS_INLINE Reg mul(Reg a, Reg b) { return _mm_mul_pd(a, b); }
  static DCS_INLINE Reg fma(Reg a, Reg b, Reg c) { return _mm_add_pd(_mm_mul_pd(a, b), c); }
  static DCS_INLINE Reg max(Reg a, Reg b) { return _mm_max_pd(a, b); }
  static DCS_INLINE Reg where_less(Reg a, Reg b, Reg yes, Reg no) {
    const __m128d mask = _mm_cmplt_pd(a, b);
    return _mm_or_pd(_mm_and_pd(mask, yes), _mm_andnot_pd(mask, no));
  }
  static DCS_INLINE unsigned equal_lanes(Reg a, Reg b) {
    return static_cast<unsigned>(_mm_movemask_pd(_mm_cmpeq_pd(a, b)));
  }
  static DCS_INLINE Reg power_of_two(Reg shifted) {
    return _mm_castsi128_pd(
        _mm_add_epi64(_mm_slli_epi64(_mm_castpd_si128(shifted), 52), _mm_set1_epi64x(int64_t{1023} << 52)));
  }
};

#endif

template <typename C, int kCount>
DCS_INLINE typename Simd<C>::Reg horner(typename Simd<C>::Reg x, const C (&coefficients)[kCount]) {
  using S = Simd<C>;
  typename S::Reg sum = S::splat(coefficients[0]);
#pragma GCC unroll 16
  for (int i = 1; i < kCount; ++i) sum = S::fma(sum, x, S::splat(coefficients[i]));
  return sum;
}

// exp for x <= 0 within 1 ulp; results below the smallest normal number are 0, for arithmetic with subnormals is a
// hundred times slower. x = n log 2 + r with |r| <= log(2) / 2, log 2 in two parts of which n times the first is exact
// (Cody and Waite 1980); the polynomials are Cephes' expf and, in double, Taylor's.
//
// scaled_exponential is 2^power exp(x): the power, a whole number, is added to n, so that it adds no error and results
// go 2^power times lower.
DCS_INLINE __attribute__((unused)) Simd<float>::Reg scaled_exponential(Simd<float>::Reg x, float power) {
  using S = Simd<float>;
  const S::Reg magic = S::splat(12582912.f);
  const S::Reg shifted = S::fma(x, S::splat(1.44269504f), magic), n = S::sub(shifted, magic);
  const S::Reg r = S::fma(n, S::splat(2.12194440e-4f), S::fma(n, S::splat(-0.693359375f), x));
  const S::Reg tail = horner<float>(
      r, {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f});
  const S::Reg fraction = S::add(S::fma(S::mul(r, r), tail, r), S::splat(1.f));
  const S::Reg least = S::splat(-87.336f - 0.693147181f * power);
  return S::where_less(x, least, S::splat(0.f), S::mul(fraction, S::power_of_two(S::add(shifted, S::splat(power)))));
}
DCS_INLINE __attribute__((unused)) Simd<float>::Reg exponential(Simd<float>::Reg x) {
  return scaled_exponential(x, 0.f);
}

DCS_INLINE __attribute__((unused)) Simd<double>::Reg scaled_exponential(Simd<double>::Reg x, double power) {
  using S = Simd<double>;
  const S::Reg magic = S::splat(6755399441055744.0);
  const S::Reg shifted = S::fma(x, S::splat(1.4426950408889634), magic), n = S::sub(shifted, magic);
  const S::Reg r = S::fma(n, S::splat(-1.42860682030941723212e-6), S::fma(n, S::splat(-0.693145751953125), x));
  const S::Reg tail = horner<double>(r,
      {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
          1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5});
  const S::Reg fraction = S::add(S::fma(S::mul(r, r), tail, r), S::splat(1.0));
  const S::Reg least = S::splat(-708.396 - 0.69314718055994531 * power);
  return S::where_less(x, least, S::splat(0.0), S::mul(fraction, S::power_of_two(S::add(shifted, S::splat(power)))));
}
DCS_INLINE __attribute__((unused)) Simd<double>::Reg exponential(Simd<double>::Reg x) {
  return scaled_exponential(x, 0.0);
}

// tanh(x) and its derivative. With e = exp(-2|x|): tanh = 1 - 2e / (1 + e), which loses digits for small x (there
// Cephes' tanhf), and 1 - tanh^2 = 4e / (1 + e)^2, which loses none for large x.
struct Squashed {
  Simd<float>::Reg value, slope;
};
DCS_INLINE __attribute__((unused)) Squashed squash(Simd<float>::Reg x) {
  using S = Simd<float>;
  const S::Reg size = S::magnitude(x), one = S::splat(1.f);
  const S::Reg e = exponential(S::mul(size, S::splat(-2.f))), inverse = S::div(one, S::add(one, e));
  const S::Reg square = S::mul(size, size);
  const S::Reg tail = horner<float>(
      square, {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f});
  const S::Reg small = S::fma(S::mul(tail, square), size, size),
               large = S::fma(S::mul(S::splat(-2.f), e), inverse, one);
  const S::Reg value = S::with_sign(S::where_less(size, S::splat(0.625f), small, large), x);
  return {value, S::mul(S::mul(S::splat(4.f), e), S::mul(inverse, inverse))};
}

template <typename C>
DCS_INLINE double sum_lanes(typename Simd<C>::Reg v) {
  C lanes[Simd<C>::kWidth];
  Simd<C>::store(lanes, v);
  double sum = 0;
  for (int i = 0; i < Simd<C>::kWidth; ++i) sum += static_cast<double>(lanes[i]);
  return sum;
}

template <typename C>
DCS_INLINE C largest_lane(typename Simd<C>::Reg v) {
  C lanes[Simd<C>::kWidth];
  Simd<C>::store(lanes, v);
  C largest = lanes[0];
  for (int i = 1; i < Simd<C>::kWidth; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  return largest;
}

// Elements to numbers and back.
DCS_INLINE __attribute__((unused)) void convert(const BFloat16* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}
DCS_INLINE __attribute__((unused)) void convert(const float* from, int64_t count, BFloat16* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_bfloat16(from[i]);
}
DCS_INLINE __attribute__((unused)) void convert(const Half* from, int64_t count, float* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < count; ++i) to[i] = to_float(from[i]);
}
DCS_INLINE __attribute__((unused)) void convert(const float* from, int64_t count, Half* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
        _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; ++i) to[i] = to_half(from[i]);
}
template <typename C>
DCS_INLINE void convert(const C* from, int64_t count, C* to) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(C));
}

}  // namespace
}  // namespace dcs::cpu
