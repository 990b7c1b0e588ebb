// Where a tile of the row kernel (tile_rows.cuh) and a thread's vectors in it lie.
#pragma once

#include "common/element_types.cuh"
#include "common/row_offset.cuh"
#include "common/vector.cuh"
#include "dcs/scan/plan/tuning.h"
#include "dcs/scan/problem.h"

namespace dcs {

constexpr int kMaxWarps = 2 * kTileWarps;

struct RowsParams {
  ScanProblem problem;
  int64_t tiles;         // of a row, the blocks of a cluster
  int64_t padded;        // a row's length in whole vectors
  uint32_t whole_begin;  // tiles whole_begin .. whole_end - 1 have no position outside their row
  uint32_t whole_end;
};

// What the parts of a row kernel have in common. The direction is fixed, which saves a tenth of the instructions.
template <typename T_, bool kStep_, bool kReverse_>
struct RowsKind {
  using T = T_;
  static constexpr bool kStep = kStep_, kReverse = kReverse_, kShort = sizeof(T) == 2;
  static constexpr int kVec = 16 / sizeof(T), kChunks = kRowChunks;
};

// A tile is a row, or its part for a block of a cluster. A row is memory [0, length). Scan position s of this tile lies
// at memory position s, or extent - 1 - s, behind `base`; vectors are aligned in memory, so a reversed row starts `pad`
// positions early. All positions are relative to the tile.
template <typename Kind>
struct RowsTile {
  static constexpr int kVec = Kind::kVec, kChunks = Kind::kChunks;
  const RowsParams& params;
  const ScanProblem& p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int extent = warps * kChunks * 32 * kVec;  // elements of the tile
  const int first_vector = warp * kChunks * 32 + lane;
  bool whole;  // no position outside its row
  uint32_t tile = 0;
  int64_t row, outer, inner;
  int64_t start, base;
  int pad, low = 0, high;  // positions low .. high - 1 in memory exist

  __device__ __forceinline__ explicit RowsTile(const RowsParams& of) : params(of), p(of.problem) {
    const uint32_t block = blockIdx.x;
    row = block;
    if (params.tiles > 1) {  // the blocks of a cluster
      row = block / static_cast<uint32_t>(params.tiles);
      tile = block - static_cast<uint32_t>(row) * static_cast<uint32_t>(params.tiles);
    }
    outer = p.inner == 1 ? row : row / p.inner;
    inner = p.inner == 1 ? 0 : row - outer * p.inner;
    whole = tile >= params.whole_begin && tile < params.whole_end;
    start = static_cast<int64_t>(tile) * extent;
    base = is_reverse() ? params.padded - start - extent : start;
    pad = is_reverse() ? static_cast<int>(params.padded - p.length) : 0;
    high = extent;
    if (!whole) {
      low = static_cast<int>(max(int64_t{0}, -base));
      high = static_cast<int>(min(static_cast<int64_t>(extent), p.length - base));
    }
  }

  __device__ __forceinline__ bool is_reverse() const { return Kind::kReverse; }

  // Of a thread's k-th vector.
  __device__ __forceinline__ int position(int k) const { return (first_vector + k * 32) * kVec; }
  __device__ __forceinline__ int address(int k) const {
    return is_reverse() ? extent - kVec - position(k) : position(k);
  }
  __device__ __forceinline__ int apart() const {
    return is_reverse() ? -32 * kVec : 32 * kVec;
  }  // from one to the next, in memory

  __device__ __forceinline__ bool inside(int s) const {
    const int at = is_reverse() ? extent - 1 - s : s;
    return at >= low && at < high;
  }
  // Whether its row starts with element i of a thread's k-th vector.
  __device__ __forceinline__ bool starts(int k, int i) const {
    return k == 0 && tile == 0 && first_vector == 0 && i == pad;
  }
  template <typename Pointer>
  __device__ __forceinline__ Pointer tile_of(Pointer pointer, const Strides& strides) const {
    int64_t offset = outer * strides.outer + base;
    if (p.inner > 1) offset += inner * strides.inner;
    return pointer + offset;
  }
};

}  // namespace dcs
