// The row kernel's (tile_rows.cuh) carry into a warp: across the warps of a block, the blocks of a cluster and the
// tiles of a row.
#pragma once

#include "common/ptx/cluster.cuh"
#include "scan/carry/lookback.cuh"
#include "scan/rows/lane_scan.cuh"

namespace dcs {

template <typename Kind>
__device__ __forceinline__ typename Kind::Wide carry_across_warps(
    const RowsTile<Kind>& at, const RowsCuts<Kind>& cuts, const LaneScan<Kind>& lanes) {
  using Wide = typename Kind::Wide;
  constexpr bool kByChunk = Kind::kByChunk, kStep = Kind::kStep;
  constexpr int kChunks = Kind::kChunks;
  const RowsParams& params = at.params;
  const int lane = at.lane, warp = at.warp, warps = at.warps;
  const uint32_t tile = at.tile;
  __shared__ Wide warp_totals[kMaxWarps];
  __shared__ Wide warp_gates[kMaxWarps];
  __shared__ bool warp_closed[kMaxWarps];
  Wide carry = cast<Wide>(0.0), warp_power = cast<Wide>(1.0);
  if constexpr (!kByChunk) {
    warp_power = lanes.chunk_gates[0];
#pragma unroll
    for (int e = 1; e < kChunks; e *= 2) warp_power = power_mul(warp_power, warp_power);
  }
  const auto warp_piece = [&](int w) {
    Wide factor;
    if constexpr (kByChunk) factor = warp_gates[w];
    else factor = warp_power;
    bool stops = false;
    if constexpr (!Kind::kPlain) stops = warp_closed[w];
    return Piece<Wide>{warp_totals[w], factor, stops};
  };
  Piece<Wide> mine = lanes.chunk_piece(0, cuts.closed);
#pragma unroll
  for (int k = 1; k < kChunks; ++k) {
    const Piece<Wide> next = lanes.chunk_piece(k, cuts.closed);
    mine.total = after(next, mine.total);
    if constexpr (kByChunk) mine.gates = clamped_mul(mine.gates, next.gates);
    mine.closed = mine.closed || next.closed;
  }
  if (lane == 0) {
    warp_totals[warp] = mine.total;
    if constexpr (kByChunk) warp_gates[warp] = mine.gates;
    if constexpr (!Kind::kPlain) warp_closed[warp] = mine.closed;
  }
  __syncthreads();
  if constexpr (Kind::kPlain) {
    if (params.tiles > 1) {
      // Each block leaves its total with all blocks of its row.
      __shared__ Wide cluster_totals[kMaxCluster], cluster_gates[kMaxCluster];
      Wide tile_power = warp_power;
      if constexpr (!kStep)
        for (int e = 1; e < warps; e *= 2) tile_power = power_mul(tile_power, tile_power);
      wait_for_cluster();  // all blocks have started
      if (threadIdx.x < params.tiles) {
        Piece<Wide> own = warp_piece(0);
        for (int w = 1; w < warps; ++w) {
          const Piece<Wide> next = warp_piece(w);
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
  if constexpr (Kind::kGeneral) {
    if (params.tiles > 1) {
      __shared__ Wide groups_carry;
      __shared__ Piece<Wide> group_before, tiles_before;
      Status<Wide>* statuses = static_cast<Status<Wide>*>(params.statuses);
      const Chain<Wide> chain{statuses + at.row * params.tiles,
          statuses + params.rows * params.tiles + at.row * params.groups, tile, params.tiles};
      Piece<Wide> own, whole_group;
      if (warp == 0) {
        own = warp_piece(0);
        for (int w = 1; w < kTileWarps; ++w) {  // a chain's tiles are full
          const Piece<Wide> next = warp_piece(w);
          own.total = after(next, own.total);
          own.gates = clamped_mul(own.gates, next.gates);
          own.closed = own.closed || next.closed;
        }
        if (lane == 0) chain.publish(own);
        const Piece<Wide> before = chain.fold_before(own, whole_group, lane);
        if (lane == 0) tiles_before = before;
      } else if (warp == 1) {
        const Wide prefix = chain.groups_before(lane);
        if (lane == 0) groups_carry = prefix;
      } else if (warp == 2) {
        const Piece<Wide> before = chain.group_before(lane);
        if (lane == 0) group_before = before;
      }
      __syncthreads();
      const Wide prefix = after(group_before, groups_carry);
      if (chain.closes_group() && threadIdx.x == 0) chain.publish_prefix(whole_group, prefix);
      carry = after(tiles_before, prefix);
    }
  }
  for (int w = 0; w < warp; ++w) carry = after(warp_piece(w), carry);
  return carry;
}

}  // namespace dcs
