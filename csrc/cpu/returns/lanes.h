// Steps side by side: `Wide` takes kWidth adjacent elements of every line, `Single` one. What is written over them
// rounds alike in both, as products are only added by multiply_add.
#pragma once

#include "common/simd.h"

namespace dcs::cpu {
namespace {

struct Single {
  using Number = double;
  using Mask = bool;
  static constexpr int64_t kCount = 1;

  static DCS_INLINE Number splat(double value) { return value; }
  static DCS_INLINE Mask always(bool value) { return value; }
  static DCS_INLINE Mask only(int64_t lane) { return lane == 0; }
  template <typename T>
  static DCS_INLINE Number load(const T* from) {
    return Element<T>::load(*from);
  }
  template <typename T>
  static DCS_INLINE void store(T* to, Number value) {
    *to = Element<T>::store(value);
  }
  static DCS_INLINE Mask flags(const uint8_t* from) { return *from != 0; }
  static DCS_INLINE Number select(Mask mask, Number a, Number b) { return mask ? a : b; }
  static DCS_INLINE Mask either(Mask a, Mask b) { return a | b; }
  static DCS_INLINE Mask is_zero(Number value) { return value == 0.0; }
  static DCS_INLINE Number at_most(Number value, Number bound) { return value > bound ? bound : value; }  // NaN stays
  static DCS_INLINE Number add(Number a, Number b) { return a + b; }
  static DCS_INLINE Number subtract(Number a, Number b) { return a - b; }
};

struct Wide {
  using Number = Vector;
  static constexpr int64_t kCount = kWidth;

  static DCS_INLINE Number splat(double value) { return cpu::splat(value); }
  template <typename T>
  static DCS_INLINE Number load(const T* from) {
    return cpu::load(from);
  }
  template <typename T>
  static DCS_INLINE void store(T* to, Number value) {
    cpu::store(to, value);
  }

#if defined(__AVX512F__)
  using Mask = __mmask8;
  static DCS_INLINE Mask always(bool value) { return value ? 0xff : 0; }
  static DCS_INLINE Mask flags(const uint8_t* from) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return static_cast<Mask>(_mm_test_epi8_mask(bytes, bytes));
  }
  static DCS_INLINE Number select(Mask mask, Number a, Number b) { return _mm512_mask_blend_pd(mask, b, a); }
  static DCS_INLINE Mask either(Mask a, Mask b) { return a | b; }
  static DCS_INLINE Mask is_zero(Number value) { return _mm512_cmp_pd_mask(value, _mm512_setzero_pd(), _CMP_EQ_OQ); }
  // Where an operand is NaN the result is the second one.
  static DCS_INLINE Number at_most(Number value, Number bound) { return _mm512_min_pd(bound, value); }
  static DCS_INLINE Number add(Number a, Number b) { return _mm512_add_pd(a, b); }
  static DCS_INLINE Number subtract(Number a, Number b) { return _mm512_sub_pd(a, b); }
#elif defined(__AVX2__)
  using Mask = __m256d;
  static DCS_INLINE Mask always(bool value) { return _mm256_castsi256_pd(_mm256_set1_epi64x(value ? -1 : 0)); }
  static DCS_INLINE Mask flags(const uint8_t* from) {
    int32_t bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return _mm256_castsi256_pd(
        _mm256_cmpgt_epi64(_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes)), _mm256_setzero_si256()));
  }
  static DCS_INLINE Number select(Mask mask, Number a, Number b) { return _mm256_blendv_pd(b, a, mask); }
  static DCS_INLINE Mask either(Mask a, Mask b) { return _mm256_or_pd(a, b); }
  static DCS_INLINE Mask is_zero(Number value) { return _mm256_cmp_pd(value, _mm256_setzero_pd(), _CMP_EQ_OQ); }
  static DCS_INLINE Number at_most(Number value, Number bound) { return _mm256_min_pd(bound, value); }
  static DCS_INLINE Number add(Number a, Number b) { return _mm256_add_pd(a, b); }
  static DCS_INLINE Number subtract(Number a, Number b) { return _mm256_sub_pd(a, b); }
#else
  using Mask = __m128d;
  static DCS_INLINE Mask always(bool value) { return _mm_castsi128_pd(_mm_set1_epi64x(value ? -1 : 0)); }
  static DCS_INLINE Mask flags(const uint8_t* from) {
    return _mm_castsi128_pd(_mm_set_epi64x(from[1] ? -1 : 0, from[0] ? -1 : 0));
  }
  static DCS_INLINE Number select(Mask mask, Number a, Number b) {
    return _mm_or_pd(_mm_and_pd(mask, a), _mm_andnot_pd(mask, b));
  }
  static DCS_INLINE Mask either(Mask a, Mask b) { return _mm_or_pd(a, b); }
  static DCS_INLINE Mask is_zero(Number value) { return _mm_cmpeq_pd(value, _mm_setzero_pd()); }
  static DCS_INLINE Number at_most(Number value, Number bound) { return _mm_min_pd(bound, value); }
  static DCS_INLINE Number add(Number a, Number b) { return _mm_add_pd(a, b); }
  static DCS_INLINE Number subtract(Number a, Number b) { return _mm_sub_pd(a, b); }
#endif

  // The lane `lane`, or none where it is out of range.
  static DCS_INLINE Mask only(int64_t lane) {
    static const uint8_t bytes[16] = {0, 0, 0, 0, 0, 0, 0, 1};
    return lane < 0 || lane >= kCount ? always(false) : flags(bytes + (7 - lane));
  }

  // Lane i is what lane i + kBy was, the last kBy lanes what the first ones of `fill` are.
  template <int kBy>
  static DCS_INLINE Number move_in(Number value, Number fill) {
#if defined(__AVX512F__)
    return _mm512_castsi512_pd(_mm512_alignr_epi64(_mm512_castpd_si512(fill), _mm512_castpd_si512(value), kBy));
#elif defined(__AVX2__)
    const Number halves = _mm256_permute2f128_pd(value, fill, 0x21);
    if constexpr (kBy == 2) return halves;
    return _mm256_shuffle_pd(value, halves, 0x5);
#else
    return _mm_shuffle_pd(value, fill, 0x1);
#endif
  }
  template <int kBy>
  static DCS_INLINE Mask move_in(Mask mask) {
#if defined(__AVX512F__)
    return static_cast<Mask>(mask >> kBy);
#else
    return move_in<kBy>(mask, splat(0.0));
#endif
  }
};

// Rows of one lane, or of kCount lanes, after the recurrence: what every step ends in, and what was carried to it.
template <typename L>
struct Carried {
  typename L::Number own, after;
};

// The recurrence over adjacent steps, from the last one back: own[t] = delta[t] + gate[t] * own[t + 1], delta[t] where
// ends[t]. `carry`: own beyond the last step; it becomes the first step's. Within a vector by doubling (Hillis and
// Steele, 1986), off the way of the carry from vector to vector.
//
// The gates: one a step, or the same for all, whose powers are made once.
template <typename L>
struct Gates {
  typename L::Number each;
};
template <typename L>
struct SameGates;
template <>
struct SameGates<Single> {
  double gate;
};
template <>
struct SameGates<Wide> {
  Wide::Number by_one, by_two, by_four,
      beyond;  // powers over so many steps; from each lane to the carry beyond the last one
};

DCS_INLINE SameGates<Single> same_gates(Single, double gate) { return {gate}; }
DCS_INLINE SameGates<Wide> same_gates(Wide, double gate) {
  double beyond[kWidth];
  double power = gate;
  for (int i = kWidth - 1; i >= 0; --i, power *= gate) beyond[i] = power;
  return {splat(gate), splat(gate * gate), splat(gate * gate * (gate * gate)), load(beyond)};
}

DCS_INLINE Carried<Single> run_back_one(double delta, double gate, bool ends, double* carry) {
  const double after = *carry;
  *carry = ends ? delta : multiply_add(gate, after, delta);
  return {*carry, after};
}
DCS_INLINE Carried<Single> run_back(double delta, const Gates<Single>& gates, bool ends, double* carry) {
  return run_back_one(delta, gates.each, ends, carry);
}
DCS_INLINE Carried<Single> run_back(double delta, const SameGates<Single>& gates, bool ends, double* carry) {
  return run_back_one(delta, gates.gate, ends, carry);
}

template <int kBy>
DCS_INLINE void double_reach(Wide::Number& delta, Wide::Number gate, Wide::Mask& ends) {
  delta = Wide::select(ends, delta, multiply_add(gate, Wide::move_in<kBy>(delta, splat(0.0)), delta));
  ends = Wide::either(ends, Wide::move_in<kBy>(ends));
}
template <int kBy>
DCS_INLINE void double_gates(Wide::Number& gate) {
  gate = multiply(gate, Wide::move_in<kBy>(gate, splat(1.0)));
}

DCS_INLINE Carried<Wide> join_beyond(Wide::Number delta, Wide::Number gate, Wide::Mask ends, double* carry) {
  const Wide::Number beyond = splat(*carry), own = Wide::select(ends, delta, multiply_add(gate, beyond, delta));
  *carry = first_lane(own);
  return {own, Wide::move_in<1>(own, beyond)};
}
DCS_INLINE Carried<Wide> run_back(Wide::Number delta, const Gates<Wide>& gates, Wide::Mask ends, double* carry) {
  Wide::Number gate = gates.each;
  double_reach<1>(delta, gate, ends), double_gates<1>(gate);
  if constexpr (kWidth >= 4) double_reach<2>(delta, gate, ends), double_gates<2>(gate);
  if constexpr (kWidth >= 8) double_reach<4>(delta, gate, ends), double_gates<4>(gate);
  return join_beyond(delta, gate, ends, carry);
}
DCS_INLINE Carried<Wide> run_back(Wide::Number delta, const SameGates<Wide>& gates, Wide::Mask ends, double* carry) {
  double_reach<1>(delta, gates.by_one, ends);
  if constexpr (kWidth >= 4) double_reach<2>(delta, gates.by_two, ends);
  if constexpr (kWidth >= 8) double_reach<4>(delta, gates.by_four, ends);
  return join_beyond(delta, gates.beyond, ends, carry);
}

// The gates of a call's steps where they are all the same.
template <typename L>
struct CallGates {
  SameGates<Single> singles;
  SameGates<L> wides;

  explicit CallGates(double gate) : singles(same_gates(Single{}, gate)), wides(same_gates(L{}, gate)) {}
  DCS_INLINE const SameGates<Single>& of(Single) const { return singles; }
  DCS_INLINE const SameGates<L>& of(L) const { return wides; }
};

// run(lanes, j) over [begin, count): Wide while there are enough left, then Single.
template <typename Run>
DCS_INLINE void for_lanes(int64_t begin, int64_t count, const Run& run) {
  int64_t j = begin;
  for (; j + Wide::kCount <= count; j += Wide::kCount) run(Wide{}, j);
  for (; j < count; ++j) run(Single{}, j);
}

// The same from the end back, by L: what is over is taken first.
template <typename L, typename Run>
DCS_INLINE void for_lanes_back(int64_t count, const Run& run) {
  int64_t j = count;
  for (; j % L::kCount != 0; --j) run(Single{}, j - 1);
  for (; j > 0; j -= L::kCount) run(L{}, j - L::kCount);
}

}  // namespace
}  // namespace dcs::cpu
