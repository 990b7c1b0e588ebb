// Short rows that follow each other in memory, forward: all of them one sequence, cut where a row begins. Within a
// vector, log2(width) steps of v += g * (v moved on by 2^k lanes) give the scan from a carry of 0, and masks, which
// repeat with the rows, keep rows apart. With one gate the factors are its powers; with gates or resets they are
// products of gates, which may overflow or underflow, and inf * 0 is NaN: a tile with a result that is not finite is
// run through again step by step.
#pragma once

#include <cstring>
#include <utility>

#include "scan/contiguous.h"

namespace dcs::cpu {
namespace {

constexpr int64_t kTileElements = 512;                // elements
constexpr int64_t kFlatRow = 32, kFlatGatedRow = 16;  // longer rows are faster otherwise

inline int64_t row_stride(const ScanProblem& problem, const Strides& strides) {
  return problem.inner == 1 ? strides.outer : strides.inner;
}

inline bool has_even_rows(const ScanProblem& problem, const Strides& strides) {
  return problem.inner == 1 || problem.outer == 1 || strides.outer == problem.inner * strides.inner;
}

inline bool has_flat_rows(const ScanProblem& problem, const Strides& strides) {
  return strides.time == 1 && has_even_rows(problem, strides);
}

inline bool has_one_gate(const ScanProblem& problem) {
  return problem.gamma_kind == GammaKind::kNumber && problem.reset == nullptr && problem.initial == nullptr &&
      keeps_powers(problem.gamma_value, kLargestGamma);
}

// Whether an operand's rows lie one behind the other, or there is one.
inline bool is_dense(const ScanProblem& problem, const Strides& strides) {
  return problem.rows() == 1 || row_stride(problem, strides) == problem.length;
}

// Whether no row goes on from one vector to the next.
inline bool divides_vectors(const ScanProblem& problem) { return kWidth % problem.length == 0; }

inline bool is_flat(const ScanProblem& problem) {
  if (!is_real(problem) || problem.backward || problem.shifted || problem.length < 2) return false;
  if (problem.length > (has_one_gate(problem) ? kFlatRow : kFlatGatedRow)) return false;
  return has_flat_rows(problem, problem.input_strides) && has_flat_rows(problem, problem.output_strides) &&
      is_dense(problem, problem.output_strides) &&
      (problem.reset == nullptr || has_flat_rows(problem, problem.reset_strides)) &&
      (problem.gamma_kind != GammaKind::kStep || has_flat_rows(problem, problem.gamma_strides)) &&
      (problem.gamma_kind != GammaKind::kRow || has_even_rows(problem, problem.gamma_strides)) &&
      (problem.initial == nullptr || has_even_rows(problem, problem.initial_strides));
}

inline int64_t rows_of_tile(const ScanProblem& problem) { return kTileElements / problem.length / 16 * 16; }

inline int64_t flat_tiles(const ScanProblem& problem) {
  const int64_t each = rows_of_tile(problem);
  return (problem.rows() + each - 1) / each;
}

DCS_SHARED inline void read_row_gates(const ScanProblem& problem, int64_t row, int64_t count, double* gates) {
  const int64_t stride = row_stride(problem, problem.gamma_strides), from = row * stride;
  switch (problem.gamma_dtype) {
    case ElementType::Half: return read_values(static_cast<const Half*>(problem.gamma) + from, stride, count, gates);
    case ElementType::BFloat16:
      return read_values(static_cast<const BFloat16*>(problem.gamma) + from, stride, count, gates);
    case ElementType::Float: return read_values(static_cast<const float*>(problem.gamma) + from, stride, count, gates);
    default: return read_values(static_cast<const double*>(problem.gamma) + from, stride, count, gates);
  }
}

// kBlocks: blocks of 16 bytes of a row, or 0 where they are counted.
template <int kBlocks>
void copy_blocks(char* to, const char* from, int64_t stride, int64_t rows, int64_t bytes) {
  const int64_t covered = kBlocks > 0 ? kBlocks * 16 : bytes;
  for (int64_t r = 0; r < rows; ++r, from += stride, to += bytes)
    for (int64_t at = 0; at < covered; at += 16)
      _mm_storeu_si128(
          reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
}

// Rows of an operand side by side, in blocks of 16 bytes where they do not reach beyond `end`.
DCS_SHARED inline void pack_rows(
    char* to, const char* from, int64_t stride, int64_t rows, int64_t bytes, const char* end) {
  const int64_t blocks = (bytes + 15) / 16, room = end - from - blocks * 16;
  int64_t inside = room < 0 ? 0 : stride > 0 ? room / stride + 1 : rows;
  inside = inside < rows ? inside : rows;
  switch (blocks) {
    case 1: copy_blocks<1>(to, from, stride, inside, bytes); break;
    case 2: copy_blocks<2>(to, from, stride, inside, bytes); break;
    case 3: copy_blocks<3>(to, from, stride, inside, bytes); break;
    case 4: copy_blocks<4>(to, from, stride, inside, bytes); break;
    case 5: copy_blocks<5>(to, from, stride, inside, bytes); break;
    case 6: copy_blocks<6>(to, from, stride, inside, bytes); break;
    default: copy_blocks<0>(to, from, stride, inside, bytes);
  }
  for (int64_t r = inside; r < rows; ++r) std::memcpy(to + r * bytes, from + r * stride, static_cast<size_t>(bytes));
}

template <typename T, bool kMirrored>
struct FlatRows {
  static constexpr int kMasks = 5;  // steps 1, 2 and 4, the carry into each lane, the carry beyond the vector

  const ScanProblem& problem;
  const int64_t length, each;  // each: rows of a tile, whole vectors
  const bool all_dense;        // all operands of steps
  alignas(64) LaneWord masks[kFlatRow * kMasks * kLaneWords];
  alignas(64) double gates[kTileElements + 2 * kWidth];
  alignas(64) double added[kTileElements + kWidth];  // what initial values add to the rows' first steps
  T x[kTileElements + 16], y[kTileElements + 16], step_gates[kTileElements + 16];
  bool flags[kTileElements + 16];
  double ones[3][kWidth];  // in the first 1, 2 and 4 lanes

  DCS_SHARED explicit FlatRows(const ScanProblem& given)
      : problem(given),
        length(given.length),
        each(rows_of_tile(given)),
        all_dense(is_dense(given, given.input_strides) &&
            (given.gamma_kind != GammaKind::kStep || is_dense(given, given.gamma_strides)) &&
            (given.reset == nullptr || is_dense(given, given.reset_strides))) {
    int64_t steps[kWidth], ahead[kWidth], past[kWidth];  // ahead: above 0 where the row of the first lane goes on
    for (int64_t lane = 0; lane < kWidth; ++lane) steps[kMirrored ? kWidth - 1 - lane : lane] = lane % length;
    LaneWord* mask = masks;
    for (int64_t phase = 0; phase < length; ++phase) {
      for (int64_t at = 0; at < kWidth; ++at) {
        ahead[at] = steps[at] - (kMirrored ? kWidth - 1 - at : at);
        past[at] = phase > 0 && phase + kWidth <= length ? 1 : 0;
      }
      for (const int64_t least : {1, 2, 4}) store_lanes(std::exchange(mask, mask + kLaneWords), steps, least);
      store_lanes(std::exchange(mask, mask + kLaneWords), ahead, 1);
      store_lanes(std::exchange(mask, mask + kLaneWords), past, 1);
      for (int64_t& step : steps) step = step + 1 == length ? 0 : step + 1;
    }
    if (has_one_gate(given)) return;
    for (int lane = 0; lane < kWidth; ++lane)
      for (int k = 0; k < 3; ++k) ones[k][kMirrored ? kWidth - 1 - lane : lane] = lane < (1 << k) ? 1.0 : 0.0;
    for (double& value : added) value = 0;
    for (double& gate : gates) gate = given.gamma_value;
  }

  DCS_INLINE Lanes mask(int64_t phase, int which) const {
    return load_lanes(masks + (phase * kMasks + which) * kLaneWords);
  }

  // Of `count` elements, whole vectors, of each of which `kLength` divides the lanes: nothing goes from one to the
  // next.
  template <int kLength>
  void scan_within(const Powers<kMirrored> powers, const T* from, T* to, int64_t count) const {
    const Lanes one = mask(0, 0), two = mask(0, 1), four = mask(0, 2);
    for (int64_t at = 0; at < count; at += kWidth) {
      Vector v = load(from + at);
      v = multiply_add_in(one, move_on<1, kMirrored>(v), powers.one, v);
      if constexpr (kLength > 2) v = multiply_add_in(two, move_on<2, kMirrored>(v), powers.two, v);
      if constexpr (kLength > 4) v = multiply_add_in(four, move_on<4, kMirrored>(v), powers.four, v);
      store(to + at, v);
    }
  }
  // Of a tile.
  void scan_powers(const Powers<kMirrored>& powers, const T* from, T* to) const {
    const int64_t count = each * length;
    if (length == 2) return scan_within<2>(powers, from, to, count);
    if constexpr (kWidth >= 4)
      if (length == 4) return scan_within<4>(powers, from, to, count);
    if constexpr (kWidth >= 8)
      if (length == 8) return scan_within<8>(powers, from, to, count);
    if constexpr (kWidth >= 8)
      if (length < 4) return scan_across<false>(powers, from, to, count / 2);
    scan_across<true>(powers, from, to, count / 2);
  }
  // Of both halves of a tile, whole vectors of whole rows: side by side, as carries are waited for, and masks are the
  // same. Powers are copied, since results might be stored over those of a reference.
  // kFour: rows have steps that are four lanes on.
  template <bool kFour>
  void scan_across(const Powers<kMirrored> powers, const T* from, T* to, int64_t half) const {
    const Vector beyond = last_lane<kMirrored>(powers.near);
    const int64_t steps = length, on = kWidth % steps;
    const int64_t ahead = kMirrored ? -2 * half : 2 * half;  // prefetchers do not follow halves: the next tile
    Vector carries[2] = {splat(0.0), splat(0.0)};
    for (int64_t i = 0, phase = 0; i < half; i += kWidth) {
      const Lanes one = mask(phase, 0), two = mask(phase, 1), four = mask(phase, 2), into = mask(phase, 3),
                  past = mask(phase, 4);
      for (int h = 0; h < 2; ++h) {
        const int64_t at = h * half + (kMirrored ? half - kWidth - i : i);
        ask_ahead(from + at, ahead);
        ask_ahead(to + at, ahead);
        Vector v = load(from + at);
        v = multiply_add_in(one, move_on<1, kMirrored>(v), powers.one, v);
        if constexpr (kWidth >= 4) v = multiply_add_in(two, move_on<2, kMirrored>(v), powers.two, v);
        if constexpr (kWidth >= 8 && kFour) v = multiply_add_in(four, move_on<4, kMirrored>(v), powers.four, v);
        store(to + at, multiply_add_in(into, carries[h], powers.near, v));
        carries[h] = multiply_add_in(past, carries[h], beyond, last_lane<kMirrored>(v));
      }
      phase += on;
      if (phase >= steps) phase -= steps;
    }
  }

  // False if a value is not finite. Gates are of steps (given) or `gates`.
  bool scan_gates(const T* from, const T* given, const bool* resets, T* to, int64_t count) const {
    const int64_t step = kWidth % length;
    const Vector zeros = splat(0.0), one = splat(1.0);
    const bool adds = problem.initial != nullptr;
    Vector carry = zeros, specials = zeros;
    for (int64_t i = 0, phase = 0; i < count; i += kWidth) {
      const int64_t at = kMirrored ? count - kWidth - i : i;
      Vector g = only(mask(phase, 0), given != nullptr ? load(given + at) : load(gates + at));
      if (resets != nullptr) g = select(resets + at, zeros, g);
      Vector v = load(from + at);
      if (adds) v = multiply_add(one, load(added + at), v);
      v = multiply_add(g, move_on<1, kMirrored>(v), v);
      g = multiply(g, bit_or(move_on<1, kMirrored>(g), load(ones[0])));
      if constexpr (kWidth >= 4)
        if (length > 2) {
          v = multiply_add(g, move_on<2, kMirrored>(v), v);
          g = multiply(g, bit_or(move_on<2, kMirrored>(g), load(ones[1])));
        }
      if constexpr (kWidth >= 8)
        if (length > 4) {
          v = multiply_add(g, move_on<4, kMirrored>(v), v);
          g = multiply(g, bit_or(move_on<4, kMirrored>(g), load(ones[2])));
        }
      v = multiply_add(g, carry, v);
      carry = last_lane<kMirrored>(v);
      specials = multiply_add(v, zeros, specials);
      store(to + at, v);
      phase += step;
      if (phase >= length) phase -= length;
    }
    return !has_special(specials);
  }

  DCS_SHARED void step_by_step(const T* from, const T* given, const bool* resets, T* to, int64_t rows) const {
    for (int64_t row = 0; row < rows; ++row) {
      double carry = 0;
      for (int64_t k = 0; k < length; ++k) {
        const int64_t at = row * length + (kMirrored ? length - 1 - k : k);
        const double value = Element<T>::load(from[at]),
                     gate = given != nullptr ? Element<T>::load(given[at]) : gates[at];
        if (k == 0) carry = problem.initial != nullptr ? value + added[at] : value;
        else carry = resets != nullptr && resets[at] ? value : multiply_add(gate, carry, value);
        to[at] = Element<T>::store(carry);
      }
    }
  }

  template <typename E>
  const E* end_of(const E* operand, const Strides& strides) const {
    return operand + strides.at(problem.outer - 1, problem.inner - 1) + length;
  }

  // An operand's rows side by side, in place if they are and `in_place` allows it, else in `room`.
  template <typename E>
  const E* packed(const E* operand, const Strides& strides, int64_t row, int64_t rows, bool in_place, E* room) const {
    const int64_t stride = row_stride(problem, strides);
    const E* from = operand + row * stride;
    if (in_place && is_dense(problem, strides)) return from;
    constexpr int64_t kBytes = sizeof(E);
    pack_rows(reinterpret_cast<char*>(room), reinterpret_cast<const char*>(from), stride * kBytes, rows,
        length * kBytes, reinterpret_cast<const char*>(end_of(operand, strides)));
    return room;
  }

  DCS_SHARED void spread_row_gates(int64_t row, int64_t rows) {
    double values[kTileElements / 2];
    read_row_gates(problem, row, rows, values);
    for (int64_t r = 0; r < rows; ++r) {
      const Vector gate = splat(values[r]);
      // What goes beyond the row belongs to the next, or to nobody.
      for (int64_t k = 0; k < length; k += kWidth) store(gates + r * length + k, gate);
    }
  }

  DCS_SHARED void add_initial(int64_t row, int64_t rows, const T* given, const bool* resets) {
    double values[kTileElements / 2];
    const int64_t stride = row_stride(problem, problem.initial_strides);
    read_values(static_cast<const T*>(problem.initial) + row * stride, stride, rows, values);
    int64_t at = kMirrored ? length - 1 : 0;
    for (int64_t r = 0; r < rows; ++r, at += length) {
      const double gate = given != nullptr ? Element<T>::load(given[at]) : gates[at];
      added[at] = resets != nullptr && resets[at] ? 0.0 : gate * values[r];
    }
  }

  // A tile; `beyond`: elements to be added for whole vectors, or a whole tile, behind the last step in scan order.
  void tile(const Powers<kMirrored>& powers, bool one_gate, int64_t row, int64_t rows) {
    const int64_t count = rows * length, beyond = one_gate ? each * length - count : (kWidth - count % kWidth) % kWidth,
                  front = kMirrored ? beyond : 0;
    const bool whole = beyond == 0;
    const auto operand = [&](const auto* base, const Strides& strides, auto* room) {
      return packed(base, strides, row, rows, whole, room + front);
    };
    T* result = static_cast<T*>(problem.output) + row * length;
    // Packed rows come and go up in memory, also where their steps go down; scan_within goes up.
    const bool in_place = whole && (!kMirrored || all_dense || (one_gate && divides_vectors(problem)));
    T* to = in_place ? result : y + front;
    const T* from = operand(static_cast<const T*>(problem.input), problem.input_strides, x);
    if (one_gate) {
      // What nobody asks for is computed, too: not of what the stack happens to hold, which may be slow subnormals.
      const int64_t unused = kMirrored ? 0 : count;
      for (int64_t i = 0; i < beyond; ++i) x[unused + i] = T{};
      scan_powers(powers, from - front, to - front);
    } else {
      const T* given = nullptr;
      const bool* resets = nullptr;
      if (problem.gamma_kind == GammaKind::kStep)
        given = operand(static_cast<const T*>(problem.gamma), problem.gamma_strides, step_gates);
      if (problem.reset != nullptr) resets = operand(problem.reset, problem.reset_strides, flags);
      if (problem.gamma_kind == GammaKind::kRow) spread_row_gates(row, rows);
      if (problem.initial != nullptr) add_initial(row, rows, given, resets);
      if (!whole || !scan_gates(from, given, resets, to, count)) step_by_step(from, given, resets, to, rows);
    }
    if (!in_place) std::memcpy(result, to, static_cast<size_t>(count) * sizeof(T));
  }

  void run(int64_t begin, int64_t end) {
    const bool one_gate = has_one_gate(problem);
    const Powers<kMirrored> powers(one_gate ? problem.gamma_value : 0.0);
    // Prefetchers follow one direction: tiles go down in memory where their steps do, but not where rows are packed or
    // nothing goes from a vector to the next.
    const bool down = kMirrored && all_dense && !(one_gate && divides_vectors(problem));
    const int64_t tiles = (end - begin + each - 1) / each;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = begin + (down ? tiles - 1 - i : i) * each, left = end - row;
      tile(powers, one_gate, row, left < each ? left : each);
    }
  }
};

// Rows are cut into tiles by their numbers alone, so that a row's offset in a vector, and its bits, hang on no thread.
template <typename T>
void flat_rows(const ScanProblem& problem, int64_t begin, int64_t end) {
  const int64_t each = rows_of_tile(problem);
  begin *= each;
  end = end * each < problem.rows() ? end * each : problem.rows();
  if (problem.reverse) FlatRows<T, true>(problem).run(begin, end);
  else FlatRows<T, false>(problem).run(begin, end);
}

}  // namespace
}  // namespace dcs::cpu
