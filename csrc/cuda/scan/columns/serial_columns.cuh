// Scans along a strided time where there are enough columns to fill the GPU: a thread takes all steps of its own
// serially, which it reads from global memory. A batch of steps is always on its way: what is used makes room for the
// step that is a batch later. It asks nothing of strides, sizes or gammas, so it also takes what no other kernel does.
#pragma once

#include <algorithm>

#include "common/ptx/dependent_launch.cuh"
#include "common/vector.cuh"
#include "scan/columns/column_values.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

// kUnit neighboring columns of T; kFlags: with resets.
template <typename T, bool kStep, bool kBackward, int kUnit, bool kFlags>
struct SerialColumn {
  using Scan = ColumnScan<T, kStep, kBackward, kUnit>;
  using Cell = typename Scan::Cell;
  static constexpr int kSize = sizeof(T), kCellBytes = kUnit * kSize, kTensors = (kStep ? 2 : 1) + (kBackward ? 1 : 0);
  // Steps of a batch: 16 loads of four bytes, or fewer; single half-precision elements, half of that, half as many
  // again. Steps are used, and asked for, some at a time.
  static constexpr int kLoads = kCellBytes <= 4 ? 16
      : kCellBytes == 8                         ? 8
                                                : 2,
                       kBatch = std::max(kTensors == 1 ? kLoads : kLoads / 2, 2) * (kCellBytes == 2 ? 3 : 2) / 2;
  // Of three tensors all of a batch: their loads would be more than a warp can wait for one by one.
  static constexpr int kSome = kBatch < 4 || kTensors == 3 ? kBatch : 4;

  Steps<const char> input, gates, saved, flags;
  Steps<char> output, grad_gamma;
  int64_t to_end;   // steps to the row's end
  bool starts;      // the next step is its row's first one
  bool carries_in;  // which then has a carry all the same: an initial value
  bool shifted, conjugate;
  int64_t flag_apart;  // between columns
  bool flags_pair;     // those of a step's two columns are one aligned word
  Scan scan;

  // The batch, its flags a byte a column, and those of the step before the next one that is used.
  Cell x[kBatch], g[kStep ? kBatch : 1], after[kBackward ? kBatch : 1];
  uint32_t flag[kFlags ? kBatch : 1], flag_before = 0;

  __device__ __forceinline__ SerialColumn(const ScanProblem& p, const ColumnIndex& at) {
    scan.begin(p, at);
    find_operands(p, at);
  }

  // All steps.
  __device__ __forceinline__ void run() {
    int left = steps_left();
#pragma unroll
    for (int k = 0; k < kBatch; k += kSome) load(k, left);
#pragma unroll 1
    while (to_end > 0) {
      left = steps_left();
      batch(left);
    }
  }

 private:
  // Where operands lie at the first step, in the order of the scan.
  __device__ __forceinline__ void find_operands(const ScanProblem& p, const ColumnIndex& at) {
    const int64_t row = p.reverse ? p.length - 1 : 0, sign = p.reverse ? -1 : 1;
    const int shift = p.shifted ? 1 : 0;
    const auto steps_of = [&](auto* pointer, const Strides& strides, int64_t size, int64_t later) {
      using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(pointer)>>, const char, char>;
      Byte* const begin = reinterpret_cast<Byte*>(pointer) + strides.at(at.outer, row + sign * later, at.column) * size;
      return Steps<Byte>{begin, sign * strides.time * size};
    };
    input = steps_of(static_cast<const char*>(p.input), p.input_strides, kSize, 0);
    output = steps_of(static_cast<char*>(p.output), p.output_strides, kSize, 0);
    if constexpr (kStep) gates = steps_of(static_cast<const char*>(p.gamma), p.gamma_strides, kSize, -shift);
    if constexpr (kBackward) saved = steps_of(static_cast<const char*>(p.saved), p.saved_strides, kSize, 1);
    if constexpr (kBackward && kStep)
      grad_gamma = steps_of(static_cast<char*>(p.grad_gamma), p.grad_gamma_strides, kSize, 0);
    if constexpr (kFlags) {
      flags = steps_of(reinterpret_cast<const char*>(p.reset), p.reset_strides, 1, 0);
      flag_apart = p.reset_strides.inner;
      flags_pair = flag_apart == 1 && (reinterpret_cast<uintptr_t>(flags.at) | flags.apart) % 2 == 0;
    }
    starts = true;
    carries_in = p.initial && !p.backward;
    to_end = p.length;
    shifted = p.shifted;
    conjugate = p.conjugate_gamma;
  }

  __device__ __forceinline__ static Cell cell(const Steps<const char>& steps, int i) {
    return *reinterpret_cast<const Cell*>(steps.at + i * steps.apart);
  }
  // Asks for some steps from `first` on, in the batch's registers, where the row has them: `left`.
  __device__ __forceinline__ void load(int first, int left) {
    // Backward the step behind the last one is read, too; the first step of all may have no gate.
    if (left >= first + kSome + (kBackward ? 1 : 0) && !(kStep && first == 0 && shifted)) load_some<false>(first, left);
    else if (left > first) load_some<true>(first, left);
    if constexpr (kFlags) {
#pragma unroll
      for (int i = first; i < first + kSome; ++i)
        if (i < left) flag[i % kBatch] = flags_of(flags.at + i * flags.apart);
    }
  }
  template <bool kGuarded>
  __device__ __forceinline__ void load_some(int first, int left) {
#pragma unroll
    for (int i = first; i < first + kSome; ++i) {
      const int b = i % kBatch;
      const bool exists = !kGuarded || i < left;
      if (exists) x[b] = cell(input, i);
      if constexpr (kStep) {
        if (kGuarded && i == 0 && shifted) g[b] = Cell{};
        else if (exists) g[b] = cell(gates, i);
      }
      if constexpr (kBackward) {
        if (!kGuarded || i + 1 < left) after[b] = cell(saved, i);
      }
    }
  }
  // Nobody may look at them before they are used, so that they come with the operands.
  __device__ __forceinline__ uint32_t flags_of(const char* at) const {
    if constexpr (kUnit == 1) {
      return *reinterpret_cast<const uint8_t*>(at);
    } else {
      if (flags_pair) return *reinterpret_cast<const uint16_t*>(at);
      return *reinterpret_cast<const uint8_t*>(at) | *reinterpret_cast<const uint8_t*>(at + flag_apart) << 8;
    }
  }
  // Of the u-th column; any byte but 0 is set.
  __device__ __forceinline__ static uint32_t is_set(uint32_t flags, int u) { return (flags >> 8 * u & 0xff) != 0; }
  // To the row's end, of two batches at most.
  __device__ __forceinline__ int steps_left() const { return static_cast<int>(min(to_end, int64_t{2 * kBatch + 1})); }
  // A step whose operands have come; kGuarded: perhaps the row's last one.
  template <bool kGuarded>
  __device__ __forceinline__ void use(int b, int left) {
    uint32_t cut = b == 0 && starts && !carries_in ? (1u << kUnit) - 1 : 0, dropped = 0;
    if constexpr (kFlags) {
      const uint32_t cutting = shifted ? flag_before : flag[b];
#pragma unroll
      for (int u = 0; u < kUnit; ++u) cut |= is_set(cutting, u) << u, dropped |= is_set(flag[b], u) << u;
      flag_before = flag[b];
    }
    *reinterpret_cast<Cell*>(output.at + b * output.apart) = scan.step(x[b], g[kStep ? b : 0], conjugate, cut);
    if constexpr (kBackward) {
      const Cell terms = scan.gradient(after[b], kGuarded && b + 1 == left, dropped);
      if constexpr (kStep) *reinterpret_cast<Cell*>(grad_gamma.at + b * grad_gamma.apart) = terms;
    }
  }

  // The steps that have been asked for, and asks for as many more.
  __device__ __forceinline__ void batch(int left) {
    const int whole = left - (kBackward ? 1 : 0);  // steps that nothing has to be asked of
#pragma unroll
    for (int k = 0; k < kBatch; k += kSome) {
      if (whole >= k + kSome) use_some<false>(k, left);
      else if (left > k) use_some<true>(k, left);
      else break;
      load(kBatch + k, left);
    }
    input.at += kBatch * input.apart;
    if constexpr (kStep) gates.at += kBatch * gates.apart;
    if constexpr (kBackward) saved.at += kBatch * saved.apart;
    output.at += kBatch * output.apart;
    if constexpr (kBackward && kStep) grad_gamma.at += kBatch * grad_gamma.apart;
    if constexpr (kFlags) flags.at += kBatch * flags.apart;
    to_end -= kBatch;
    starts = false;
  }
  template <bool kGuarded>
  __device__ __forceinline__ void use_some(int first, int left) {
#pragma unroll
    for (int b = first; b < first + kSome; ++b)
      if (!kGuarded || b < left) use<kGuarded>(b, left);
  }
};

template <typename T, bool kStep, bool kBackward, int kUnit, bool kFlags>
__global__ void __launch_bounds__(kColumnThreads, kFlags && sizeof(T) == 2 ? 3 : 4)
    serial_columns_kernel(const __grid_constant__ ScanProblem p) {
  const int64_t cell = static_cast<int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x, cells = p.inner / kUnit;
  launch_dependents();
  const ColumnIndex at = column_index_of(cell, cells, p.outer, kUnit);
  if (at.outer >= p.outer || at.column >= p.inner) return;
  griddepcontrol_wait();
  SerialColumn<T, kStep, kBackward, kUnit, kFlags> column(p, at);
  column.run();
  if constexpr (kBackward && !kStep) {
#pragma unroll
    for (int u = 0; u < kUnit; ++u) ColumnValues<T, kStep>::store_sum(p, at, u, 0, 1, column.scan.sum[u]);
  }
}

}  // namespace dcs
