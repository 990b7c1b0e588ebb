// Which tiles a softmax of columns takes (launch.cuh has the table), or of rows that no cluster holds.
#pragma once

#include <optional>

#include "softmax/chunks.cuh"
#include "softmax/resident.cuh"
#include "softmax/thread_launch.cuh"

namespace dcs {

template <typename T>
class TileLaunch : protected ThreadLaunch<T> {
 protected:
  using Base = ThreadLaunch<T>;
  using Base::Base;
  using Base::begins_early;
  using Base::device_;
  using Base::elements;
  using Base::is_view;
  using Base::kHalf;
  using Base::kSize;
  using Base::kVec;
  using Base::launch;
  using Base::launch_after;
  using Base::launch_clusters;
  using Base::launch_together;
  using Base::p_;
  using Base::shared_of;
  using Base::slab;
  using Base::slab_unit;
  using Base::stream_;
  using Base::unit_of;
  using Base::vectors_of;
  using Base::whole;
  using Base::workspace_;
  using typename Base::Acc;

  // Of a chunk of a slab, about; parts of a slab's chunks and columns, at most.
  static constexpr int64_t kChunkBytes = 64 << 10, kMostParts = 512;
  // Of a tile's chunks, which a block joins in less time than a launch takes.
  static constexpr int64_t kDirectParts = 2048;
  // Groups of blocks that run together, of which some load while others store; of the tensor their words take less than
  // one in so many bytes.
  static constexpr int64_t kMixedGroups = 6, kMostWordsShare = 8;
  // What a block holds, at most, where blocks are few: more of it is faster in the hands of more blocks that run
  // together.
  static constexpr int64_t kFewBlocksBytes = 30 << 10;
  // Bytes of a column vector, and of a block, that more blocks are not worth it for; of a wide window, at most; of a
  // tensor that is large.
  static constexpr int64_t kShortLine = 4 << 10, kShortBytes = 8 << 10, kWideBytes = 28 << 10, kLargeBytes = 16 << 20;

  // Of a slab that is large; of a step of slabs of whole vectors, at most.
  static constexpr int64_t kLargeSlabBytes = 4 * kChunkBytes, kSlabStepBytes = 1 << 10;

  SoftmaxTiles<T> tiles() const {
    auto tiles = this->template operands<SoftmaxTiles<T>>();
    tiles.outer = p_.outer, tiles.length = p_.length, tiles.inner = p_.inner;
    tiles.runs = this->runs();
    tiles.elements = elements();
    return tiles;
  }
  // Shared memory of a block that holds so many vectors and joins so many parts.
  int64_t held_bytes(int64_t vectors, int64_t parts) const {
    return vectors * (p_.backward ? 32 : 16) + parts * static_cast<int64_t>(sizeof(Part<Acc>));
  }
  // Forward, as backward has no powers to make.
  bool leaves_idle(int64_t blocks, int64_t vectors) const {
    return !p_.backward && !is_view() && 2 * blocks < device_.multiprocessors && vectors * 16 > kFewBlocksBytes;
  }
  template <typename Kernel>
  std::optional<cudaError_t> launch_held(
      Kernel kernel, const SoftmaxTiles<T>& params, int64_t tiles, int64_t threads, int64_t shared, int cluster) const {
    return launch_clusters(begins_early(tiles * cluster), kernel, params, tiles * cluster, threads, shared, cluster);
  }
  template <template <typename> class Lines>
  auto held_kernel() const {
    return p_.backward ? softmax_held_kernel<T, true, Lines> : softmax_held_kernel<T, false, Lines>;
  }
  // The parts of the chunks of `tiles` tiles, of so many columns each, and those of whole tiles where the former are
  // many, or `joins`; `shared`: parts that a block's join takes.
  template <template <typename> class Lines>
  cudaError_t launch_parts(SoftmaxTiles<T>& params, int64_t tiles, int64_t columns, int64_t shared, bool joins) {
    const int64_t part = sizeof(Part<Acc>), grid = tiles * params.chunks, parts = grid * columns;
    params.part_columns = static_cast<int>(columns);
    params.parts = static_cast<Part<Acc>*>(workspace_.allocate((parts + tiles * columns) * part));
    const cudaError_t error =
        launch(p_.backward ? softmax_chunk_kernel<T, true, Lines> : softmax_chunk_kernel<T, false, Lines>, params, grid,
            kTileThreads, shared * part);
    if (error != cudaSuccess || (!joins && params.chunks * columns <= kDirectParts)) return error;
    params.joined = params.parts + parts;
    const auto kernel = p_.backward ? softmax_join_chunks_kernel<Acc, true> : softmax_join_chunks_kernel<Acc, false>;
    return launch_after(kernel,
        SoftmaxParts<Acc>{params.parts, params.joined, params.chunks, static_cast<int>(columns)},
        tiles * ceil_div(columns, kJoinColumns), kTileThreads, 0);
  }
  template <template <typename> class Lines, bool kBackward>
  cudaError_t launch_finish(const SoftmaxTiles<T>& params, int64_t tiles, int64_t columns) const {
    return launch_after(softmax_finish_kernel<T, kBackward, Lines>, params, tiles * params.chunks, kTileThreads,
        (columns + columns / kVec) * static_cast<int64_t>(sizeof(Part<Acc>)));
  }
  template <template <typename> class Lines>
  cudaError_t launch_chunks(SoftmaxTiles<T>& params, int64_t tiles, int64_t columns, int64_t shared) {
    const cudaError_t error = launch_parts<Lines>(params, tiles, columns, shared, false);
    if (error != cudaSuccess) return error;
    return p_.backward ? launch_finish<Lines, true>(params, tiles, columns)
                       : launch_finish<Lines, false>(params, tiles, columns);
  }

  cudaError_t run_slabs() {
    const int64_t vectors = vectors_of(slab()), unit = slab_unit();
    // Of a thread: few where there are few in all, or in a slab.
    const int64_t each =
        vectors < 256 ? 4 : std::clamp<int64_t>(p_.outer * vectors / (int64_t{256} * device_.multiprocessors), 4, 8);
    SoftmaxTiles<T> params = tiles();
    for (int cluster = 1; cluster <= device_.cluster; cluster *= 2) {
      const int64_t share = ceil_div(vectors, cluster);
      const int64_t width = std::min(
          round_up(std::max(ceil_div(share, each), std::min<int64_t>(share, 32)), unit), kTileThreads / unit * unit);
      const int64_t threads = round_up(width, 32);
      params.width = static_cast<int>(width);
      params.each = static_cast<int>(ceil_div(share, width));
      params.chunk = width * params.each, params.chunks = cluster;
      const int64_t shared = held_bytes(
          params.each * threads, slab_parts<T>(p_.inner, width, threads) + held_exchange_parts(p_.inner, cluster));
      // A few clusters take longer than two launches.
      if (shared <= shared_of(3) && (cluster == 1 || p_.outer * cluster >= 16) &&
          !leaves_idle(p_.outer * cluster, share)) {
        const auto error = launch_held(held_kernel<Slab>(), params, p_.outer, threads, shared, cluster);
        if (error) return *error;
      }
    }
    return run_together();
  }

  // Blocks of the resident kernel that run at once.
  int64_t resident_blocks() const { return 3 * device_.multiprocessors; }
  // How many groups hold a tile each at the same time, and of how many blocks, if a tile takes `least` to `most` of
  // these; at least `wanted` in a single round.
  struct Groups {
    int64_t groups, blocks;
  };
  std::optional<Groups> groups_of(int64_t tiles, int64_t least, int64_t most, int64_t wanted) const {
    most = std::min(most, resident_blocks());
    if (least > most) return std::nullopt;
    const int64_t blocks = std::clamp(wanted, least, most);
    // As even rounds as can be. Several take longer than two launches if most blocks load, or store, at the same time.
    const int64_t rounds = ceil_div(tiles, resident_blocks() / blocks), groups = ceil_div(tiles, rounds);
    if (rounds == 1) return Groups{groups, blocks};
    if (groups < kMixedGroups) return std::nullopt;
    return Groups{groups, std::min(resident_blocks() / groups, most)};
  }
  // params.chunks blocks of a group hold a tile. Nothing where their words take too much memory, or where the blocks do
  // not run at once: a green context, or an instance of a part of the GPU, has less room, and some systems have no such
  // launches.
  template <template <typename> class Lines, bool kBackward>
  std::optional<cudaError_t> launch_groups(
      SoftmaxTiles<T>& params, int64_t groups, int64_t columns, int64_t shared) const {
    const int64_t blocks = params.chunks,
                  bytes = params.tiles * group_words(blocks, columns) * static_cast<int64_t>(sizeof(PartWords<Acc>));
    if (bytes > elements() * kSize / kMostWordsShare) return std::nullopt;
    params.words = workspace_.allocate(bytes);
    params.tag = counted_tag(params.words, bytes, groups * blocks, stream_);
    const cudaError_t error =
        launch_together(softmax_resident_kernel<T, kBackward, Lines>, params, groups * blocks, kTileThreads, shared);
    if (error == cudaSuccess) return error;
    cudaGetLastError();
    return std::nullopt;
  }

  // Slabs that the blocks of a group hold, all of them together; what is too much for that is read twice.
  cudaError_t run_together() {
    const int64_t vectors = vectors_of(slab()), unit = slab_unit(), columns = p_.inner,
                  width = kTileThreads / unit * unit, at_once = kMostGroupParts / columns,
                  exchange = std::max(
                      group_exchange_parts(columns, at_once), group_exchange_parts(columns, resident_blocks())),
                  beside = (slab_parts<T>(columns, width, kTileThreads) + columns + exchange) *
        static_cast<int64_t>(sizeof(Part<Acc>));
    const int64_t most_each = (shared_of(3) - beside) / (held_bytes(1, 0) * kTileThreads);
    if (most_each < 1) return run_chunks();
    const int64_t least = ceil_div(vectors, most_each * width);
    // Of a slab: one for each multiprocessor if a thread has two vectors, two if it has four.
    const auto wanted = [&](int64_t each, int64_t vectors_each) {
      return std::min(each * device_.multiprocessors / p_.outer, ceil_div(vectors, vectors_each * width));
    };
    const auto groups = groups_of(
        p_.outer, least, least <= at_once ? at_once : resident_blocks(), std::max(wanted(1, 2), wanted(2, 4)));
    if (!groups) return run_chunks();
    SoftmaxTiles<T> params = tiles();
    params.width = static_cast<int>(width);
    params.each = static_cast<int>(ceil_div(ceil_div(vectors, groups->blocks), width));
    params.chunk = width * params.each;
    params.chunks = ceil_div(vectors, params.chunk);
    params.tiles = p_.outer;
    const int64_t shared = held_bytes(params.each * kTileThreads, 0) + beside;
    const std::optional<cudaError_t> error = p_.backward
        ? launch_groups<Slab, true>(params, groups->groups, columns, shared)
        : launch_groups<Slab, false>(params, groups->groups, columns, shared);
    return error ? *error : run_chunks();
  }

  // Windows of a view that the blocks of a group hold, several groups at once: read twice, it would be copied first.
  // Without gaps they are as fast read twice. A window of 256 bytes where it begins inside of a sector of 32, as those
  // that a cluster holds, or of 128, of which a group holds twice as many steps.
  std::optional<cudaError_t> run_windows_together() {
    if (p_.inner * kSize % 32 != 0)
      if (const auto error = run_windows_together(16)) return error;
    return run_windows_together(8);
  }
  std::optional<cudaError_t> run_windows_together(int64_t across) {
    SoftmaxTiles<T> params = tiles();
    params.tiles = set_across(params, across);
    const int64_t columns = across * kVec, down = kTileThreads / across, room = shared_of(3),
                  beside = column_parts<T>(across, kTileThreads) + across * (kVec + 1);
    // The exchange's parts are a guess until the blocks are known.
    const int64_t most_each =
        (room - held_bytes(0, beside + columns + resident_blocks())) / (held_bytes(1, 0) * kTileThreads);
    if (most_each < 1) return std::nullopt;
    const int64_t least = ceil_div(p_.length, most_each * down);
    const auto groups = groups_of(params.tiles, least, resident_blocks(),
        std::min(resident_blocks() / params.tiles, ceil_div(p_.length, 2 * down)));
    if (!groups) return std::nullopt;
    params.down = static_cast<int>(down);
    params.by_down = Divisor(static_cast<uint32_t>(down));
    params.each = static_cast<int>(ceil_div(ceil_div(p_.length, groups->blocks), down));
    params.chunk = down * params.each;
    params.chunks = ceil_div(p_.length, params.chunk);
    const int64_t shared =
        held_bytes(params.each * kTileThreads, beside + group_exchange_parts(columns, params.chunks));
    if (shared > room) return std::nullopt;
    return launch_groups<ViewWindow, false>(params, groups->groups, columns, shared);
  }

  cudaError_t run_chunks() {
    SoftmaxTiles<T> params = tiles();
    set_chunks(params);
    return launch_chunks<Slab>(params, p_.outer, p_.inner, slab_parts<T>(p_.inner, params.width, kTileThreads));
  }
  // Chunks of slabs of params.inner columns.
  void set_chunks(SoftmaxTiles<T>& params) const {
    const int64_t columns = params.inner, size = p_.length * columns;
    params.width = static_cast<int>(kTileThreads / unit_of(columns) * unit_of(columns));
    // Small chunks keep the device busy to the end, but each block of the last kernel joins the parts of all of a
    // slab's.
    const int64_t rounds = ceil_div(vectors_of(size), params.width);
    const int64_t small = std::min(size * kSize / kChunkBytes, kMostParts / columns);
    const int64_t wanted = std::clamp<int64_t>(
        std::max(small, 2 * device_.multiprocessors / p_.outer), 1, ceil_div(rounds, kGroupVectors<T>));
    params.chunk = ceil_div(rounds, wanted) * params.width;
    params.chunks = ceil_div(rounds * params.width, params.chunk);
  }

  // Of a view of padded steps, more of them than the multiprocessors hold, without a copy. The first kernel reads whole
  // vectors, to which the gaps are columns as others are; the last one vectors or words of 4 bytes.
  std::optional<cudaError_t> run_view_chunks() {
    const int64_t pitch = p_.inner + p_.gap, word = kSize == 2 ? 2 : 1;
    const bool has_gaps = p_.run == p_.inner && p_.gap >= 0 && p_.gap <= p_.inner,
               in_words = p_.inner % word == 0 && p_.gap % word == 0 && reinterpret_cast<uintptr_t>(p_.input) % 16 == 0;
    if (!has_gaps || !in_words || unit_of(pitch) > kTileThreads || slab_unit() > kTileThreads) return std::nullopt;
    if (slab() * kSize < kLargeSlabBytes || elements() * kSize < resident_blocks() * shared_of(3)) return std::nullopt;
    SoftmaxTiles<T> params = tiles();
    params.inner = pitch;
    params.elements = params.runs.span;
    set_chunks(params);
    const cudaError_t error =
        launch_parts<Slab>(params, p_.outer, pitch, slab_parts<T>(pitch, params.width, kTileThreads), true);
    if (error != cudaSuccess) return error;
    params.inner = p_.inner;
    params.elements = elements();
    params.in_vectors = whole(p_.inner) && whole(p_.gap);
    set_chunks(params);
    return launch_finish<ViewSlab, false>(params, p_.outer, p_.inner);
  }

  // Takes windows of `across` vectors; the result is how many.
  int64_t set_across(SoftmaxTiles<T>& params, int64_t across) const {
    params.across_bits = 0;
    while (1 << params.across_bits < across) ++params.across_bits;
    params.unit = static_cast<int>(kVec / std::gcd<int64_t>(p_.inner, kVec));
    if (whole(p_.inner)) return ceil_div(p_.outer * (p_.inner / kVec), across);
    params.windows = ceil_div(p_.inner, (across - 1) * kVec);
    return p_.outer * params.windows;
  }

  // Windows of `across` vectors, held by clusters of so many blocks, if these have `room` bytes each.
  std::optional<cudaError_t> run_held(int64_t across, int cluster, int64_t room) const {
    SoftmaxTiles<T> params = tiles();
    const int64_t count = set_across(params, across);
    const int64_t vectors = p_.outer * p_.length * ceil_div(p_.inner, kVec), share = ceil_div(p_.length, cluster);
    // Of a thread, if a block has threads enough: more where joining their parts counts beside what they take.
    const int64_t each = std::clamp<int64_t>(
        vectors / (int64_t{2} * kTileThreads * device_.multiprocessors), 1, kHalf && !p_.backward ? 12 : 8);
    const int64_t rows = std::max<int64_t>(32 / across, 1) * params.unit;  // steps that `down` is a multiple of
    const int64_t down = round_up(std::min(ceil_div(share, each), kTileThreads / across), rows),
                  threads = across * down;
    params.down = static_cast<int>(down);
    params.by_down = Divisor(static_cast<uint32_t>(down));
    params.chunk = round_up(share, down), params.chunks = cluster;
    params.each = static_cast<int>(params.chunk / down);
    const int64_t shared = held_bytes(
        params.each * threads, column_parts<T>(across, threads) + held_exchange_parts(across * kVec, cluster));
    if (threads > kTileThreads || shared > room) return std::nullopt;
    // Those of no whole vectors are faster as slabs, which more blocks hold.
    if (!whole(p_.inner) && slab_unit() <= kTileThreads && leaves_idle(count * cluster, params.each * threads))
      return std::nullopt;
    if (is_view())
      return launch_held(softmax_held_kernel<T, false, ViewWindow>, params, count, threads, shared, cluster);
    return launch_held(held_kernel<ColumnWindow>(), params, count, threads, shared, cluster);
  }

  // Windows that a block or a cluster has room for.
  std::optional<cudaError_t> run_windows() const {
    const int64_t line = p_.length * (p_.backward ? 32 : 16);  // bytes of a column vector
    const int64_t vectors = p_.outer * ceil_div(p_.inner, kVec);
    const int most = std::min(device_.cluster, 8);
    // A window is 128 bytes of a step, or 256 where it begins inside of a sector of 32. Narrower ones, and clusters, if
    // the device is not busy otherwise, or a cluster has no room; where windows overlap, that is worth it only beside
    // the launches of another kernel.
    const bool large = elements() * kSize >= kLargeBytes;
    const int64_t narrowest = whole(p_.inner) ? 4 : large ? 16 : 8;
    int64_t across = p_.inner * kSize % 32 == 0 ? 8 : 16;
    if (vectors * most <= 8 * device_.multiprocessors && line > kShortLine) across = std::min(across, narrowest);
    int least = 1;
    while (least < most && vectors * least < across * device_.multiprocessors && line * across > kShortBytes * least)
      least *= 2;
    // Wider ones for short columns.
    for (int64_t wide = 32; least == 1 && wide > across; wide /= 2)
      if (wide * line <= kWideBytes && vectors >= wide * device_.multiprocessors)
        if (const auto error = run_held(wide, 1, shared_of(3))) return error;
    for (int64_t narrow = across; narrow >= narrowest; narrow /= 2) {
      for (int cluster = least; cluster <= most; cluster *= 2)
        if (const auto error = run_held(narrow, cluster, shared_of(3))) return error;
      if (const auto error = run_held(narrow, most, shared_of(2))) return error;
      // Half precision has too much to compute for a block alone on its multiprocessor.
      if (!kHalf && !whole(p_.inner) && large)
        if (const auto error = run_held(narrow, most, shared_of(1))) return error;
    }
    for (int64_t narrow = across; narrow >= narrowest; narrow /= 2)
      if (const auto error = run_held(narrow, device_.cluster, shared_of(3))) return error;
    return std::nullopt;
  }

  cudaError_t run_columns() {
    if (const std::optional<cudaError_t> error = run_windows()) return *error;
    // Slabs are read in whole vectors, which windows overlap. Short steps leave lanes of a window without a vector.
    if ((!whole(p_.inner) || p_.inner * kSize <= kSlabStepBytes) && slab_unit() <= kTileThreads) return run_slabs();
    return run_column_chunks();
  }

  cudaError_t run_column_chunks() {
    SoftmaxTiles<T> params = tiles();
    const int64_t across = p_.inner >= 128 * kVec ? 32 : 16;
    params.down = static_cast<int>(kTileThreads / across);
    params.by_down = Divisor(static_cast<uint32_t>(params.down));
    const int64_t count = set_across(params, across), round = params.down * kGroupVectors<T>,
                  rounds = ceil_div(p_.length, round);
    const int64_t wanted =
        std::clamp<int64_t>(ceil_div(4 * device_.multiprocessors, count), 1, std::min<int64_t>(128, rounds));
    params.chunk = ceil_div(rounds, wanted) * round;
    params.chunks = ceil_div(p_.length, params.chunk);
    return launch_chunks<ColumnWindow>(params, count, across * kVec, column_parts<T>(across, kTileThreads));
  }
};

}  // namespace dcs
