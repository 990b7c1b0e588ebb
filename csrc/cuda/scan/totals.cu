// Sums of slices of a tensor (totals.h).
#include "scan/totals.h"

#include "common/element_types.cuh"
#include "common/ptx/dependent_launch.cuh"

namespace dcs {
namespace {

constexpr int kThreads = 1024;
constexpr int kEach = kTotalSlice / kThreads;  // elements of a thread

// Of the elements of a block, at totals[blockIdx.x].
template <typename T>
__global__ void __launch_bounds__(kThreads) total_kernel(const T* values, int64_t count, T* totals) {
  __shared__ double sums[kThreads / 32];
  static_assert(kThreads == 32 * 32);
  const int64_t first = blockIdx.x * int64_t{kTotalSlice} + threadIdx.x;
  T mine[kEach];
  griddepcontrol_wait();
#pragma unroll
  for (int k = 0; k < kEach; ++k) mine[k] = first + k * kThreads < count ? values[first + k * kThreads] : T(0);
  double sum = mine[0];
#pragma unroll
  for (int k = 1; k < kEach; ++k) sum += mine[k];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  sum = warp_sum(sum);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (warp > 0) return;
  sum = warp_sum(sums[lane]);
  if (lane == 0) totals[blockIdx.x] = static_cast<T>(sum);
}

template <typename T>
cudaError_t launch(const void* values, int64_t count, void* totals, bool dependent, cudaStream_t stream) {
  return launch_dependent(total_kernel<T>, dependent, ceil_div(count, kTotalSlice), kThreads, 0, stream,
      static_cast<const T*>(values), count, static_cast<T*>(totals));
}

}  // namespace

cudaError_t launch_totals(
    ElementType dtype, const void* values, int64_t count, void* totals, const Device& device, cudaStream_t stream) {
  const bool dependent = device.cluster > 1;
  return dtype == ElementType::Double ? launch<double>(values, count, totals, dependent, stream)
                                      : launch<float>(values, count, totals, dependent, stream);
}

}  // namespace dcs
