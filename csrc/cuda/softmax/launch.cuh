// Which softmax kernel a problem takes, and with what tiles. A vector has 16 bytes; all tensors begin at one.
//
// clang-format off
// | lines                                                   | kernel                                             |
// | ------------------------------------------------------- | -------------------------------------------------- |
// | rows of less than 64 bytes that are no whole vectors    | packed_lines.cuh, slabs: through shared memory     |
// | rows of up to 256 vectors (half precision: 128)         | rows.cuh, lanes: several rows a warp               |
// | rows that a block or a cluster holds                    | rows.cuh, block: a row in registers                |
// | longer rows; a few that leave clusters idle             | slabs.cuh, chunks: read twice                      |
// | slabs, (length, inner), of up to 2 KB                   | packed_lines.cuh, slabs                            |
// | inner below 128 bytes, or 1 KB if no whole vectors:     |                                                    |
// |   slabs of up to 64 KB                                  | slabs.cuh, slab: in a block's registers            |
// |   larger slabs                                          | slabs.cuh, chunks: read twice                      |
// | larger inner:                                           |                                                    |
// |   no whole vectors, up to 8 steps                       | packed_lines.cuh, steps                            |
// |   as many steps as a block holds (256 to 1024)          | columns.cuh: a window of columns in registers      |
// |   more steps                                            | columns.cuh, part and finish: read twice           |
// clang-format on
#pragma once

#include <algorithm>
#include <numeric>

#include "softmax/launch.h"
#include "softmax/columns.cuh"
#include "softmax/packed_lines.cuh"
#include "softmax/rows.cuh"
#include "softmax/slabs.cuh"

namespace dcs {

// Vectors of a row to a block of a cluster: two such blocks of 512 threads on a multiprocessor, so that one loads while
// the other stores.
constexpr int64_t kClusterShare = 512 * kBlockVectors;

inline int64_t power_of_two_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}
inline int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

template <typename T>
class SoftmaxLaunch {
 public:
  SoftmaxLaunch(const SoftmaxProblem& problem, const Device& device, SoftmaxWorkspace& workspace, cudaStream_t stream)
      : p_(problem), device_(device), workspace_(workspace), stream_(stream) {}

  cudaError_t run() {
    if (p_.inner == 1) return run_rows();
    if (slab() * kSize <= kPackedSlabBytes && p_.length <= 32 * kPackedElements) return run_packed();
    const bool narrow = p_.inner * kSize < 128 || (!whole(p_.inner) && p_.inner * kSize < 1024);
    if (narrow && slab_unit() <= kChunkThreads) return run_slabs();
    return !whole(p_.inner) && p_.length <= kPackedElements ? run_steps() : run_columns();
  }

 private:
  using Acc = typename Types<T>::Acc;
  static constexpr int kSize = sizeof(T), kVec = 16 / sizeof(T);
  static constexpr bool kHalf = sizeof(T) == 2;
  static constexpr int kLaneVectors = kHalf ? 4 : 8;  // of a lane, of 16 bytes: 32 floats
  static constexpr int64_t kPackedSlabBytes = 2048, kPackedRowBytes = 64;
  // What a second read finds in L2, in bytes of both inputs.
  static constexpr int64_t kCachedBytes = 24 << 20;
  // Of a chunk of a slab, about; parts of a slab's chunks and columns, at most.
  static constexpr int64_t kChunkBytes = 64 << 10, kMostParts = 512;

  static bool whole(int64_t elements) { return elements % kVec == 0; }
  int64_t slab() const { return p_.length * p_.inner; }
  // Vectors after which columns are where they were.
  int64_t slab_unit() const { return p_.inner / std::gcd<int64_t>(p_.inner, kVec); }
  // Of a line of so many neighboring elements, at most: it can begin at any element of its first vector.
  static int64_t vectors_of(int64_t elements) {
    return whole(elements) ? elements / kVec : ceil_div(elements + kVec - 1, kVec);
  }
  template <typename Params>
  Params operands() const {
    return {static_cast<const T*>(p_.input), static_cast<const T*>(p_.saved), static_cast<T*>(p_.output)};
  }

  // `dependent`: waits itself for the launch before it.
  template <typename Kernel, typename Params>
  cudaError_t launch(Kernel kernel, const Params& params, int64_t grid, int64_t threads, int64_t shared = 0,
      int cluster = 1, bool dependent = false) const {
    const cudaError_t allowed = allow_shared(kernel, shared, device_.shared_per_block);
    if (allowed != cudaSuccess) return allowed;
    if (cluster > 8) {
      const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute attribute = dependent ? programmatic_serialization() : in_clusters_of(cluster);
    const bool attributed = cluster > 1 || (dependent && device_.cluster > 1);
    const cudaLaunchConfig_t config = launch_config(grid, threads, shared, stream_, &attribute, attributed ? 1 : 0);
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
    return error != cudaSuccess ? error : cudaGetLastError();
  }
  template <typename Kernel, typename Params>
  cudaError_t launch_after(Kernel kernel, const Params& params, int64_t grid, int64_t threads, int64_t shared) const {
    return launch(kernel, params, grid, threads, shared, 1, true);
  }

  SoftmaxPacked<T> packed() const {
    auto packed = operands<SoftmaxPacked<T>>();
    packed.elements = p_.outer * slab();
    packed.length = static_cast<int>(p_.length);
    return packed;
  }

  cudaError_t run_packed() const {
    SoftmaxPacked<T> params = packed();
    params.columns = static_cast<int>(p_.inner);
    // Whole vectors to a block, and enough blocks.
    const int64_t slabs = std::min(kPackedBytes / (slab() * kSize), ceil_div(p_.outer, 4 * device_.multiprocessors));
    params.tile =
        static_cast<int>(round_up(std::max<int64_t>(slabs, 1), kVec / std::gcd<int64_t>(slab(), kVec)) * slab());
    while (kPackedElements << params.lane_bits < p_.length) ++params.lane_bits;
    const int64_t grid = ceil_div(params.elements, params.tile), shared = params.tile * kSize * (p_.backward ? 2 : 1);
    return with_elements([&](auto elements) {
      constexpr int kElements = decltype(elements)::value;
      return launch(
          p_.backward ? softmax_packed_kernel<T, kElements, true> : softmax_packed_kernel<T, kElements, false>, params,
          grid, kPackedThreads, shared);
    });
  }

  cudaError_t run_steps() const {
    SoftmaxPacked<T> params = packed();
    params.inner = p_.inner;
    const int64_t most = kPackedBytes / (p_.length * kSize) / kVec * kVec;
    params.window = static_cast<int>(
        std::clamp<int64_t>(round_up(ceil_div(p_.outer * p_.inner, 4 * device_.multiprocessors), kVec), 64, most));
    params.windows = ceil_div(p_.inner, params.window);
    const int64_t shared = p_.length * (params.window + kVec) * kSize * (p_.backward ? 2 : 1);
    return with_elements([&](auto elements) {
      constexpr int kElements = decltype(elements)::value;
      return launch(p_.backward ? softmax_steps_kernel<T, kElements, true> : softmax_steps_kernel<T, kElements, false>,
          params, p_.outer * params.windows, kPackedThreads, shared);
    });
  }

  // Of a line to a lane, at least.
  template <typename Run>
  cudaError_t with_elements(const Run& run) const {
    if (p_.length <= 2) return run(std::integral_constant<int, 2>());
    if (p_.length <= 4) return run(std::integral_constant<int, 4>());
    return run(std::integral_constant<int, kPackedElements>());
  }

  cudaError_t run_rows() {
    if (!whole(p_.length) && p_.length * kSize < kPackedRowBytes) return run_packed();
    rows_ = operands<SoftmaxRows<T>>();
    rows_.rows = p_.outer, rows_.columns = p_.length;
    return whole(p_.length) ? run_rows_of<true>() : run_rows_of<false>();
  }

  template <bool kWhole>
  cudaError_t run_rows_of() {
    const int64_t vectors = vectors_of(p_.length);
    if (vectors <= 32 * kLaneVectors) return run_lanes<kWhole>();
    // Powers of four vectors of half precision fit the registers, so that they are made once.
    if constexpr (kHalf) {
      if (!p_.backward && vectors <= 512 * 4) return run_blocks<4, kWhole>();
    }
    return run_blocks<8, kWhole>();
  }

  template <bool kWhole>
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
    if (each <= 1) return few ? launch_lanes<kWhole, 1, 1>() : launch_lanes<kWhole, 1, 4>();
    if (each <= 2) return few ? launch_lanes<kWhole, 2, 1>() : launch_lanes<kWhole, 2, 2>();
    if (each <= 4) return launch_lanes<kWhole, 4, 1>();
    if constexpr (!kHalf) return launch_lanes<kWhole, 8, 1>();
    else return cudaErrorInvalidValue;
  }

  template <bool kWhole, int kVectors, int kRows>
  cudaError_t launch_lanes() const {
    const int64_t grid = ceil_div(rows_.rows, kRows * (kLaneThreads >> rows_.lane_bits));
    if (p_.backward)
      return launch(softmax_lanes_kernel<T, kWhole, kVectors, kRows, true, -1>, rows_, grid, kLaneThreads);
    // A warp takes a row where there are few of them, or where they are long: what it takes counts there. A few rows of
    // two vectors a lane, and rows of eight, never have fewer lanes.
    constexpr int kWarp = kRows == 1 ? 5 : -1, kFewer = kVectors == 8 || (kVectors == 2 && kRows == 1) ? 5 : -1;
    const auto kernel = rows_.lane_bits == 5 ? softmax_lanes_kernel<T, kWhole, kVectors, kRows, false, kWarp>
                                             : softmax_lanes_kernel<T, kWhole, kVectors, kRows, false, kFewer>;
    return launch(kernel, rows_, grid, kLaneThreads);
  }

  template <int kVectors, bool kWhole>
  cudaError_t run_blocks() {
    const auto kernel =
        p_.backward ? softmax_backward_block_kernel<T, 8, kWhole> : softmax_block_kernel<T, kVectors, kWhole>;
    const int64_t vectors = vectors_of(p_.length);
    const int most_blocks = device_.cluster;
    // Backward a block keeps its share of the output in shared memory.
    const int64_t most_warps = std::min<int64_t>(
        kBlockThreads / 32, p_.backward ? (device_.shared_per_block - 2048) / (32 * 16 * 8) : kBlockThreads / 32);
    const int64_t most_share = most_warps * 32 * kVectors;
    int cluster = 1;
    const auto share = [&] { return ceil_div(vectors, cluster); };
    const auto fits = [&] { return share() <= most_share; };
    while (cluster < std::min(most_blocks, 8) && share() > std::min<int64_t>(kClusterShare, most_share)) cluster *= 2;
    // Few rows: more blocks to a row, so that every multiprocessor has work.
    const bool few = rows_.rows * cluster < 2 * device_.multiprocessors;
    while (cluster < std::min(most_blocks, 8) && rows_.rows * cluster < 2 * device_.multiprocessors && share() >= 1024)
      cluster *= 2;
    if (!fits() && most_blocks == 16) cluster = 16;
    if (!fits() || idle_in_clusters(share(), cluster)) return run_chunks();
    // Few rows: more threads to a block as well.
    const int64_t each = few ? 2 : kVectors;
    const int64_t warps =
        std::clamp<int64_t>(ceil_div(share(), 32 * each), ceil_div(share(), 32 * kVectors), most_warps);
    const int64_t shared = p_.backward ? warps * 32 * kVectors * 16 : 0;
    rows_.share = static_cast<int>(share());
    if (cluster > 8 && !is_possible(kernel, warps * 32, shared, cluster)) return run_chunks();
    return launch(kernel, rows_, rows_.rows * cluster, warps * 32, shared, cluster);
  }

  // Whether rows are so many that their last clusters run nearly alone, after all others, and few enough for a second
  // read to come from L2.
  bool idle_in_clusters(int64_t share, int cluster) const {
    if (cluster < 8) return false;
    const int64_t at_once = (share <= kClusterShare ? 2 : 1) * (device_.multiprocessors / cluster);
    const int64_t waves = ceil_div(p_.outer, at_once);
    const int64_t bytes = p_.outer * p_.length * kSize * (p_.backward ? 2 : 1);
    return waves > 1 && 5 * p_.outer < 3 * waves * at_once && bytes <= kCachedBytes;
  }

  // Whether the device's groups of multiprocessors have room for such a cluster. One of 8 blocks is possible wherever
  // there are clusters.
  template <typename Kernel>
  bool is_possible(Kernel kernel, int64_t threads, int64_t shared, int cluster) const {
    allow_shared(kernel, shared, device_.shared_per_block);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaLaunchAttribute attribute = in_clusters_of(cluster);
    const cudaLaunchConfig_t config = launch_config(cluster, threads, shared, stream_, &attribute, cluster > 1 ? 1 : 0);
    int clusters = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && clusters > 0;
  }

  SoftmaxSlabs<T> slabs() const {
    auto slabs = operands<SoftmaxSlabs<T>>();
    slabs.elements = p_.outer * slab(), slabs.size = slab();
    slabs.columns = static_cast<int>(p_.inner);
    return slabs;
  }

  cudaError_t run_slabs() {
    const int64_t vectors = vectors_of(slab());
    // Half of a thread's vectors where they are so few that more threads would have none.
    return vectors <= 32 * kSlabVectors ? launch_slabs<kSlabVectors / 2>(vectors) : launch_slabs<kSlabVectors>(vectors);
  }

  template <int kVectors>
  cudaError_t launch_slabs(int64_t vectors) {
    const int64_t width = round_up(std::max(ceil_div(vectors, kVectors), std::min<int64_t>(vectors, 32)), slab_unit());
    if (width > kSlabThreads) return run_chunks();
    SoftmaxSlabs<T> params = slabs();
    params.width = static_cast<int>(width);
    params.chunk = width * kVectors, params.chunks = 1;
    const int64_t threads = round_up(width, 32);
    return launch(p_.backward ? softmax_slab_kernel<T, kVectors, true> : softmax_slab_kernel<T, kVectors, false>,
        params, p_.outer, threads, slab_shared_bytes<T>(p_.inner, width, threads));
  }

  cudaError_t run_chunks() {
    SoftmaxSlabs<T> params = slabs();
    params.width = static_cast<int>(kChunkThreads / slab_unit() * slab_unit());
    // Small chunks keep the device busy to the end, but each block of the last kernel joins the parts of all of a
    // slab's.
    const int64_t rounds = ceil_div(vectors_of(slab()), params.width);
    const int64_t small = std::min(slab() * kSize / kChunkBytes, kMostParts / p_.inner);
    const int64_t wanted = std::clamp<int64_t>(
        std::max(small, 2 * device_.multiprocessors / p_.outer), 1, ceil_div(rounds, kChunkVectors));
    params.chunk = ceil_div(rounds, wanted) * params.width;
    params.chunks = ceil_div(rounds * params.width, params.chunk);
    const int64_t grid = p_.outer * params.chunks, parts = grid * p_.inner, joined = p_.outer * p_.inner;
    params.parts =
        static_cast<Part<Acc>*>(workspace_.allocate((parts + joined) * static_cast<int64_t>(sizeof(Part<Acc>))));
    cudaError_t error = launch(p_.backward ? softmax_chunk_kernel<T, true> : softmax_chunk_kernel<T, false>, params,
        grid, kChunkThreads, slab_shared_bytes<T>(p_.inner, params.width, kChunkThreads));
    // A block reads the parts of a few chunks faster than a launch takes.
    if (error == cudaSuccess && params.chunks * p_.inner > 1024) {
      params.joined = params.parts + parts;
      error = launch_after(p_.backward ? softmax_join_chunks_kernel<T, true> : softmax_join_chunks_kernel<T, false>,
          params, p_.outer * ceil_div(p_.inner, kJoinColumns), kChunkThreads, 0);
    }
    if (error != cudaSuccess) return error;
    return launch_after(p_.backward ? softmax_finish_kernel<T, true> : softmax_finish_kernel<T, false>, params, grid,
        kChunkThreads, joined_parts(p_.inner, kChunkThreads) * static_cast<int64_t>(sizeof(Part<Acc>)));
  }

  cudaError_t run_columns() {
    auto columns = operands<SoftmaxColumns<T>>();
    columns.outer = p_.outer, columns.length = p_.length, columns.inner = p_.inner;
    const int64_t steps = p_.backward ? kColumnSteps<T> / 2 : kColumnSteps<T>;
    const bool shifted = !whole(p_.inner);
    constexpr int64_t kNarrowest = 8;  // vectors: whole sectors
    const int64_t unit = kVec / std::gcd<int64_t>(p_.inner, kVec);
    int64_t down = std::max(power_of_two_from(ceil_div(p_.length, steps)), unit);
    const bool fits = down <= kColumnThreads<T> / kNarrowest;
    if (!fits) down = 32;
    const int64_t across = std::max<int64_t>(kNarrowest, (shifted ? 512 : 256) / down);
    columns.across = static_cast<int>(across), columns.down = static_cast<int>(down);
    if (shifted) columns.windows = ceil_div(p_.inner, (across - 1) * kVec);
    const int64_t tiles = shifted ? p_.outer * columns.windows : ceil_div(p_.outer * (p_.inner / kVec), across),
                  shared = column_shared_bytes<T>(across, down);
    if (fits)
      return launch(p_.backward ? softmax_columns_kernel<T, true> : softmax_columns_kernel<T, false>, columns, tiles,
          across * down, shared);
    const int64_t rounds = ceil_div(p_.length, down * 4);
    const int64_t wanted =
        std::clamp<int64_t>(ceil_div(16 * device_.multiprocessors, tiles), 1, std::min<int64_t>(64, rounds));
    columns.chunk = ceil_div(rounds, wanted) * down * 4;
    columns.chunks = ceil_div(p_.length, columns.chunk);
    columns.parts = static_cast<Part<Acc>*>(
        workspace_.allocate(columns.chunks * p_.outer * p_.inner * static_cast<int64_t>(sizeof(Part<Acc>))));
    const cudaError_t error =
        launch(p_.backward ? softmax_columns_part_kernel<T, true> : softmax_columns_part_kernel<T, false>, columns,
            tiles * columns.chunks, across * down, shared);
    if (error != cudaSuccess) return error;
    return launch_after(p_.backward ? softmax_columns_finish_kernel<T, true> : softmax_columns_finish_kernel<T, false>,
        columns, tiles * columns.chunks, across * down, shared);
  }

  const SoftmaxProblem& p_;
  const Device& device_;
  SoftmaxWorkspace& workspace_;
  cudaStream_t stream_;
  SoftmaxRows<T> rows_{};
};

}  // namespace dcs
