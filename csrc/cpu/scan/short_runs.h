// Columns that lie side by side in the output, but in the input in short runs with gaps between them, as those of a
// padded last dimension do where time is another one: blocks of them are copied together, and then scanned as
// neighbors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "dcs/layout.h"
#include "dcs/scan/problem.h"
#include "scan/kernels.h"
#include "scan/runs.h"

namespace dcs::cpu {

// Columns that are worth a copy, and bytes of a run: of more, kernels of columns take a run at a time in 0.55 to 0.85
// of the time.
constexpr int64_t kLeastRunColumns = 64, kMostRunBytes = 16;

// The scan of all columns as neighbors, of an input without gaps.
inline ScanProblem without_runs(const ScanProblem& p) {
  ScanProblem joined = p;
  joined.outer = 1;
  joined.inner = p.rows();
  joined.input_strides = {0, 0, 1};  // those of a block's copy, but for time
  joined.output_strides = {0, p.output_strides.time, 1};
  joined.gamma_strides = {0, 0, p.gamma_strides.inner};
  joined.initial_strides = {0, 0, p.initial_strides.inner};
  return joined;
}

inline bool has_short_runs(const ScanProblem& p) {
  const auto joins = [&](const void* pointer, const Strides& s) {
    return !pointer || (s.outer == p.inner * s.inner && s.time == 0);
  };
  return !p.backward && !p.reset && p.gamma_kind != GammaKind::kStep &&
      p.inner * element_size(p.dtype) <= kMostRunBytes && p.outer > 1 && p.rows() >= kLeastRunColumns &&
      (p.inner == 1 || (p.input_strides.inner == 1 && p.output_strides.inner == 1)) &&
      p.output_strides.outer == p.inner && p.input_strides.outer > p.inner && p.output_strides.time >= p.rows() &&
      joins(p.initial, p.initial_strides) && (p.gamma_kind == GammaKind::kNumber || joins(p.gamma, p.gamma_strides)) &&
      p.length * kLeastRunColumns * element_size(p.dtype) <= kClosedBytes;
}

// Columns of a block, whole runs.
inline int64_t run_columns(const ScanProblem& p) {
  const int64_t most = std::min(kColumns, kClosedBytes / (p.length * element_size(p.dtype)));
  return std::max(kLeastRunColumns, most) / p.inner * p.inner;
}

// Blocks [begin, end) of the columns. `joined`: the problem without_runs.
inline void scan_short_runs(
    const ScanProblem& p, const ScanProblem& joined, const Kernels& table, int64_t begin, int64_t end) {
  const int64_t bytes = element_size(p.dtype), gamma_bytes = element_size(p.gamma_dtype), columns = joined.inner,
                width = run_columns(p), last = column_blocks(columns, width) - 1;
  const std::unique_ptr<char[]> copy(new char[p.length * (width + kWidestVector) * bytes]);
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * width, count = block == last ? columns - first : width;
    const char* const from = static_cast<const char*>(p.input) + first / p.inner * p.input_strides.outer * bytes;
    for (int64_t t = 0; t < p.length; ++t)
      copy_runs(copy.get() + t * count * bytes, from + t * p.input_strides.time * bytes, count / p.inner,
          p.input_strides.outer * bytes, p.inner * bytes);
    ScanProblem some = joined;
    some.inner = count;
    some.input = copy.get();
    some.input_strides.time = count;
    some.output = static_cast<char*>(p.output) + first * bytes;
    if (p.initial) some.initial = static_cast<const char*>(p.initial) + first * joined.initial_strides.inner * bytes;
    if (p.gamma) some.gamma = static_cast<const char*>(p.gamma) + first * joined.gamma_strides.inner * gamma_bytes;
    table.columns(some, 0, 0, count);
  }
}

}  // namespace dcs::cpu
