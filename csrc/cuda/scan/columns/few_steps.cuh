// Scans of few steps along a strided time: a thread takes several columns, and asks for all of their steps at once.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "scan/columns/column_values.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

// kUnit neighboring columns of T.
template <typename T, bool kStep, bool kBackward, int kUnit>
struct FewSteps {
  using Scan = ColumnScan<T, kStep, kBackward, kUnit>;
  using Cell = typename Scan::Cell;

  ColumnPlace at;
  Cell x[kFewSteps], g[kStep ? kFewSteps : 1], after[kBackward ? kFewSteps : 1];

  // An operand at the column's first step, in the order of the scan, or some steps later.
  template <typename E>
  __device__ __forceinline__ Steps<E> steps_of(
      const ScanProblem& p, E* pointer, const Strides& strides, int later = 0) const {
    const int64_t apart = p.reverse ? -strides.time : strides.time,
                  begin = (p.reverse ? (p.length - 1) * strides.time : 0) + later * apart;
    const int64_t outer = p.outer == 1 ? 0 : at.outer * strides.outer;
    return {pointer + (begin + outer + at.column * strides.inner), apart};
  }
  template <typename E>
  static __device__ __forceinline__ Cell next(Steps<E>& steps) {
    const Cell cell = *reinterpret_cast<const Cell*>(steps.at);
    steps.at += steps.apart;
    return cell;
  }
  static __device__ __forceinline__ void put_next(Steps<T>& steps, const Cell& cell) {
    *reinterpret_cast<Cell*>(steps.at) = cell;
    steps.at += steps.apart;
  }
  // Of which columns the flag is set, as bits.
  static __device__ __forceinline__ uint32_t next_flags(Steps<const bool>& flags, int64_t apart) {
    uint32_t bits = 0;
#pragma unroll
    for (int u = 0; u < kUnit; ++u) bits |= (flags.at[u * apart] ? 1u : 0u) << u;
    flags.at += flags.apart;
    return bits;
  }

  __device__ __forceinline__ void load(const ScanProblem& p) {
    const int shift = p.shifted ? 1 : 0, length = static_cast<int>(p.length);
    auto input = steps_of(p, static_cast<const T*>(p.input), p.input_strides);
    auto gates = steps_of(p, static_cast<const T*>(p.gamma), p.gamma_strides);
    auto saved = steps_of(p, static_cast<const T*>(p.saved), p.saved_strides, 1);
#pragma unroll
    for (int i = 0; i < kFewSteps; ++i) {
      if (i >= length) break;
      x[i] = next(input);
      if constexpr (kStep) g[i] = i >= shift ? next(gates) : Cell{};
      if constexpr (kBackward) after[i] = i + 1 < length ? next(saved) : Cell{};
    }
  }

  __device__ __forceinline__ void run(const ScanProblem& p) const {
    const int shift = p.shifted ? 1 : 0, length = static_cast<int>(p.length);
    const bool carries_in = p.initial && !p.backward, has_flags = p.reset;
    const int64_t flag_apart = p.reset_strides.inner;
    auto output = steps_of(p, static_cast<T*>(p.output), p.output_strides);
    auto grad_gamma = steps_of(p, static_cast<T*>(p.grad_gamma), p.grad_gamma_strides);
    auto cut_flags = steps_of(p, p.reset, p.reset_strides), drop_flags = cut_flags;
    Scan scan;
    scan.begin(p, at);
#pragma unroll
    for (int i = 0; i < kFewSteps; ++i) {
      if (i >= length) break;
      uint32_t cuts = has_flags && i >= shift ? next_flags(cut_flags, flag_apart) : 0;
      if (i == 0 && !carries_in) cuts = (1u << kUnit) - 1;
      put_next(output, scan.step(x[i], g[kStep ? i : 0], p.conjugate_gamma, cuts));
      if constexpr (kBackward) {
        const uint32_t drops = has_flags ? next_flags(drop_flags, flag_apart) : 0;
        const Cell terms = scan.gradient(after[i], i + 1 == length, drops);
        if constexpr (kStep) put_next(grad_gamma, terms);
      }
    }
    if constexpr (kBackward && !kStep) {
#pragma unroll
      for (int u = 0; u < kUnit; ++u) Scan::Values::put_sum(p, at, u, 0, 1, scan.sum[u]);
    }
  }
};

// Blocks of a multiprocessor: what registers have room for.
constexpr int few_steps_blocks(int bytes, bool one_tensor) {
  return bytes > 8 ? 2 : bytes > 4 ? 3 : one_tensor ? 5 : 4;
}

// A thread takes `cells`, kColumnThreads apart, so that a warp reads neighbors.
template <typename T, bool kStep, bool kBackward, int kUnit>
__global__ void __launch_bounds__(kColumnThreads, few_steps_blocks(sizeof(T), !kStep && !kBackward))
    few_steps_kernel(const __grid_constant__ ScanProblem p, const int cells) {
  constexpr int kCells = few_steps_cells(kStep, kBackward);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (cells * kColumnThreads) + threadIdx.x,
                side_by_side = p.inner / kUnit, all = p.outer * side_by_side;
  overlap_launches();
  FewSteps<T, kStep, kBackward, kUnit> columns[kCells];
#pragma unroll
  for (int j = 0; j < kCells; ++j) {
    const int64_t cell = first + j * kColumnThreads;
    if (j >= cells || cell >= all) break;
    columns[j].at = place_of(cell, side_by_side, p.outer, kUnit);
    columns[j].load(p);
  }
#pragma unroll
  for (int j = 0; j < kCells; ++j) {
    if (j >= cells || first + j * kColumnThreads >= all) break;
    columns[j].run(p);
  }
}

}  // namespace dcs
