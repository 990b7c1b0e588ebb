// Which kernel takes the rows of `_cross_entropy_rows_`, and with how many blocks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/ptx/cluster.cuh"
#include "cross_entropy/rows.cuh"
#include "cross_entropy/long_rows.cuh"

namespace dcs {

// Of a row, from which on long_rows.cuh takes it; shorter ones have barriers too close for blocks alone.
constexpr int64_t kLongBytes = 24 << 10, kLongBytesForward = 8 << 10;
constexpr int kLongThreads = 512;  // of a block alone on its multiprocessor: 128 registers a thread
constexpr int64_t kMostLongRows = 1 << 30;
constexpr double kMostLongCap = 1000;  // softcap: an exponent relative to the largest is then good to 1e-4
constexpr double kMostFixedCap =
    40;  // tanh as 16 bits, times it: errors of the exponents beside which bfloat16's rounding stays what it is

constexpr int kRowStaticBytes = 2 * kLongWarps * static_cast<int>(sizeof(LongSums<true>));

// A kernel with `shared` bytes of dynamic shared memory, in clusters of `cluster` blocks. `waits`: for the launches
// before it, so that it may begin while they end.
template <typename Params>
cudaError_t launch_rows(void (*kernel)(Params), const Params& params, int64_t grid, int threads, size_t shared,
    int64_t cluster, const Device& device, cudaStream_t stream, bool waits = false) {
  const cudaError_t allowed =
      allow_shared(kernel, static_cast<int64_t>(shared), device.shared_per_block, kRowStaticBytes);
  if (allowed != cudaSuccess) return allowed;
  const struct {
    bool dependent;
    int64_t cluster;
  } plan{waits && device.cluster > 1, cluster};
  cudaLaunchAttribute attributes[2];
  const int count = find_attributes(kernel, plan, attributes);
  const cudaLaunchConfig_t config =
      launch_config(grid, threads, static_cast<int64_t>(shared), stream, attributes, count);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  return error != cudaSuccess ? error : cudaGetLastError();
}

// The kernel of rows.cuh.
template <typename T, bool kFull>
cudaError_t launch_cross_entropy_as(CrossEntropyRowsParams params, const Device& device, cudaStream_t stream) {
  constexpr int64_t kVec = 16 / sizeof(T);
  const RowsProblem& problem = params.problem;
  const auto misaligned = [](int64_t bytes) { return bytes % 16 != 0; };
  const bool shifted = misaligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(problem.logits))) ||
      (problem.rows > 1 && misaligned(problem.stride * static_cast<int64_t>(sizeof(T))));
  const int64_t vectors = (problem.columns + kVec - 1) / kVec + (shifted ? 1 : 0);

  const auto launch = [&](auto kernel, int64_t grid, int threads, int64_t rows_of_block, int64_t cluster) {
    return launch_rows<CrossEntropyRowsParams>(kernel, params, grid, threads,
        static_cast<size_t>(params.staged * rows_of_block * 16), cluster, device, stream, true);
  };

  // Two blocks on a multiprocessor at least: while one stores, the other loads.
  const int64_t room = std::min<int64_t>(device.shared_per_block, device.shared_per_multiprocessor / 2) - 2048;
  const auto stage = [&](int64_t wanted, int64_t rows_of_block) {
    params.staged = problem.gradient ? static_cast<int>(std::min<int64_t>(wanted, room / 16 / rows_of_block)) : 0;
  };
  if (problem.columns <= kWarpColumns) {
    stage(vectors, kRowWarps);
    return launch(cross_entropy_kernel<T, kFull, Scope::kWarp>, (problem.rows + kRowWarps - 1) / kRowWarps,
        32 * kRowWarps, kRowWarps, 1);
  }
  int64_t cluster = 1, share = vectors;
  if constexpr (!std::is_same_v<T, double>) {
    if (device.cluster > 1) {
      const auto too_much = [&] { return problem.gradient && share * 16 > kShareBytes; };
      // Few rows: more blocks to a row, so that every multiprocessor has work.
      const auto too_few = [&] {
        return problem.rows * cluster < 2 * device.multiprocessors && share >= 4 * kRowThreads;
      };
      while (cluster < 8 && (too_much() || too_few())) {
        cluster *= 2;
        share = (vectors + cluster - 1) / cluster;
      }
    }
  }
  const int threads = share >= 4 * kRowThreads ? kRowThreads
      : share >= 2 * kRowThreads               ? kRowThreads / 2
                                               : kRowThreads / 4;
  stage(share, 1);
  if constexpr (!std::is_same_v<T, double>) {
    if (cluster > 1)
      return launch(cross_entropy_kernel<T, kFull, Scope::kCluster>, problem.rows * cluster, threads, 1, cluster);
  }
  return launch(cross_entropy_kernel<T, kFull, Scope::kBlock>, problem.rows, threads, 1, 1);
}

inline bool is_entropic(const RowsProblem& problem) { return problem.entropy || problem.grad_entropy.data; }

// Whether long_rows.cuh has the kernel for it.
template <typename T>
bool is_long(const RowsProblem& problem) {
  if (std::is_same_v<T, double> ||
      problem.columns * static_cast<int64_t>(sizeof(T)) < (problem.gradient ? kLongBytes : kLongBytesForward) ||
      problem.rows > kMostLongRows)
    return false;
  if (!problem.target || problem.bias || problem.label_smoothing != 0 || !(problem.logit_scale > 0)) return false;
  return !(problem.softcap > 0) ||
      (sizeof(T) == 2 && !problem.predictions && !is_entropic(problem) && problem.softcap <= kMostLongCap);
}

// Where the kernel of long_rows.cuh also writes the gradient; nowhere if rows do not start at whole vectors.
template <typename T>
SavedSlices saved_in_vectors(const RowsProblem& problem) {
  constexpr int64_t kVec = 16 / sizeof(T);
  const bool shifted =
      reinterpret_cast<uintptr_t>(problem.logits) % 16 != 0 || (problem.rows > 1 && problem.stride % kVec != 0);
  return sizeof(T) != 2 || shifted ? SavedSlices() : saved_slices(problem, sizeof(T), kVec);
}

// Whether the rows' kernel does, so that the caller need not.
template <typename T>
bool saves_gradient(const RowsProblem& problem) {
  return is_long<T>(problem) && saved_in_vectors<T>(problem).beside != nullptr;
}

template <typename T, bool kSoftcap, bool kEntropy>
cudaError_t launch_long(LongParams params, const Device& device, cudaStream_t stream) {
  const RowsProblem& problem = params.problem;
  const int64_t vectors = problem.columns * static_cast<int64_t>(sizeof(T)) / 16, slots = device.multiprocessors;
  int64_t cluster = 1;
  const auto share = [&] { return (vectors + cluster - 1) / cluster; };
  // Few rows: more blocks to a row, so that every multiprocessor has work.
  const auto too_few = [&] { return problem.rows * cluster < slots && share() >= 4 * kLongThreads; };
  const auto staged = [&](int64_t room, int64_t threads) {
    return static_cast<int>(std::min((share() + threads - 1) / threads * threads, room / 16 / threads * threads));
  };
  if (!problem.gradient) {
    const auto few = cross_entropy_long_kernel<T, kSoftcap, kEntropy, false, true, kLongThreads, 2>;
    if (device.cluster > 1) {
      while (cluster < 8 && too_few()) cluster *= 2;
      if (cluster > 1)
        return launch_rows<LongParams>(few, params, problem.rows * cluster, kLongThreads, 0, cluster, device, stream);
    }
    const auto many = cross_entropy_long_kernel<T, kSoftcap, kEntropy, false, false, 128, 8>;
    return launch_rows<LongParams>(many, params, problem.rows, 128, 0, 1, device, stream);
  }
  // A block alone on its multiprocessor, or two.
  const int64_t room = device.shared_per_block - kLongWarps * 2 * static_cast<int64_t>(sizeof(LongSums<kEntropy>));
  const int64_t half_room = std::min<int64_t>(room, device.shared_per_multiprocessor / 2 - 2048);
  const auto together = cross_entropy_long_kernel<T, kSoftcap, kEntropy, true, true, kLongThreads, 1>;
  if (device.cluster > 1) {
    // What has no room comes from L2 once more, which has room for some of it.
    while (cluster < 8 && (share() * 16 > room + room / 8 || too_few())) cluster *= 2;
  }
  if (kSoftcap && problem.softcap > kMostFixedCap && std::is_same_v<T, __nv_bfloat16>) params.staged = 0;
  else if (cluster == 1 && share() * 16 <= half_room) params.staged = staged(half_room, kLongThreads / 2);
  else params.staged = staged(room, kLongThreads);
  const size_t shared = static_cast<size_t>(params.staged) * 16;
  if (cluster == 1 && share() * 16 <= half_room) {
    const auto two = cross_entropy_long_kernel<T, kSoftcap, kEntropy, true, false, kLongThreads / 2, 2>;
    return launch_rows<LongParams>(
        two, params, std::min(problem.rows, 2 * slots), kLongThreads / 2, shared, 1, device, stream);
  }
  if (cluster == 1) {
    const auto one = cross_entropy_long_kernel<T, kSoftcap, kEntropy, true, false, kLongThreads, 1>;
    return launch_rows<LongParams>(one, params, std::min(problem.rows, slots), kLongThreads, shared, 1, device, stream);
  }
  // Pairs of multiprocessors are all in some cluster of two, but not in one of more: then the blocks of a row go when
  // it is done.
  const int64_t rows = cluster == 2 ? std::min(problem.rows, std::max<int64_t>(slots / 2, 1)) : problem.rows;
  return launch_rows<LongParams>(together, params, rows * cluster, kLongThreads, shared, cluster, device, stream);
}

template <typename T>
cudaError_t launch_rows_of(const RowsProblem& problem, const Device& device, cudaStream_t stream) {
  constexpr double kLogTwo = 0.693147180559945309;
  if constexpr (!std::is_same_v<T, double>) {
    if (is_long<T>(problem)) {
      const double scale = problem.softcap > 0 ? problem.softcap : problem.logit_scale;
      const double squash = problem.softcap > 0 ? -2 * problem.logit_scale / (problem.softcap * kLogTwo) : 0;
      LongParams params{
          problem, 0, static_cast<float>(scale), static_cast<float>(scale / kLogTwo), static_cast<float>(squash)};
      params.saved = saved_in_vectors<T>(problem);
      if constexpr (sizeof(T) == 2) {
        if (problem.softcap > 0) return launch_long<T, true, false>(params, device, stream);
      }
      return is_entropic(problem) ? launch_long<T, false, true>(params, device, stream)
                                  : launch_long<T, false, false>(params, device, stream);
    }
  }
  CrossEntropyRowsParams params;
  params.problem = problem;
  params.softcap = static_cast<float>(problem.softcap);
  params.inverse_softcap = problem.softcap > 0 ? static_cast<float>(1 / problem.softcap) : 0.f;
  if constexpr (std::is_same_v<T, double>) {
    return launch_cross_entropy_as<T, true>(params, device, stream);
  } else {
    const bool full = problem.bias || problem.softcap > 0 || !(problem.logit_scale > 0) ||
        (problem.weight && problem.label_smoothing != 0) || problem.probabilities;
    params.scale = static_cast<float>(full ? 1.0 : problem.logit_scale);
    params.factor = static_cast<float>((full ? 1.0 : problem.logit_scale) / kLogTwo);
    return full ? launch_cross_entropy_as<T, true>(params, device, stream)
                : launch_cross_entropy_as<T, false>(params, device, stream);
  }
}

// From the logits' memory to the other one, where the kernel has not been there.
template <typename T, typename Word>
__global__ void __launch_bounds__(256)
    save_gradient_kernel(const __grid_constant__ SavedSlices saved, const T* gradient, int64_t stride, int words) {
  const int64_t row = blockIdx.y;
  const Word* const from = reinterpret_cast<const Word*>(gradient + row * stride);
  for (int word = blockIdx.x * 256 + threadIdx.x; word < words; word += gridDim.x * 256)
    *saved.at<Word>(row, word) = from[word];
}

template <typename T>
cudaError_t launch_cross_entropy(const RowsProblem& problem, const Device& device, cudaStream_t stream) {
  const cudaError_t error = launch_rows_of<T>(problem, device, stream);
  if (error != cudaSuccess || !problem.saved.beside || saves_gradient<T>(problem)) return error;
  constexpr int64_t kMostRows = 65535;
  const SavedSlices all_rows = saved_slices(problem, sizeof(T), 1);
  if (!all_rows.beside) return cudaErrorInvalidValue;
  for (int64_t row = 0; row < problem.rows; row += kMostRows) {
    SavedSlices from_row = all_rows;
    from_row.first_row += row;
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(ceil_div(problem.columns, 1024), 64)),
        static_cast<unsigned>(std::min(problem.rows - row, kMostRows)));
    save_gradient_kernel<T, T><<<grid, 256, 0, stream>>>(from_row,
        static_cast<const T*>(problem.logits) + row * problem.stride, problem.stride,
        static_cast<int>(problem.columns));
  }
  return cudaGetLastError();
}

}  // namespace dcs
