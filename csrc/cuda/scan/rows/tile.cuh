// Where a tile of the row kernel (tile_rows.cuh) and a thread's vectors in it lie, and where rows start.
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
  int64_t tiles;  // tiles of a row, the blocks of a cluster; 1 when packed
  int64_t rows;
  int64_t packed_rows;   // rows in a tile when rows are short and contiguous, else 0
  int64_t length;        // of a row, or of a tile's packed rows
  int64_t padded;        // that in whole vectors
  uint32_t whole_begin;  // tiles (packed: blocks) whole_begin .. whole_end - 1 have no position outside their rows
  uint32_t whole_end;
};

// What the parts of a row kernel have in common. The direction is fixed, which saves a tenth of the instructions.
// kPacked: a tile is whole short rows of whole vectors with one gamma, and the carry is cut at vectors. Else it is a
// row, or its part for a block of a cluster.
template <typename T_, bool kStep_, bool kPacked_, bool kReverse_>
struct RowsKind {
  using T = T_;
  static constexpr bool kStep = kStep_, kReverse = kReverse_, kShort = sizeof(T) == 2;
  static constexpr int kVec = 16 / sizeof(T), kChunks = kRowChunks;
  static constexpr bool kPacked = kPacked_;
  static_assert(!(kStep && kPacked));
};

// A row, or the packed rows as one, is memory [0, length). Scan position s of this tile lies at memory position s, or
// extent - 1 - s, behind `base`; vectors are aligned in memory, so a reversed row starts `pad` positions early. All
// positions are relative to the tile.
template <typename Kind>
struct RowsTile {
  static constexpr int kVec = Kind::kVec, kChunks = Kind::kChunks;
  static constexpr bool kPacked = Kind::kPacked;
  const RowsParams& params;
  const ScanProblem& p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int extent = warps * kChunks * 32 * kVec;  // elements of the tile
  const int first_vector = warp * kChunks * 32 + lane;
  bool whole;  // no position outside its rows
  uint32_t tile = 0;
  int64_t row, outer, inner;
  int64_t length, start, base;
  int pad, low = 0, high;  // positions low .. high - 1 in memory exist
  int time;                // of a packed row
  int rows_here;

  __device__ __forceinline__ explicit RowsTile(const RowsParams& of) : params(of), p(of.problem) {
    const uint32_t block = blockIdx.x;
    row = block;
    if (kPacked) {
      row *= params.packed_rows;
    } else if (params.tiles > 1) {  // the blocks of a cluster
      row = block / static_cast<uint32_t>(params.tiles);
      tile = block - static_cast<uint32_t>(row) * static_cast<uint32_t>(params.tiles);
    }
    outer = p.inner == 1 ? row : row / p.inner;
    inner = p.inner == 1 ? 0 : row - outer * p.inner;
    const uint32_t number = kPacked ? block : tile;
    whole = number >= params.whole_begin && number < params.whole_end;
    length = params.length;
    int64_t padded = params.padded;
    if (kPacked && !whole) {  // the last rows
      length = min(params.rows - row, params.packed_rows) * p.length;
      padded = (length + kVec - 1) / kVec * kVec;
    }
    start = static_cast<int64_t>(tile) * extent;
    base = is_reverse() ? padded - start - extent : start;
    pad = is_reverse() ? static_cast<int>(padded - length) : 0;
    high = extent;
    if (!whole) {
      low = static_cast<int>(max(int64_t{0}, -base));
      high = static_cast<int>(min(static_cast<int64_t>(extent), length - base));
    }
    time = static_cast<int>(min(p.length, int64_t{1} << 30));
    rows_here = kPacked ? static_cast<int>(length) / time : 1;
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
  // The r-th packed row that the scan meets.
  __device__ __forceinline__ int64_t packed_row(int r) const {
    return is_reverse() ? row + rows_here - 1 - r : row + r;
  }
  template <typename Pointer>
  __device__ __forceinline__ Pointer tile_of(Pointer pointer, const Strides& strides) const {
    int64_t offset = outer * strides.outer + base;
    if (p.inner > 1) offset += inner * strides.inner;
    return pointer + offset;
  }
};

// Where rows start.
template <typename Kind>
struct RowsCuts {
  static constexpr int kVec = Kind::kVec, kChunks = Kind::kChunks;
  int reach[kChunks] = {};  // how many lanes back the carry of this lane's last element comes from
  uint32_t open = 0;        // bit k: the carry into chunk k enters this lane
  uint32_t closed = 0;      // bit k: and does not leave the chunk

  // Whether no carry enters element i.
  __device__ __forceinline__ bool is_cut(const RowsTile<Kind>& at, int k, int i) const {
    if constexpr (Kind::kPacked) return i == 0 && !(open >> k & 1) && reach[k] == 0;
    else return k == 0 && at.tile == 0 && at.first_vector == 0 && i == at.pad;
  }

  __device__ __forceinline__ explicit RowsCuts(const RowsTile<Kind>& at) {
    const int lane = at.lane;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if constexpr (!Kind::kPacked) {
        reach[k] = lane;
        open |= 1u << k;
      } else {
        const int before = static_cast<int>(static_cast<uint32_t>(at.position(k)) % static_cast<uint32_t>(at.time)) /
            kVec;  // vectors of its row before it
        reach[k] = min(lane, before);
        if (before > lane) open |= 1u << k;
        if (__any_sync(0xffffffffu, before <= lane)) closed |= 1u << k;
      }
    }
  }
};

}  // namespace dcs
