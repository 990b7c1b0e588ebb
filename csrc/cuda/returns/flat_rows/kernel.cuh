// The temporal difference scan of contiguous time, whatever the rows' length and alignment: they are one flat sequence,
// of which a block takes whole rows and a warp a slice that comes to shared memory and goes from there in whole
// vectors. Of longer rows each is a cluster's, whose blocks wait for each other alone; of those that no cluster holds
// blocks take tiles and look back in global memory (links.cuh).
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "returns/flat_rows/lane.cuh"
#include "scan/carry/cluster_segments.cuh"

namespace dcs {

// Segments of a row from the `first` on, `apart` from each other, as one, up to the first that is closed: what lies
// behind it is not seen.
template <typename Wide>
__device__ __forceinline__ Segment<Wide> joined(const Segment<Wide>* segments, int first, int end, int apart) {
  Segment<Wide> all{0, 1, false};
#pragma unroll 1
  for (int i = first; i != end; i += apart) {
    const Segment<Wide> next = segments[i];
    all.total = fold(all.total, all.gates, next.total);
    all.closed = next.closed;
    if (all.closed) break;
    if constexpr (std::is_same_v<Wide, float>) all.gates *= next.gates;
    else all.gates = power_mul(all.gates, next.gates);
  }
  return all;
}
// Those of all, and those that are scanned before the `rank`th, of `count` in order of time.
template <bool kGoesBack, typename Wide>
__device__ __forceinline__ Segment<Wide> all_joined(const Segment<Wide>* segments, int count) {
  return kGoesBack ? joined(segments, 0, count, 1) : joined(segments, count - 1, -1, -1);
}
template <bool kGoesBack, typename Wide>
__device__ __forceinline__ Segment<Wide> joined_before(const Segment<Wide>* segments, int rank, int count) {
  return kGoesBack ? joined(segments, rank + 1, count, 1) : joined(segments, rank - 1, -1, -1);
}

// What the blocks of a row leave each other, in shared memory.
template <typename Wide, bool kGoesBack>
struct FlatCluster : ClusterSegments<Wide, kMostFlatReturnsCluster> {
  static __device__ __forceinline__ int blocks_before(int rank, int count) {
    return kGoesBack ? count - 1 - rank : rank;
  }
  // The carry into the block, whose segment is `own`, by all threads.
  __device__ __forceinline__ Wide enter(const Segment<Wide>& own, int rank, int count) {
    const int thread = static_cast<int>(threadIdx.x);
    wait_for_cluster();
    if (kGoesBack ? thread < rank : thread > rank && thread < count) this->store(own, rank, thread);
    this->wait();
    return joined_before<kGoesBack>(this->of_blocks, rank, count).total;
  }
};

// What a Lane makes of its steps (lane.cuh, gradients/flat_rows.cuh), in blocks of at most kWarps.
template <typename Lane, int kWarps, typename Params>
__device__ __forceinline__ void run_flat_rows(const Params& p) {
  using Wide = typename Lane::Wide;
  constexpr bool kGoesBack = Lane::kGoesBack;
  extern __shared__ __align__(128) unsigned char flat_returns_shared[];
  __shared__ uint64_t full[kWarps];
  __shared__ Segment<Wide> segments[kWarps];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32),
            warps = static_cast<int>(blockDim.x / 32);
  const FlatTileRows tile(p);
  const typename Lane::Slice slice{p, tile, flat_returns_shared + warp * p.warp_bytes, warp, lane};
  launch_dependents();
  __shared__ FlatCluster<Wide, kGoesBack> cluster;
  if (p.cluster > 1) cluster.init(cluster.blocks_before(tile.rank, p.cluster));
  if (lane == 0) {
    mbarrier_init(&full[warp], slice.arrivals(p));
    mbarrier_fence_init();
  }
  __syncwarp();
  griddepcontrol_wait();
  slice.load(&full[warp]);
  __shared__ uint64_t tag;
  if (p.is_linked && threadIdx.x == 0) tag = tag_of_launch(p.links.call);
  Lane at(p, slice, flat_returns_shared + p.rows_at);
  at.find_rows();
  __syncwarp();
  mbarrier_wait(&full[warp], 0);
  at.find_cuts();
  typename Lane::Steps steps;
  double gates = 1.0;
  const auto total = at.total(steps, gates);
  FlatCarry<Wide> carry;
  const Segment<Wide> segment = at.exchange(static_cast<Wide>(total), static_cast<Wide>(gates), carry);
  if (lane == (kGoesBack ? 0 : 31)) segments[warp] = segment;
  __syncthreads();
  __shared__ Wide linked;
  Wide behind = 0;
  Segment<Wide> own{};
  if (warp == 0 && (p.cluster > 1 || p.is_linked)) own = all_joined<kGoesBack>(segments, warps);
  if (p.cluster > 1) {
    behind = cluster.enter(own, tile.rank, p.cluster);
  } else if (p.is_linked) {
    if (warp == 0) {
      const double carry = p.links.enter({own.total, own.gates, own.closed}, tile.row, tile.number, tag);
      if (lane == 0) linked = static_cast<Wide>(carry);
    }
    __syncthreads();
    behind = linked;
  }
  behind = after(joined_before<kGoesBack>(segments, warp, warps), behind);
  at.finish(steps, static_cast<typename Lane::Acc>(carry.from(behind)));
  slice.store();
}

template <typename T, FlatForm kForm, int kVectors>
__global__ void __launch_bounds__(32 * flat_returns_warps(kForm), kFlatReturnsBlocks)
    flat_returns_kernel(const __grid_constant__ FlatReturnsParams<T> p) {
  run_flat_rows<FlatLane<T, kForm, kVectors>, flat_returns_warps(kForm)>(p);
}

}  // namespace dcs
