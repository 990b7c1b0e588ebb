// Sums over time in columns/small_columns.cuh, of gamma's gradient, in a fixed tree: of a warp's slots, of the warps,
// and of the blocks of a cluster, which send theirs to the last one. Blocks that are no cluster leave theirs to a
// second launch (totals.cu).
#pragma once

#include "common/ptx/cluster.cuh"
#include "scan/columns/small_index.cuh"

namespace dcs {

template <typename Index>
__device__ __forceinline__ double sum_of_slots(const Index& at, double sum) {
#pragma unroll 1
  for (int d = 1 << at.p.span_bits; d < 32; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  return sum;
}

struct ColumnSums {
  double warps[kSmallBlockWarps][kSmallSpan], blocks[kMostRowCluster][kSmallSpan];
  uint64_t arrivals;  // completes when the sums of all blocks but the last have come there

  // Before the barrier of the block and the arrival in the cluster, which others' stores wait for.
  template <typename Index>
  __device__ __forceinline__ void init_barrier(const Index& at) {
    const int others = static_cast<int>(at.p.cluster.divisor) - 1, columns = 1 << at.p.span_bits;
    if (threadIdx.x == 0)
      init_transaction_barrier(&arrivals, at.rank == others ? others * columns * static_cast<int>(sizeof(double)) : 0);
  }
  // Each slot takes every so many of the first `count` of them.
  template <typename Index, int kRows>
  static __device__ __forceinline__ double sum_of(const Index& at, const double (&sums)[kRows][kSmallSpan], int count) {
    double sum = 0.0;
#pragma unroll 4
    for (int i = at.slot; i < count; i += at.slots) sum += sums[i][at.span_column];
    return sum_of_slots(at, sum);
  }
  // In all lanes of a column: its sum over time, in the first warp of the last block; or over the block's time.
  template <bool kShares, typename Index>
  __device__ __forceinline__ bool add_up(const Index& at, double& sum) {
    const int last = static_cast<int>(at.p.cluster.divisor) - 1;
    sum = sum_of_slots(at, sum);
    if (at.slot == 0) warps[at.warp][at.span_column] = sum;
    __syncthreads();
    if (at.warp > 0) return false;
    sum = sum_of(at, warps, at.warps);
    if (kShares) return true;
    if (at.rank < last) {
      double* const to = &blocks[at.rank][at.span_column];
      if (at.slot == 0) store_async_in_cluster(to, &arrivals, static_cast<uint32_t>(last), sum);
      return false;
    }
    if (last > 0) {
      mbarrier_wait(&arrivals, 0);
      sum += sum_of(at, blocks, last);
    }
    return true;
  }
};

}  // namespace dcs
