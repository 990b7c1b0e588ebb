// Sums of slices of a tensor (totals.h).
#include "scan/totals.h"

#include "common/element_types.cuh"
#include "common/ptx/dependent_launch.cuh"

namespace dcs {
namespace {

constexpr int kThreads = 1024, kEach = kTotalSlice / kThreads;  // elements of a thread at once
constexpr int kSideBySide = 8;                                  // slices of a block where a warp takes one
constexpr int64_t kWarpSlice = 32 * kEach;

// kWarps take a slice; its sum at `totals`.
template <typename T, int kWarps>
__global__ void __launch_bounds__(kThreads) total_kernel(const T* values, int64_t count, int64_t slice, T* totals) {
  constexpr int kOfSlice = 32 * kWarps;
  __shared__ double sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kOfSlice) + threadIdx.x / kOfSlice,
                end = min((number + 1) * slice, count);
  double sum = 0.0;
  griddepcontrol_wait();
  for (int64_t first = number * slice + threadIdx.x % kOfSlice; first < end; first += kOfSlice * kEach) {
    T mine[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) mine[k] = first + k * kOfSlice < end ? values[first + k * kOfSlice] : T(0);
#pragma unroll
    for (int k = 0; k < kEach; ++k) sum += mine[k];
  }
  sum = warp_sum(sum);
  if constexpr (kWarps > 1) {
    static_assert(kWarps == 32);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = warp_sum(sums[lane]);
  }
  if (lane == 0 && number * slice < count) totals[number] = static_cast<T>(sum);
}

template <typename T>
cudaError_t launch(
    const void* values, int64_t count, int64_t slice, void* totals, bool dependent, cudaStream_t stream) {
  const int64_t slices = ceil_div(count, slice);
  const auto run = [&](auto kernel, int64_t blocks, int threads) {
    return launch_dependent(kernel, dependent, blocks, threads, 0, stream, static_cast<const T*>(values), count, slice,
        static_cast<T*>(totals));
  };
  if (slice > kWarpSlice) return run(total_kernel<T, 32>, slices, kThreads);
  return run(total_kernel<T, 1>, ceil_div(slices, kSideBySide), 32 * kSideBySide);
}

}  // namespace

cudaError_t launch_totals(ElementType dtype, const void* values, int64_t count, int64_t slice, void* totals,
    const Device& device, cudaStream_t stream) {
  const bool dependent = device.cluster > 1;
  return dtype == ElementType::Double ? launch<double>(values, count, slice, totals, dependent, stream)
                                      : launch<float>(values, count, slice, totals, dependent, stream);
}

}  // namespace dcs
