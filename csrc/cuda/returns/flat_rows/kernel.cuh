// The temporal difference scan of contiguous time, where rows fit into a block, whatever their length and alignment:
// they are one flat sequence, of which a block takes whole rows and a warp a slice that comes to shared memory and goes
// from there in whole vectors. No block waits for another.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "returns/flat_rows/lane.cuh"

namespace dcs {

// Blocks of a multiprocessor for whose registers there is room.
constexpr int flat_returns_blocks(FlatForm form) { return form == FlatForm::kOwn || form == FlatForm::kLambda ? 2 : 1; }

template <typename T, FlatForm kForm, int kVectors>
__global__ void __launch_bounds__(32 * kFlatReturnsWarps, flat_returns_blocks(kForm))
    flat_returns_kernel(const __grid_constant__ FlatReturnsParams<T> p) {
  using Lane = FlatLane<T, kForm, kVectors>;
  using Wide = typename Lane::Wide;
  extern __shared__ __align__(128) unsigned char flat_returns_shared[];
  __shared__ uint64_t full[kFlatReturnsWarps];
  __shared__ Piece<Wide> pieces[kFlatReturnsWarps];
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
  Lane at(slice, flat_returns_shared + p.rows_at);
  at.find_rows();
  __syncwarp();
  mbarrier_wait(&full[warp], 0);
  at.find_cuts();
  typename Lane::Steps steps;
  double gates = 1.0;
  const auto total = at.total(steps, gates);
  FlatCarry<Wide> carry;
  const Piece<Wide> piece = at.exchange(static_cast<Wide>(total), static_cast<Wide>(gates), carry);
  if (lane == 0) pieces[warp] = piece;
  __syncthreads();
  Wide behind = 0, weight = 1;
#pragma unroll 1
  for (int w = warp + 1; w < warps; ++w) {
    const Piece<Wide> next = pieces[w];
    behind = fold(behind, weight, next.total);
    if (next.closed) break;
    if constexpr (std::is_same_v<Wide, float>) weight *= next.gates;
    else weight = clamped_mul(weight, next.gates);
  }
  at.finish(steps, static_cast<typename Lane::Acc>(carry.from(behind)));
  slice.store();
}

}  // namespace dcs
