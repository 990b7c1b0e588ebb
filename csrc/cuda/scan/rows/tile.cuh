// Where a tile of the row kernel (tile_rows.cuh) and a thread's vectors in it lie, and where the carry is cut.
#pragma once

#include "dcs/scan/plan/aligned.h"
#include "common/element_types.cuh"
#include "common/vector.cuh"

namespace dcs {

constexpr int kMaxWarps = 2 * kTileWarps;

struct RowsParams {
  ScanProblem problem;
  int64_t tiles;  // tiles of a row; 1 when packed
  int64_t rows;
  int64_t packed_rows;   // rows in a tile when rows are short and contiguous, else 0
  int64_t length;        // of a row, or of a tile's packed rows
  int64_t padded;        // that in whole vectors
  uint32_t whole_begin;  // tiles (packed: blocks) whole_begin .. whole_end - 1 have no position outside their rows
  uint32_t whole_end;
  bool one_gamma;  // of all rows
  void* statuses;  // look-back: tiles * rows, then groups * rows
  int64_t groups;
};

// What cuts a kernel looks for.
enum class Cuts {
  kPlain,       // a row is one tile, or those of a cluster of blocks: its start
  kPacked,      // whole short rows of whole vectors, one gamma or step gammas: starts at vectors
  kPackedEach,  // the same with a gamma for each row
  kGeneral,     // resets, initial values, short rows of any length, unaligned rows
};

// The general kernel reads its direction from the problem; in the others it is fixed, which saves a tenth of their
// instructions.
enum class Direction { kLeft, kRight, kEither };

// Vectors of a thread (plan/aligned.h, warp_elements). The registers they take bound how many blocks are in flight.
template <typename T>
constexpr int kChunksOf = sizeof(T) > 8 ? 2 : 4;

// What the parts of a row kernel have in common.
template <typename T_, bool kStep_, Cuts kCuts_, int kVec_, Direction kDirection_>
struct RowsKind {
  using T = T_;
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  static constexpr bool kStep = kStep_, kShort = sizeof(T) == 2;
  static constexpr Cuts kCuts = kCuts_;
  static constexpr Direction kDirection = kDirection_;
  static constexpr int kVec = kVec_, kChunks = kChunksOf<T>;
  static constexpr bool kPlain = kCuts == Cuts::kPlain, kGeneral = kCuts == Cuts::kGeneral,
                        kPackedEach = kCuts == Cuts::kPackedEach;
  static constexpr bool kAtVectors = kCuts == Cuts::kPacked || kPackedEach;
  static constexpr bool kByChunk =
      kStep || kGeneral || kPackedEach;  // products of gates are not the same in all chunks
};

// A row, or the packed rows as one, is memory [0, length). Scan position s of this tile lies at memory position s, or
// extent - 1 - s, behind `base`; vectors are aligned in memory, so a reversed row starts `pad` positions early. All
// positions are relative to the tile.
template <typename Kind>
struct RowsTile {
  static constexpr int kVec = Kind::kVec, kChunks = Kind::kChunks;
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
    const bool reverse = is_reverse(), packed = is_packed();
    // Blocks take the first tiles of all rows, then the second tiles, ...: a tile's predecessors in its row have mostly
    // finished before it starts.
    row = block;
    if (packed) {
      row *= params.packed_rows;
    } else if (Kind::kGeneral && params.tiles > 1) {
      tile = block / static_cast<uint32_t>(params.rows);
      row = block - tile * static_cast<uint32_t>(params.rows);
    } else if (Kind::kPlain && params.tiles > 1) {  // the blocks of a cluster
      row = block / static_cast<uint32_t>(params.tiles);
      tile = block - static_cast<uint32_t>(row) * static_cast<uint32_t>(params.tiles);
    }
    outer = p.inner == 1 ? row : row / p.inner;
    inner = p.inner == 1 ? 0 : row - outer * p.inner;
    const uint32_t place = packed ? block : tile;
    whole = place >= params.whole_begin && place < params.whole_end;
    length = params.length;
    int64_t padded = params.padded;
    if (packed && !whole) {  // the last rows
      length = min(params.rows - row, params.packed_rows) * p.length;
      padded = (length + kVec - 1) / kVec * kVec;
    }
    start = static_cast<int64_t>(tile) * extent;
    base = reverse ? padded - start - extent : start;
    pad = reverse ? static_cast<int>(padded - length) : 0;
    high = extent;
    if (!whole) {
      low = static_cast<int>(max(int64_t{0}, -base));
      high = static_cast<int>(min(static_cast<int64_t>(extent), length - base));
    }
    time = static_cast<int>(min(p.length, int64_t{1} << 30));
    rows_here = packed ? static_cast<int>(length) / time : 1;
  }

  // Functions, so that what the kind fixes is a constant from the start.
  __device__ __forceinline__ bool is_reverse() const {
    if constexpr (Kind::kDirection == Direction::kEither) return p.reverse;
    else return Kind::kDirection == Direction::kRight;
  }
  __device__ __forceinline__ bool is_packed() const {
    if constexpr (Kind::kGeneral) return params.packed_rows > 0;
    else return Kind::kAtVectors;
  }

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
  __device__ __forceinline__ int64_t row_of(int s) const {
    if (!is_packed()) return row;
    const int at = is_reverse() ? extent - 1 - s : s;
    return row + (max(low, min(at, high - 1)) + static_cast<int>(base)) / time;
  }
  // The r-th packed row that the scan meets.
  __device__ __forceinline__ int64_t packed_row(int r) const {
    return is_reverse() ? row + rows_here - 1 - r : row + r;
  }
  __device__ __forceinline__ int64_t row_offset(int64_t r, const Strides& strides) const {
    return p.inner == 1 ? r * strides.outer : (r / p.inner) * strides.outer + (r % p.inner) * strides.inner;
  }
  template <typename Pointer>
  __device__ __forceinline__ Pointer tile_of(Pointer pointer, const Strides& strides) const {
    int64_t offset = outer * strides.outer + base;
    if (p.inner > 1) offset += inner * strides.inner;
    return pointer + offset;
  }

  // Packed rows of `span` vectors. Where step gammas' fill a warp's chunks evenly, none crosses into the next chunk;
  // other rows of that kind have a kernel of their own (packed_rows.cuh).
  __device__ __forceinline__ int span() const {
    if constexpr (Kind::kAtVectors) return time / kVec;
    else return 32;
  }
  __device__ __forceinline__ bool alone_in_chunks() const {
    if constexpr (Kind::kStep && Kind::kAtVectors) return 32 % span() == 0;
    else return false;
  }
};

// Where rows start and resets cut.
template <typename Kind>
struct RowsCuts {
  static constexpr int kVec = Kind::kVec, kChunks = Kind::kChunks;
  uint32_t cuts[Kind::kGeneral ? kChunks : 1] = {};    // bit i: the carry does not enter element i
  uint32_t starts[Kind::kGeneral ? kChunks : 1] = {};  // bit i: a row starts there
  int reach[kChunks] = {};  // how many lanes back the carry of this lane's last element comes from
  uint32_t open = 0;        // bit k: the carry into chunk k enters this lane
  uint32_t closed = 0;      // bit k: and does not leave the chunk

  __device__ __forceinline__ bool is_cut(const RowsTile<Kind>& at, int k, int i) const {
    if constexpr (Kind::kGeneral) return (cuts[k] >> i & 1) != 0;
    else if constexpr (Kind::kAtVectors) return i == 0 && !(open >> k & 1) && reach[k] == 0;
    else return k == 0 && at.tile == 0 && at.first_vector == 0 && i == at.pad;
  }

  // `reset`: of the tile, or null.
  __device__ __forceinline__ void find(const RowsTile<Kind>& at, const bool* reset) {
    const int lane = at.lane, time = at.time, pad = at.pad;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if constexpr (Kind::kPlain) {
        reach[k] = lane;
        open |= 1u << k;
      } else if constexpr (Kind::kAtVectors) {
        const int before = static_cast<int>(static_cast<uint32_t>(at.position(k)) % static_cast<uint32_t>(time)) /
            kVec;  // vectors of its row before it
        reach[k] = min(lane, before);
        if (before > lane) open |= 1u << k;
        if (__any_sync(0xffffffffu, before <= lane)) closed |= 1u << k;
      } else {
        const int s0 = at.position(k);
        uint32_t flags = 0;
        if (reset) {
          const int address = at.address(k);
          flags = load_flags<kVec>(reset, address, at.low, at.high, at.is_reverse());
          if (at.p.shifted) {
            const int64_t before = at.base + (at.is_reverse() ? address + kVec : address - 1);
            flags = flags << 1 | static_cast<uint32_t>(before >= 0 && before < at.length && reset[before - at.base]);
          }
        }
        if (at.is_packed()) {
          int r = s0 >= pad ? (s0 - pad) % time : s0 - pad;
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            if (r == 0) starts[k] |= 1u << i;
            if (++r == time) r = 0;
          }
        } else if (at.tile == 0 && s0 <= pad && pad < s0 + kVec) {
          starts[k] = 1u << (pad - s0);
        }
        cuts[k] = (flags | starts[k]) & ((1u << kVec) - 1);
        const uint32_t cut_lanes = __ballot_sync(0xffffffffu, cuts[k] != 0);
        const uint32_t upto = cut_lanes & (0xffffffffu >> (31 - lane));
        reach[k] = min(lane, upto ? lane - (31 - __clz(upto)) : 32);
        if ((cut_lanes & ((1u << lane) - 1)) == 0) open |= 1u << k;
        if (cut_lanes) closed |= 1u << k;
      }
    }
  }
};

}  // namespace dcs
