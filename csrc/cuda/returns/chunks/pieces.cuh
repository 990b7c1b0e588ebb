// Pieces of sequences, scanned across a warp: lanes are parts one after the other, of one sequence after the other.
#pragma once

#include "scan/carry/segment.cuh"

namespace dcs {

// `piece` as it continues `before`.
__device__ __forceinline__ Piece<double> continued(const Piece<double>& piece, const Piece<double>& before) {
  if (piece.closed) return piece;
  return {fold(piece.total, piece.gates, before.total), clamped_mul(piece.gates, before.gates), before.closed};
}

// A warp's pieces, each with those before it back to where its sequence begins.
__device__ __forceinline__ void scan_pieces(Piece<double>& piece, bool& begins) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const Piece<double> other{shuffle_up(piece.total, d), shuffle_up(piece.gates, d),
        static_cast<bool>(__shfl_up_sync(0xffffffffu, piece.closed, d))};
    const bool other_begins = __shfl_up_sync(0xffffffffu, begins, d);
    if (lane >= d && !begins) {
      piece = continued(piece, other);
      begins = other_begins;
    }
  }
}
// The same of totals that powers over 1, 2, 4, ... of them take a carry over. `stops`: nothing is carried into a lane.
// Whether a lane and those before it all have something carried into them.
template <int kLanes>
__device__ __forceinline__ bool scan_totals(double& total, bool stops, const double* powers) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t stopped = __ballot_sync(0xffffffffu, stops) & (0xffffffffu >> (31 - lane));
  const int reach = stopped ? lane - 31 + __clz(static_cast<int>(stopped)) : lane;
#pragma unroll
  for (int k = 0; 1 << k < kLanes; ++k) {
    const double before = shuffle_up(total, 1 << k);
    if (1 << k <= reach) total = fold(total, powers[k], before);
  }
  return stopped == 0;
}

}  // namespace dcs
