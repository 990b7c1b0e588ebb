// Steps of float side by side in float, 16 in a vector: a third of the instructions that 8 in double take, conversions
// left out. Only within a vector: what is carried from one to the next stays double, so that no rounding adds up along
// a row. Of calls whose discounts are numbers; along rows, that float holds the powers of.
#pragma once

#include <type_traits>

#include "returns/lanes.h"

#if defined(__AVX512F__)

namespace dcs::cpu {
namespace {

DCS_INLINE __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
DCS_INLINE __m512 multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }

struct Floats {
  using Number = __m512;
  using Mask = __mmask16;
  static constexpr int64_t kCount = 16;

  static DCS_INLINE Number splat(double value) { return _mm512_set1_ps(static_cast<float>(value)); }
  static DCS_INLINE Number load(const float* from) { return _mm512_loadu_ps(from); }
  static DCS_INLINE void store(float* to, Number value) { _mm512_storeu_ps(to, value); }
  static DCS_INLINE Mask always(bool value) { return value ? 0xffff : 0; }
  static DCS_INLINE Mask only(int64_t lane) { return static_cast<Mask>(lane >= 0 && lane < kCount ? 1u << lane : 0u); }
  static DCS_INLINE Mask flags(const uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm_test_epi8_mask(bytes, bytes);
  }
  static DCS_INLINE Number select(Mask mask, Number a, Number b) { return _mm512_mask_blend_ps(mask, b, a); }
  static DCS_INLINE Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static DCS_INLINE Mask is_zero(Number value) { return _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_EQ_OQ); }
  static DCS_INLINE Number add(Number a, Number b) { return _mm512_add_ps(a, b); }
  static DCS_INLINE Number subtract(Number a, Number b) { return _mm512_sub_ps(a, b); }

  static DCS_INLINE Vector low(Number value) { return _mm512_cvtps_pd(_mm512_castps512_ps256(value)); }
  static DCS_INLINE Vector high(Number value) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1)); }
  static DCS_INLINE Number join(Vector low, Vector high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
  }
};

template <>
struct SameGates<Floats> {
  __m512 by[4], beyond;  // powers over 1, 2, 4 and 8 steps; from each lane to the carry beyond the last one
  double whole;          // over 16
};

DCS_INLINE SameGates<Floats> same_gates(Floats, double gate) {
  SameGates<Floats> gates;
  float beyond[16];
  double power = gate;
  for (int i = 15; i >= 0; --i) {
    beyond[i] = static_cast<float>(power);
    gates.whole = power;
    power *= gate;
  }
  gates.beyond = _mm512_loadu_ps(beyond);
  for (int s = 0; s < 4; ++s) gates.by[s] = Floats::splat(beyond[16 - (1 << s)]);
  return gates;
}

// Whether the powers over 16 steps are normal numbers, or 0 throughout.
inline bool holds_powers(double gate) {
  double power = gate < 0 ? -gate : gate;
  if (!(power <= 1.0)) return false;
  for (int s = 0; s < 4; ++s) power *= power;
  return power == 0.0 ? gate == 0.0 : power >= 1.2e-38;
}

// `carried.after` is left out: only ratios ask for it.
DCS_INLINE Carried<Floats> run_back(__m512 delta, const SameGates<Floats>& gates, __mmask16 ends, double* carry) {
  const __m512i none = _mm512_setzero_si512();
  uint32_t passes = static_cast<uint16_t>(~ends);
  // Lane i joins what lane i + 1, 2, 4, 8 has, unless there is an end in its reach.
  const auto reach = [&](auto by, int s) __attribute__((always_inline)) {
    const __m512 moved = _mm512_castsi512_ps(_mm512_alignr_epi32(none, _mm512_castps_si512(delta), by()));
    delta = _mm512_mask3_fmadd_ps(gates.by[s], moved, delta, static_cast<__mmask16>(passes));
    passes &= (passes | 0xffff0000u) >> by();
  };
  reach(std::integral_constant<int, 1>{}, 0);
  reach(std::integral_constant<int, 2>{}, 1);
  reach(std::integral_constant<int, 4>{}, 2);
  reach(std::integral_constant<int, 8>{}, 3);
  const __m512 own = _mm512_mask3_fmadd_ps(gates.beyond, Floats::splat(*carry), delta, static_cast<__mmask16>(passes));
  // Without a branch, which an episode's end would be a surprise to.
  const __m128d first = _mm_set_sd(_mm512_cvtss_f32(delta));
  *carry = _mm_cvtsd_f64(
      _mm_mask3_fmadd_sd(_mm_set_sd(gates.whole), _mm_set_sd(*carry), first, static_cast<__mmask8>(passes)));
  return {own, own};
}

}  // namespace
}  // namespace dcs::cpu

#endif
