// Where the operands of a tile of columns lie in shared memory, each of which is one piece of memory
// (cuda/returns/tile_columns/flat.cuh). Host code without CUDA or torch types.
#pragma once

#include <cstdint>

#include "dcs/returns/plan.h"

namespace dcs {

// Operands, then results.
enum TilePieceOf {
  kRewardsPiece,
  kValuesPiece,
  kNextPiece,
  kRhosPiece,
  kTerminatedPiece,
  kTruncatedPiece,
  kGammaPiece,
  kTracePiece,
  kTileOperands,
  kAdvantagesPiece = kTileOperands,
  kTargetsPiece,
  kPgPiece,
  kTilePieces
};

// Null: not there.
struct TilePiece {
  char* data = nullptr;  // of the whole tensor
  int row_bytes = 0;     // of a step
  int more = 0;          // steps behind a tile that are copied, too
  int slot = 0;          // in shared memory, of the vector of 16 bytes in which the tile begins
};
struct TilePieces {
  TilePiece of[kTilePieces];
  int64_t bytes = 0;
};

// Of a tile of so many steps. A piece begins as far behind a whole vector as it does in memory; results take the place
// of operands that they agree with in that.
inline TilePieces tile_pieces(const ReturnsProblem& p, int64_t steps) {
  TilePieces pieces;
  const int64_t bytes = bytes_of(p.dtype);
  const auto place = [&](TilePiece& piece) {
    piece.slot = static_cast<int>(pieces.bytes);
    pieces.bytes += (piece.row_bytes * (steps + piece.more) + 30) / 16 * 16;
  };
  const auto add = [&](TilePieceOf which, const ReturnsInput& input, int64_t size, int more = 0) {
    if (!input.data) return;
    pieces.of[which] = {static_cast<char*>(const_cast<void*>(input.data)), static_cast<int>(p.inner * size), more, 0};
    place(pieces.of[which]);
  };
  // Values of next states alone are read as the only ones.
  const bool has_own = p.values.data && !p.values_are_next, is_one = !has_own && p.next_values.data;
  add(kRewardsPiece, p.rewards, bytes);
  add(kValuesPiece, is_one ? p.next_values : p.values, bytes, p.next_values.data ? 0 : 1);
  if (!is_one) add(kNextPiece, p.next_values, bytes);
  add(kRhosPiece, p.rhos, bytes);
  add(kTerminatedPiece, p.terminated, p.terminated_is_bool ? 1 : bytes);
  add(kTruncatedPiece, p.truncated, p.truncated_is_bool ? 1 : bytes);
  if (p.gamma.kind == GammaKind::kStep) add(kGammaPiece, p.gamma.tensor, bytes_of(p.gamma.dtype));
  if (p.trace.kind == GammaKind::kStep) add(kTracePiece, p.trace.tensor, bytes_of(p.trace.dtype));
  bool is_taken[kRhosPiece + 1] = {};
  const auto add_result = [&](TilePieceOf which, const ReturnsOutput& output) {
    if (!output.data) return;
    TilePiece& piece = pieces.of[which];
    piece = {static_cast<char*>(output.data), static_cast<int>(p.inner * bytes), 0, 0};
    const auto offset = [](const TilePiece& of) { return reinterpret_cast<uintptr_t>(of.data) % 16; };
    for (int i = 0; i <= kRhosPiece; ++i) {
      if (is_taken[i] || !pieces.of[i].data || offset(pieces.of[i]) != offset(piece)) continue;
      is_taken[i] = true;
      piece.slot = pieces.of[i].slot;
      return;
    }
    place(piece);
  };
  add_result(kAdvantagesPiece, p.advantages);
  add_result(kTargetsPiece, p.targets);
  add_result(kPgPiece, p.pg_advantages);
  return pieces;
}

}  // namespace dcs
