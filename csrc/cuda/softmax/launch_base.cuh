// What launches of all softmax kernels share: the problem, and how a kernel is launched.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>

#include "common/any_vector.cuh"
#include "softmax/launch.h"
#include "softmax/values.cuh"

namespace dcs {

inline int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

template <typename T>
class SoftmaxLaunchBase {
 public:
  SoftmaxLaunchBase(
      const SoftmaxProblem& problem, const Device& device, SoftmaxWorkspace& workspace, cudaStream_t stream)
      : p_(problem), device_(device), workspace_(workspace), stream_(stream) {}

 protected:
  using Acc = typename Types<T>::Acc;
  static constexpr int kSize = sizeof(T), kVec = 16 / sizeof(T);
  static constexpr bool kHalf = sizeof(T) == 2;
  // Launches begin as the one before ends where both together have a multiprocessor for each of their blocks: else some
  // have more blocks than others, and the last ones end late.
  static constexpr int64_t kDependentShare = 2;

  static bool whole(int64_t elements) { return elements % kVec == 0; }
  int64_t slab() const { return p_.length * p_.inner; }
  // Vectors after which so many columns are where they were.
  static int64_t unit_of(int64_t columns) { return columns / std::gcd<int64_t>(columns, kVec); }
  int64_t slab_unit() const { return unit_of(p_.inner); }
  // Of a line of so many neighboring elements, at most: it can begin at any element of its first vector.
  static int64_t vectors_of(int64_t elements) {
    return whole(elements) ? elements / kVec : ceil_div(elements + kVec - 1, kVec);
  }
  int64_t elements() const { return p_.outer * slab(); }
  template <typename Params>
  Params operands() const {
    return {static_cast<const T*>(p_.input), static_cast<const T*>(p_.saved), static_cast<T*>(p_.output)};
  }

  // run(the first of the constants that has room for `count`, or the last one).
  template <int kFirst, int... kLater, typename Run>
  static auto with_room(int64_t count, const Run& run) {
    if constexpr (sizeof...(kLater) > 0) {
      if (count > kFirst) return with_room<kLater...>(count, run);
    }
    return run(std::integral_constant<int, kFirst>());
  }

  bool is_view() const { return p_.run > 0; }
  RunIndex runs() const { return is_view() ? RunIndex(elements(), p_.run, p_.gap) : RunIndex(); }
  // A view's elements become the output's, in place.
  cudaError_t copy_view() {
    const cudaError_t error = copy_runs({p_.input, p_.output, elements(), p_.run, p_.gap, kSize}, stream_);
    p_.input = p_.output;
    p_.run = 0;
    return error;
  }

  // Kernels wait themselves for the launch before them, so that those of few blocks begin as it ends.
  template <typename Kernel, typename Params>
  cudaError_t launch(Kernel kernel, const Params& params, int64_t grid, int64_t threads, int64_t shared = 0) const {
    return launch_at(is_dependent(grid), kernel, params, grid, threads, shared);
  }
  // After another kernel of this call.
  template <typename Kernel, typename Params>
  cudaError_t launch_after(Kernel kernel, const Params& params, int64_t grid, int64_t threads, int64_t shared) const {
    return launch_at(true, kernel, params, grid, threads, shared);
  }
  // In clusters. Nothing where these have more than 8 blocks and the device's groups of multiprocessors have no room
  // for so many of them at once: it may be a green context, or an instance of a part of a GPU.
  template <typename Kernel, typename Params>
  std::optional<cudaError_t> launch_clusters(bool dependent, Kernel kernel, const Params& params, int64_t grid,
      int64_t threads, int64_t shared, int cluster, int64_t at_once = 1) const {
    if (cluster > 8 && !is_possible(kernel, threads, shared, cluster, at_once)) return std::nullopt;
    const cudaError_t error = launch_at(dependent, kernel, params, grid, threads, shared, cluster);
    if (error == cudaSuccess || cluster <= 8) return error;
    cudaGetLastError();
    return std::nullopt;
  }
  bool is_dependent(int64_t grid) const { return grid <= device_.multiprocessors / kDependentShare; }
  // All blocks at once, or none.
  template <typename Kernel, typename Params>
  cudaError_t launch_together(
      Kernel kernel, const Params& params, int64_t grid, int64_t threads, int64_t shared) const {
    cudaLaunchAttribute attribute = cooperating();
    return launch_with(&attribute, 1, kernel, params, grid, threads, shared);
  }

  // Shared memory of a block of which a multiprocessor has so many.
  int64_t shared_of(int blocks) const {
    return std::min<int64_t>(device_.shared_per_block, device_.shared_per_multiprocessor / blocks - 1024) -
        kStaticBytes;
  }

  template <typename Kernel, typename Params>
  cudaError_t launch_at(bool dependent, Kernel kernel, const Params& params, int64_t grid, int64_t threads,
      int64_t shared, int cluster = 1) const {
    const struct {
      bool dependent;
      int cluster;
    } plan{dependent && device_.cluster > 1, cluster};
    cudaLaunchAttribute attributes[2];
    const int count = find_attributes(kernel, plan, attributes);
    return launch_with(attributes, count, kernel, params, grid, threads, shared);
  }

  template <typename Kernel>
  bool is_possible(Kernel kernel, int64_t threads, int64_t shared, int cluster, int64_t at_once) const {
    allow_shared(kernel, shared, device_.shared_per_block);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaLaunchAttribute attribute = in_clusters_of(cluster);
    const cudaLaunchConfig_t config = launch_config(cluster, threads, shared, stream_, &attribute, 1);
    int clusters = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && clusters >= at_once;
  }

  template <typename Kernel, typename Params>
  cudaError_t launch_with(cudaLaunchAttribute* attributes, int count, Kernel kernel, const Params& params, int64_t grid,
      int64_t threads, int64_t shared) const {
    const cudaError_t allowed = allow_shared(kernel, shared, device_.shared_per_block);
    if (allowed != cudaSuccess) {
      cudaGetLastError();
      return allowed;
    }
    const cudaLaunchConfig_t config = launch_config(grid, threads, shared, stream_, attributes, count);
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
    return error != cudaSuccess ? error : cudaGetLastError();
  }

  SoftmaxProblem p_;
  const Device& device_;
  SoftmaxWorkspace& workspace_;
  cudaStream_t stream_;
};

}  // namespace dcs
