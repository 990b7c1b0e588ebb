// Scans of few steps along a strided time: a thread takes several columns, and asks for all of their steps at once.
#pragma once

#include "common/divisor.cuh"
#include "common/ptx/dependent_launch.cuh"
#include "scan/columns/column_values.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

struct FewStepsParams {
  ScanProblem problem;   // forward in time: operands begin at the scan's first step, the saved output at its second
  Divisor side_by_side;  // cells, a word of columns each, of one `outer`
  uint32_t all;          // of them
  int cells;             // of a thread
};

// kUnit neighboring columns of T, a word of each step.
template <typename T, bool kStep, bool kBackward, int kUnit>
struct FewSteps {
  // Columns that are scanned at a time, once all words have been asked for: the state of all would take more registers
  // than the words.
  static constexpr int kSome = sizeof(T) == 2 && kUnit > 1 ? 2 : 1, kParts = kUnit / kSome;
  static constexpr int kSteps = few_steps_of(sizeof(T), kUnit);
  // So few steps lose a few units of float's rounding of the terms, far less than half precision's.
  using Scan = ColumnScan<T, kStep, kBackward, kSome, false>;
  using Cell = typename Scan::Cell;
  using Acc = typename Types<T>::Acc;
  static constexpr int kSums = sizeof(Acc) * kUnit <= 16 ? kUnit : 16 / sizeof(Acc);  // of gamma's gradient, of a word
  struct alignas(kUnit * sizeof(T)) Word {
    Cell parts[kParts];
  };

  ColumnIndex at;
  Word x[kSteps], g[kStep ? kSteps : 1], after[kBackward ? kSteps : 1];  // then the outputs and gates' gradients
  uint32_t flags = 0;                                                    // of kUnit columns a step

  // An operand at the columns.
  template <typename E>
  __device__ __forceinline__ Steps<E> steps_of(E* pointer, const Strides& strides) const {
    const int64_t offset = kUnit > 2 ? strides.at(at.outer, 0) + at.column : strides.at(at.outer, at.column);
    return {pointer + offset, strides.time};
  }
  static __device__ __forceinline__ Word next(Steps<const T>& steps) {
    const Word word = *reinterpret_cast<const Word*>(steps.at);
    steps.at += steps.apart;
    return word;
  }
  static __device__ __forceinline__ void store_next(Steps<T>& steps, const Word& word) {
    *reinterpret_cast<Word*>(steps.at) = word;
    steps.at += steps.apart;
  }

  __device__ __forceinline__ void load(const ScanProblem& p) {
    const int shift = p.shifted ? 1 : 0, length = static_cast<int>(p.length);
    auto input = steps_of(static_cast<const T*>(p.input), p.input_strides);
    auto gates = steps_of(static_cast<const T*>(p.gamma), p.gamma_strides);
    auto saved = steps_of(static_cast<const T*>(p.saved), p.saved_strides);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i >= length) break;
      x[i] = next(input);
      if constexpr (kStep) g[i] = i >= shift ? next(gates) : Word{};
      if constexpr (kBackward) after[i] = i + 1 < length ? next(saved) : Word{};
    }
  }
  // Of four and more columns they are words, too.
  __device__ __forceinline__ void load_flags(const ScanProblem& p) {
    constexpr bool kWords = kUnit % 4 == 0;
    constexpr int kLoads = kWords ? kUnit / 4 : kUnit, kColumns = kUnit / kLoads;
    const int length = static_cast<int>(p.length);
    auto steps = steps_of(reinterpret_cast<const unsigned char*>(p.reset), p.reset_strides);
    uint32_t read[kSteps][kLoads];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i >= length) break;
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        read[i][j] = kWords ? reinterpret_cast<const uint32_t*>(steps.at)[j] : steps.at[j * p.reset_strides.inner];
      steps.at += steps.apart;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i >= length) break;
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        flags |= (kWords ? flag_bits(read[i][j]) : read[i][j] ? 1u : 0u) << (i * kUnit + j * kColumns);
    }
  }

  __device__ __forceinline__ void run(const ScanProblem& p) {
    Acc sums[kSums];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      run_part(p, part, sums);
      if constexpr (kBackward && !kStep) {
        const int end = (part + 1) * kSome;
        if (end % kSums == 0) store_sums(p, end - kSums, sums);
      }
    }
    const int length = static_cast<int>(p.length);
    auto output = steps_of(static_cast<T*>(p.output), p.output_strides);
    auto grad_gamma = steps_of(static_cast<T*>(p.grad_gamma), p.grad_gamma_strides);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i >= length) break;
      store_next(output, x[i]);
      if constexpr (kStep && kBackward) store_next(grad_gamma, g[i]);
    }
  }

 private:
  __device__ __forceinline__ void run_part(const ScanProblem& p, int part, Acc (&sums)[kSums]) {
    constexpr uint32_t kAll = (1u << kSome) - 1;
    const int shift = p.shifted ? 1 : 0, length = static_cast<int>(p.length);
    const bool carries_in = p.initial && !p.backward;
    const uint32_t drops = flags >> (part * kSome),
                   cuts = flags << (shift * kUnit) >> (part * kSome) | (carries_in ? 0 : kAll);
    Scan scan;
    scan.begin(p, {at.outer, at.column + part * kSome});
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i >= length) break;
      x[i].parts[part] =
          scan.step(x[i].parts[part], g[kStep ? i : 0].parts[part], p.conjugate_gamma, cuts >> (i * kUnit) & kAll);
      if constexpr (kBackward) {
        const Cell terms = scan.gradient(after[i].parts[part], i + 1 == length, drops >> (i * kUnit) & kAll);
        if constexpr (kStep) g[i].parts[part] = terms;
      }
    }
    if constexpr (kBackward && !kStep) {
#pragma unroll
      for (int u = 0; u < kSome; ++u) sums[(part * kSome + u) % kSums] = cast<Acc>(scan.sum[u]);
    }
  }
  // Gamma's gradients of some columns from `first` on, as one word where they lie so.
  __device__ __forceinline__ void store_sums(const ScanProblem& p, int first, const Acc (&sums)[kSums]) const {
    using Sums = Vector<Acc, kSums>;
    const Strides& strides = p.grad_gamma_strides;
    Acc* const to = static_cast<Acc*>(p.grad_gamma) + (strides.at(at.outer, 0) + at.column + first);
    if (p.partials == 1 && strides.inner == 1 && reinterpret_cast<uintptr_t>(to) % sizeof(Sums) == 0) {
      Sums word;
#pragma unroll
      for (int u = 0; u < kSums; ++u) word.set(u, sums[u]);
      *reinterpret_cast<Sums*>(to) = word;
    } else {
#pragma unroll
      for (int u = 0; u < kSums; ++u)
        Scan::Values::store_sum(p, at, first + u, 0, 1, cast<typename Scan::Wide>(sums[u]));
    }
  }
};

// A thread's cells are kColumnThreads apart, so that a warp reads neighbors.
template <typename T, bool kStep, bool kBackward, int kUnit>
__global__ void __launch_bounds__(kColumnThreads, few_steps_blocks(sizeof(T), kUnit, kStep, kBackward))
    few_steps_kernel(const __grid_constant__ FewStepsParams params) {
  constexpr int kCells = few_steps_cells(kUnit * sizeof(T), kStep, kBackward);
  const ScanProblem& p = params.problem;
  const uint32_t first = blockIdx.x * (params.cells * kColumnThreads) + threadIdx.x;
  overlap_launches();
  FewSteps<T, kStep, kBackward, kUnit> columns[kCells];
#pragma unroll
  for (int j = 0; j < kCells; ++j) {
    const uint32_t cell = first + j * kColumnThreads;
    if (j >= params.cells || cell >= params.all) break;
    const uint32_t outer = p.outer == 1 ? 0 : params.side_by_side.of(cell);
    columns[j].at = {outer, int64_t{cell - outer * params.side_by_side.divisor} * kUnit};
    columns[j].load(p);
    if (j == 0 && p.reset) columns[j].load_flags(p);  // a thread's only cell then
  }
#pragma unroll
  for (int j = 0; j < kCells; ++j) {
    if (j >= params.cells || first + j * kColumnThreads >= params.all) break;
    columns[j].run(p);
  }
}

}  // namespace dcs
