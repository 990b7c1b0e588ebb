// What the driver (ops.cpp) asks of the kernels, which are compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "dcs/returns/problem.h"

namespace dcs::cpu {

// Columns that one call takes: their carries and lines stay in the first-level cache, and lines are whole pages of
// floats (with 256 a third slower).
constexpr int64_t kReturnsColumns = 1024;
constexpr int64_t kTileColumns =
    128;  // whose steps are adjacent in memory: so many of them are taken by tiles, no more (lines.h)

struct ReturnsKernels {
  const char* name;
  // Columns [inner, inner + count) of one outer index, kReturnsColumns at most.
  void (*columns)(const ReturnsProblem&, int64_t outer, int64_t inner, int64_t count);
  // Whole rows [begin, end), numbered outer * problem.inner + inner.
  void (*rows)(const ReturnsProblem&, int64_t begin, int64_t end);
  // `_n_step_returns` of such columns; problem.steps * count doubles each in `totals` and `gates`.
  void (*n_step)(const ReturnsProblem&, int64_t outer, int64_t inner, int64_t count, double* totals, double* gates);
};

extern const ReturnsKernels kReturnsDefault;
extern const ReturnsKernels kReturnsAvx2;
extern const ReturnsKernels kReturnsAvx512;

}  // namespace dcs::cpu
