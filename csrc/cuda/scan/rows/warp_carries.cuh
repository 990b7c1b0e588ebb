// The row kernel's (tile_rows.cuh) carry into a warp: across the warps of a block and the blocks of a cluster.
#pragma once

#include "scan/carry/cluster_segments.cuh"
#include "scan/rows/lane_scan.cuh"

namespace dcs {

using TileSegments = ClusterSegments<double, kMaxCluster>;

template <typename Kind>
__device__ __forceinline__ double carry_across_warps(
    const RowsTile<Kind>& at, const LaneScan<Kind>& lanes, TileSegments& cluster) {
  constexpr bool kStep = Kind::kStep;
  constexpr int kChunks = Kind::kChunks;
  const RowsParams& params = at.params;
  const int lane = at.lane, warp = at.warp, warps = at.warps;
  const uint32_t tile = at.tile;
  __shared__ double warp_totals[kMaxWarps];
  __shared__ double warp_gates[kMaxWarps];
  double carry = 0.0, warp_power = 1.0;
  if constexpr (!kStep) {
    warp_power = lanes.chunk_gates[0];
#pragma unroll
    for (int e = 1; e < kChunks; e *= 2) warp_power = power_mul(warp_power, warp_power);
  }
  const auto gates_of_warp = [&](int w) {
    if constexpr (kStep) return warp_gates[w];
    else return warp_power;
  };
  double total = lanes.total_of(0), gates = lanes.gates_of(0);
#pragma unroll
  for (int k = 1; k < kChunks; ++k) {
    total = fold(lanes.total_of(k), lanes.gates_of(k), total);
    if constexpr (kStep) gates = clamped_mul(gates, lanes.gates_of(k));
  }
  if (lane == 0) {
    warp_totals[warp] = total;
    if constexpr (kStep) warp_gates[warp] = gates;
  }
  __syncthreads();
  if (params.tiles > 1) {
    // Each block leaves its total with all later blocks of its row.
    double tile_power = warp_power;
    if constexpr (!kStep)
      for (int e = 1; e < warps; e *= 2) tile_power = power_mul(tile_power, tile_power);
    wait_for_cluster();  // until the others' barriers are ready
    if (threadIdx.x > tile && threadIdx.x < params.tiles) {
      double own_total = warp_totals[0], own_gates = gates_of_warp(0);
      for (int w = 1; w < warps; ++w) {
        own_total = fold(warp_totals[w], gates_of_warp(w), own_total);
        if constexpr (kStep) own_gates = clamped_mul(own_gates, warp_gates[w]);
      }
      cluster.store({own_total, own_gates, false}, static_cast<int>(tile), static_cast<int>(threadIdx.x));
    }
    cluster.wait();
    for (uint32_t t = 0; t < tile; ++t) {
      const Segment<double>& before = cluster.of_blocks[t];
      carry = fold(before.total, kStep ? before.gates : tile_power, carry);
    }
  }
  for (int w = 0; w < warp; ++w) carry = fold(warp_totals[w], gates_of_warp(w), carry);
  return carry;
}

}  // namespace dcs
