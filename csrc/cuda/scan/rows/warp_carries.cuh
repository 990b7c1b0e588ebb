// The row kernel's (tile_rows.cuh) carry into a warp: across the warps of a block and the blocks of a cluster.
#pragma once

#include "common/ptx/cluster.cuh"
#include "scan/carry/segment.cuh"
#include "scan/rows/lane_scan.cuh"

namespace dcs {

template <typename Kind>
__device__ __forceinline__ double carry_across_warps(
    const RowsTile<Kind>& at, const RowsCuts<Kind>& cuts, const LaneScan<Kind>& lanes) {
  constexpr bool kStep = Kind::kStep;
  constexpr int kChunks = Kind::kChunks;
  const RowsParams& params = at.params;
  const int lane = at.lane, warp = at.warp, warps = at.warps;
  const uint32_t tile = at.tile;
  __shared__ double warp_totals[kMaxWarps];
  __shared__ double warp_gates[kMaxWarps];
  __shared__ bool warp_closed[kMaxWarps];
  double carry = 0.0, warp_power = 1.0;
  if constexpr (!kStep) {
    warp_power = lanes.chunk_gates[0];
#pragma unroll
    for (int e = 1; e < kChunks; e *= 2) warp_power = power_mul(warp_power, warp_power);
  }
  const auto warp_segment = [&](int w) {
    double factor;
    if constexpr (kStep) factor = warp_gates[w];
    else factor = warp_power;
    bool stops = false;
    if constexpr (Kind::kPacked) stops = warp_closed[w];
    return Segment<double>{warp_totals[w], factor, stops};
  };
  Segment<double> mine = lanes.chunk_segment(0, cuts.closed);
#pragma unroll
  for (int k = 1; k < kChunks; ++k) {
    const Segment<double> next = lanes.chunk_segment(k, cuts.closed);
    mine.total = after(next, mine.total);
    if constexpr (kStep) mine.gates = clamped_mul(mine.gates, next.gates);
    mine.closed = mine.closed || next.closed;
  }
  if (lane == 0) {
    warp_totals[warp] = mine.total;
    if constexpr (kStep) warp_gates[warp] = mine.gates;
    if constexpr (Kind::kPacked) warp_closed[warp] = mine.closed;
  }
  __syncthreads();
  if constexpr (!Kind::kPacked) {
    if (params.tiles > 1) {
      // Each block leaves its total with all blocks of its row.
      __shared__ double cluster_totals[kMaxCluster], cluster_gates[kMaxCluster];
      double tile_power = warp_power;
      if constexpr (!kStep)
        for (int e = 1; e < warps; e *= 2) tile_power = power_mul(tile_power, tile_power);
      wait_for_cluster();  // all blocks have started
      if (threadIdx.x < params.tiles) {
        Segment<double> own = warp_segment(0);
        for (int w = 1; w < warps; ++w) {
          const Segment<double> next = warp_segment(w);
          own.total = after(next, own.total);
          if constexpr (kStep) own.gates = clamped_mul(own.gates, next.gates);
        }
        store_in_cluster(&cluster_totals[tile], threadIdx.x, own.total);
        if constexpr (kStep) store_in_cluster(&cluster_gates[tile], threadIdx.x, own.gates);
      }
      arrive_in_cluster();
      wait_for_cluster();
      for (uint32_t t = 0; t < tile; ++t) carry = fold(cluster_totals[t], kStep ? cluster_gates[t] : tile_power, carry);
    }
  }
  for (int w = 0; w < warp; ++w) carry = after(warp_segment(w), carry);
  return carry;
}

}  // namespace dcs
