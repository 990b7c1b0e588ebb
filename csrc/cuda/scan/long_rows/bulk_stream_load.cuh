// The warp of a block of bulk_stream.cuh that loads tiles, and how these lie in shared memory.
#pragma once

#include "common/vector.cuh"
#include "scan/long_rows/bulk_stream_shared.cuh"

namespace dcs {

// A tile in shared memory: input, then gates and, where they are shifted, the vector before them in the order of the
// scan, then saved and the one after it. These neighbors take whole lines: what begins in the middle of one is slower
// to copy.
template <bool kStep, bool kBackward, bool kReverse, bool kShifted, typename Shape>
struct BulkStreamLayout {
  static constexpr int kTile = Shape::kTile;
  static constexpr int kBeforeGates = kStep && kShifted ? kBulkStreamSpare : 0,
                       kAfterSaved = kBackward ? kBulkStreamSpare : 0;
  static constexpr int kGatesAt = kTile + (kReverse ? 0 : kBeforeGates);
  static constexpr int kSavedAt = kTile * (kStep ? 2 : 1) + kBeforeGates + (kReverse ? kAfterSaved : 0);
  static constexpr int kStageVectors = kTile * Shape::kTensors + kBeforeGates + kAfterSaved;
  // From a tensor's first vector in the tile.
  static constexpr int kBefore = kReverse ? kTile : -1, kAfter = kReverse ? -1 : kTile;
};

// Asks for a tile, to lie in `stage`; one lane does. A tile in vectors of the row's memory is [first, first +
// kTileVectors), of which [0, whole_vectors) exist as a whole, and perhaps one more in part.
template <typename T, bool kStep, bool kBackward, bool kReverse, bool kShifted, typename Shape>
__device__ __forceinline__ void load_tile(const StreamParams& params, BulkStreamShared<kStep, Shape>& shared,
    Vector<T, 16 / sizeof(T)>* stages, const TileCursor& now, double gamma, int stage) {
  using Layout = BulkStreamLayout<kStep, kBackward, kReverse, kShifted, Shape>;
  constexpr int kVec = 16 / sizeof(T), kTileVectors = Shape::kTile;
  const ScanProblem& p = params.problem;
  const int64_t whole_vectors = p.length / kVec;
  const int rest = static_cast<int>(p.length - whole_vectors * kVec);
  TileInfo& info = shared.infos[stage];
  if (!now.inside()) {
    info.row = TileInfo::kNoRow;
    mbarrier_arrive(&shared.full[stage]);
    return;
  }
  const int64_t start = static_cast<int64_t>(now.tile) * kTileVectors;
  const int64_t first = kReverse ? params.padded / kVec - start - kTileVectors : start;
  info.row = now.row;
  if constexpr (!kStep) info.gamma = gamma;
  info.output = row_offset(now.row, p.inner, p.output_strides) + first * kVec;
  if constexpr (kBackward && kStep) info.grad = row_offset(now.row, p.inner, p.grad_gamma_strides) + first * kVec;
  info.low = static_cast<int>(max(int64_t{0}, -first)) * kVec;
  info.high = static_cast<int>(min(int64_t{kTileVectors * kVec}, p.length - first * kVec));
  const bool whole = info.low == 0 && info.high == kTileVectors * kVec;
  info.flags = (whole ? TileInfo::kWhole : 0u) | (now.tile == 0 ? TileInfo::kStarts : 0u) |
      (now.tile + 1 == params.tiles ? TileInfo::kEnds : 0u);
  auto* const to = stages + stage * Layout::kStageVectors;
  int bytes = 0;
  const auto each = [&](const auto& visit) {
    visit(static_cast<const T*>(p.input), p.input_strides, 0, 0, kTileVectors);
    if constexpr (kStep) visit(static_cast<const T*>(p.gamma), p.gamma_strides, Layout::kGatesAt, 0, kTileVectors);
    if constexpr (kStep && kShifted)
      visit(static_cast<const T*>(p.gamma), p.gamma_strides, Layout::kGatesAt, Layout::kBefore, 1);
    if constexpr (kBackward) visit(static_cast<const T*>(p.saved), p.saved_strides, Layout::kSavedAt, 0, kTileVectors);
    if constexpr (kBackward)
      visit(static_cast<const T*>(p.saved), p.saved_strides, Layout::kSavedAt, Layout::kAfter, 1);
  };
  // `count` vectors from `skip` behind the tile's first on.
  each([&](const T* pointer, const Strides& strides, int at, int skip, int count) {
    const int64_t begin = max(first + skip, int64_t{0}), end = min(first + skip + count, whole_vectors);
    if (end > begin) bytes += static_cast<int>(end - begin) * 16;
    // A part of a vector must be there before the arrival.
    if (rest && whole_vectors >= first + skip && whole_vectors < first + skip + count)
      to[at + static_cast<int>(whole_vectors - first)] =
          load_vector<T, kVec>(pointer + row_offset(now.row, p.inner, strides) + whole_vectors * kVec, 0, 0, rest);
  });
  // The gate before a warp's slice is read even where the row has none: so that it is not what another warp has left
  // there.
  if constexpr (kBackward && kStep) {
    for (int warp = 1; !whole && warp < Shape::kWarps; ++warp) {
      const int offset = kReverse ? kTileVectors - warp * Shape::kSlice : warp * Shape::kSlice - 1;
      if (first + offset < 0 || (first + offset) * kVec >= p.length) to[Layout::kGatesAt + offset] = {};
    }
  }
  mbarrier_arrive_expect_tx(&shared.full[stage], bytes);
  each([&](const T* pointer, const Strides& strides, int at, int skip, int count) {
    const int64_t begin = max(first + skip, int64_t{0}), end = min(first + skip + count, whole_vectors);
    const T* const from = pointer + row_offset(now.row, p.inner, strides) + begin * kVec;
    if (end <= begin) return;
    const auto load_with = [&](const auto& load) {
      load(to + at + static_cast<int>(begin - first), from, static_cast<int>(end - begin) * 16, &shared.full[stage]);
    };
    if (kStep && !kBackward && params.load_once) load_with(bulk_load_once);
    else load_with(bulk_load);
  });
}

// Loads the block's tiles, one after the other, and then none.
template <typename T, bool kStep, bool kBackward, bool kReverse, bool kShifted, typename Shape>
__device__ __forceinline__ void load_tiles(
    const StreamParams& params, BulkStreamShared<kStep, Shape>& shared, Vector<T, 16 / sizeof(T)>* stages) {
  using Shared = BulkStreamShared<kStep, Shape>;
  int stage = 0;
  bool filling = true, more = true;
  double gamma = 1.0;
  for (TileCursor now(params); more; now.move_on()) {
    if (!filling) wait_at(Shared::kLeft + stage, Shared::kArrivals);
    more = now.inside();
    if (threadIdx.x % 32 == 0)
      load_tile<T, kStep, kBackward, kReverse, kShifted>(params, shared, stages, now, gamma, stage);
    if (!kStep && !params.one_gamma) {
      TileCursor next = now;
      next.move_on();
      if (next.inside()) gamma = gamma_of_row(params.problem, next.row);
    }
    if (++stage == Shape::kStages) stage = 0, filling = false;
    // Where blocks share rows, one or two tiles at a time at the start: all at once, some block's first would come
    // late, and all wait for its total.
    constexpr int kFirst = kStep ? 1 : 2;
    if (more && filling && !params.row_per_block && stage >= kFirst) mbarrier_wait(&shared.full[stage - kFirst], 0);
  }
}

}  // namespace dcs
