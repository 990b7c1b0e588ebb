// Scans along a strided time with few neighboring columns a step, such as (many, time, 3), of one gamma or one a
// column: threads that read a column each from global memory would fetch a sector for a few bytes of it. A block takes
// the columns of some outer rows and copies some steps of them at a time to shared memory, in the order of memory,
// while it scans those before; a thread scans a column serially there, in place, and the results go back in the order
// of memory. It asks nothing of alignment, and no block waits for another.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/ptx/dependent_launch.cuh"
#include "scan/columns/columns_params.cuh"
#include "scan/columns/column_values.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

// Where some steps of an outer row lie in the order of memory. In shared memory elements of one or two bytes are as far
// behind a whole word as in global memory, so that words of it are words there.
template <typename E>
__device__ __forceinline__ E* staged_in(const E* at, char* slot) {
  return reinterpret_cast<E*>(slot + (sizeof(E) < 4 ? reinterpret_cast<uintptr_t>(at) % 4 : 0));
}

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

template <typename T>
struct StagedColumns {
  using Scan = ColumnScan<T, false, false, 1>;
  using Cell = typename Scan::Cell;
  static constexpr int kWarps = kStagedThreads / 32;

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
    slab = static_cast<int>(threadIdx.x) / inner;
    column = static_cast<int>(threadIdx.x) - slab * inner;
    works = slab < slabs;
  }

  // The first in the order of memory of `count` steps from `begin` on in that of the scan; it may be outside the row.
  template <typename E>
  __device__ __forceinline__ E* lowest(E* data, const Strides& strides, int of_slab, int64_t begin, int count) const {
    return data + strides.at(first_outer + of_slab, p.reverse ? p.length - begin - count : begin, 0);
  }
  __device__ __forceinline__ const T* input(int of_slab, int64_t begin, int count) const {
    return lowest(static_cast<const T*>(p.input), p.input_strides, of_slab, begin, count);
  }
  __device__ __forceinline__ const uint8_t* flags(int of_slab, int64_t begin, int count) const {
    return lowest(reinterpret_cast<const uint8_t*>(p.reset), p.reset_strides, of_slab, begin, count);
  }
  __device__ __forceinline__ char* slot(int buffer, int of_slab) const {
    return shared + (buffer * t.slabs + of_slab) * t.slab_bytes;
  }
  __device__ __forceinline__ char* flags_slot(int buffer, int of_slab) const {
    return slot(buffer, of_slab) + t.operand_bytes;
  }
  __device__ __forceinline__ int count_of(int64_t begin) const {
    return static_cast<int>(min(int64_t{t.steps}, p.length - begin));
  }
  // Visits the slabs of the warp.
  template <typename Visit>
  __device__ __forceinline__ void each_slab(const Visit& visit) const {
#pragma unroll 1
    for (int s = static_cast<int>(threadIdx.x) / 32; s < slabs; s += kWarps) visit(s);
  }

  __device__ __forceinline__ void fetch(int buffer, int64_t begin) const {
    const int count = count_of(begin);
    const auto copy_word = [](auto* to, const auto* from) { copy_async<4>(to, from, 4); };
    each_slab([&](int s) {
      const T* const from = input(s, begin, count);
      T* const to = staged_in(from, slot(buffer, s));
      if constexpr (sizeof(T) >= 4) {
#pragma unroll 4
        for (int i = static_cast<int>(threadIdx.x) % 32; i < count * inner; i += 32)
          copy_async<sizeof(T)>(to + i, from + i, sizeof(T));
      } else {
        each_word(from, 0, count * inner, [&](int i) { copy_word(to + i, from + i); }, [&](int i) { to[i] = from[i]; });
      }
      if (!p.reset) return;
      // Where gates are those of the step before, so are flags: the first step of all has none.
      const int missing = begin < shift ? inner : 0;
      const uint8_t* const flag = flags(s, begin - shift, count);
      uint8_t* const flag_to = staged_in(flag, flags_slot(buffer, s));
      each_word(
          flag, p.reverse ? 0 : missing, count * inner - (p.reverse ? missing : 0),
          [&](int i) { copy_word(flag_to + i, flag + i); }, [&](int i) { flag_to[i] = flag[i]; });
    });
  }
  __device__ __forceinline__ void store(int buffer, int64_t begin) const {
    const int count = count_of(begin);
    each_slab([&](int s) {
      const T* const from = input(s, begin, count);
      const T* const values = staged_in(from, slot(buffer, s));
      T* const to = lowest(static_cast<T*>(p.output), p.output_strides, s, begin, count);
      if (sizeof(T) >= 4 || (reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from)) % 4 != 0) {
#pragma unroll 4
        for (int i = static_cast<int>(threadIdx.x) % 32; i < count * inner; i += 32) to[i] = values[i];
      } else {
        each_word(
            to, 0, count * inner,
            [&](int i) { *reinterpret_cast<uint32_t*>(to + i) = *reinterpret_cast<const uint32_t*>(values + i); },
            [&](int i) { to[i] = values[i]; });
      }
    });
  }

  // The thread's column, in the place of its input.
  __device__ __forceinline__ void scan_steps(int buffer, int64_t begin, Scan& scan) const {
    const int count = count_of(begin), apart = p.reverse ? -inner : inner,
              first = (p.reverse ? count - 1 : 0) * inner + column;
    T* const x = staged_in(input(slab, begin, count), slot(buffer, slab)) + first;
    const uint8_t* const cuts =
        p.reset ? staged_in(flags(slab, begin - shift, count), flags_slot(buffer, slab)) + first : nullptr;
    const auto step = [&](int i, bool cut) {
      Cell* const cell = reinterpret_cast<Cell*>(x + i * apart);
      *cell = scan.step(*cell, Cell{}, false, cut ? 1 : 0);
    };
    const bool starts = begin == 0;
    step(0, (starts && !p.initial) || (cuts && !(starts && shift > 0) && cuts[0]));
    if (cuts) {
#pragma unroll 4
      for (int i = 1; i < count; ++i) step(i, cuts[i * apart]);
    } else {
#pragma unroll 4
      for (int i = 1; i < count; ++i) step(i, false);
    }
  }

  __device__ __forceinline__ void run() const {
    Scan scan;
    fetch(0, 0);
    commit_copies();
    scan.begin(p, {first_outer + (works ? slab : 0), works ? column : 0});
    int buffer = 0;
#pragma unroll 1
    for (int64_t begin = 0; begin < p.length; begin += t.steps, buffer ^= 1) {
      if (begin + t.steps < p.length) {
        __syncwarp();  // until lanes have stored what the next steps take the place of
        fetch(buffer ^ 1, begin + t.steps);
        commit_copies();
        wait_for_copies<1>();
      } else {
        wait_for_copies<0>();
      }
      __syncthreads();
      if (works) scan_steps(buffer, begin, scan);
      __syncthreads();
      store(buffer, begin);
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kStagedThreads)
    staged_columns_kernel(const __grid_constant__ StagedColumnsParams params) {
  extern __shared__ __align__(16) unsigned char staged_shared[];
  launch_dependents();
  const StagedColumns<T> columns(params, staged_shared);
  griddepcontrol_wait();
  columns.run();
}

}  // namespace dcs
