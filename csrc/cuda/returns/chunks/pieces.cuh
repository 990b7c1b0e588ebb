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
// The same where one power takes a carry over any part; `before`: parts before, in the sequence and the warp.
__device__ __forceinline__ void scan_totals(Piece<double>& piece, bool& begins, double power, int before) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double reach = power;
  piece.gates = power;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const double total = shuffle_up(piece.total, d);
    const int state = __shfl_up_sync(0xffffffffu, (piece.closed ? 2 : 0) | (begins ? 1 : 0), d);
    if (lane >= d && !begins) {
      if (!piece.closed) {
        piece.total = fold(piece.total, reach, total);
        piece.closed = state & 2;
      }
      begins = state & 1;
    }
    if (before & d) piece.gates = clamped_mul(piece.gates, reach);
    reach = clamped_mul(reach, reach);
  }
}

}  // namespace dcs
