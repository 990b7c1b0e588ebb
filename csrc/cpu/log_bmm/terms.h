// Elements term by term, for those that the product of exponentials does not give: where it underflowed, and where +inf
// or NaN are.
#pragma once

#include "log_bmm/operands.h"

namespace dcs::cpu {
namespace {

// log(s) - power log 2 of `count` numbers s > 0, as in Cephes' logf to an absolute error of 1e-7, in two parts: rest +
// whole log 2. One float of a logarithm around -70 would be off by 4e-6, which is too much where the maxima cancel it.
// (Loops of one kind of number, which compilers vectorize.)
DCS_INLINE void split_logarithms(const float* s, int64_t count, float power, float* whole, float* rest) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = as_bits(s[i]);
    const float mantissa = as_float((bits & 0x007fffffu) | 0x3f000000u);  // [0.5, 1)
    const bool low = mantissa < 0.707106781f;
    whole[i] = static_cast<float>(static_cast<int32_t>(bits >> 23) - (low ? 127 : 126)) - power;
    const float x = (low ? mantissa + mantissa : mantissa) - 1.f, square = x * x;
    float y = 7.0376836292e-2f;
    y = y * x - 1.1514610310e-1f;
    y = y * x + 1.1676998740e-1f;
    y = y * x - 1.2420140846e-1f;
    y = y * x + 1.4249322787e-1f;
    y = y * x - 1.6668057665e-1f;
    y = y * x + 2.0000714765e-1f;
    y = y * x - 2.4999993993e-1f;
    y = y * x + 3.3333331174e-1f;
    rest[i] = x + (y * x * square - 0.5f * square);
  }
}
// 2^-power is a normal number, and so is what a certified s comes to.
DCS_INLINE void split_logarithms(const double* s, int64_t count, double power, double* whole, double* rest) {
  const double scale = __builtin_ldexp(1.0, -static_cast<int>(power));
  for (int64_t i = 0; i < count; ++i) whole[i] = 0, rest[i] = __builtin_log(s[i] * scale);
}

// A row of a and one of b (its column), with the terms between them.
template <typename C>
struct Pair {
  using S = Simd<C>;
  using Reg = typename S::Reg;
  static constexpr int kWidth = S::kWidth;

  const C* a;
  const C* b;
  int64_t depth;
  C largest_a, largest_b;

  struct Result {
    C out, log_s;
  };

  // logsumexp as torch's: NaN wherever a term is NaN, then +inf wherever one is that, -inf where all are.
  Result logsumexp() const {
    const Reg nothing = S::splat(kMinusInfinity<C>);
    Reg most[2] = {nothing, nothing};
    each([&](Reg t, int lane) __attribute__((always_inline)) { most[lane] = S::max(t, most[lane]); });
    const C largest = largest_lane<C>(S::max(most[0], most[1]));
    if (!(largest > kMinusInfinity<C> && largest < -kMinusInfinity<C>)) {
      C out = largest;
      for (int64_t k = 0; k < depth; ++k) out = a[k] + b[k] == a[k] + b[k] ? out : a[k] + b[k];
      return {out, out == kMinusInfinity<C> ? out : out - largest_a - largest_b};
    }
    const Reg top = S::splat(largest);
    Reg sums[2] = {S::splat(C(0)), S::splat(C(0))};
    each([&](Reg t, int lane)
             __attribute__((always_inline)) { sums[lane] = S::add(sums[lane], exponential(S::sub(t, top))); });
    const double log_sum = __builtin_log(sum_lanes<C>(S::add(sums[0], sums[1])));
    // The largest term as the weights have it, rounding and all: where it is the only one, its weight is 1.
    const int64_t k = position(largest);
    const C rise = (a[k] - largest_a) + (b[k] - largest_b);
    return {
        static_cast<C>(static_cast<double>(largest) + log_sum), static_cast<C>(static_cast<double>(rise) + log_sum)};
  }

  // sums[k] += W y z[k]; z null: 1
  void add_weighted(C log_s, C y, const C* z, C* sums) const {
    const Reg scale = S::splat(y);
    int64_t k = 0;
    for (; k + kWidth <= depth; k += kWidth) {
      const Reg w = S::mul(weights(S::load(a + k), S::load(b + k), log_s), scale);
      S::store(sums + k, z == nullptr ? S::add(S::load(sums + k), w) : S::fma(w, S::load(z + k), S::load(sums + k)));
    }
    if (k == depth) return;
    C lanes[kWidth];
    S::store(
        lanes, S::mul(weights(load_part(a + k, depth - k, C(0)), load_part(b + k, depth - k, C(0)), log_s), scale));
    for (int64_t i = 0; k + i < depth; ++i) sums[k + i] += z == nullptr ? lanes[i] : lanes[i] * z[k + i];
  }

  // sum_k W x z; null: 1
  C dot(C log_s, const C* x, const C* z) const {
    Reg sum = S::splat(C(0));
    int64_t k = 0;
    for (; k + kWidth <= depth; k += kWidth) {
      Reg w = weights(S::load(a + k), S::load(b + k), log_s);
      if (x != nullptr) w = S::mul(w, S::load(x + k));
      sum = z == nullptr ? S::add(sum, w) : S::fma(w, S::load(z + k), sum);
    }
    double total = sum_lanes<C>(sum);
    if (k == depth) return static_cast<C>(total);
    C lanes[kWidth];
    S::store(lanes, weights(load_part(a + k, depth - k, C(0)), load_part(b + k, depth - k, C(0)), log_s));
    for (int64_t i = 0; k + i < depth; ++i)
      total += static_cast<double>(lanes[i] * (x == nullptr ? C(1) : x[k + i]) * (z == nullptr ? C(1) : z[k + i]));
    return static_cast<C>(total);
  }

 private:
  DCS_INLINE Reg weights(Reg a_values, Reg b_values, C log_s) const {
    const Reg shifted = S::add(S::sub(a_values, S::splat(largest_a)), S::sub(b_values, S::splat(largest_b)));
    return exponential(S::sub(shifted, S::splat(log_s)));
  }

  // Of a term that there is.
  int64_t position(C term) const {
    const Reg wanted = S::splat(term);
    int64_t k = 0;
    for (; k + kWidth <= depth; k += kWidth) {
      const unsigned lanes = S::equal_lanes(S::add(S::load(a + k), S::load(b + k)), wanted);
      if (lanes != 0) return k + __builtin_ctz(lanes);
    }
    while (k + 1 < depth && a[k] + b[k] != term) ++k;
    return k;
  }

  // run(terms, 0 or 1): all terms, two vectors at a time; beyond the last they are -inf.
  template <typename Run>
  DCS_INLINE void each(const Run& run) const {
    int64_t k = 0;
    for (; k + 2 * kWidth <= depth; k += 2 * kWidth) {
      run(S::add(S::load(a + k), S::load(b + k)), 0);
      run(S::add(S::load(a + k + kWidth), S::load(b + k + kWidth)), 1);
    }
    for (; k < depth; k += kWidth) {
      const int64_t count = depth - k < kWidth ? depth - k : kWidth;
      run(S::add(load_part(a + k, count, kMinusInfinity<C>), load_part(b + k, count, C(0))), 0);
    }
  }
};

// The pair of rows (batch, i) and (batch, j).
template <typename C>
DCS_INLINE Pair<C> pair_of(const ShiftedRows& a, const ShiftedRows& b, int64_t batch, int64_t i, int64_t j) {
  const int64_t first = (a.batches == 1 ? 0 : batch) * a.rows + i, second = (b.batches == 1 ? 0 : batch) * b.rows + j;
  return {row_of<C>(a.values, first, a.depth), row_of<C>(b.values, second, b.depth), a.depth,
      static_cast<const C*>(a.largest)[first], static_cast<const C*>(b.largest)[second]};
}

}  // namespace
}  // namespace dcs::cpu
