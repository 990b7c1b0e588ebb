// Scans along a strided time with few neighboring columns a step, such as (many, time, 3), of a shared gamma or one a
// column: threads that read a column each from global memory would fetch a sector for a few bytes of it. A block takes
// the columns of some outer rows and copies some steps of them at a time to shared memory, in the order of memory,
// while it scans those before; a thread scans a column serially there, in place, and the results go back in the order
// of memory. It asks nothing of alignment, and no block waits for another.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "scan/columns/column_values.cuh"
#include "scan/columns/staged_slabs.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

template <typename T>
struct StagedColumns : StagedSlabs<T, 4, false> {
  using Slabs = StagedSlabs<T, 4, false>;
  using Slabs::p, Slabs::t, Slabs::inner, Slabs::shift, Slabs::first_outer, Slabs::slabs;
  using Scan = ColumnScan<T, false, false, 1>;
  using Cell = typename Scan::Cell;

  int slab, column;  // the thread's
  bool works;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  __device__ __forceinline__ StagedColumns(const StagedColumnsParams& params, unsigned char* memory)
      : Slabs(params, memory) {
    slab = static_cast<int>(threadIdx.x) / inner;
    column = static_cast<int>(threadIdx.x) - slab * inner;
    works = slab < slabs;
  }

  // Visits the slabs of the warp.
  template <typename Visit>
  __device__ __forceinline__ void each_slab(const Visit& visit) const {
#pragma unroll 1
    for (int s = static_cast<int>(threadIdx.x) / 32; s < slabs; s += kStagedThreads / 32) visit(s);
  }
  __device__ __forceinline__ void fetch(int buffer, int64_t begin) const {
    const int count = this->count_of(begin);
    each_slab([&](int s) {
      copy_words_async(this->staged(buffer, s, begin, count), this->input(s, begin, count), 0, count * inner, lane, 32);
      if (!p.reset) return;
      this->known_flags(begin, count * inner, [&](int first, int end) {
        copy_words_async(
            this->staged_flags(buffer, s, begin, count), this->flags(s, begin, count), first, end, lane, 32);
      });
    });
  }
  __device__ __forceinline__ void store(int buffer, int64_t begin) const {
    const int count = this->count_of(begin);
    each_slab([&](int s) {
      const T* const values = this->staged(buffer, s, begin, count);
      T* const to = this->output(s, begin, count);
      if (sizeof(T) >= 4 || words_agree(to, this->input(s, begin, count), 4))
        copy_words<4>(to, values, count * inner, lane, 32);
      else copy_words<sizeof(T)>(to, values, count * inner, lane, 32);
    });
  }

  // The thread's column, in the place of its input.
  __device__ __forceinline__ void scan_steps(int buffer, int64_t begin, Scan& scan) const {
    const int count = this->count_of(begin), apart = p.reverse ? -inner : inner,
              first = (p.reverse ? count - 1 : 0) * inner + column;
    T* const x = this->staged(buffer, slab, begin, count) + first;
    const uint8_t* const cuts = p.reset ? this->staged_flags(buffer, slab, begin, count) + first : nullptr;
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
