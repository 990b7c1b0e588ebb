// Rows that fit into a block: a tile is as many whole rows as do, and no block waits for another. Of longer rows, where
// they are few, each is a cluster's: its blocks store what they leave in the shared memory of those behind them.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "scan/carry/cluster_segments.cuh"
#include "scan/rows/lane_passes.cuh"

namespace dcs {

// Gamma's gradient is a sum a row: one that starts in an earlier lane than it ends is put together from the lanes'
// parts, in their order.
template <typename Passes>
struct RowSums {
  using Acc = typename Passes::Acc;
  using Wide = typename Passes::Wide;
  using Stored = typename Types<typename Passes::Element>::Acc;

  const Passes& passes;
  int64_t first_row, end_row;  // the block's

  __device__ __forceinline__ void write(int64_t row, Wide sum) const {
    if (row < first_row || row >= end_row) return;
    const ScanProblem& problem = passes.p.problem;
    Stored* const to = static_cast<Stored*>(problem.grad_gamma) +
        RowIndex(passes.p, memory_row<Passes::kIn>(passes.p, row)).offset(problem.grad_gamma_strides);
    to[0] = cast<Stored>(sum);
#pragma unroll 1
    for (int64_t j = 1; j < problem.partials; ++j) to[j] = cast<Stored>(cast<Wide>(0.0));
  }
};

// The indices of a block's tile.
struct FlatTile {
  int64_t low, high;
  int rank = 0;  // in its cluster
  int row = 0;   // the cluster's

  __device__ __forceinline__ explicit FlatTile(const FlatParams& p) {
    if (p.cluster == 1) {
      low = blockIdx.x * p.tile + p.phase;
      high = min(low + p.tile, p.count + p.phase);
    } else {
      row = static_cast<int>(blockIdx.x) / p.cluster;
      rank = static_cast<int>(blockIdx.x) - row * p.cluster;
      const int64_t start = row * p.problem.length + p.phase, first = start / kFlatGrain * kFlatGrain + rank * p.tile;
      low = max(first, start);
      high = min(first + p.tile, start + p.problem.length);
    }
  }
};

// What the blocks of a cluster leave each other, in shared memory.
template <typename Wide>
struct ClusterCarry : ClusterSegments<Wide, kMostRowCluster> {
  Wide own_sum;  // the block's

  // What enters the block, by all threads; `segments` are its warps'.
  __device__ __forceinline__ Wide enter(const Segment<Wide> (&segments)[kFlatWarps], int rank, int blocks) {
    const int thread = static_cast<int>(threadIdx.x), warps = static_cast<int>(blockDim.x) / 32;
    wait_for_cluster();
    if (thread > rank && thread < blocks) {
      Segment<Wide> all = segments[0];
      for (int w = 1; w < warps; ++w)
        all = {
            after(segments[w], all.total), power_mul(all.gates, segments[w].gates), all.closed || segments[w].closed};
      this->store(all, rank, thread);
    }
    this->wait();
    Wide carry = cast<Wide>(0.0);
    for (int r = 0; r < rank; ++r) carry = after(this->of_blocks[r], carry);
    return carry;
  }

  // The sum over the blocks of what their warps have, for the first block's first thread. A block stays until all have
  // read (`leave`).
  __device__ __forceinline__ Wide sum_of_blocks(const Wide (&sums)[kFlatWarps], int blocks) {
    const int thread = static_cast<int>(threadIdx.x), warps = static_cast<int>(blockDim.x) / 32;
    if (thread == 0) {
      own_sum = sums[0];
      for (int w = 1; w < warps; ++w) own_sum = own_sum + sums[w];
    }
    arrive_in_cluster();
    wait_for_cluster();
    Wide sum = own_sum;
    if (thread == 0)
      for (int r = 1; r < blocks; ++r) sum = sum + in_cluster(own_sum, static_cast<uint32_t>(r));
    arrive_in_cluster_relaxed();
    return sum;
  }
  static __device__ __forceinline__ void leave() { wait_for_cluster(); }
};

template <typename T, bool kStep, bool kBackward, Direction kDirection>
__global__ void __launch_bounds__(32 * kFlatWarps, 4) flat_rows_kernel(const __grid_constant__ FlatParams p) {
  using Work = Slice<T, kStep, kBackward, kDirection, false>;
  using Passes = LanePasses<T, kStep, kBackward, kDirection, false>;
  using Acc = typename Passes::Acc;
  using Wide = typename Passes::Wide;
  constexpr bool kSums = kBackward && !kStep;  // of gamma's gradient, a row
  extern __shared__ __align__(128) unsigned char flat_shared[];
  __shared__ uint64_t full[kFlatWarps];
  __shared__ Segment<Wide> segments[kFlatWarps];
  __shared__ ClusterCarry<Wide> cluster;
  static_assert(sizeof(cluster) + sizeof(segments) + sizeof(full) <= kStaticBytes / 2);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const FlatTile tile(p);
  if (p.cluster > 1) cluster.init(tile.rank);
  const Work work{InDirection<kDirection>(p), p,
      tile.low / kFlatGrain * kFlatGrain + static_cast<int64_t>(warp) * Work::elements_of(p), tile.low, tile.high,
      flat_shared + warp * Work::bytes_of(p)};
  const Passes passes{InDirection<kDirection>(p), work};
  launch_dependents();
  if (lane == 0) {
    mbarrier_init(&full[warp], load_arrivals(p));
    mbarrier_fence_init();
  }
  __syncwarp();
  griddepcontrol_wait();
  work.load(&full[warp]);
  const typename Passes::Edges edges =
      passes.ask([&] { return locate(p, work.first - 1); }, [&] { return locate(p, work.first + work.elements()); });
  const FlatPosition position = locate(p, work.first + lane * passes.own);
  const Wide gamma = kStep ? cast<Wide>(1.0) : gamma_of<kDirection, Wide>(p, position.row);
  RowNumbers<T> numbers{};
  if (passes.rows_differ()) numbers = passes.ask_rows(position.row - (position.done == 0 ? 1 : 0));
  mbarrier_wait(&full[warp], 0);
  const LaneCuts cuts = passes.find_cuts(position, edges.reset_before);
  typename Passes::State at = passes.prepare(edges, passes.pass_of(cuts), gamma);
  const Segment<Wide> segment = passes.total(at, cuts, numbers, [&] { return passes.powers_of(gamma); });
  if (lane == 31) segments[warp] = segment;
  __syncthreads();
  Wide carry = cast<Wide>(0.0);
  if (p.cluster > 1) carry = cluster.enter(segments, tile.rank, p.cluster);
  for (int w = 0; w < warp; ++w) carry = after(segments[w], carry);

  RowSums<Passes> rows{passes, 0, 0};
  if (kSums && p.cluster == 1) {
    rows.first_row = (tile.low - p.phase) / p.problem.length;
    rows.end_row = (tile.high - p.phase) / p.problem.length;
  }
  const LaneSums<Acc> sums =
      passes.finish(at, cuts, numbers, carry, [&](int64_t row, Acc sum) { rows.write(row, cast<Wide>(sum)); });
  work.store();
  if (kSums && p.cluster > 1) {
    // The row's part of the lane: rows are longer than lanes, where one starts at most.
    const bool starts = (cuts.starts & ((uint64_t{1} << passes.own) - 1)) != 0;
    const Wide head = cast<Wide>(starts ? sums.head : sums.tail), tail = cast<Wide>(starts ? sums.tail : sums.head);
    Wide sum = cuts.row == tile.row ? head : cuts.row + 1 == tile.row ? tail : cast<Wide>(0.0);
    sum = warp_sum(sum);
    __shared__ Wide sums_of_warps[kFlatWarps];
    if (lane == 0) sums_of_warps[warp] = sum;
    __syncthreads();
    sum = cluster.sum_of_blocks(sums_of_warps, p.cluster);
    rows.first_row = tile.row;
    rows.end_row = tile.row + 1;
    if (tile.rank == 0 && threadIdx.x == 0) rows.write(tile.row, sum);
  } else if constexpr (kSums) {
    // The lanes' sums up to their own, as far back as the nearest start of a row.
    __shared__ Wide warp_sums[kFlatWarps];
    __shared__ bool warp_starts[kFlatWarps];
    const bool starts = (cuts.starts & ((uint64_t{1} << passes.own) - 1)) != 0;
    const uint32_t all = __ballot_sync(0xffffffffu, starts);
    const int reach = reach_of(all & (0xffffffffu >> (31 - lane)), lane);
    Wide sum = cast<Wide>(sums.tail);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const Wide other = shuffle_up(sum, d);
      if (reach >= d) sum = sum + other;
    }
    if (lane == 31) warp_sums[warp] = sum, warp_starts[warp] = all != 0;
    __syncthreads();
    Wide before = shuffle_up(sum, 1);
    if (lane == 0) before = cast<Wide>(0.0);
    if ((all & ((1u << lane) - 1)) == 0) {
      Wide into = cast<Wide>(0.0);
#pragma unroll 1
      for (int w = 0; w < warp; ++w) into = warp_starts[w] ? warp_sums[w] : into + warp_sums[w];
      before = into + before;
    }
    if (starts) rows.write(cuts.row, before + cast<Wide>(sums.head));
  }
  if (lane == 0) wait_for_stores_to_read();
  if (kSums && p.cluster > 1) ClusterCarry<Wide>::leave();
}

}  // namespace dcs
