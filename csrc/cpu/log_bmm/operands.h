// Operands of the log-semiring products made ready: rows of numbers in the dtype of the sums, their maxima, their
// exponentials.
#pragma once

#include "log_bmm/kernels.h"
#include "common/vector_math.h"

namespace dcs::cpu {
namespace {

template <typename C>
constexpr C kMinusInfinity = -__builtin_inf();

// Transposes go by squares of so many elements, a cache line of floats a side: rows a power of two apart share a set of
// the first-level cache.
constexpr int64_t kSquare = 16;

// The arithmetic's dtype.
template <typename T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};

DCS_INLINE float number(float value) { return value; }
DCS_INLINE double number(double value) { return value; }
DCS_INLINE float number(Half value) { return to_float(value); }
DCS_INLINE float number(BFloat16 value) { return to_float(value); }

template <typename C>
DCS_INLINE const C* row_of(const void* array, int64_t row, int64_t length) {
  return static_cast<const C*>(array) + row * length;
}

// A whole vector from `count` elements, less than one, and `filling`.
template <typename C>
DCS_INLINE typename Simd<C>::Reg load_part(const C* from, int64_t count, C filling) {
  C lanes[Simd<C>::kWidth];
  for (int i = 0; i < Simd<C>::kWidth; ++i) lanes[i] = i < count ? from[i] : filling;
  return Simd<C>::load(lanes);
}

// `count` <= kSquare rows from `from`, to a dense array.
template <typename T, typename C>
void copy_rows(const T* from, int64_t row, int64_t column, int64_t count, int64_t depth, C* to) {
  if (column == 1) {
    for (int64_t r = 0; r < count; ++r) convert(from + r * row, depth, to + r * depth);
    return;
  }
  C square[kSquare][kSquare];
  for (int64_t k = 0; k < depth; k += kSquare) {
    const int64_t width = depth - k < kSquare ? depth - k : kSquare;
    for (int64_t j = 0; j < width; ++j)
      for (int64_t r = 0; r < count; ++r) square[r][j] = number(from[r * row + (k + j) * column]);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t j = 0; j < width; ++j) to[r * depth + k + j] = square[r][j];
  }
}

// Maximum (no NaN ever is it; the sums will have it; 0 for an infinite one), exponentials and mask of one row.
template <typename C>
void shift_row(const ShiftedRows& problem, int64_t row) {
  using S = Simd<C>;
  const int64_t depth = problem.depth, whole = depth / S::kWidth * S::kWidth, rest = depth - whole;
  const C* values = row_of<C>(problem.values, row, depth);
  C* powers = static_cast<C*>(problem.powers) + row * depth;
  const typename S::Reg nothing = S::splat(kMinusInfinity<C>);
  typename S::Reg most = nothing;
  unsigned has_infinity = 0;
  for (int64_t k = 0; k < whole; k += S::kWidth) {
    const typename S::Reg v = S::load(values + k);
    most = S::max(v, most);
    has_infinity |= S::equal_lanes(v, nothing);
  }
  C largest = largest_lane<C>(most);
  for (int64_t k = whole; k < depth; ++k) {
    largest = values[k] > largest ? values[k] : largest;
    has_infinity |= values[k] == kMinusInfinity<C>;
  }
  problem.masked[row] = static_cast<uint8_t>(largest == kMinusInfinity<C> ? 2 : has_infinity != 0);
  if (largest == kMinusInfinity<C>) largest = 0;
  // Beside a +inf finite numbers weigh exp(-inf) = 0, as in torch.logsumexp's gradient: the shift is not to make log S
  // a NaN. The exponentials keep the NaN of inf - inf, and so send all sums of the row to Pair.
  static_cast<C*>(problem.largest)[row] = largest == -kMinusInfinity<C> ? C(0) : largest;

  const typename S::Reg top = S::splat(largest), floor = S::splat(static_cast<C>(problem.scaling.floor));
  const C power = static_cast<C>(problem.scaling.power);
  const bool floored = has_infinity != 0 && problem.scaling.floor > 0;
  const auto exponentials = [&](typename S::Reg v) __attribute__((always_inline)) {
    const typename S::Reg e = scaled_exponential(S::sub(v, top), power);
    // The maximum takes its second operand where one is NaN.
    return floored ? S::where_less(nothing, v, S::max(floor, e), e) : e;
  };
  for (int64_t k = 0; k < whole; k += S::kWidth) S::store(powers + k, exponentials(S::load(values + k)));
  if (rest != 0) {
    C lanes[S::kWidth];
    S::store(lanes, exponentials(load_part<C>(values + whole, rest, C(0))));
    for (int64_t i = 0; i < rest; ++i) powers[whole + i] = lanes[i];
  }
}

template <typename T, typename C>
void shift_rows(const ShiftedRows& problem, int64_t begin, int64_t end) {
  while (begin < end) {
    const int64_t batch = begin / problem.rows, first = begin % problem.rows;
    int64_t count = problem.rows - first < kSquare ? problem.rows - first : kSquare;
    count = end - begin < count ? end - begin : count;
    if (problem.copied != nullptr) {
      const T* from =
          static_cast<const T*>(problem.source.data) + batch * problem.source.batch + first * problem.source.row;
      copy_rows<T, C>(from, problem.source.row, problem.source.column, count, problem.depth,
          static_cast<C*>(problem.copied) + begin * problem.depth);
    }
    for (int64_t r = 0; problem.powers != nullptr && r < count; ++r) shift_row<C>(problem, begin + r);
    begin += count;
  }
}

void shift(const ShiftedRows& problem, int64_t begin, int64_t end) {
  switch (problem.dtype) {
    case ScalarType::Half: return shift_rows<Half, float>(problem, begin, end);
    case ScalarType::BFloat16: return shift_rows<BFloat16, float>(problem, begin, end);
    case ScalarType::Float: return shift_rows<float, float>(problem, begin, end);
    default: return shift_rows<double, double>(problem, begin, end);
  }
}

}  // namespace
}  // namespace dcs::cpu
