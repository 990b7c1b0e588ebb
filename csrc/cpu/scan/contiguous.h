// Rows whose steps are adjacent in memory, with one gate: SIMD along the row. Within a vector, log2(width) steps of
// v += gamma^(2^k) * (v moved on by 2^k lanes) (Hillis and Steele, 1986) give the scan from a carry of 0, off the
// critical path; the carry itself takes one multiply-add for two vectors.
#pragma once

#include "scan/lanes.h"
#include "common/simd.h"

namespace dcs::cpu {
namespace {

// Above it powers of gamma within two vectors could overflow: inf * 0 would make NaN of finite rows.
constexpr double kLargestGamma = 1e15;
// Above it the power of a whole chunk could.
constexpr double kLargestChunkGamma = 1.05;

// Below it powers within four vectors could underflow: inf * 0 would make NaN of what stays infinite. 0 itself does so
// at every step.
constexpr double kSmallestGamma = 1e-9;

DCS_INLINE bool keeps_powers(double gamma, double largest) {
  const double size = gamma < 0 ? -gamma : gamma;
  return size <= largest && (size >= kSmallestGamma || size == 0);
}

template <bool kMirrored>
struct Powers {
  double gamma;
  Vector one, two, four;  // gamma^1, ^2, ^4
  Vector near, far;       // what a carry is multiplied by in each lane of the next vector, and of the one after it
  Vector pair;            // gamma^(2 * width)

  explicit Powers(double number) : gamma(number) {
    double power[2 * kWidth];
    power[0] = number;
    for (int i = 1; i < 2 * kWidth; ++i) power[i] = power[(i - 1) / 2] * power[i / 2];
    double lanes[2 * kWidth];
    for (int i = 0; i < kWidth; ++i) {
      lanes[i] = power[kMirrored ? kWidth - 1 - i : i];
      lanes[kWidth + i] = power[kWidth + (kMirrored ? kWidth - 1 - i : i)];
    }
    one = splat(power[0]);
    two = splat(power[1]);
    four = splat(power[3]);
    near = load(lanes);
    far = load(lanes + kWidth);
    pair = splat(power[2 * kWidth - 1]);
  }

  DCS_INLINE Vector scan(Vector v) const {
    v = multiply_add(move_on<1, kMirrored>(v), one, v);
    if constexpr (kWidth >= 4) v = multiply_add(move_on<2, kMirrored>(v), two, v);
    if constexpr (kWidth >= 8) v = multiply_add(move_on<4, kMirrored>(v), four, v);
    return v;
  }
};

// Scans `count` steps from `carry`; returns the last value. input, output and saved point at the first step in scan
// order (saved: at the second). With kBackward, `sum` gathers output * saved.
template <typename T, bool kMirrored, bool kBackward>
DCS_INLINE double scan_contiguous(const Powers<kMirrored>& powers, const T* input, T* output, const T* saved,
    int64_t count, double carry, double* sum) {
  constexpr int64_t kBack = kMirrored ? kWidth - 1 : 0;  // a vector's lowest address lies this far below its first step
  constexpr int64_t kOn = kMirrored ? -1 : 1;
  int64_t k = 0;
  Vector carries = splat(carry), sums = splat(0.0);
  for (; k + 2 * kWidth <= count; k += 2 * kWidth) {
    const int64_t at = kOn * k - kBack, then = kOn * (k + kWidth) - kBack;
    const Vector a = powers.scan(load(input + at));
    const Vector b = multiply_add(powers.near, last_lane<kMirrored>(a), powers.scan(load(input + then)));
    const Vector y_a = multiply_add(powers.near, carries, a), y_b = multiply_add(powers.far, carries, b);
    carries = multiply_add(powers.pair, carries, last_lane<kMirrored>(b));
    store(output + at, y_a);
    store(output + then, y_b);
    if constexpr (kBackward) {
      sums = multiply_add(y_a, load(saved + at), sums);
      sums = multiply_add(y_b, load(saved + then), sums);
    }
  }
  if (k + kWidth <= count) {
    const int64_t at = kOn * k - kBack;
    const Vector y = multiply_add(powers.near, carries, powers.scan(load(input + at)));
    carries = last_lane<kMirrored>(y);
    store(output + at, y);
    if constexpr (kBackward) sums = multiply_add(y, load(saved + at), sums);
    k += kWidth;
  }
  double lanes[kWidth];
  store(lanes, carries);
  carry = lanes[0];
  if constexpr (kBackward) *sum += add_lanes(sums);
  for (; k < count; ++k) {
    carry = multiply_add(powers.gamma, carry, Element<T>::load(input[kOn * k]));
    output[kOn * k] = Element<T>::store(carry);
    if constexpr (kBackward) *sum = multiply_add(carry, Element<T>::load(saved[kOn * k]), *sum);
  }
  return carry;
}

// A lane's steps. The last one of a row is apart in the backward: no saved value follows it.
template <typename T, bool kMirrored>
DCS_SHARED void scan_lane(
    const ScanProblem& problem, const Powers<kMirrored>& powers, Lane<T, double>& lane, int64_t count) {
  constexpr int64_t kOn = kMirrored ? -1 : 1;
  if (!problem.backward) {
    scan_contiguous<T, kMirrored, false>(powers, lane.input, lane.output, nullptr, count, lane.carry, nullptr);
    return;
  }
  const int64_t body = lane.last ? count - 1 : count;
  const double carry =
      scan_contiguous<T, kMirrored, true>(powers, lane.input, lane.output, lane.saved, body, lane.carry, &lane.sum);
  if (lane.last) {
    const double y = multiply_add(powers.gamma, carry, Element<T>::load(lane.input[kOn * body]));
    lane.output[kOn * body] = Element<T>::store(y);
    lane.sum = multiply_add(y, lane.tail, lane.sum);
  }
}

template <typename T, bool kMirrored>
void contiguous_rows_of(const ScanProblem& problem, int64_t begin, int64_t end) {
  const bool same_gate = problem.gamma_kind == GammaKind::kNumber;
  Powers<kMirrored> powers(problem.gamma_value);
  // Steps that run down in memory: so do the rows. Against the turn at every row the prefetchers help nothing (65536 x
  // 128 float: 13.1 ms, not 3.5).
  RowCursor cursor(problem, kMirrored ? end - 1 : begin);
  if (same_gate && !problem.backward && keeps_powers(problem.gamma_value, kLargestGamma)) {
    // Apart, for rows so short that describing a lane would take longer than the scan.
    const T* input = static_cast<const T*>(problem.input);
    T* output = static_cast<T*>(problem.output);
    const bool carries = problem.initial != nullptr && !problem.shifted;
    for (int64_t row = begin; row < end; ++row, cursor.next<kMirrored>())
      scan_contiguous<T, kMirrored, false>(powers,
          locate(problem, input, problem.input_strides, cursor.outer, cursor.inner, 0),
          locate(problem, output, problem.output_strides, cursor.outer, cursor.inner, 0), nullptr, problem.length,
          carries ? read_initial<T>(problem, cursor.outer, cursor.inner) : 0.0, nullptr);
    return;
  }
  for (int64_t row = begin; row < end; ++row, cursor.next<kMirrored>()) {
    Lane<T, double> lane = make_lane<T, double, false>(problem, cursor.outer, cursor.inner, 0, problem.length);
    if (!same_gate && !(lane.constant == powers.gamma)) powers = Powers<kMirrored>(lane.constant);
    if (keeps_powers(lane.constant, kLargestGamma)) scan_lane<T, kMirrored>(problem, powers, lane, problem.length);
    else run_lanes_any<T, double, false, 1>(problem, &lane, problem.length);
    if (problem.backward) write_partial<T>(problem, cursor.outer, cursor.inner, lane.sum);
  }
}

template <typename T>
void contiguous_rows(const ScanProblem& problem, int64_t begin, int64_t end) {
  if (problem.reverse) return contiguous_rows_of<T, true>(problem, begin, end);
  contiguous_rows_of<T, false>(problem, begin, end);
}

template <typename T, bool kMirrored>
void contiguous_chunks_of(
    const ScanProblem& problem, int64_t outer, int64_t inner, double gamma, int64_t begin, int64_t end, Chunk* chunks) {
  const Powers<kMirrored> powers(gamma);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t count = chunk_length(problem, chunk);
    Lane<T, double> lane = make_lane<T, double, false>(problem, outer, inner, chunk * kChunk, count);
    if (chunk > 0) lane.carry = chunks[chunk - begin].carry.re;
    scan_lane<T, kMirrored>(problem, powers, lane, count);
    keep(&chunks[chunk - begin].partial, lane.sum);
  }
}

template <typename T>
void contiguous_chunks(
    const ScanProblem& problem, int64_t outer, int64_t inner, int64_t begin, int64_t end, Chunk* chunks) {
  const double gamma = read_gate<double>(problem, outer, inner);
  if (!keeps_powers(gamma, kLargestGamma))
    return lane_chunks<T, double, false>(problem, outer, inner, begin, end, chunks);
  if (problem.reverse) return contiguous_chunks_of<T, true>(problem, outer, inner, gamma, begin, end, chunks);
  contiguous_chunks_of<T, false>(problem, outer, inner, gamma, begin, end, chunks);
}

// The value that `count` steps (a multiple of 4 vectors) end in from 0: 4 vectors of partial sums, gamma^(4 * width)
// apart, weighted at the end.
template <typename T, bool kMirrored>
DCS_SHARED double fold_contiguous(double gamma, const T* input, int64_t count) {
  constexpr int kApart = 4 * kWidth;
  constexpr int64_t kOn = kMirrored ? -1 : 1;
  constexpr int64_t kBack = kMirrored ? kWidth - 1 : 0;
  double power = 1.0, weights[kApart];
  for (int i = kApart - 1; i >= 0; --i) {
    const int within = i % kWidth;
    weights[i - within + (kMirrored ? kWidth - 1 - within : within)] = power;
    power *= gamma;
  }
  const Vector apart = splat(power);
  Vector sums[4] = {splat(0.0), splat(0.0), splat(0.0), splat(0.0)};
  for (int64_t k = 0; k < count; k += kApart)
    for (int i = 0; i < 4; ++i) sums[i] = multiply_add(sums[i], apart, load(input + kOn * (k + i * kWidth) - kBack));
  Vector total = splat(0.0);
  for (int i = 0; i < 4; ++i) total = multiply_add(sums[i], load(weights + i * kWidth), total);
  return add_lanes(total);
}

template <typename T>
void contiguous_fold_chunks(
    const ScanProblem& problem, int64_t outer, int64_t inner, int64_t begin, int64_t end, Chunk* chunks) {
  const double gamma = read_gate<double>(problem, outer, inner);
  if (!keeps_powers(gamma, kLargestChunkGamma))
    return fold_chunks<T, double, false>(problem, outer, inner, begin, end, chunks);
  double product = gamma;
  for (int64_t covered = 1; covered < kChunk; covered *= 2) product *= product;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    Chunk& described = chunks[chunk - begin];
    if (chunk_length(problem, chunk) < kChunk) {
      fold_chunks<T, double, false>(problem, outer, inner, chunk, chunk + 1, &described);
      continue;
    }
    const T* input =
        locate(problem, static_cast<const T*>(problem.input), problem.input_strides, outer, inner, chunk * kChunk);
    double sum = problem.reverse ? fold_contiguous<T, true>(gamma, input, kChunk)
                                 : fold_contiguous<T, false>(gamma, input, kChunk);
    if (chunk == 0 && !problem.shifted) sum = multiply_add(product, read_initial<T>(problem, outer, inner), sum);
    keep(&described.sum, sum);
    keep(&described.product, product);
    described.cut = chunk == 0;
  }
}

}  // namespace
}  // namespace dcs::cpu
