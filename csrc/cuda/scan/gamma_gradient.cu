// The sum of all elements of a tensor, a launch for up to 8192 of them: torch's own takes two for the sums of a few
// long rows, 4 us on an H200.
#include "scan/gamma_gradient.h"

#include <torch/csrc/stable/ops.h>

#include <array>

#include "common/ptx/dependent_launch.cuh"
#include "common/host.h"
#include "common/element_types.cuh"

namespace dcs {
namespace {

constexpr int kThreads = 1024;
constexpr int kEach = 8;  // elements of a thread
constexpr int64_t kSlice = int64_t{kThreads} * kEach;

// Of the elements of a block, at totals[blockIdx.x].
template <typename T>
__global__ void __launch_bounds__(kThreads) total_kernel(const T* values, int64_t count, T* totals) {
  __shared__ double sums[kThreads / 32];
  static_assert(kThreads == 32 * 32);
  const int64_t first = blockIdx.x * kSlice + threadIdx.x;
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
void launch(const Tensor& values, const Tensor& totals, const Device& device, cudaStream_t stream) {
  const int64_t count = values.numel();
  launch_dependent(total_kernel<T>, device.cluster > 1, totals.numel(), kThreads, 0, stream,
      static_cast<const T*>(values.const_data_ptr()), count, static_cast<T*>(totals.mutable_data_ptr()));
}

}  // namespace

Tensor total(const Tensor& values) {
  const int32_t index = values.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(index);
  const Device& device = device_of(index, "discounted_cumsum");
  const std::array<int64_t, 1> size{(values.numel() + kSlice - 1) / kSlice};
  const bool is_last = size[0] <= 1;
  const Tensor totals =
      torch::stable::new_empty(values, torch::headeronly::IntHeaderOnlyArrayRef(size.data(), is_last ? 0 : 1));
  if (values.scalar_type() == ScalarType::Double) launch<double>(values, totals, device, current_stream(index));
  else launch<float>(values, totals, device, current_stream(index));
  check_cuda(cudaGetLastError(), "discounted_cumsum", "launching the kernel");
  return is_last ? totals : total(totals);
}

}  // namespace dcs
