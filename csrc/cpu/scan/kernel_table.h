// The table of kernels; included by one file an instruction set, which defines DCS_KERNELS (the table's name) and
// DCS_ISA (its name in messages).
#pragma once

#include "scan/abreast.h"
#include "scan/columns.h"
#include "scan/flat.h"
#include "scan/interleaved.h"
#include "scan/lagged.h"
#include "scan/lanes.h"
#include "scan/window.h"

namespace dcs::cpu {
namespace {

template <typename Run>
DCS_INLINE void with_real(const ScanProblem& problem, const Run& run) {
  switch (problem.dtype) {
    case ElementType::Half: return run(Type<Half>{});
    case ElementType::BFloat16: return run(Type<BFloat16>{});
    case ElementType::Float: return run(Type<float>{});
    default: return run(Type<double>{});
  }
}

bool is_lagged(const ScanProblem& problem) { return is_real(problem) && columns_together(problem) > 1; }

bool by_columns(const ScanProblem& problem) {
  return problem.output_strides.inner == 1 && problem.inner >= (is_real(problem) ? kWidth : 4);
}

// Fewer rows than lanes leave lanes idle unless they are cut into chunks, at the cost of a second pass; beside more,
// chunks of long ones give every thread work.
constexpr int64_t kFewRows = 32, kLeastCut = 64, kLeastElements = 100000;

bool by_chunks(const ScanProblem& problem) {
  const int64_t rows = problem.rows();
  const bool is_large = rows * problem.length > kLeastElements;
  if (!is_abreast(problem)) return rows < kFewRows && problem.length >= 2 * kChunk && is_large;
  if (2 * rows < kAbreast) return problem.length >= kLeastCut;
  return rows < kFewRows && problem.length >= (rows < kAbreast ? 2 : kAbreast) * kChunk && is_large;
}

int64_t together(const ScanProblem& problem) { return is_lagged(problem) ? columns_together(problem) : 1; }

int64_t abreast(const ScanProblem& problem) { return is_abreast(problem) ? kAbreast : 1; }

int64_t sets(const ScanProblem& problem) {
  if (is_interleaved(problem)) return problem.rows();
  if (is_flat(problem)) return flat_tiles(problem);
  if (!is_abreast(problem)) return problem.rows() / together(problem);
  const Grid grid(problem);
  return grid.groups * grid.others;
}

void columns(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  with_types(problem, [&](auto type, auto gate, auto step) {
    scan_columns_any<typename decltype(type)::type, typename decltype(gate)::type, decltype(step)::value>(
        problem, outer, inner, count);
  });
}

void rows(const ScanProblem& problem, int64_t begin, int64_t end) {
  if (is_real(problem))
    return with_real(problem, [&](auto type) {
      using T = typename decltype(type)::type;
      if constexpr (sizeof(T) >= 4)
        if (is_interleaved(problem)) return interleaved_rows<T>(problem, begin, end);
      if (is_flat(problem)) return flat_rows<T>(problem, begin, end);
      if (is_lagged(problem)) return lagged_rows<T>(problem, begin * together(problem), end * together(problem));
      if (is_abreast(problem)) return abreast_rows<T>(problem, begin, end);
      contiguous_rows<T>(problem, begin, end);
    });
  with_types(problem, [&](auto type, auto gate, auto step) {
    using T = typename decltype(type)::type;
    if constexpr (!IsReal<T>::value)
      lane_rows<T, typename decltype(gate)::type, decltype(step)::value>(problem, begin, end);
  });
}

void aggregate(const ScanProblem& problem, int64_t row, int64_t begin, int64_t end, Chunk* chunks, int64_t stride) {
  const int64_t outer = row / problem.inner, inner = row % problem.inner;
  if (is_real(problem))
    return with_real(problem, [&](auto type) {
      using T = typename decltype(type)::type;
      if (is_lagged(problem)) return lagged_chunks<T, true, false>(problem, row, begin, end, chunks, stride);
      if (is_abreast(problem)) return abreast_fold<T>(problem, row, begin, end, chunks);
      if (is_contiguous(problem)) return contiguous_fold_chunks<T>(problem, outer, inner, begin, end, chunks);
      fold_chunks<T, double, true>(problem, outer, inner, begin, end, chunks);
    });
  with_types(problem, [&](auto type, auto gate, auto step) {
    using T = typename decltype(type)::type;
    if constexpr (!IsReal<T>::value)
      fold_chunks<T, typename decltype(gate)::type, decltype(step)::value>(problem, outer, inner, begin, end, chunks);
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
  const int64_t outer = row / problem.inner, inner = row % problem.inner;
  if (is_real(problem))
    return with_real(problem, [&](auto type) {
      using T = typename decltype(type)::type;
      if (is_lagged(problem)) return lagged_chunks<T, false, true>(problem, row, begin, end, chunks, stride);
      if (is_abreast(problem)) return abreast_chunks<T>(problem, row, begin, end, chunks);
      if (is_contiguous(problem)) return contiguous_chunks<T>(problem, outer, inner, begin, end, chunks);
      lane_chunks<T, double, true>(problem, outer, inner, begin, end, chunks);
    });
  with_types(problem, [&](auto type, auto gate, auto step) {
    using T = typename decltype(type)::type;
    if constexpr (!IsReal<T>::value)
      lane_chunks<T, typename decltype(gate)::type, decltype(step)::value>(problem, outer, inner, begin, end, chunks);
  });
}

void scan_and_aggregate(const ScanProblem& problem, int64_t row, int64_t chunk, Chunk* chunks) {
  with_real(problem, [&](auto type) {
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

extern const Kernels DCS_KERNELS = {DCS_ISA, by_columns, by_chunks, columns, sets, rows, chunk_steps, abreast, together,
    aggregate, carry, scan_chunks, is_lagged, scan_and_aggregate, add_partials, store_partial, window};

}  // namespace dcs::cpu
