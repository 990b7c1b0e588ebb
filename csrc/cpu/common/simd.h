// Vectors of doubles, as wide as the file's instruction set has them: loads and stores with conversion, and an
// inclusive scan within a vector.
#pragma once

#include <immintrin.h>

#include "common/element.h"

namespace dcs::cpu {
namespace {

#if defined(__AVX512F__)

using Vector = __m512d;
constexpr int kWidth = 8;

DCS_INLINE Vector splat(double value) { return _mm512_set1_pd(value); }
DCS_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_pd(a, b, c); }
DCS_INLINE Vector multiply(Vector a, Vector b) { return _mm512_mul_pd(a, b); }
DCS_INLINE Vector bit_and(Vector a, Vector b) { return _mm512_and_pd(a, b); }
DCS_INLINE Vector bit_or(Vector a, Vector b) { return _mm512_or_pd(a, b); }
DCS_INLINE Vector load(const double* from) { return _mm512_loadu_pd(from); }
DCS_INLINE Vector load(const float* from) { return _mm512_cvtps_pd(_mm256_loadu_ps(from)); }
DCS_INLINE Vector load(const BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
}
DCS_INLINE Vector load(const Half* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_cvtps_pd(_mm512_castps512_ps256(_mm512_cvtph_ps(_mm256_castsi128_si256(bits))));
}
DCS_INLINE void store(double* to, Vector v) { _mm512_storeu_pd(to, v); }
DCS_INLINE void store(float* to, Vector v) { _mm256_storeu_ps(to, _mm512_cvtpd_ps(v)); }
// Rounded to nearest even. A NaN, which the conversion to float has made quiet, stays as it is.
DCS_INLINE void store(BFloat16* to, Vector v) {
  const __m256 floats = _mm512_cvtpd_ps(v);
  const __m256i bits = _mm256_castps_si256(floats);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __mmask8 is_number = _mm256_cmp_ps_mask(floats, floats, _CMP_ORD_Q);
  const __m256i rounded =
      _mm256_mask_add_epi32(bits, is_number, bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtepi32_epi16(_mm256_srli_epi32(rounded, 16)));
}
DCS_INLINE void store(Half* to, Vector v) {
  const __m512 wide = _mm512_castps256_ps512(_mm512_cvtpd_ps(v));
  const __m256i bits = _mm512_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(bits));
}

// v moved `kBy` lanes on in scan order (from lane 0 up, or mirrored: from the last lane down), zeros moved in.
template <int kBy, bool kMirrored>
DCS_INLINE Vector move_on(Vector v) {
  const __m512i zero = _mm512_setzero_si512(), bits = _mm512_castpd_si512(v);
  if constexpr (kMirrored) return _mm512_castsi512_pd(_mm512_alignr_epi64(zero, bits, kBy));
  return _mm512_castsi512_pd(_mm512_alignr_epi64(bits, zero, 8 - kBy));
}

// The last lane in scan order, in every lane.
template <bool kMirrored>
DCS_INLINE Vector last_lane(Vector v) {
  return _mm512_permutexvar_pd(_mm512_set1_epi64(kMirrored ? 0 : 7), v);
}

// v moved `kBy` lanes up, `fill` moved in.
template <int kBy>
DCS_INLINE Vector move_up(Vector v, Vector fill) {
  return _mm512_castsi512_pd(_mm512_alignr_epi64(_mm512_castpd_si512(v), _mm512_castpd_si512(fill), 8 - kBy));
}

// The last kLag lanes, repeated: lane 0 gets number kTurn of them, modulo kLag.
template <int kLag, int kTurn = 0>
DCS_INLINE Vector repeat_last(Vector v) {
  constexpr int kFrom = 8 - kLag;
  return _mm512_permutexvar_pd(_mm512_setr_epi64(kFrom + kTurn % kLag, kFrom + (kTurn + 1) % kLag,
                                   kFrom + (kTurn + 2) % kLag, kFrom + (kTurn + 3) % kLag, kFrom + (kTurn + 4) % kLag,
                                   kFrom + (kTurn + 5) % kLag, kFrom + (kTurn + 6) % kLag, kFrom + (kTurn + 7) % kLag),
      v);
}

DCS_INLINE Vector reversed(Vector v) { return _mm512_permutexvar_pd(_mm512_setr_epi64(7, 6, 5, 4, 3, 2, 1, 0), v); }

// a's lanes where a flag is set, else b's.
DCS_INLINE Vector select(const bool* flags, Vector a, Vector b) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(flags));
  return _mm512_mask_mov_pd(b, static_cast<__mmask8>(_mm_test_epi8_mask(bytes, bytes)), a);
}

// Whether a lane is infinite or NaN.
DCS_INLINE bool has_special(Vector v) { return _mm512_fpclass_pd_mask(v, 0x99) != 0; }

// Some of the lanes, and how they are stored: kLaneWords words.
using Lanes = __mmask8;
using LaneWord = uint8_t;
constexpr int kLaneWords = 1;

DCS_INLINE Lanes load_lanes(const LaneWord* from) { return *from; }
// Those of values that are not below `least`.
DCS_INLINE void store_lanes(LaneWord* to, const int64_t* values, int64_t least) {
  *to = _mm512_cmpge_epi64_mask(_mm512_loadu_si512(values), _mm512_set1_epi64(least));
}
// v in these lanes, 0 in the others.
DCS_INLINE Vector only(Lanes lanes, Vector v) { return _mm512_maskz_mov_pd(lanes, v); }
// a * b + c in these lanes, c in the others.
DCS_INLINE Vector multiply_add_in(Lanes lanes, Vector a, Vector b, Vector c) {
  return _mm512_mask3_fmadd_pd(a, b, c, lanes);
}

#elif defined(__AVX2__)

using Vector = __m256d;
constexpr int kWidth = 4;

DCS_INLINE Vector splat(double value) { return _mm256_set1_pd(value); }
DCS_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_pd(a, b, c); }
DCS_INLINE Vector multiply(Vector a, Vector b) { return _mm256_mul_pd(a, b); }
DCS_INLINE Vector bit_and(Vector a, Vector b) { return _mm256_and_pd(a, b); }
DCS_INLINE Vector bit_or(Vector a, Vector b) { return _mm256_or_pd(a, b); }
DCS_INLINE Vector load(const double* from) { return _mm256_loadu_pd(from); }
DCS_INLINE Vector load(const float* from) { return _mm256_cvtps_pd(_mm_loadu_ps(from)); }
DCS_INLINE Vector load(const BFloat16* from) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16)));
}
DCS_INLINE void store(double* to, Vector v) { _mm256_storeu_pd(to, v); }
DCS_INLINE void store(float* to, Vector v) { _mm_storeu_ps(to, _mm256_cvtpd_ps(v)); }

template <int kBy, bool kMirrored>
DCS_INLINE Vector move_on(Vector v) {
  if constexpr (kBy == 1 && kMirrored) return _mm256_blend_pd(_mm256_permute4x64_pd(v, 0xf9), _mm256_setzero_pd(), 8);
  if constexpr (kBy == 1) return _mm256_blend_pd(_mm256_permute4x64_pd(v, 0x90), _mm256_setzero_pd(), 1);
  return _mm256_permute2f128_pd(v, v, kMirrored ? 0x81 : 0x08);
}

template <bool kMirrored>
DCS_INLINE Vector last_lane(Vector v) {
  return _mm256_permute4x64_pd(v, kMirrored ? 0x00 : 0xff);
}

template <int kBy>
DCS_INLINE Vector move_up(Vector v, Vector fill) {
  constexpr int kLanes = kBy == 1 ? 0x90 : kBy == 2 ? 0x40 : 0x00;
  return _mm256_blend_pd(_mm256_permute4x64_pd(v, kLanes), fill, (1 << kBy) - 1);
}

template <int kLag, int kTurn = 0>
DCS_INLINE Vector repeat_last(Vector v) {
  constexpr unsigned kFrom = 4 - kLag;
  constexpr unsigned kLanes = (kFrom + kTurn % kLag) | (kFrom + (kTurn + 1) % kLag) << 2 |
      (kFrom + (kTurn + 2) % kLag) << 4 | (kFrom + (kTurn + 3) % kLag) << 6;
  return _mm256_permute4x64_pd(v, kLanes);
}

DCS_INLINE Vector reversed(Vector v) { return _mm256_permute4x64_pd(v, 0x1b); }

DCS_INLINE Vector select(const bool* flags, Vector a, Vector b) {
  int32_t bytes;
  std::memcpy(&bytes, flags, sizeof bytes);
  const __m256i lanes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
  return _mm256_blendv_pd(a, b, _mm256_castsi256_pd(_mm256_cmpeq_epi64(lanes, _mm256_setzero_si256())));
}

DCS_INLINE bool has_special(Vector v) {
  const Vector size = _mm256_andnot_pd(_mm256_set1_pd(-0.0), v);
  return _mm256_movemask_pd(_mm256_cmp_pd(size, _mm256_set1_pd(kLargest), _CMP_NLE_UQ)) != 0;
}

#else

using Vector = __m128d;
constexpr int kWidth = 2;

DCS_INLINE Vector splat(double value) { return _mm_set1_pd(value); }
DCS_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm_add_pd(_mm_mul_pd(a, b), c); }
DCS_INLINE Vector multiply(Vector a, Vector b) { return _mm_mul_pd(a, b); }
DCS_INLINE Vector bit_and(Vector a, Vector b) { return _mm_and_pd(a, b); }
DCS_INLINE Vector bit_or(Vector a, Vector b) { return _mm_or_pd(a, b); }
DCS_INLINE Vector load(const double* from) { return _mm_loadu_pd(from); }
DCS_INLINE Vector load(const float* from) {
  return _mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
DCS_INLINE void store(double* to, Vector v) { _mm_storeu_pd(to, v); }
DCS_INLINE void store(float* to, Vector v) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_castps_si128(_mm_cvtpd_ps(v)));
}

template <int kBy, bool kMirrored>
DCS_INLINE Vector move_on(Vector v) {
  if constexpr (kMirrored) return _mm_unpackhi_pd(v, _mm_setzero_pd());
  return _mm_unpacklo_pd(_mm_setzero_pd(), v);
}

template <bool kMirrored>
DCS_INLINE Vector last_lane(Vector v) {
  return kMirrored ? _mm_unpacklo_pd(v, v) : _mm_unpackhi_pd(v, v);
}

template <int kBy>
DCS_INLINE Vector move_up(Vector v, Vector fill) {
  return _mm_unpacklo_pd(fill, v);
}

template <int kLag, int kTurn = 0>
DCS_INLINE Vector repeat_last(Vector v) {
  return _mm_unpackhi_pd(v, v);
}

DCS_INLINE Vector reversed(Vector v) { return _mm_shuffle_pd(v, v, 1); }

DCS_INLINE Vector select(const bool* flags, Vector a, Vector b) {
  const __m128d mask = _mm_castsi128_pd(_mm_set_epi64x(-int64_t{flags[1]}, -int64_t{flags[0]}));
  return _mm_or_pd(_mm_and_pd(mask, a), _mm_andnot_pd(mask, b));
}

DCS_INLINE bool has_special(Vector v) {
  const Vector size = _mm_andnot_pd(_mm_set1_pd(-0.0), v);
  return _mm_movemask_pd(_mm_cmpnle_pd(size, _mm_set1_pd(kLargest))) != 0;
}

#endif

#if !defined(__AVX512F__)

using Lanes = Vector;
using LaneWord = uint64_t;
constexpr int kLaneWords = kWidth;

DCS_INLINE Lanes load_lanes(const LaneWord* from) { return load(reinterpret_cast<const double*>(from)); }
DCS_INLINE void store_lanes(LaneWord* to, const int64_t* values, int64_t least) {
  for (int i = 0; i < kWidth; ++i) to[i] = values[i] >= least ? ~uint64_t{0} : 0;
}
DCS_INLINE Vector only(Lanes lanes, Vector v) { return bit_and(lanes, v); }
DCS_INLINE Vector multiply_add_in(Lanes lanes, Vector a, Vector b, Vector c) {
  return multiply_add(bit_and(a, lanes), b, c);
}

// The 16-bit types one by one where there are no instructions for them (half: F16C, which -mavx2 alone does not give).
template <typename T>
DCS_INLINE Vector load_each(const T* from) {
  double values[kWidth];
  for (int i = 0; i < kWidth; ++i) values[i] = Element<T>::load(from[i]);
  return load(values);
}
template <typename T>
DCS_INLINE void store_each(T* to, Vector v) {
  double values[kWidth];
  store(values, v);
  for (int i = 0; i < kWidth; ++i) to[i] = Element<T>::store(values[i]);
}

#if defined(__AVX2__)
// Rounded to nearest even. A NaN, which the conversion to float has made quiet, stays as it is.
DCS_INLINE void store(BFloat16* to, Vector v) {
  const __m128 floats = _mm256_cvtpd_ps(v);
  const __m128i bits = _mm_castps_si128(floats);
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i is_number = _mm_castps_si128(_mm_cmpord_ps(floats, floats));
  const __m128i rounded = _mm_add_epi32(bits, _mm_and_si128(is_number, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff))));
  const __m128i high = _mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(rounded, high));
}
#else
DCS_INLINE Vector load(const BFloat16* from) { return load_each(from); }
DCS_INLINE void store(BFloat16* to, Vector v) { store_each(to, v); }
#endif

#if defined(__AVX2__) && defined(__F16C__)
DCS_INLINE Vector load(const Half* from) {
  return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
DCS_INLINE void store(Half* to, Vector v) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_cvtps_ph(_mm256_cvtpd_ps(v), _MM_FROUND_TO_NEAREST_INT));
}
#else
DCS_INLINE Vector load(const Half* from) { return load_each(from); }
DCS_INLINE void store(Half* to, Vector v) { store_each(to, v); }
#endif

#endif

// Asks for the line so many elements on, which need not be there.
template <typename T>
DCS_INLINE void ask_ahead(const T* from, int64_t elements) {
  constexpr int64_t kBytes = sizeof(T);
  const uintptr_t at = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(elements * kBytes);
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

#if defined(__AVX512F__)
DCS_INLINE double first_lane(Vector v) { return _mm512_cvtsd_f64(v); }
#elif defined(__AVX2__)
DCS_INLINE double first_lane(Vector v) { return _mm256_cvtsd_f64(v); }
#else
DCS_INLINE double first_lane(Vector v) { return _mm_cvtsd_f64(v); }
#endif

DCS_INLINE double add_lanes(Vector v) {
  double lanes[kWidth];
  store(lanes, v);
  double sum = lanes[0];
  for (int i = 1; i < kWidth; ++i) sum += lanes[i];
  return sum;
}

}  // namespace
}  // namespace dcs::cpu
