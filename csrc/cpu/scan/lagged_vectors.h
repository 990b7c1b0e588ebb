// What scans of few columns do vector by vector (lagged.h).
#pragma once

#include "scan/lanes.h"

namespace dcs::cpu {
namespace {

constexpr int kMostLag = kWidth > 2 ? kWidth - 1 : 1, kLeastLag = kMostLag > 1 ? 2 : 1;

// A vector's gates, over 1, 2 and 4 steps of a column, and the products of them down to its beginning.
template <int kLag>
struct LocalGates {
  Vector over[3], product;

  DCS_INLINE LocalGates(Vector gates, int levels) : over{gates, gates, gates}, product(gates) {
    const Vector ones = splat(1.0);
    if constexpr (kLag < kWidth) product = over[1] = multiply(product, move_up<kLag>(product, ones));
    if constexpr (2 * kLag < kWidth)
      if (levels > 1) product = over[2] = multiply(product, move_up<2 * kLag>(product, ones));
    if constexpr (4 * kLag < kWidth)
      if (levels > 2) product = multiply(product, move_up<4 * kLag>(product, ones));
  }
  // The vector's scan from a carry of 0.
  DCS_INLINE Vector scan(Vector v, int levels) const {
    const Vector zeros = splat(0.0);
    if constexpr (kLag < kWidth) v = multiply_add(over[0], move_up<kLag>(v, zeros), v);
    if constexpr (2 * kLag < kWidth)
      if (levels > 1) v = multiply_add(over[1], move_up<2 * kLag>(v, zeros), v);
    if constexpr (4 * kLag < kWidth)
      if (levels > 2) v = multiply_add(over[2], move_up<4 * kLag>(v, zeros), v);
    return v;
  }
};

template <int kLag>
DCS_INLINE Vector repeat(const double* columns) {
  double lanes[kWidth];
  for (int i = 0; i < kWidth; ++i) lanes[i] = columns[i % kLag];
  return load(lanes);
}

// What a vector's lanes continue, and those of the vector after it.
template <int kLag>
struct LaggedCarry {
  Vector near, far;

  explicit DCS_INLINE LaggedCarry(const double* columns) {
    double lanes[2 * kWidth];
    for (int i = 0; i < 2 * kWidth; ++i) lanes[i] = columns[i % kLag];
    near = load(lanes);
    far = load(lanes + kWidth);
  }
  DCS_INLINE void follow(Vector last) {
    near = repeat_last<kLag>(last);
    far = repeat_last<kLag, kWidth>(last);
  }
  DCS_INLINE void write(double* columns) const {
    double lanes[kWidth];
    store(lanes, near);
    for (int c = 0; c < kLag; ++c) columns[c] = lanes[c];
  }
};

// What a tile or a chunk makes of its carry: sum + product * carry, column by column.
struct Folded {
  double sums[kMostLag], products[kMostLag];
};

// Scans `count` elements (padded to pairs of vectors) from `carries`, one a column; false if a value is not finite. The
// carry takes one multiply-add for two vectors. With kFold, whose tiles are whole pairs, folds them onto `folded`, and
// the values of its scan count too.
template <int kLag, bool kFold>
bool scan_lagged(
    const double* x, const double* gates, double* y, int64_t count, int levels, const double* carries, Folded* folded) {
  LaggedCarry<kLag> carry(carries), sum(kFold ? folded->sums : carries), product(kFold ? folded->products : carries);
  const Vector zeros = splat(0.0);
  Vector specials = zeros;  // a NaN once a value is infinite or NaN
  for (int64_t i = 0; i < count; i += 2 * kWidth) {
    const LocalGates<kLag> a(load(gates + i), levels), b(load(gates + i + kWidth), levels);
    const Vector v_a = a.scan(load(x + i), levels),
                 v_b = multiply_add(b.product, repeat_last<kLag>(v_a), b.scan(load(x + i + kWidth), levels)),
                 both = multiply(b.product, repeat_last<kLag>(a.product));
    const Vector y_a = multiply_add(a.product, carry.near, v_a), y_b = multiply_add(both, carry.far, v_b);
    carry.follow(y_b);
    store(y + i, y_a);
    store(y + i + kWidth, y_b);
    specials = multiply_add(y_b, zeros, multiply_add(y_a, zeros, specials));
    if constexpr (kFold) {
      sum.follow(multiply_add(both, sum.far, v_b));
      product.follow(multiply(both, product.far));
    }
  }
  if constexpr (kFold) {
    sum.write(folded->sums);
    product.write(folded->products);
  }
  return !has_special(specials);
}

// The same of one gate for all, from memory to memory, with the same bits; false if a value that is asked for is not
// finite. kFold: of whole pairs of vectors; kWrite: with results.
template <typename T, int kLag, bool kFold, bool kWrite>
bool scan_same_gates(
    const T* x, T* y, int64_t count, bool reverse, double gate, int levels, const double* carries, Folded* folded) {
  LaggedCarry<kLag> carry(carries), sum(kFold ? folded->sums : carries), product(kFold ? folded->products : carries);
  const LocalGates<kLag> gates(splat(gate), levels);
  const Vector both = multiply(gates.product, repeat_last<kLag>(gates.product)), zeros = splat(0.0);
  Vector specials = zeros;  // a NaN once a value is infinite or NaN
  // from(i), to(i, vector): elements i ... i + kWidth - 1 in scan order.
  const auto pair = [&](int64_t i, const auto& from, const auto& to) __attribute__((always_inline)) {
    const Vector v_a = gates.scan(from(i), levels),
                 v_b = multiply_add(gates.product, repeat_last<kLag>(v_a), gates.scan(from(i + kWidth), levels));
    if constexpr (kWrite) {
      const Vector y_a = multiply_add(gates.product, carry.near, v_a), y_b = multiply_add(both, carry.far, v_b);
      carry.follow(y_b);
      to(i, y_a);
      to(i + kWidth, y_b);
      specials = multiply_add(y_b, zeros, multiply_add(y_a, zeros, specials));
    }
    if constexpr (kFold) {
      sum.follow(multiply_add(both, sum.far, v_b));
      product.follow(multiply(both, product.far));
    }
  };
  const int64_t whole = count / (2 * kWidth) * (2 * kWidth);
  if (reverse) {
    const T* const last = x + (count - kWidth);
    T* const last_to = y + (count - kWidth);
    for (int64_t i = 0; i < whole; i += 2 * kWidth)
      pair(
          i, [&](int64_t k) { return reversed(load(last - k)); },
          [&](int64_t k, Vector v) { store(last_to - k, reversed(v)); });
  } else {
    for (int64_t i = 0; i < whole; i += 2 * kWidth)
      pair(i, [&](int64_t k) { return load(x + k); }, [&](int64_t k, Vector v) { store(y + k, v); });
  }
  if (whole < count) {
    double rest[2 * kWidth] = {}, results[2 * kWidth];
    const auto place = [&](int64_t i) { return reverse ? count - 1 - i : i; };
    for (int64_t i = whole; i < count; ++i) rest[i - whole] = Element<T>::load(x[place(i)]);
    pair(0, [&](int64_t k) { return load(rest + k); }, [&](int64_t k, Vector v) { store(results + k, v); });
    if constexpr (kWrite)
      for (int64_t i = whole; i < count; ++i) y[place(i)] = Element<T>::store(results[i - whole]);
  }
  bool all_finite = !has_special(specials);
  if constexpr (kFold) {
    sum.write(folded->sums);
    product.write(folded->products);
    for (int c = 0; c < kLag; ++c) all_finite = all_finite && is_finite(folded->sums[c]);
  }
  return all_finite;
}

// call(lag as a constant).
template <int kLag, typename Call>
DCS_INLINE void with_lag(int64_t lag, const Call& call) {
  if (lag == kLag) return call(Number<kLag>{});
  if constexpr (kLag < kMostLag) with_lag<kLag + 1>(lag, call);
}

}  // namespace
}  // namespace dcs::cpu
