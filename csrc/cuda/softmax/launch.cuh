// Which softmax kernel a problem takes, and with what tiles. A vector has 16 bytes; all tensors but views begin at one.
//
// clang-format off
// | lines                                                   | kernel                                             |
// | ------------------------------------------------------- | -------------------------------------------------- |
// | rows of 9 elements to 256 bytes that are no whole       | short_rows.cuh: through shared memory, by bulk     |
// |   vectors; in half precision 640 bytes if they are many | copies                                             |
// | others of less than 64 bytes that are no whole vectors  | packed_lines.cuh, slabs: through shared memory     |
// | rows of up to 256 vectors (half precision: 128)         | rows.cuh, lanes: several rows a warp               |
// | rows that a block or a cluster holds, few of them with  |                                                    |
// |   two vectors to a thread                               | block_rows.cuh: a row in registers                 |
// | longer rows, and a few that leave clusters idle, as     |                                                    |
// |   slabs of one column:                                  |                                                    |
// |   that the multiprocessors together have room for       | resident.cuh: in shared memory                     |
// |   longer ones, in groups that leave few blocks idle     | streamed.cuh: resident in part, others read twice  |
// |   others                                                | chunks.cuh: read twice                             |
// | inner of whole vectors, 128 bytes and more, of up to 8  | thread_columns.cuh: a thread takes all steps of a  |
// |   steps, or 16 of doubles and, forward, of floats       |   vector                                           |
// | slabs, (length, inner), of up to 2 KB                   | packed_lines.cuh, slabs                            |
// | inner of no whole vectors, 128 bytes and more, of up to | thread_columns.cuh: a thread takes all steps of    |
// |   16 steps, or 8 of floats backward; of few elements    |   some words of 4 bytes, or elements               |
// |   the next one has those of more than four steps        |                                                    |
// | few elements                                            | small_columns.cuh: a thread takes some steps of    |
// |                                                         |   one column, a block or a cluster a window        |
// | inner below 128 bytes; or below 512 if no whole vectors |                                                    |
// |   and many slabs; or, if no whole vectors or of up to   |                                                    |
// |   1 KB, what no cluster has room for as columns:        | slabs.cuh, tiles of whole slabs:                   |
// |   that a block, or a cluster, has room for              |   cluster_tiles.cuh: in shared memory              |
// |   that the multiprocessors together have room for       |   resident.cuh: in shared memory                   |
// |   larger ones, as longer rows                           |   streamed.cuh, chunks.cuh                         |
// | larger inner:                                           |                                                    |
// |                                                         | columns.cuh, tiles of 64 to 512 bytes of a step:   |
// |   that a block, or a cluster, has room for              |   cluster_tiles.cuh: in shared memory              |
// |   of views, that groups of blocks have room for, six at |   resident.cuh: in shared memory                   |
// |   once, or as many as there are windows                 |                                                    |
// |   more steps, of up to 4096 columns, as longer rows     |   streamed.cuh, by strips of one or more steps     |
// |   others                                                |   chunks.cuh: read twice                           |
// clang-format on
//
// Forward, where a block would hold more than 30 KB and most multiprocessors have none, slabs, and windows of no whole
// vectors, are resident.cuh's instead. An input that is a view (its elements lie in runs) is read in place by
// small_columns.cuh where it has few elements in slabs of more than 2 KB, by thread_columns.cuh where columns have as
// few steps as above and a run has 128 bytes or more of a step, in whole vectors or in slabs of more than 2 KB; forward
// also by rows.cuh and block_rows.cuh, by packed_lines.cuh where runs have whole slabs, or whole rows of less than 128
// bytes that are no whole vectors, and the gaps between them are no longer, and by windows, in clusters or groups, of
// columns of 128 bytes and more, by streamed.cuh where a run has whole slabs, and by chunks of large slabs where a run
// is a step. For the others it is copied into the output first.
#pragma once

#include "softmax/block_rows.cuh"
#include "softmax/packed_lines.cuh"
#include "softmax/short_rows.cuh"
#include "softmax/thread_launch.cuh"
#include "softmax/tile_launch.cuh"

namespace dcs {

// Vectors of a row to a block of a cluster: two such blocks of 512 threads on a multiprocessor, so that one loads while
// the other stores.
constexpr int64_t kClusterShare = 512 * kBlockVectors;

inline int64_t power_of_two_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

template <typename T>
class SoftmaxLaunch : TileLaunch<T> {
  using Base = TileLaunch<T>;
  using Base::copy_view;
  using Base::device_;
  using Base::elements;
  using Base::has_few_elements;
  using Base::has_few_steps;
  using Base::has_whole_steps;
  using Base::is_small;
  using Base::is_view;
  using Base::kCachedBytes;
  using Base::kHalf;
  using Base::kSize;
  using Base::kVec;
  using Base::launch;
  using Base::launch_clusters;
  using Base::p_;
  using Base::run_columns;
  using Base::run_few_steps;
  using Base::run_padded_slabs;
  using Base::run_slabs;
  using Base::run_small;
  using Base::run_together;
  using Base::run_view_chunks;
  using Base::run_windows;
  using Base::run_windows_together;
  using Base::slab;
  using Base::slab_unit;
  using Base::stream_;
  using Base::vectors_of;
  using Base::whole;

 public:
  using Base::Base;

  cudaError_t run() {
    if (is_view()) {
      if (const std::optional<cudaError_t> error = run_view()) return *error;
      if (const cudaError_t error = copy_view(); error != cudaSuccess) return error;
    }
    if (p_.inner == 1) return run_rows();
    if (has_whole_steps()) return run_few_steps();
    if (is_packed_slab()) return run_packed();
    if (has_few_steps() && !has_few_elements()) return run_few_steps();
    if (is_small())
      if (const std::optional<cudaError_t> error = run_small()) return *error;
    const bool narrow = p_.inner * kSize < kNarrowBytes,
               many = !whole(p_.inner) && p_.inner * kSize < 512 && p_.outer >= device_.multiprocessors;
    if ((narrow || many) && slab_unit() <= kTileThreads) return run_slabs();
    return has_few_steps() ? run_few_steps() : run_columns();
  }

 private:
  static constexpr int kLaneVectors = kHalf ? 4 : 8;  // of a lane, of 16 bytes: 32 floats
  // Bytes of a row in short_rows.cuh, at most; of one in half precision where rows have so many a multiprocessor.
  static constexpr int64_t kShortRowBytes = 256, kMostShortRowBytes = 640, kManyShortRowBytes = 64 << 10;
  static constexpr int64_t kPackedSlabBytes = 2048, kPackedRowBytes = 64, kPackedViewBytes = 128, kNarrowBytes = 128;
  // Blocks of a multiprocessor up to which launches of rows in blocks begin as the one before ends: more than others'
  // (kDependentShare), as they are short.
  static constexpr int64_t kDependentRowBlocks = 2;
  // Vectors of a row to a block of a cluster of 16 that has its multiprocessor alone, at most: an exchange between all
  // blocks of the device takes longer than what more multiprocessors gain.
  static constexpr int64_t kAloneShare = kHalf ? 4096 : 4608;

  // Of a view, where a kernel reads it in place.
  std::optional<cudaError_t> run_view() {
    const bool has_words = has_few_steps() && !is_packed_slab();
    if (has_whole_steps() || (has_words && !has_few_elements())) return run_few_steps();
    if (is_small() && !is_packed_slab())
      if (const std::optional<cudaError_t> error = run_small()) return error;
    if (has_words) return run_few_steps();
    if (p_.backward) return std::nullopt;
    if (is_packed_view()) return run_packed();
    if (p_.run % (p_.inner == 1 ? p_.length : p_.inner) != 0) return std::nullopt;
    if (p_.inner > 1) {
      const bool is_narrow = p_.inner * kSize < kNarrowBytes || is_packed_slab();
      if (!is_narrow) {
        if (const auto error = run_windows()) return error;
        if (const auto error = run_windows_together()) return error;
      }
      if (const auto error = run_padded_slabs()) return error;
      return run_view_chunks();
    }
    if (is_packed_row()) return std::nullopt;
    set_rows();
    const auto error = run_rows_of<RowKind::kView>();
    return error ? error : run_padded_slabs();
  }

  // Whether rows, or slabs, are short, and so are the gaps between their runs, which are read with them.
  bool is_packed_view() const {
    const bool is_short = p_.inner == 1 ? !whole(p_.length) && p_.length * kSize < kPackedViewBytes : is_packed_slab();
    return is_short && p_.run % slab() == 0 && p_.gap >= 0 && p_.gap <= p_.run &&
        packed_gaps() * kSize <= 2 * kPackedBytes;
  }
  // Elements of a block: whole slabs and whole vectors, and enough blocks.
  int64_t packed_tile() const {
    const int64_t slabs = std::min(kPackedBytes / (slab() * kSize), ceil_div(p_.outer, 4 * device_.multiprocessors));
    return round_up(std::max<int64_t>(slabs, 1), kVec / std::gcd<int64_t>(slab(), kVec)) * slab();
  }
  // Lanes of a line, as a power of two, if each has so many elements at most.
  int lane_bits_of(int elements) const {
    int bits = 0;
    while (elements << bits < p_.length) ++bits;
    return bits;
  }
  // Elements between the runs of a block's part of a view, at most.
  int64_t packed_gaps() const { return (packed_tile() / p_.run + 1) * p_.gap; }

  cudaError_t run_packed() const {
    auto params = this->template operands<SoftmaxPacked<T>>();
    params.elements = elements();
    params.runs = this->runs();
    params.length = static_cast<int>(p_.length);
    params.columns = static_cast<int>(p_.inner);
    params.tile = static_cast<int>(packed_tile());
    params.lane_bits = lane_bits_of(kPackedElements);
    const int64_t grid = ceil_div(params.elements, params.tile);
    int64_t shared = params.tile * (p_.backward ? 2 : 1);
    if (is_view()) shared += params.tile + packed_gaps() + 2 * kVec;
    shared *= kSize;
    return with_elements([&](auto elements) {
      constexpr int kElements = decltype(elements)::value;
      return launch(
          p_.backward ? softmax_packed_kernel<T, kElements, true> : softmax_packed_kernel<T, kElements, false>, params,
          grid, kPackedThreads, shared);
    });
  }

  // Elements of a line to a lane, at least.
  template <typename Run>
  cudaError_t with_elements(const Run& run) const {
    return Base::template with_room<2, 4, kPackedElements>(p_.length, run);
  }

  bool is_packed_slab() const {
    return p_.inner > 1 && slab() * kSize <= kPackedSlabBytes && p_.length <= 32 * kPackedElements;
  }
  // On an H200 longer ones gain where there are many (84 shapes): of 2e5 to 2e6 elements they take up to 1.3 of the
  // time.
  bool is_short_row() const {
    const int64_t bytes = p_.length * kSize;
    const bool many = kHalf && elements() * kSize >= kManyShortRowBytes * device_.multiprocessors;
    return device_.cluster > 1 && !is_view() && !whole(p_.length) && p_.length > kShortRowElements / 2 &&
        bytes <= (many ? kMostShortRowBytes : kShortRowBytes);
  }
  cudaError_t run_short_rows() const {
    auto params = this->template operands<SoftmaxShortRows<T>>();
    params.rows = p_.outer;
    params.length = static_cast<int>(p_.length);
    params.lane_bits = lane_bits_of(kShortRowElements);
    params.tile = static_cast<int>(packed_tile() / p_.length);
    const int64_t grid = ceil_div(p_.outer, params.tile),
                  shared = params.tile * p_.length * kSize * (p_.backward ? 2 : 1);
    return Base::template with_room<kShortRowElements - kShortRowParts, kShortRowElements>(
        ceil_div(p_.length, int64_t{1} << params.lane_bits), [&](auto elements) {
          constexpr int kElements = decltype(elements)::value;
          return launch(p_.backward ? softmax_short_rows_kernel<T, kElements, true>
                                    : softmax_short_rows_kernel<T, kElements, false>,
              params, grid, kShortRowThreads, shared);
        });
  }

  bool is_packed_row() const { return !whole(p_.length) && p_.length * kSize < kPackedRowBytes; }
  void set_rows() {
    rows_ = this->template operands<SoftmaxRows<T>>();
    rows_.rows = p_.outer, rows_.columns = p_.length;
    rows_.runs = this->runs();
  }
  cudaError_t run_rows() {
    if constexpr (kSize <= 4) {
      if (is_short_row()) return run_short_rows();
    }
    if (is_packed_row()) return run_packed();
    set_rows();
    const std::optional<cudaError_t> error =
        whole(p_.length) ? run_rows_of<RowKind::kWhole>() : run_rows_of<RowKind::kAny>();
    return error ? *error : run_together();
  }

  // Of rows that lanes, a block or a cluster hold.
  template <RowKind kKind>
  std::optional<cudaError_t> run_rows_of() {
    const int64_t vectors = vectors_of(p_.length);
    if (vectors <= 32 * kLaneVectors) return run_lanes<kKind>();
    // Powers of four vectors of half precision fit the registers, so that they are made once.
    if constexpr (kHalf) {
      if (!p_.backward && vectors <= 512 * 4) return run_blocks<4, kKind>();
    }
    return run_blocks<8, kKind>();
  }

  template <RowKind kKind>
  cudaError_t run_lanes() {
    const int64_t vectors = vectors_of(p_.length);
    // Eight lanes read whole sectors of 128 bytes; more only where a lane's vectors do not suffice, or where so few
    // rows leave the device waiting.
    const bool few = rows_.rows * 8 < int64_t{512} * device_.multiprocessors;
    const int64_t most = few ? 1 : 4;  // vectors of a lane before it gets help
    int64_t lanes = std::min<int64_t>(power_of_two_from(vectors), 8);
    while (lanes < 32 && lanes * most < vectors) lanes *= 2;
    rows_.lane_bits = 0;
    while (1 << rows_.lane_bits < lanes) ++rows_.lane_bits;
    const int64_t each = ceil_div(vectors, lanes);
    // Four vectors of a thread are on their way at least, if need be of several rows.
    if (each <= 1) return few ? launch_lanes<kKind, 1, 1>() : launch_lanes<kKind, 1, 4>();
    if (each <= 2) return few ? launch_lanes<kKind, 2, 1>() : launch_lanes<kKind, 2, 2>();
    if (each <= 4) return launch_lanes<kKind, 4, 1>();
    if constexpr (!kHalf) return launch_lanes<kKind, 8, 1>();
    else return cudaErrorInvalidValue;
  }

  template <RowKind kKind, int kVectors, int kRows>
  cudaError_t launch_lanes() const {
    const int64_t grid = ceil_div(rows_.rows, kRows * (kLaneThreads >> rows_.lane_bits));
    if constexpr (kKind != RowKind::kView) {
      if (p_.backward)
        return launch(softmax_lanes_kernel<T, kKind, kVectors, kRows, true, -1>, rows_, grid, kLaneThreads);
    }
    // A warp takes a row where there are few of them, or where they are long: what it takes counts there. A few rows of
    // two vectors a lane, and rows of eight, never have fewer lanes.
    constexpr int kWarp = kRows == 1 ? 5 : -1, kFewer = kVectors == 8 || (kVectors == 2 && kRows == 1) ? 5 : -1;
    const auto kernel = rows_.lane_bits == 5 ? softmax_lanes_kernel<T, kKind, kVectors, kRows, false, kWarp>
                                             : softmax_lanes_kernel<T, kKind, kVectors, kRows, false, kFewer>;
    return launch(kernel, rows_, grid, kLaneThreads);
  }

  template <int kVectors, RowKind kKind>
  std::optional<cudaError_t> run_blocks() {
    const int64_t vectors = vectors_of(p_.length);
    // Backward a block keeps its share of the output in shared memory.
    const int64_t most_warps = std::min<int64_t>(
        kBlockThreads / 32, p_.backward ? (device_.shared_per_block - 2048) / (32 * 16 * 8) : kBlockThreads / 32);
    const int64_t most_share = most_warps * 32 * kVectors;
    int cluster = 1;
    const auto share = [&] { return ceil_div(vectors, cluster); };
    while (cluster < std::min(device_.cluster, 8) && share() > std::min<int64_t>(kClusterShare, most_share))
      cluster *= 2;
    // Few rows: more blocks to a row, so that every multiprocessor has work, and more threads to a block.
    const bool few = rows_.rows * cluster < 2 * device_.multiprocessors;
    // Clusters of 16 all at once; half precision gains by fewer vectors a thread even so.
    const int most_blocks =
        kHalf || rows_.rows * vectors <= int64_t{2048} * device_.multiprocessors ? device_.cluster : 8;
    while (few && cluster < most_blocks && rows_.rows * cluster < 2 * device_.multiprocessors && share() >= 512)
      cluster *= 2;
    rows_.share = static_cast<int>(share());
    if (few && share() <= most_warps * 64) return launch_blocks<2, kKind>(ceil_div(share(), 64), cluster);
    if (cluster > 8) {
      if (rows_.rows * cluster > device_.multiprocessors || share() > kAloneShare) return std::nullopt;
      if constexpr (kHalf) {
        if (!p_.backward) return launch_blocks<4, kKind>(ceil_div(share(), 32 * 4), cluster);
      }
      return launch_blocks<8, kKind>(ceil_div(share(), 32 * 8), cluster);
    }
    if (share() > most_share || idle_in_clusters(share(), cluster)) return std::nullopt;
    return launch_blocks<kVectors, kKind>(few ? most_warps : ceil_div(share(), 32 * kVectors), cluster);
  }

  template <int kVectors, RowKind kKind>
  std::optional<cudaError_t> launch_blocks(int64_t warps, int cluster) {
    constexpr int kBackwardVectors = kVectors == 4 ? 8 : kVectors;
    auto kernel = softmax_block_kernel<T, kVectors, kKind>;
    if constexpr (kKind != RowKind::kView) {
      if (p_.backward) kernel = softmax_backward_block_kernel<T, kBackwardVectors, kKind>;
    }
    const int64_t shared = p_.backward ? warps * 32 * kVectors * 16 : 0;
    const int64_t grid = rows_.rows * cluster;
    return launch_clusters(
        grid <= kDependentRowBlocks * device_.multiprocessors, kernel, rows_, grid, warps * 32, shared, cluster);
  }

  // Whether rows are so many that their last clusters run nearly alone, after all others, and few enough for a second
  // read to come from L2.
  bool idle_in_clusters(int64_t share, int cluster) const {
    if (cluster < 8) return false;
    const int64_t at_once = (share <= kClusterShare ? 2 : 1) * std::max(1, device_.multiprocessors / cluster);
    const int64_t waves = ceil_div(p_.outer, at_once);
    const int64_t bytes = p_.outer * p_.length * kSize * (p_.backward ? 2 : 1);
    return waves > 1 && 5 * p_.outer < 3 * waves * at_once && bytes <= kCachedBytes;
  }

  SoftmaxRows<T> rows_{};
};

}  // namespace dcs
