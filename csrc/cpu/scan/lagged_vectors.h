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

// A scan by pairs of vectors, for which a carry takes one multiply-add. kFold: folds them onto `folded`, too.
template <int kLag, bool kFold>
struct PairScan {
  const int levels;
  LaggedCarry<kLag> carry, sum, product;
  Vector specials = splat(0.0);  // a NaN once a value is infinite or NaN

  DCS_INLINE PairScan(const double* carries, const Folded* folded, int of_levels)
      : levels(of_levels),
        carry(carries),
        sum(kFold ? folded->sums : carries),
        product(kFold ? folded->products : carries) {}

  // `both`: the products of the second vector's gates down to the first one's beginning. write(result, result) where
  // results are asked for.
  template <bool kWrite, typename Write>
  DCS_INLINE void take(
      const LocalGates<kLag>& a, const LocalGates<kLag>& b, Vector both, Vector x_a, Vector x_b, const Write& write) {
    const Vector v_a = a.scan(x_a, levels), v_b = multiply_add(b.product, repeat_last<kLag>(v_a), b.scan(x_b, levels)),
                 zeros = splat(0.0);
    if constexpr (kWrite) {
      const Vector y_a = multiply_add(a.product, carry.near, v_a), y_b = multiply_add(both, carry.far, v_b);
      carry.follow(y_b);
      write(y_a, y_b);
      specials = multiply_add(y_b, zeros, multiply_add(y_a, zeros, specials));
    }
    if constexpr (kFold) {
      sum.follow(multiply_add(both, sum.far, v_b));
      product.follow(multiply(both, product.far));
    }
  }
  // Whether all results were finite.
  DCS_INLINE bool finish(Folded* folded) const {
    if constexpr (kFold) {
      sum.write(folded->sums);
      product.write(folded->products);
    }
    return !has_special(specials);
  }
};
template <int kLag>
DCS_INLINE Vector products_of(const LocalGates<kLag>& a, const LocalGates<kLag>& b) {
  return multiply(b.product, repeat_last<kLag>(a.product));
}

// Scans `count` elements (padded to pairs of vectors) from `carries`, one a column; false if a value is not finite.
// With kFold, whose tiles are whole pairs, the values of its scan count too.
template <int kLag, bool kFold>
bool scan_lagged(
    const double* x, const double* gates, double* y, int64_t count, int levels, const double* carries, Folded* folded) {
  PairScan<kLag, kFold> scan(carries, folded, levels);
  for (int64_t i = 0; i < count; i += 2 * kWidth) {
    const LocalGates<kLag> a(load(gates + i), levels), b(load(gates + i + kWidth), levels);
    scan.template take<true>(a, b, products_of(a, b), load(x + i), load(x + i + kWidth), [&](Vector y_a, Vector y_b) {
      store(y + i, y_a);
      store(y + i + kWidth, y_b);
    });
  }
  return scan.finish(folded);
}

// The same of one gate for all, from memory to memory, with the same bits; false if a value that is asked for is not
// finite. kFold: of whole pairs of vectors; kWrite: with results.
template <typename T, int kLag, bool kFold, bool kWrite>
bool scan_same_gates(
    const T* x, T* y, int64_t count, bool reverse, double gate, int levels, const double* carries, Folded* folded) {
  PairScan<kLag, kFold> scan(carries, folded, levels);
  const LocalGates<kLag> gates(splat(gate), levels);
  const Vector both = products_of(gates, gates);
  const int64_t whole = count / (2 * kWidth) * (2 * kWidth);
  if (reverse) {
    const T* const last = x + (count - kWidth);
    T* const last_to = y + (count - kWidth);
    for (int64_t i = 0; i < whole; i += 2 * kWidth)
      scan.template take<kWrite>(
          gates, gates, both, reversed(load(last - i)), reversed(load(last - i - kWidth)), [&](Vector y_a, Vector y_b) {
            store(last_to - i, reversed(y_a));
            store(last_to - i - kWidth, reversed(y_b));
          });
  } else {
    for (int64_t i = 0; i < whole; i += 2 * kWidth)
      scan.template take<kWrite>(gates, gates, both, load(x + i), load(x + i + kWidth), [&](Vector y_a, Vector y_b) {
        store(y + i, y_a);
        store(y + i + kWidth, y_b);
      });
  }
  if (whole < count) {
    double rest[2 * kWidth] = {}, results[2 * kWidth];
    const auto place = [&](int64_t i) { return reverse ? count - 1 - i : i; };
    for (int64_t i = whole; i < count; ++i) rest[i - whole] = Element<T>::load(x[place(i)]);
    scan.template take<kWrite>(gates, gates, both, load(rest), load(rest + kWidth), [&](Vector y_a, Vector y_b) {
      store(results, y_a);
      store(results + kWidth, y_b);
    });
    if constexpr (kWrite)
      for (int64_t i = whole; i < count; ++i) y[place(i)] = Element<T>::store(results[i - whole]);
  }
  bool all_finite = scan.finish(folded);
  if constexpr (kFold)
    for (int c = 0; c < kLag; ++c) all_finite = all_finite && is_finite(folded->sums[c]);
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
