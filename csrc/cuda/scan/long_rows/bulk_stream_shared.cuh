// What the warps of a block of bulk_stream.cuh share.
#pragma once

#include "common/ptx/bulk_copy.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/row_offset.cuh"
#include "scan/long_rows/params.cuh"
#include "common/element_types.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

template <int kTensors_, int kWarps_, int kVectors_, int kStages_, int kAhead_>
struct BulkStreamShape {
  static constexpr int kTensors = kTensors_;  // read: input, gates, saved output
  static constexpr int kWarps = kWarps_;      // that scan, of a block
  static constexpr int kVectors = kVectors_;  // of a thread
  static constexpr int kStages = kStages_;    // tiles in shared memory
  static constexpr int kAhead = kAhead_;      // tiles whose totals are known before one is finished
  static constexpr int kThreads = kWarps * 32 + 96;
  static constexpr int kWindow = kMostBulkStreamBlocks / 32;  // tiles of the window that a lane reads
  static constexpr int kSlice = kVectors * 32;                // vectors of a warp
  static constexpr int kTile = kSlice * kWarps;
  static constexpr int kStageVectors = kTile * kTensors + kBulkStreamSpare * (kTensors - 1);
  static constexpr int kSharedBytes = kStages * kStageVectors * 16;
};

// Where a tile in shared memory lies: its vectors in the order of memory, from offsets of the output and of the gates'
// gradient on. Its elements low .. high - 1 are the row's.
struct TileInfo {
  int64_t output, grad;
  double gamma;  // where rows have one each, but for a block's first tile
  int low, high;
  uint32_t row;  // kNoRow: no tile follows
  uint32_t flags;
  static constexpr uint32_t kWhole = 1, kStarts = 2, kEnds = 4, kNoRow = 0xffffffffu;
};

template <bool kStep, typename Shape>
struct BulkStreamShared {
  static constexpr int kTurns = Shape::kAhead + 1;  // of what passes between the warps: so many tiles are under way
  // Named barriers, at which the warps that scan arrive: a tile has left; its totals are there to be published, to be
  // collected; all sums are there.
  static constexpr int kLeft = 1, kToPublish = kLeft + Shape::kStages, kToCollect = kToPublish + kTurns,
                       kLastSums = kToCollect + kTurns;
  static_assert(kLastSums < kNamedBarriers);
  static constexpr int kArrivals = (Shape::kWarps + 1) * 32;  // with the warp that waits
  uint64_t full[Shape::kStages], carries_ready[kTurns];       // a tile has arrived; its carries are there
  TileInfo infos[Shape::kStages];
  double totals[kTurns][Shape::kWarps], gates[kStep ? kTurns : 1][Shape::kWarps],
      carries[kTurns][Shape::kWarps];  // of warps
  float sums[kTurns][Shape::kWarps];   // of gamma's gradient

  __device__ __forceinline__ void init(bool row_per_block) {
    // Who leaves a carry arrives, who has read a total to publish it, and who has read another warp's gate, where those
    // are to be written over.
    for (int i = 0; i < kTurns; ++i)
      mbarrier_init(&carries_ready[i], Shape::kWarps * (1 + (row_per_block ? 0 : 1) + (Shape::kTensors == 3 ? 1 : 0)));
    for (int i = 0; i < Shape::kStages; ++i) mbarrier_init(&full[i], 1);
    mbarrier_fence_init();
  }
};

__device__ __forceinline__ double gamma_of_row(const ScanProblem& p, uint32_t row) {
  if (p.gamma_kind == GammaKind::kNumber) return p.gamma_value;
  return load_gamma<double>(p.gamma, p.gamma_dtype, row_offset(row, p.inner, p.gamma_strides), false);
}

// A block's tiles, one after the other.
struct TileCursor {
  uint32_t row, tile, rows, tiles, rows_on, tiles_on, next_row;

  __device__ __forceinline__ explicit TileCursor(const StreamParams& params) : rows(params.rows), tiles(params.tiles) {
    const uint32_t blocks = gridDim.x;
    row = params.row_per_block ? blockIdx.x : blockIdx.x / tiles;
    tile = params.row_per_block ? 0 : blockIdx.x - row * tiles;
    rows_on = params.row_per_block ? 0 : blocks / tiles;
    tiles_on = params.row_per_block ? 1 : blocks - rows_on * tiles;
    next_row = params.row_per_block ? blocks : 1;  // behind a row's last tile
  }
  __device__ __forceinline__ bool inside() const { return row < rows; }
  __device__ __forceinline__ void move_on() {
    row += rows_on;
    tile += tiles_on;
    if (tile >= tiles) {
      tile -= tiles;
      row += next_row;
    }
  }
};

}  // namespace dcs
