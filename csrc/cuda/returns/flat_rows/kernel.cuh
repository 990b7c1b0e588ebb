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
  using Acc = typename Lane::Acc;
  extern __shared__ __align__(128) unsigned char flat_returns_shared[];
  __shared__ uint64_t full[kFlatReturnsWarps];
  __shared__ Piece<double> pieces[kFlatReturnsWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
            warps = static_cast<int>(blockDim.x) / 32;
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
  Lane steps(slice, flat_returns_shared + p.rows_at);
  steps.find_rows();
  __syncwarp();
  mbarrier_wait(&full[warp], 0);
  steps.find_cuts();
  typename Lane::Differences differences;
  double gates = 1.0;
  const double total = static_cast<double>(steps.total(differences, gates));
  FlatCarry carry;
  const Piece<double> piece = steps.exchange(total, gates, carry);
  if (lane == 0) pieces[warp] = piece;
  __syncthreads();
  double before = 0.0, weight = 1.0;
#pragma unroll 1
  for (int w = warp + 1; w < warps; ++w) {
    const Piece<double> next = pieces[w];
    before = fold(before, weight, next.total);
    if (next.closed) break;
    weight = clamped_mul(weight, next.gates);
  }
  steps.finish(differences, static_cast<Acc>(carry.enters ? fold(carry.before, carry.weight, before) : carry.before));
  slice.store();
}

}  // namespace dcs
