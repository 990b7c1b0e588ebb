// Scans of few steps along a strided time: a thread takes several columns, and asks for all of their steps at once.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "scan/columns/column_values.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

// kUnit neighboring columns of T, of `length` steps.
template <typename T, bool kStep, bool kBackward, int kUnit>
struct FewSteps {
  using Scan = ColumnScan<T, kStep, kBackward, kUnit>;
  using Cell = typename Scan::Cell;

  ColumnPlace at;
  Cell x[kFewSteps], g[kStep ? kFewSteps : 1], after[kBackward ? kFewSteps : 1];

  // An operand at the column's i-th step, in the order of the scan.
  template <typename E>
  __device__ __forceinline__ E* step_of(const ScanProblem& p, E* pointer, const Strides& strides, int i) const {
    const int64_t row = p.reverse ? p.length - 1 - i : i;
    return pointer + (at.outer * strides.outer + at.column * strides.inner) + row * strides.time;
  }
  __device__ __forceinline__ Cell cell(const ScanProblem& p, const void* pointer, const Strides& strides, int i) const {
    return *reinterpret_cast<const Cell*>(step_of(p, static_cast<const T*>(pointer), strides, i));
  }
  __device__ __forceinline__ void put(
      const ScanProblem& p, void* pointer, const Strides& strides, int i, const Cell& value) const {
    *reinterpret_cast<Cell*>(step_of(p, static_cast<T*>(pointer), strides, i)) = value;
  }
  // Before which columns' i-th step the scan starts anew, as bits.
  __device__ __forceinline__ uint32_t flags(const ScanProblem& p, int i) const {
    uint32_t bits = 0;
    if (!p.reset || i < 0) return bits;
#pragma unroll
    for (int u = 0; u < kUnit; ++u)
      bits |= (step_of(p, p.reset, p.reset_strides, i)[u * p.reset_strides.inner] ? 1u : 0u) << u;
    return bits;
  }

  __device__ __forceinline__ void load(const ScanProblem& p) {
    const int shift = p.shifted ? 1 : 0, length = static_cast<int>(p.length);
#pragma unroll
    for (int i = 0; i < kFewSteps; ++i) {
      if (i >= length) break;
      x[i] = cell(p, p.input, p.input_strides, i);
      if constexpr (kStep) g[i] = i >= shift ? cell(p, p.gamma, p.gamma_strides, i - shift) : Cell{};
      if constexpr (kBackward) after[i] = i + 1 < length ? cell(p, p.saved, p.saved_strides, i + 1) : Cell{};
    }
  }

  __device__ __forceinline__ void run(const ScanProblem& p) const {
    const int shift = p.shifted ? 1 : 0, length = static_cast<int>(p.length);
    const bool carries_in = p.initial && !p.backward;
    Scan scan;
    scan.begin(p, at);
#pragma unroll
    for (int i = 0; i < kFewSteps; ++i) {
      if (i >= length) break;
      const uint32_t cuts = i == 0 && !carries_in ? (1u << kUnit) - 1 : flags(p, i - shift);
      put(p, p.output, p.output_strides, i, scan.step(x[i], g[kStep ? i : 0], p.conjugate_gamma, cuts));
      if constexpr (kBackward) {
        const Cell terms = scan.gradient(after[i], i + 1 == length, flags(p, i));
        if constexpr (kStep) put(p, p.grad_gamma, p.grad_gamma_strides, i, terms);
      }
    }
    if constexpr (kBackward && !kStep) {
#pragma unroll
      for (int u = 0; u < kUnit; ++u) Scan::Values::put_sum(p, at, u, 0, 1, scan.sum[u]);
    }
  }
};

// A thread's columns are kColumnThreads cells apart, so that a warp reads neighbors.
template <typename T, bool kStep, bool kBackward, int kUnit>
__global__ void __launch_bounds__(kColumnThreads, 4) few_steps_kernel(const __grid_constant__ ScanProblem p) {
  constexpr int kCells = few_steps_cells(kStep, kBackward);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kCells * kColumnThreads) + threadIdx.x,
                cells = p.inner / kUnit, all = p.outer * cells;
  overlap_launches();
  FewSteps<T, kStep, kBackward, kUnit> columns[kCells];
#pragma unroll
  for (int j = 0; j < kCells; ++j) {
    const int64_t cell = first + j * kColumnThreads;
    if (cell >= all) break;
    columns[j].at = place_of(cell, cells, p.outer, kUnit);
    columns[j].load(p);
  }
#pragma unroll
  for (int j = 0; j < kCells; ++j) {
    if (first + j * kColumnThreads >= all) break;
    columns[j].run(p);
  }
}

}  // namespace dcs
