// Gamma's gradient in small rows (small_rows.cuh) where it is a sum a row: lanes, warps and the blocks of a cluster add
// what they have of a row in their order. Its last element's thread writes it.
#pragma once

#include "common/ptx/cluster.cuh"
#include "dcs/scan/plan/tuning.h"
#include "scan/carry/segment.cuh"
#include "scan/rows/small_elements.cuh"

namespace dcs {

// Of a warp: what it has of the row that goes on behind it, and whether that starts there.
struct WarpSum {
  double sum;
  bool starts;
};

// In shared memory: the warps' sums; those of a cluster's earlier blocks, which these store where the row ends, and
// their transaction barrier.
struct BlockSums {
  WarpSum of_warps[kSmallBlockWarps];
  double of_blocks[kMostRowCluster];
  uint64_t arrivals;

  // Before the cluster's blocks meet.
  __device__ __forceinline__ void init(int rank) {
    if (threadIdx.x == 0) init_transaction_barrier(&arrivals, rank * static_cast<int>(sizeof(double)));
  }
};

template <int kVec, typename Acc>
struct SmallSums {
  const SmallRowsParams& p;
  const SmallElements<kVec>& mine;
  uint32_t starts, ends;  // bits of elements
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;

  __device__ __forceinline__ void write(int row, double sum) const {
    float* const to = static_cast<float*>(const_cast<void*>(p.sums.data)) + mine.offset(p.sums, row);
    to[0] = static_cast<float>(sum);
#pragma unroll 1
    for (int j = 1; j < p.partials; ++j) to[j] = 0.f;
  }
  // Of so many of the block's warps, from the last start on.
  __device__ __forceinline__ double of_warps(const BlockSums& sums, int count) const {
    const WarpSum own = lane < count ? sums.of_warps[lane] : WarpSum{0.0, false};
    const uint32_t all = __ballot_sync(0xffffffffu, own.starts);
    return warp_sum(all && lane < 31 - __clz(all) ? 0.0 : own.sum);
  }

  // By all threads of the block.
  __device__ __forceinline__ void add(const Acc (&values)[kVec], BlockSums& sums) const {
    Acc tail = values[0];
#pragma unroll
    for (int i = 1; i < kVec; ++i) tail = values[i] + (starts >> i & 1 ? cast<Acc>(0.0) : tail);
    const uint32_t all = __ballot_sync(0xffffffffu, starts != 0);
    const int reach = reach_of(all & (0xffffffffu >> (31 - lane)), lane);
    double sum = cast<double>(tail);
#pragma unroll
    for (int j = 0; j < 5; ++j) {
      if (j >= p.levels) break;
      const double other = shuffle_up(sum, 1 << j);
      if (reach >= 1 << j) sum += other;
    }
    if (lane == 31) sums.of_warps[warp] = {sum, all != 0};
    __syncthreads();
    const bool is_cluster = p.cluster.divisor > 1;
    const int last = is_cluster ? mine.last_rank() : mine.rank;
    if (mine.rank < last) {
      if (warp > 0) return;
      const double of_block = of_warps(sums, warps);
      if (lane == 0) store_async_in_cluster(&sums.of_blocks[mine.rank], &sums.arrivals, last, of_block);
      return;
    }
    const uint32_t own_ends = ends & ((1u << mine.high) - (1u << mine.low));
    if (!__any_sync(0xffffffffu, own_ends != 0)) return;
    double into = of_warps(sums, warp);
    if (is_cluster && mine.rank > 0) {
      mbarrier_wait(&sums.arrivals, 0);
      into += warp_sum(lane < mine.rank ? sums.of_blocks[lane] : 0.0);
    }
    double before = shuffle_up(sum, 1);
    if (lane == 0) before = 0.0;
    if (!(all & ((1u << lane) - 1))) before += into;
    Acc of_row = cast<Acc>(0.0);
    mine.each([&](int i, int row, int) {
      if (starts >> i & 1) of_row = cast<Acc>(0.0), before = 0.0;
      of_row = of_row + values[i];
      if (own_ends >> i & 1) write(row, before + cast<double>(of_row));
    });
  }
};

}  // namespace dcs
