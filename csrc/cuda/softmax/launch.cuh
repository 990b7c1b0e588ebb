// Which softmax kernel a problem takes, and in what pieces.
#pragma once

#include <algorithm>

#include "softmax/launch.h"
#include "softmax/columns.cuh"
#include "softmax/split_rows.cuh"

namespace dcs {

// Vectors of a row to a block of a cluster: two such blocks of 512 threads on a multiprocessor, so that one loads while
// the other stores.
constexpr int64_t kClusterShare = 512 * kBlockVectors;
constexpr int64_t kMostShare = kBlockThreads * kBlockVectors;

inline int64_t power_of_two_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

template <typename T>
class SoftmaxLaunch {
 public:
  SoftmaxLaunch(
      const SoftmaxProblem& problem, const Device& device, const SoftmaxWorkspace& workspace, cudaStream_t stream)
      : p_(problem), device_(device), workspace_(workspace), stream_(stream) {}

  cudaError_t run() {
    if (p_.inner == 1) {
      rows_ = {static_cast<const T*>(p_.input), static_cast<const T*>(p_.saved), static_cast<T*>(p_.output), p_.outer,
          p_.length};
      return whole(p_.length) ? run_rows<true>() : run_rows<false>();
    }
    return whole(p_.inner) ? run_columns<kVec>() : run_columns<1>();
  }

 private:
  using Acc = typename Types<T>::Acc;
  static constexpr int kVec = 16 / sizeof(T);
  static constexpr bool kHalf = sizeof(T) == 2;
  static constexpr int kLaneVectors = kHalf ? 4 : 8;  // of a lane, of 16 bytes: 32 floats

  bool whole(int64_t elements) const { return elements % kVec == 0 && reinterpret_cast<uintptr_t>(p_.input) % 16 == 0; }

  template <typename Kernel, typename Params>
  cudaError_t launch(
      Kernel kernel, const Params& params, int64_t grid, int64_t threads, int64_t shared = 0, int cluster = 1) const {
    const cudaError_t allowed = allow_shared(kernel, shared, device_.shared_per_block);
    if (allowed != cudaSuccess) return allowed;
    if (cluster > 8) {
      const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute attribute = in_clusters_of(cluster);
    const cudaLaunchConfig_t config = launch_config(grid, threads, shared, stream_, &attribute, cluster > 1 ? 1 : 0);
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
    return error != cudaSuccess ? error : cudaGetLastError();
  }

  template <bool kWhole>
  cudaError_t run_rows() {
    if (kWhole && rows_.columns <= 32 * kLaneVectors * kVec) return run_lanes<kVec>();
    if (!kWhole && rows_.columns <= 32 * kBlockVectors) return run_lanes<1>();
    // Powers of four vectors of half precision fit the registers, so that they are made once.
    if constexpr (kHalf) {
      if (!p_.backward && rows_.columns / kVec <= 512 * 4) return run_blocks<4, kWhole>();
    }
    return run_blocks<8, kWhole>();
  }

  template <int kWidth>
  cudaError_t run_lanes() {
    const int64_t vectors = rows_.columns / kWidth;
    // Eight lanes read whole sectors of 128 bytes; more only where a lane's vectors do not suffice, or where so few
    // rows leave the device waiting.
    const bool few = rows_.rows * 8 < int64_t{512} * device_.multiprocessors;
    const int64_t most = kWidth == 1 || few ? 1 : 4;  // vectors of a lane before it gets help
    int64_t lanes = std::min<int64_t>(power_of_two_from(vectors), 8);
    while (lanes < 32 && lanes * most < vectors) lanes *= 2;
    rows_.lane_bits = 0;
    while (1 << rows_.lane_bits < lanes) ++rows_.lane_bits;
    const int64_t each = ceil_div(vectors, lanes);
    // Four vectors of a thread are on their way at least, if need be of several rows.
    if (each <= 1) return few ? launch_lanes<kWidth, 1, 1>() : launch_lanes<kWidth, 1, 4>();
    if (each <= 2) return few ? launch_lanes<kWidth, 2, 1>() : launch_lanes<kWidth, 2, 2>();
    if (each <= 4) return launch_lanes<kWidth, 4, 1>();
    if constexpr (kWidth == 1 || !kHalf) return launch_lanes<kWidth, 8, 1>();
    else return cudaErrorInvalidValue;
  }

  template <int kWidth, int kVectors, int kRows>
  cudaError_t launch_lanes() const {
    const int64_t grid = ceil_div(rows_.rows, kRows * (kLaneThreads >> rows_.lane_bits));
    if (p_.backward)
      return launch(softmax_lanes_kernel<T, kWidth, kVectors, kRows, true, -1>, rows_, grid, kLaneThreads);
    // A warp takes a row where there are few of them, or where they are long: what it takes counts there.
    if constexpr (kWidth > 1 && kRows == 1) {
      if (rows_.lane_bits == 5)
        return launch(softmax_lanes_kernel<T, kWidth, kVectors, kRows, false, 5>, rows_, grid, kLaneThreads);
    }
    return launch(softmax_lanes_kernel<T, kWidth, kVectors, kRows, false, -1>, rows_, grid, kLaneThreads);
  }

  template <int kVectors, bool kWhole>
  cudaError_t run_blocks() {
    const auto kernel =
        p_.backward ? softmax_backward_block_kernel<T, 8, kWhole> : softmax_block_kernel<T, kVectors, kWhole>;
    const int64_t vectors = rows_.columns / kVec + (kWhole ? 0 : 2);
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
    if (!fits()) return run_split();
    // Few rows: more threads to a block as well.
    const int64_t each = few ? 2 : kVectors;
    const int64_t warps =
        std::clamp<int64_t>(ceil_div(share(), 32 * each), ceil_div(share(), 32 * kVectors), most_warps);
    const int64_t shared = p_.backward ? warps * 32 * kVectors * 16 : 0;
    rows_.share = static_cast<int>(share());
    if (cluster > 8 && !is_possible(kernel, warps * 32, shared, cluster)) return run_split();
    return launch(kernel, rows_, rows_.rows * cluster, warps * 32, shared, cluster);
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

  cudaError_t run_split() {
    SoftmaxSplit<T> split{rows_};
    const int64_t tiles = ceil_div(rows_.columns / kVec + 2, kSplitTile);
    // Enough chunks to fill the device, and not so many that a row's parts take longer than a chunk.
    const int64_t wanted = std::clamp<int64_t>(ceil_div(16 * device_.multiprocessors, rows_.rows), 1, 2048);
    split.chunk = ceil_div(tiles, std::min(wanted, tiles)) * kSplitTile;
    split.chunks = ceil_div(tiles * kSplitTile, split.chunk);
    const int64_t grid = rows_.rows * split.chunks;
    split.parts = static_cast<Part<Acc>*>(workspace_(grid * static_cast<int64_t>(sizeof(Part<Acc>))));
    const cudaError_t error =
        launch(p_.backward ? softmax_part_kernel<T, true> : softmax_part_kernel<T, false>, split, grid, kSplitThreads);
    if (error != cudaSuccess) return error;
    return launch(
        p_.backward ? softmax_finish_kernel<T, true> : softmax_finish_kernel<T, false>, split, grid, kSplitThreads);
  }

  template <int kWidth>
  cudaError_t run_columns() {
    SoftmaxColumns<T> columns{static_cast<const T*>(p_.input), static_cast<const T*>(p_.saved),
        static_cast<T*>(p_.output), p_.outer, p_.length, p_.inner};
    const int64_t steps = p_.backward ? kColumnSteps<kWidth> / 2 : kColumnSteps<kWidth>;
    const int64_t narrowest = kWidth == 1 ? 32 : 8;  // whole sectors
    const int64_t most_down = kColumnThreads<kWidth> / narrowest;
    int64_t down = power_of_two_from(ceil_div(p_.length, steps));
    const bool held = down <= most_down;
    if (!held) down = 256 / narrowest;
    const int64_t across = std::max<int64_t>(narrowest, 256 / down);
    columns.across = static_cast<int>(across), columns.down = static_cast<int>(down);
    const int64_t tiles = ceil_div(p_.outer * (p_.inner / kWidth), across),
                  shared = column_shared_bytes<T, kWidth>(across, down);
    if (held) {
      const auto kernel =
          p_.backward ? softmax_columns_kernel<T, kWidth, true> : softmax_columns_kernel<T, kWidth, false>;
      return launch(kernel, columns, tiles, across * down, shared);
    }
    const int64_t rounds = ceil_div(p_.length, down * 4);
    const int64_t wanted =
        std::clamp<int64_t>(ceil_div(16 * device_.multiprocessors, tiles), 1, std::min<int64_t>(64, rounds));
    columns.chunk = ceil_div(rounds, wanted) * down * 4;
    columns.chunks = ceil_div(p_.length, columns.chunk);
    columns.parts = static_cast<Part<Acc>*>(
        workspace_(columns.chunks * p_.outer * p_.inner * static_cast<int64_t>(sizeof(Part<Acc>))));
    const auto part =
        p_.backward ? softmax_columns_part_kernel<T, kWidth, true> : softmax_columns_part_kernel<T, kWidth, false>;
    const cudaError_t error = launch(part, columns, tiles * columns.chunks, across * down, shared);
    if (error != cudaSuccess) return error;
    const auto finish =
        p_.backward ? softmax_columns_finish_kernel<T, kWidth, true> : softmax_columns_finish_kernel<T, kWidth, false>;
    return launch(finish, columns, tiles * columns.chunks, across * down, shared);
  }

  const SoftmaxProblem& p_;
  const Device& device_;
  const SoftmaxWorkspace& workspace_;
  cudaStream_t stream_;
  SoftmaxRows<T> rows_{};
};

}  // namespace dcs
