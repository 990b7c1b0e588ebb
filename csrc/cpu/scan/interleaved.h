// Float and double rows of adjacent steps, step by step and several at a time: nothing is moved, and a row's
// multiply-adds wait while the others' run. For rows too short, and gates too many, for what vectors cost beside their
// arithmetic.
#pragma once

#include "scan/flat.h"

namespace dcs::cpu {
namespace {

constexpr int kInterleaved = 4;
constexpr int64_t kLongGatedRow = 128;  // from here on one gate a row is worth its powers
// From so many elements on it is worth the masks of rows that do not divide a vector's lanes.
constexpr int64_t kLeastMasked = 16384;

// Whether vectors take less than a loop (flat.h): any do whose lanes rows divide, and of many elements those of eight
// lanes, but where rows with gaps between them have to be packed for it.
inline bool is_for_vectors(const ScanProblem& problem) {
  if (!has_one_gate(problem) || !is_flat(problem)) return false;
  const bool dense = is_dense(problem, problem.input_strides);
  if (divides_vectors(problem)) return dense || kWidth > 2;
  return dense && kWidth > 4 && problem.rows() * problem.length >= kLeastMasked;
}

inline bool is_interleaved(const ScanProblem& problem) {
  if (problem.dtype != ElementType::Float && problem.dtype != ElementType::Double) return false;
  const bool is_step = problem.gamma_kind == GammaKind::kStep;
  if (problem.backward || problem.shifted || problem.reset != nullptr) return false;
  if (!is_step && problem.length >= (problem.gamma_kind == GammaKind::kRow ? kLongGatedRow : kLongRow)) return false;
  if (is_for_vectors(problem)) return false;
  return has_flat_rows(problem, problem.input_strides) && has_flat_rows(problem, problem.output_strides) &&
      (!is_step || has_flat_rows(problem, problem.gamma_strides)) &&
      (problem.gamma_kind != GammaKind::kRow || has_even_rows(problem, problem.gamma_strides)) &&
      (problem.initial == nullptr || has_even_rows(problem, problem.initial_strides));
}

// Where the next rows begin in scan order, and how far apart rows are.
template <typename T>
struct RowPointers {
  const T *x, *gates;
  T* y;
  int64_t x_apart, gates_apart, y_apart;
};

// W rows, with a gate each where there is none a step, from `carries`, or from nothing.
template <typename T, bool kStep, bool kMirrored, int W>
DCS_INLINE void scan_interleaved(
    const RowPointers<T>& rows, const double* row_gates, const double* carries, bool starts_empty, int64_t length) {
  constexpr int64_t kOn = kMirrored ? -1 : 1;
  const T *x = rows.x, *gates = rows.gates;
  T* y = rows.y;
  double carry[W], gate[W];
  for (int w = 0; w < W; ++w) {
    if constexpr (!kStep) gate[w] = row_gates[w];
    if (!starts_empty) carry[w] = carries[w];
  }
  int64_t k = 0;
  if (starts_empty) {
    for (int w = 0; w < W; ++w) {
      carry[w] = Element<T>::load(x[w * rows.x_apart]);
      y[w * rows.y_apart] = x[w * rows.x_apart];
    }
    x += kOn;
    y += kOn;
    if constexpr (kStep) gates += kOn;
    k = 1;
  }
  for (; k < length; ++k) {
    for (int w = 0; w < W; ++w) {
      if constexpr (kStep) gate[w] = Element<T>::load(gates[w * rows.gates_apart]);
      carry[w] = multiply_add(gate[w], carry[w], Element<T>::load(x[w * rows.x_apart]));
      y[w * rows.y_apart] = Element<T>::store(carry[w]);
    }
    x += kOn;
    y += kOn;
    if constexpr (kStep) gates += kOn;
  }
}

template <typename T, bool kStep, bool kMirrored>
void interleaved_rows_of(const ScanProblem& problem, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 64;
  double gates[kBlock], carries[kBlock];
  for (double& gate : gates) gate = problem.gamma_value;
  const bool starts_empty = problem.initial == nullptr;
  const int64_t first = kMirrored ? problem.length - 1 : 0;
  RowPointers<T> rows{};
  rows.x_apart = row_stride(problem, problem.input_strides);
  rows.y_apart = row_stride(problem, problem.output_strides);
  if (kStep) rows.gates_apart = row_stride(problem, problem.gamma_strides);
  for (int64_t row = begin; row < end; row += kBlock) {
    const int64_t count = end - row < kBlock ? end - row : kBlock;
    if (problem.gamma_kind == GammaKind::kRow) read_row_gates(problem, row, count, gates);
    if (!starts_empty) {
      const int64_t stride = row_stride(problem, problem.initial_strides);
      read_values(static_cast<const T*>(problem.initial) + row * stride, stride, count, carries);
    }
    rows.x = static_cast<const T*>(problem.input) + row * rows.x_apart + first;
    rows.y = static_cast<T*>(problem.output) + row * rows.y_apart + first;
    if (kStep) rows.gates = static_cast<const T*>(problem.gamma) + row * rows.gates_apart + first;
    const auto next = [&](int64_t by) {
      rows.x += by * rows.x_apart;
      rows.y += by * rows.y_apart;
      if (kStep) rows.gates += by * rows.gates_apart;
    };
    int64_t r = 0;
    for (; r + kInterleaved <= count; r += kInterleaved, next(kInterleaved))
      scan_interleaved<T, kStep, kMirrored, kInterleaved>(rows, gates + r, carries + r, starts_empty, problem.length);
    for (; r < count; ++r, next(1))
      scan_interleaved<T, kStep, kMirrored, 1>(rows, gates + r, carries + r, starts_empty, problem.length);
  }
}

// Whole rows [begin, end).
template <typename T>
void interleaved_rows(const ScanProblem& problem, int64_t begin, int64_t end) {
  if (problem.gamma_kind == GammaKind::kStep) {
    if (problem.reverse) return interleaved_rows_of<T, true, true>(problem, begin, end);
    return interleaved_rows_of<T, true, false>(problem, begin, end);
  }
  if (problem.reverse) return interleaved_rows_of<T, false, true>(problem, begin, end);
  interleaved_rows_of<T, false, false>(problem, begin, end);
}

}  // namespace
}  // namespace dcs::cpu
