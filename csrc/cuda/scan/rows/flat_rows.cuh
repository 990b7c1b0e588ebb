// Rows that fit into a block: a tile is as many whole rows as do, and no block waits for another.
#pragma once

#include "common/ptx/dependent_launch.cuh"
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
        row_offset(memory_row<Passes::kBackwards>(passes.p, row), problem.inner, problem.grad_gamma_strides);
    to[0] = cast<Stored>(sum);
    for (int64_t j = 1; j < problem.partials; ++j) to[j] = cast<Stored>(cast<Wide>(0.0));
  }
};

template <typename T, bool kStep, bool kBackward, bool kReverse>
__global__ void __launch_bounds__(32 * kFlatWarps, kStep || kBackward ? 2 : 4)
    flat_rows_kernel(const __grid_constant__ FlatParams p) {
  using Work = Slice<T, kStep, kBackward, kReverse, false>;
  using Passes = LanePasses<T, kStep, kBackward, kReverse, false>;
  using Acc = typename Passes::Acc;
  using Wide = typename Passes::Wide;
  extern __shared__ __align__(128) unsigned char flat_shared[];
  __shared__ uint64_t full[kFlatWarps];
  __shared__ Piece<Wide> pieces[kFlatWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t low = blockIdx.x * p.tile + p.phase, high = min(low + p.tile, p.count + p.phase);
  const Work work{p, low / kFlatGrain * kFlatGrain + static_cast<int64_t>(warp) * Work::elements_of(p), low, high,
      flat_shared + warp * Work::bytes_of(p)};
  const Passes passes{work};
  launch_dependents();
  if (lane == 0) {
    mbarrier_init(&full[warp], load_arrivals(p));
    mbarrier_fence_init();
  }
  __syncwarp();
  griddepcontrol_wait();
  work.load(&full[warp]);
  const typename Passes::Edges edges = passes.ask(locate(p, work.first - 1), locate(p, work.first + work.elements()));
  const FlatPlace place = locate(p, work.first + lane * passes.own);
  const Wide gamma = kStep ? cast<Wide>(1.0) : gamma_of<kReverse, Wide>(p, place.row);
  mbarrier_wait(&full[warp], 0);
  const LaneCuts cuts = passes.find_cuts(place, edges.reset_before);
  typename Passes::State at = passes.prepare(edges, passes.pass_of(cuts), gamma);
  const Piece<Wide> piece = passes.total(at, cuts, [&] { return passes.powers_of(gamma); });
  if (lane == 31) pieces[warp] = piece;
  __syncthreads();
  Wide carry = cast<Wide>(0.0);
  for (int w = 0; w < warp; ++w) carry = after(pieces[w], carry);

  RowSums<Passes> rows{passes, 0, 0};
  if constexpr (kBackward && !kStep) {
    rows.first_row = (low - p.phase) / p.problem.length;
    rows.end_row = (high - p.phase) / p.problem.length;
  }
  const LaneSums<Acc> sums =
      passes.finish(at, cuts, carry, [&](int64_t row, Acc sum) { rows.write(row, cast<Wide>(sum)); });
  work.store();
  if constexpr (kBackward && !kStep) {
    // The lanes' sums up to their own, as far back as the nearest start of a row.
    __shared__ Wide warp_sums[kFlatWarps];
    __shared__ bool warp_starts[kFlatWarps];
    const bool starts = (cuts.starts & ((uint64_t{1} << passes.own) - 1)) != 0;
    const uint32_t all = __ballot_sync(0xffffffffu, starts), behind = all & (0xffffffffu >> (31 - lane));
    const int reach = behind ? lane - (31 - __clz(behind)) : lane;
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
      for (int w = 0; w < warp; ++w) into = warp_starts[w] ? warp_sums[w] : into + warp_sums[w];
      before = into + before;
    }
    if (starts) rows.write(cuts.row, before + cast<Wide>(sums.head));
  }
  if (lane == 0) wait_for_stores_to_read();
}

}  // namespace dcs
