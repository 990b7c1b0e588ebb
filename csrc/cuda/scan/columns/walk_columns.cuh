// Scans along a strided time where there are enough columns to fill the GPU: a thread walks along all steps of its own.
// It asks nothing of strides, sizes or gammas, so it also takes what no other kernel does.
#pragma once

#include "scan/columns/column_part.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

template <typename T, bool kStep, bool kBackward, int kUnit>
__global__ void __launch_bounds__(kColumnThreads, 4) walk_columns_kernel(const __grid_constant__ ScanProblem p) {
  using Part = ColumnPart<T, kStep, kBackward, kUnit>;
  using Values = ColumnValues<T, kStep, kBackward, kUnit>;
  using Wide = typename Part::Wide;
  using Sum = typename Part::Sum;
  const int64_t cell = static_cast<int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x, cells = p.inner / kUnit;
  ColumnPlace at;
  at.outer = p.outer == 1 ? 0 : cell / cells;
  at.column = (cell - at.outer * cells) * kUnit;
  if (at.outer >= p.outer || at.column >= p.inner) return;
  Part part;
  Values::set(part, p, at);
  view(part, p, at, 0);
#pragma unroll
  for (int u = 0; u < kUnit; ++u) {
    const Wide carry = kBackward ? cast<Wide>(0.0) : Values::initial_of(p, at, u);
    part.y[u] = cast<Sum>(carry);
    part.lost[u] = 0.f;
  }
  part.template scan<Reading::kWalk>(p.length);
  if constexpr (kBackward && !kStep) {
#pragma unroll
    for (int u = 0; u < kUnit; ++u) Values::put_sum(p, at, u, 0, 1, part.sum[u]);
  }
}

}  // namespace dcs
