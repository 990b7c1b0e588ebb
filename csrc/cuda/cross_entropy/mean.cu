// What a mean over rows needs beside them, by one block: in place of a launch for every operation.
#include "cross_entropy/mean.h"

#include "common/device.h"
#include "common/element_types.cuh"
#include "common/ptx/dependent_launch.cuh"

namespace dcs {
namespace {

constexpr int kThreads = 1024, kEach = 8;  // elements of a thread on their way at once

// The sum of get(i) for i below `count`, in all threads.
template <typename Get>
__device__ __forceinline__ double total_of(int64_t count, double* shared, const Get& get) {
  double sum = 0.0;
  for (int64_t first = threadIdx.x; first < count; first += kThreads * kEach) {
    double mine[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int64_t i = first + k * kThreads;
      mine[k] = i < count ? get(i) : 0.0;
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) sum += mine[k];
  }
  return block_sum(sum, shared, threadIdx.x % 32, threadIdx.x / 32, kThreads / 32);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) mean_factors_kernel(
    const int64_t* target, const T* weight, T* factors, int64_t rows, int64_t classes, int64_t ignore_index, T boost) {
  __shared__ double shared[kThreads / 32];
  overlap_launches();
  const double total = total_of(rows, shared, [&](int64_t row) {
    const int64_t of = target[row];
    if (of == ignore_index) return 0.0;
    if (weight == nullptr) return 1.0;
    return of >= 0 && of < classes ? static_cast<double>(weight[of]) : 0.0;
  });
  if (threadIdx.x > 0) return;
  const T divisor = static_cast<T>(total), scale = T(1) / divisor;
  // Over weights that sum to 0 it goes to valid rows alone: ignored ones keep the 0.
  const bool is_boosted = boost != T(0) && isfinite(scale);
  factors[0] = divisor;
  factors[1] = is_boosted ? boost : scale;
  factors[2] = is_boosted ? scale / boost : T(1);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) mean_kernel(const T* values, const T* divisor, T* mean, int64_t count) {
  __shared__ double shared[kThreads / 32];
  overlap_launches();
  const double total = total_of(count, shared, [&](int64_t i) { return static_cast<double>(values[i]); });
  if (threadIdx.x == 0) *mean = static_cast<T>(total / static_cast<double>(*divisor));
}

template <typename T>
cudaError_t launch(const MeanFactorsProblem& p, bool can_wait, cudaStream_t stream) {
  return launch_dependent(mean_factors_kernel<T>, can_wait, 1, kThreads, 0, stream, p.target,
      static_cast<const T*>(p.weight), static_cast<T*>(p.factors), p.rows, p.classes, p.ignore_index,
      static_cast<T>(p.boost));
}

template <typename T>
cudaError_t launch(const MeanProblem& p, bool can_wait, cudaStream_t stream) {
  return launch_dependent(mean_kernel<T>, can_wait, 1, kThreads, 0, stream, static_cast<const T*>(p.values),
      static_cast<const T*>(p.divisor), static_cast<T*>(p.mean), p.count);
}

}  // namespace

cudaError_t launch_mean_factors(const MeanFactorsProblem& problem, bool can_wait, cudaStream_t stream) {
  return problem.dtype == ElementType::Double ? launch<double>(problem, can_wait, stream)
                                              : launch<float>(problem, can_wait, stream);
}

cudaError_t launch_mean(const MeanProblem& problem, bool can_wait, cudaStream_t stream) {
  return problem.dtype == ElementType::Double ? launch<double>(problem, can_wait, stream)
                                              : launch<float>(problem, can_wait, stream);
}

}  // namespace dcs
