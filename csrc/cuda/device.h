// What a launch needs to know of its device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace dcs {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Device {
  int multiprocessors = 108;
  int shared_per_block = 99 << 10;  // with leave
  int shared_per_multiprocessor = 100 << 10;
  int cluster = 1;  // blocks that a cluster can have: 1 where the device has none, or the kernels were compiled for none
};

constexpr int kStaticBytes = 3 << 10;  // of shared memory in any kernel, at most

// Leave for a kernel to have `bytes` of shared memory beside its static ones. It belongs to the device; asking again costs less than a launch. Asked for is
// all of the `most` that a block can have, so that another thread takes nothing back before the launch.
template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, int64_t bytes, int most) {
  if (bytes <= (48 << 10) - kStaticBytes) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, std::max(static_cast<int>(bytes), most - kStaticBytes));
}

template <typename Kernel, typename Params>
cudaError_t launch_with(Kernel kernel, const Params& params, int64_t blocks, int threads, size_t shared, cudaStream_t stream, cudaLaunchAttribute& attribute, unsigned attributes) {
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = attributes;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace dcs
