// The table of kernels; included by one file an instruction set, which defines DCS_KERNELS (the table's name) and
// DCS_ISA (its name in messages).
#pragma once

#include "scan/columns.h"
#include "scan/contiguous.h"
#include "scan/lagged.h"
#include "scan/lanes.h"
#include "scan/window.h"

namespace dcs::cpu {
namespace {

template <typename Run>
DCS_INLINE void with_contiguous(const ScanProblem& problem, const Run& run) {
  switch (problem.dtype) {
    case ElementType::Half: return run(Type<Half>{});
    case ElementType::BFloat16: return run(Type<BFloat16>{});
    case ElementType::Float: return run(Type<float>{});
    default: return run(Type<double>{});
  }
}

// Rows with gates or resets of steps are scanned together where they are shorter, as one recurrence with a gate of 0
// where a row begins; longer ones abreast, in half the time.
constexpr int64_t kShortRow = 8, kShortHalfRow = 16;

bool is_lagged(const ScanProblem& problem) {
  if (!is_real(problem)) return false;
  if (lag_of(problem) > 1) return true;
  const bool is_half = problem.dtype == ElementType::Half || problem.dtype == ElementType::BFloat16;
  return !is_contiguous(problem) && problem.length < (is_half ? kShortHalfRow : kShortRow);
}

int64_t together(const ScanProblem& problem) { return is_lagged(problem) ? lag_of(problem) : 1; }

bool by_columns(const ScanProblem& problem) {
  return problem.output_strides.inner == 1 && problem.inner >= (is_real(problem) ? kWidth : 4);
}

void columns(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  with_types(problem, [&](auto type, auto gate, auto step) {
    scan_columns_any<typename decltype(type)::type, typename decltype(gate)::type, decltype(step)::value>(
        problem, outer, inner, count);
  });
}

void rows(const ScanProblem& problem, int64_t begin, int64_t end) {
  if (is_lagged(problem))
    return with_contiguous(
        problem, [&](auto type) { lagged_rows<typename decltype(type)::type>(problem, begin, end); });
  if (is_contiguous(problem))
    return with_contiguous(
        problem, [&](auto type) { contiguous_rows<typename decltype(type)::type>(problem, begin, end); });
  with_types(problem, [&](auto type, auto gate, auto step) {
    lane_rows<typename decltype(type)::type, typename decltype(gate)::type, decltype(step)::value>(problem, begin, end);
  });
}

void aggregate(const ScanProblem& problem, int64_t row, int64_t begin, int64_t end, Chunk* chunks, int64_t stride) {
  if (is_lagged(problem))
    return with_contiguous(problem, [&](auto type) {
      lagged_chunks<typename decltype(type)::type, true, false>(problem, row, begin, end, chunks, stride);
    });
  const int64_t outer = row / problem.inner, inner = row % problem.inner;
  if (is_contiguous(problem))
    return with_contiguous(problem, [&](auto type) {
      contiguous_fold_chunks<typename decltype(type)::type>(problem, outer, inner, begin, end, chunks);
    });
  with_types(problem, [&](auto type, auto gate, auto step) {
    fold_chunks<typename decltype(type)::type, typename decltype(gate)::type, decltype(step)::value>(
        problem, outer, inner, begin, end, chunks);
  });
}

void carry(const ScanProblem& problem, int64_t row, int64_t begin, int64_t end, Chunk* chunks, Value* value) {
  const int64_t outer = row / problem.inner, inner = row % problem.inner;
  with_types(problem, [&](auto type, auto gate, auto step) {
    carry_chunks<typename decltype(type)::type, typename decltype(gate)::type, decltype(step)::value>(
        problem, outer, inner, begin, end, chunks, value);
  });
}

void scan_chunks(const ScanProblem& problem, int64_t row, int64_t begin, int64_t end, Chunk* chunks, int64_t stride) {
  if (is_lagged(problem))
    return with_contiguous(problem, [&](auto type) {
      lagged_chunks<typename decltype(type)::type, false, true>(problem, row, begin, end, chunks, stride);
    });
  const int64_t outer = row / problem.inner, inner = row % problem.inner;
  if (is_contiguous(problem))
    return with_contiguous(problem, [&](auto type) {
      contiguous_chunks<typename decltype(type)::type>(problem, outer, inner, begin, end, chunks);
    });
  with_types(problem, [&](auto type, auto gate, auto step) {
    lane_chunks<typename decltype(type)::type, typename decltype(gate)::type, decltype(step)::value>(
        problem, outer, inner, begin, end, chunks);
  });
}

void scan_and_aggregate(const ScanProblem& problem, int64_t row, int64_t chunk, Chunk* chunks) {
  with_contiguous(problem, [&](auto type) {
    lagged_chunks<typename decltype(type)::type, true, true>(problem, row, chunk, chunk + 1, chunks, 1);
  });
}

void add_partials(const ScanProblem& problem, int64_t begin, int64_t end, const Chunk* chunks, Value* sum) {
  with_types(problem, [&](auto type, auto, auto) {
    using Sum = typename Element<typename decltype(type)::type>::Sum;
    Sum total = Kept<Sum>::get(*sum);
    for (int64_t chunk = begin; chunk < end; ++chunk) total = add(total, Kept<Sum>::get(chunks[chunk - begin].partial));
    keep(sum, total);
  });
}

void store_partial(const ScanProblem& problem, int64_t row, const Value* sum) {
  with_types(problem, [&](auto type, auto, auto) {
    using T = typename decltype(type)::type;
    write_partial<T>(problem, row / problem.inner, row % problem.inner, Kept<typename Element<T>::Sum>::get(*sum));
  });
}

void window(const ScanProblem& problem, int64_t row, int64_t begin, int64_t end, Value* scratch) {
  const int64_t outer = row / problem.inner, inner = row % problem.inner;
  with_types(problem, [&](auto type, auto gate, auto step) {
    window_blocks<typename decltype(type)::type, typename decltype(gate)::type, decltype(step)::value>(
        problem, outer, inner, begin, end, scratch);
  });
}

}  // namespace

extern const Kernels DCS_KERNELS = {DCS_ISA, by_columns, is_lagged, together, columns, rows, aggregate, carry,
    scan_chunks, scan_and_aggregate, add_partials, store_partial, window};

}  // namespace dcs::cpu
