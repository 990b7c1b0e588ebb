// Scans along a strided time with few neighboring columns a step, such as (many, time, 3): threads that read a column
// each from global memory would fetch a sector for a few bytes of it. A block takes the columns of some outer rows and
// copies some steps of them at a time to shared memory, in the order of memory, while it scans those before; a thread
// scans a column serially there, in place, and the results go back in the order of memory. It asks nothing of gammas,
// sizes or alignment, and no block waits for another.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/ptx/dependent_launch.cuh"
#include "scan/columns/columns_params.cuh"
#include "scan/columns/column_values.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

// Some steps of an operand of an outer row, in the order of memory. In shared memory elements of one or two bytes lie
// as far behind a whole word as in global memory, so that words of it are words there.
template <typename E>
struct StagedSteps {
  E* at;  // the first step's first column; the step may be before the row's first one
  int64_t time, inner;

  template <typename Pointer>
  __device__ __forceinline__ StagedSteps(Pointer* data, const Strides& strides, int64_t outer, int64_t step)
      : time(strides.time), inner(strides.inner) {
    at = static_cast<E*>(const_cast<void*>(static_cast<const void*>(data))) + strides.at(outer, step, 0);
  }
  // Bytes from a whole word.
  __device__ __forceinline__ int skew() const {
    return sizeof(E) < 4 ? static_cast<int>(reinterpret_cast<uintptr_t>(at) % 4) : 0;
  }
  __device__ __forceinline__ E* in(char* slot) const { return reinterpret_cast<E*>(slot + skew()); }
};

// Elements [first, end) of a warp's, shared among its lanes: whole words of two or four of them, and the others.
template <typename E, typename VisitWord, typename Visit>
__device__ __forceinline__ void each_word(
    const E* at, int first, int end, const VisitWord& visit_word, const Visit& visit) {
  constexpr int kOfWord = sizeof(E) < 4 ? 4 / sizeof(E) : 1;
  const int lane = static_cast<int>(threadIdx.x) % 32,
            before = static_cast<int>(reinterpret_cast<uintptr_t>(at + first) % 4) / static_cast<int>(sizeof(E)),
            edge = min((kOfWord - before) % kOfWord, end - first), words = (end - first - edge) / kOfWord,
            rest = end - first - edge - words * kOfWord;
#pragma unroll 4
  for (int i = lane; i < words; i += 32) visit_word(first + edge + i * kOfWord);
  if (lane < edge) visit(first + lane);
  if (lane >= 32 - rest) visit(end + lane - 32);
}

template <typename T, bool kStep, bool kBackward>
struct StagedColumns {
  using Scan = ColumnScan<T, kStep, kBackward, 1>;
  using Cell = typename Scan::Cell;
  static constexpr int kOperands = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0), kWarps = kStagedThreads / 32;
  enum Operand { kInput, kGates, kSaved = kStep ? 2 : 1 };

  const ScanProblem& p;
  const StagedColumnsPlan& t;
  char* const shared;
  const int inner = static_cast<int>(p.inner), shift = p.shifted ? 1 : 0;
  int64_t first_outer;
  int slabs;         // outer rows of the block
  int slab, column;  // the thread's
  bool works;

  __device__ __forceinline__ StagedColumns(const StagedColumnsParams& params, unsigned char* memory)
      : p(params.problem), t(params.plan), shared(reinterpret_cast<char*>(memory)) {
    first_outer = static_cast<int64_t>(blockIdx.x) * t.slabs;
    slabs = static_cast<int>(min(int64_t{t.slabs}, p.outer - first_outer));
    const int thread = static_cast<int>(threadIdx.x);
    slab = whole_rows(thread);
    column = thread - slab * inner;
    works = slab < slabs;
  }
  __device__ __forceinline__ int whole_rows(int elements) const {
    return static_cast<int>(static_cast<uint32_t>(elements) * t.inner_inverse >> kStagedInverseBits);
  }

  // `count` steps in the order of the scan from `begin` on: the first of them in the order of memory.
  __device__ __forceinline__ int64_t low_of(int64_t begin, int count) const {
    return p.reverse ? p.length - begin - count : begin;
  }
  __device__ __forceinline__ char* slot(int buffer, int operand, int of_slab) const {
    return shared + (buffer * t.slabs + of_slab) * t.slab_bytes + operand * t.operand_bytes;
  }

  template <typename E>
  __device__ __forceinline__ void fetch(
      int buffer, int operand, const void* data, const Strides& strides, int64_t begin, int count) const {
    const int64_t low = low_of(begin, count);
    const int first = static_cast<int>(max(int64_t{0}, -low)) * inner,
              end = static_cast<int>(min(int64_t{count}, p.length - low)) * inner;
#pragma unroll 1
    for (int s = static_cast<int>(threadIdx.x) / 32; s < slabs; s += kWarps) {
      const StagedSteps<const E> from(data, strides, first_outer + s, low);
      E* const to = const_cast<E*>(from.in(slot(buffer, operand, s)));
      if (from.inner != 1 || from.time != inner) {
        each_cell(first, end,
            [&](int i, int step, int of_column) { to[i] = from.at[step * from.time + of_column * from.inner]; });
      } else if constexpr (sizeof(E) >= 4) {
#pragma unroll 4
        for (int i = first + static_cast<int>(threadIdx.x) % 32; i < end; i += 32)
          copy_async<sizeof(E)>(to + i, from.at + i, sizeof(E));
      } else {
        each_word(
            from.at, first, end, [&](int i) { copy_async<4>(to + i, from.at + i, 4); },
            [&](int i) { to[i] = from.at[i]; });
      }
    }
  }
  // Stores `count` steps from `begin` on which are in shared memory in the place of `from`.
  __device__ __forceinline__ void store(int buffer, int operand, const StagedSteps<const T>* from, void* data,
      const Strides& strides, int64_t begin, int count, int s) const {
    const StagedSteps<T> to(data, strides, first_outer + s, low_of(begin, count));
    const T* const values = from->in(slot(buffer, operand, s));
    const int end = count * inner;
    if (to.inner != 1 || to.time != inner) {
      each_cell(
          0, end, [&](int i, int step, int of_column) { to.at[step * to.time + of_column * to.inner] = values[i]; });
    } else if (sizeof(T) >= 4 || to.skew() != from->skew()) {
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x) % 32; i < end; i += 32) to.at[i] = values[i];
    } else {
      each_word(
          to.at, 0, end,
          [&](int i) { *reinterpret_cast<uint32_t*>(to.at + i) = *reinterpret_cast<const uint32_t*>(values + i); },
          [&](int i) { to.at[i] = values[i]; });
    }
  }
  template <typename Visit>
  __device__ __forceinline__ void each_cell(int first, int end, const Visit& visit) const {
#pragma unroll 4
    for (int i = first + static_cast<int>(threadIdx.x) % 32; i < end; i += 32) {
      const int step = whole_rows(i);
      visit(i, step, i - step * inner);
    }
  }

  __device__ __forceinline__ int count_of(int64_t begin) const {
    return static_cast<int>(min(int64_t{t.steps}, p.length - begin));
  }
  __device__ __forceinline__ void fetch_all(int buffer, int64_t begin) const {
    const int count = count_of(begin);
    fetch<T>(buffer, kInput, p.input, p.input_strides, begin, count);
    if constexpr (kStep) fetch<T>(buffer, kGates, p.gamma, p.gamma_strides, begin - shift, count);
    if constexpr (kBackward) fetch<T>(buffer, kSaved, p.saved, p.saved_strides, begin + 1, count);
    // With those of the step before where gates are.
    if (p.reset) fetch<uint8_t>(buffer, kOperands, p.reset, p.reset_strides, begin - shift, count + shift);
  }
  __device__ __forceinline__ void store_all(int buffer, int64_t begin) const {
    const int count = count_of(begin);
#pragma unroll 1
    for (int s = static_cast<int>(threadIdx.x) / 32; s < slabs; s += kWarps) {
      const StagedSteps<const T> input(p.input, p.input_strides, first_outer + s, low_of(begin, count));
      store(buffer, kInput, &input, p.output, p.output_strides, begin, count, s);
      if constexpr (kStep && kBackward) {
        const StagedSteps<const T> gates(p.gamma, p.gamma_strides, first_outer + s, low_of(begin - shift, count));
        store(buffer, kGates, &gates, p.grad_gamma, p.grad_gamma_strides, begin, count, s);
      }
    }
  }

  // The thread's steps of an operand in the order of the scan.
  template <typename E>
  __device__ __forceinline__ E* first_of(
      int buffer, int operand, const void* data, const Strides& strides, int64_t begin, int count) const {
    const StagedSteps<const E> from(data, strides, first_outer + slab, low_of(begin, count));
    return const_cast<E*>(from.in(slot(buffer, operand, slab))) + (p.reverse ? count - 1 : 0) * inner + column;
  }
  __device__ __forceinline__ void scan_steps(int buffer, int64_t begin, Scan& scan) const {
    const int count = count_of(begin), apart = p.reverse ? -inner : inner;
    const bool starts = begin == 0, cuts_first = starts && !(p.initial && !p.backward),
               ends = begin + count == p.length, has_flags = p.reset != nullptr;
    T* x = first_of<T>(buffer, kInput, p.input, p.input_strides, begin, count);
    T *gates = nullptr, *saved = nullptr;
    const uint8_t* flags = nullptr;
    if constexpr (kStep) gates = first_of<T>(buffer, kGates, p.gamma, p.gamma_strides, begin - shift, count);
    if constexpr (kBackward) saved = first_of<T>(buffer, kSaved, p.saved, p.saved_strides, begin + 1, count);
    if (has_flags) flags = first_of<uint8_t>(buffer, kOperands, p.reset, p.reset_strides, begin - shift, count + shift);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const bool has_before = !(starts && i == 0 && shift > 0);  // the gate and the flag of the step before
      uint32_t cut = cuts_first && i == 0 ? 1 : 0, dropped = 0;
      if (has_flags) {
        if (has_before && flags[i * apart]) cut = 1;
        if (kBackward) dropped = flags[(i + shift) * apart] != 0;
      }
      Cell gate{};
      if constexpr (kStep) {
        if (has_before) gate = *reinterpret_cast<const Cell*>(gates + i * apart);
      }
      const Cell y = scan.step(*reinterpret_cast<const Cell*>(x + i * apart), gate, false, cut);
      *reinterpret_cast<Cell*>(x + i * apart) = y;
      if constexpr (kBackward) {
        const bool is_last = ends && i + 1 == count;
        const Cell after = is_last ? Cell{} : *reinterpret_cast<const Cell*>(saved + i * apart);
        const Cell terms = scan.gradient(after, is_last, dropped);
        if constexpr (kStep) *reinterpret_cast<Cell*>(gates + i * apart) = terms;
      }
    }
  }

  __device__ __forceinline__ void run() const {
    Scan scan;
    const ColumnIndex own{first_outer + (works ? slab : 0), works ? column : 0};
    fetch_all(0, 0);
    commit_copies();
    scan.begin(p, own);
    int buffer = 0;
#pragma unroll 1
    for (int64_t begin = 0; begin < p.length; begin += t.steps, buffer ^= 1) {
      if (begin + t.steps < p.length) {
        __syncwarp();  // until lanes have stored what the next steps take the place of
        fetch_all(buffer ^ 1, begin + t.steps);
        commit_copies();
        wait_for_copies<1>();
      } else {
        wait_for_copies<0>();
      }
      __syncthreads();
      if (works) scan_steps(buffer, begin, scan);
      __syncthreads();
      store_all(buffer, begin);
    }
    if constexpr (kBackward && !kStep) {
      if (works) ColumnValues<T, kStep>::store_sum(p, own, 0, 0, 1, scan.sum[0]);
    }
  }
};

template <typename T, bool kStep, bool kBackward>
__global__ void __launch_bounds__(kStagedThreads)
    staged_columns_kernel(const __grid_constant__ StagedColumnsParams params) {
  extern __shared__ __align__(16) unsigned char staged_shared[];
  launch_dependents();
  const StagedColumns<T, kStep, kBackward> columns(params, staged_shared);
  griddepcontrol_wait();
  columns.run();
}

}  // namespace dcs
