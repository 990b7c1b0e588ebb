// The temporal difference scan of contiguous time, whatever the rows' length and alignment: they are one flat sequence,
// of which a block takes whole rows and a warp a slice that comes to shared memory and goes from there in whole
// vectors. Of longer rows each is a cluster's, whose blocks wait for each other alone; of those that no cluster holds
// blocks take tiles and look back in global memory (links.cuh).
#pragma once

#include "common/ptx/cluster.cuh"
#include "common/ptx/dependent_launch.cuh"
#include "returns/flat_rows/lane.cuh"

namespace dcs {

// Some of the segments of a row in order of time as one, up to the first that is closed: what lies behind it is not
// seen.
template <typename Wide>
__device__ __forceinline__ Segment<Wide> joined(const Segment<Wide>* segments, int begin, int end) {
  Segment<Wide> all{0, 1, false};
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const Segment<Wide> next = segments[i];
    all.total = fold(all.total, all.gates, next.total);
    all.closed = next.closed;
    if (all.closed) break;
    if constexpr (std::is_same_v<Wide, float>) all.gates *= next.gates;
    else all.gates = clamped_mul(all.gates, next.gates);
  }
  return all;
}

// What the blocks of a row publish to each other, in shared memory.
template <typename Wide>
struct FlatCluster {
  Segment<Wide> own;
  Segment<Wide> blocks[kMostFlatReturnsCluster];

  // The carry into the block, by all threads. It stays until all have read (`leave`).
  __device__ __forceinline__ Wide enter(const Segment<Wide>* warps, int rank, int count) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) own = joined(warps, 0, static_cast<int>(blockDim.x / 32));
    arrive_in_cluster();
    wait_for_cluster();
    if (thread < count) blocks[thread] = in_cluster(own, static_cast<uint32_t>(thread));
    __syncthreads();
    arrive_in_cluster_relaxed();
    return joined(blocks, rank + 1, count).total;
  }
  static __device__ __forceinline__ void leave() {
    __syncwarp();
    wait_for_cluster();
  }
};

template <typename T, FlatForm kForm, int kVectors>
__global__ void __launch_bounds__(32 * flat_returns_warps(kForm), kFlatReturnsBlocks)
    flat_returns_kernel(const __grid_constant__ FlatReturnsParams<T> p) {
  using Lane = FlatLane<T, kForm, kVectors>;
  using Wide = typename Lane::Wide;
  extern __shared__ __align__(128) unsigned char flat_returns_shared[];
  __shared__ uint64_t full[flat_returns_warps(kForm)];
  __shared__ Segment<Wide> segments[flat_returns_warps(kForm)];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32),
            warps = static_cast<int>(blockDim.x / 32);
  const FlatTileRows tile(p);
  const FlatSlice<T, kVectors> slice{p, tile, flat_returns_shared + warp * p.warp_bytes, warp, lane};
  launch_dependents();
  if (lane == 0) {
    mbarrier_init(&full[warp], slice.arrivals(p));
    mbarrier_fence_init();
  }
  __syncwarp();
  griddepcontrol_wait();
  slice.load(&full[warp]);
  __shared__ uint64_t tag;
  if (p.is_linked && threadIdx.x == 0) tag = tag_of_launch(p.links.call);
  Lane at(slice, flat_returns_shared + p.rows_at);
  at.find_rows();
  __syncwarp();
  mbarrier_wait(&full[warp], 0);
  at.find_cuts();
  typename Lane::Steps steps;
  double gates = 1.0;
  const auto total = at.total(steps, gates);
  FlatCarry<Wide> carry;
  const Segment<Wide> segment = at.exchange(static_cast<Wide>(total), static_cast<Wide>(gates), carry);
  if (lane == 0) segments[warp] = segment;
  __syncthreads();
  __shared__ FlatCluster<Wide> cluster;
  Wide behind = 0;
  if (p.cluster > 1) {
    behind = cluster.enter(segments, tile.rank, p.cluster);
  } else if (p.is_linked) {
    if (warp == 0) {
      const Segment<Wide> own = joined(segments, 0, warps);
      const double carry = p.links.enter({own.total, own.gates, own.closed}, tile.row, tile.number, tag);
      if (lane == 0) cluster.own.total = static_cast<Wide>(carry);
    }
    __syncthreads();
    behind = cluster.own.total;
  }
  behind = after(joined(segments, warp + 1, warps), behind);
  at.finish(steps, static_cast<typename Lane::Acc>(carry.from(behind)));
  slice.store();
  if (p.cluster > 1) FlatCluster<Wide>::leave();
}

}  // namespace dcs
