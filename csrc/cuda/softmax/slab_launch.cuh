// Which slabs a softmax takes (launch.cuh has the table), or rows that no cluster holds, which are slabs of one column.
#pragma once

#include <optional>

#include "softmax/chunks.cuh"
#include "softmax/resident.cuh"
#include "softmax/streamed.cuh"
#include "softmax/thread_launch.cuh"

namespace dcs {

template <typename T>
class SlabLaunch : protected ThreadLaunch<T> {
 protected:
  using Base = ThreadLaunch<T>;
  using Base::Base;
  using Base::device_;
  using Base::elements;
  using Base::is_dependent;
  using Base::is_view;
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
  // Of a slab that is large; of a step of slabs of whole vectors, at most.
  static constexpr int64_t kLargeSlabBytes = 4 * kChunkBytes, kSlabStepBytes = 1 << 10;
  // Threads of a multiprocessor whose loads keep memory busy; strips of a group; columns, whose parts all of its blocks
  // tell each other, and those that are many; elements of a chunk, which an int numbers.
  static constexpr int64_t kEnoughStreams = 896, kMostStrips = 8, kMostStreamedColumns = 4096, kManyColumns = 256,
                           kMostChunk = 1 << 29;
  // Backward, columns of which two launches take up to a tenth less time: at least and at most.
  static constexpr int64_t kFewestChunkColumns = 2, kMostChunkColumns = 64;
  // What a second read finds in L2, in bytes of both inputs; what memory moves while a group's blocks wait for each
  // other.
  static constexpr int64_t kCachedBytes = 24 << 20, kRoundBytes = 16 << 20;

  SoftmaxTiles<T> tiles() const {
    auto tiles = this->template operands<SoftmaxTiles<T>>();
    tiles.outer = p_.outer, tiles.length = p_.length, tiles.inner = p_.inner;
    tiles.runs = this->runs();
    tiles.elements = elements();
    return tiles;
  }
  // Shared memory of a block that holds so many vectors and joins so many parts.
  int64_t resident_bytes(int64_t vectors, int64_t parts) const {
    return vectors * (p_.backward ? 32 : 16) + parts * static_cast<int64_t>(sizeof(Part<Acc>));
  }
  // Forward, as backward has no powers to make.
  bool leaves_idle(int64_t blocks, int64_t vectors) const {
    return !p_.backward && !is_view() && 2 * blocks < device_.multiprocessors && vectors * 16 > kFewBlocksBytes;
  }
  template <typename Kernel>
  std::optional<cudaError_t> launch_cluster_tiles(
      Kernel kernel, const SoftmaxTiles<T>& params, int64_t tiles, int64_t threads, int64_t shared, int cluster) const {
    return launch_clusters(is_dependent(tiles * cluster), kernel, params, tiles * cluster, threads, shared, cluster);
  }
  template <template <typename> class Lines>
  auto cluster_tiles_kernel() const {
    return p_.backward ? softmax_cluster_tiles_kernel<T, true, Lines> : softmax_cluster_tiles_kernel<T, false, Lines>;
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
      const int64_t shared = resident_bytes(
          params.each * threads, slab_parts<T>(p_.inner, width, threads) + cluster_exchange_parts(p_.inner, cluster));
      // A few clusters take longer than two launches.
      if (shared <= shared_of(3) && (cluster == 1 || p_.outer * cluster >= 16) &&
          !leaves_idle(p_.outer * cluster, share)) {
        const auto error =
            launch_cluster_tiles(cluster_tiles_kernel<Slab>(), params, p_.outer, threads, shared, cluster);
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
  template <typename Kernel>
  std::optional<cudaError_t> launch_groups(
      Kernel kernel, SoftmaxTiles<T>& params, int64_t groups, int64_t columns, int64_t threads, int64_t shared) const {
    const int64_t blocks = params.chunks,
                  bytes = params.tiles * group_words(blocks, columns) * static_cast<int64_t>(sizeof(PartWords<Acc>));
    if (bytes > elements() * kSize / kMostWordsShare) return std::nullopt;
    params.words = workspace_.allocate(bytes);
    params.tag = counted_tag(params.words, bytes, groups * blocks, stream_);
    const cudaError_t error = launch_together(kernel, params, groups * blocks, threads, shared);
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
    const int64_t most_each = (shared_of(3) - beside) / (resident_bytes(1, 0) * kTileThreads);
    if (most_each < 1) return run_twice();
    const int64_t least = ceil_div(vectors, most_each * width);
    // Of a slab: one for each multiprocessor if a thread has two vectors, two if it has four.
    const auto wanted = [&](int64_t each, int64_t vectors_each) {
      return std::min(each * device_.multiprocessors / p_.outer, ceil_div(vectors, vectors_each * width));
    };
    const auto groups = groups_of(
        p_.outer, least, least <= at_once ? at_once : resident_blocks(), std::max(wanted(1, 2), wanted(2, 4)));
    if (!groups) return run_twice();
    SoftmaxTiles<T> params = tiles();
    params.width = static_cast<int>(width);
    params.each = static_cast<int>(ceil_div(ceil_div(vectors, groups->blocks), width));
    params.chunk = width * params.each;
    params.chunks = ceil_div(vectors, params.chunk);
    params.tiles = p_.outer;
    const int64_t shared = resident_bytes(params.each * kTileThreads, 0) + beside;
    const auto kernel = p_.backward ? softmax_resident_kernel<T, true, Slab> : softmax_resident_kernel<T, false, Slab>;
    const auto error = launch_groups(kernel, params, groups->groups, columns, kTileThreads, shared);
    return error ? *error : run_twice();
  }

  // Blocks of a multiprocessor, and the strips that they read.
  struct Strips {
    int64_t blocks = 0, threads = 0, width = 0, strips = 0, stride = 0;
    int64_t active() const { return std::min(blocks * width, kEnoughStreams); }
  };
  // Of columns that are where they were after `unit` vectors. As most threads of a multiprocessor as can be, in few
  // strips; in two blocks, but of many columns, whose parts each block has and tells, in one.
  Strips strips_of(int64_t unit) const {
    const bool many = p_.inner > kManyColumns;
    Strips best;
    for (const int64_t blocks : {many ? 1 : 2, many ? 2 : 1, 3, 4}) {
      const int64_t threads = kStreamedThreads / blocks / 32 * 32, first = std::max<int64_t>(1, threads / unit);
      for (int64_t units = first; units < first + 8; ++units) {
        const int64_t stride = units * unit, strips = ceil_div(stride, threads), width = ceil_div(stride, strips);
        const Strips by{blocks, round_up(width, 32), width, strips, stride};
        if (strips <= kMostStrips && by.active() > best.active()) best = by;
      }
    }
    return best;
  }

  // How many groups take a slab at a time, and of how many blocks: those that move the fewest bytes. What is on its way
  // at the same time and does not fit on the chip is read again from memory, but few groups would all load, or store,
  // at the same time. Nothing if many blocks had no group.
  std::optional<Groups> streamed_groups(const Strips& by) const {
    const int64_t all = by.blocks * device_.multiprocessors, bytes = slab() * kSize,
                  read = p_.backward ? 2 * bytes : bytes,
                  cached = kCachedBytes + device_.multiprocessors * shared_of(1);
    std::optional<Groups> best;
    double least = 0;
    for (int64_t most = std::min(p_.outer, all / by.strips); most > 0; --most) {
      const int64_t rounds = ceil_div(p_.outer, most), groups = ceil_div(p_.outer, rounds),
                    blocks = all / (groups * by.strips) * by.strips;
      if (rounds > 1 && groups < kMixedGroups) break;
      const int64_t again = std::max<int64_t>(0, groups * read - cached);
      const double moved = static_cast<double>(rounds * (groups * (read + bytes) + again + kRoundBytes)) *
          static_cast<double>(all) / static_cast<double>(groups * blocks);
      if (10 * groups * blocks < 8 * all || (best && moved >= least)) continue;
      best = Groups{groups, blocks};
      least = moved;
    }
    return best;
  }

  bool chunks_outrun_streams() const {
    return p_.backward && kSize < 8 && p_.inner >= kFewestChunkColumns && p_.inner <= kMostChunkColumns;
  }
  // Slabs, of which the blocks of a group hold as much as they have room for.
  template <template <typename> class Lines, bool kBackward>
  std::optional<cudaError_t> run_streamed() {
    const int64_t vectors = vectors_of(slab()), columns = p_.inner;
    const Strips by = strips_of(slab_unit());
    if (by.blocks == 0 || columns > kMostStreamedColumns || chunks_outrun_streams()) return std::nullopt;
    const auto found = streamed_groups(by);
    if (!found) return std::nullopt;
    const auto [groups, blocks] = *found;
    SoftmaxTiles<T> params = tiles();
    params.width = static_cast<int>(by.width);
    params.strips = static_cast<int>(by.strips), params.stride = static_cast<int>(by.stride);
    const int64_t each = ceil_div(vectors, blocks / by.strips * by.stride);
    params.chunk = each * by.stride;
    params.chunks = ceil_div(vectors, params.chunk) * by.strips;
    params.tiles = p_.outer;
    if (params.chunk * kVec > kMostChunk) return std::nullopt;
    const int64_t beside =
        slab_parts<T>(columns, by.width, by.threads) + columns + group_exchange_parts(columns, params.chunks);
    const int64_t room = shared_of(static_cast<int>(by.blocks)) - resident_bytes(0, beside);
    if (room < 0) return std::nullopt;
    params.each = static_cast<int>(std::min(each, room / (resident_bytes(1, 0) * by.threads)));
    return launch_groups(softmax_streamed_kernel<T, kBackward, Lines>, params, groups, columns, by.threads,
        resident_bytes(params.each * by.threads, beside));
  }
  std::optional<cudaError_t> run_streamed() {
    return p_.backward ? run_streamed<Strip, true>() : run_streamed<Strip, false>();
  }

  // Of a view.
  std::optional<cudaError_t> run_padded_slabs() {
    if (p_.run % slab() != 0 || slab() * kSize < kLargeSlabBytes) return std::nullopt;
    return run_streamed<PaddedStrip, false>();
  }

  // Slabs that no group holds.
  cudaError_t run_twice() {
    const std::optional<cudaError_t> error = run_streamed();
    return error ? *error : run_chunks();
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
};

}  // namespace dcs
