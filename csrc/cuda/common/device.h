// What a launch needs to know of its device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "dcs/limits.h"

namespace dcs {

struct Device {
  int multiprocessors = 108;
  int shared_per_block = 99 << 10;  // with leave
  int shared_per_multiprocessor = 100 << 10;
  int cluster =
      1;  // blocks that a cluster can have: 1 where the device has none, or the kernels were compiled for none
};

// Leave for a kernel to have `bytes` of shared memory beside its static ones. It belongs to the device; asking again
// costs less than a launch. Asked for is all of the `most` that a block can have, so that another thread takes nothing
// back before the launch. `statics`: those of its kernels, at most.
template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, int64_t bytes, int most, int statics = kStaticBytes) {
  if (bytes <= (48 << 10) - statics) return cudaSuccess;
  return cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, std::max(static_cast<int>(bytes), most - statics));
}

// A launch's attributes: its blocks are in clusters of so many; it may begin as the launch before it ends
// (ptx/dependent_launch.cuh); its blocks all run at once.
inline cudaLaunchAttribute in_clusters_of(int64_t blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  return attribute;
}
inline cudaLaunchAttribute programmatic_serialization() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}
inline cudaLaunchAttribute cooperating() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return attribute;
}

// Of a launch that may be dependent and whose blocks may be clusters: how many there are.
template <typename Kernel, typename Plan>
int find_attributes(Kernel kernel, const Plan& plan, cudaLaunchAttribute (&attributes)[2]) {
  int count = 0;
  if (plan.dependent) attributes[count++] = programmatic_serialization();
  if (plan.cluster > 1) attributes[count++] = in_clusters_of(plan.cluster);
  // More than 8 blocks need leave, which belongs to the device.
  if (plan.cluster > 8) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  return count;
}

// A launch with the first `count` of the attributes, which must live until then.
inline cudaLaunchConfig_t launch_config(
    int64_t blocks, int64_t threads, int64_t shared, cudaStream_t stream, cudaLaunchAttribute* attributes, int count) {
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned>(count);
  return config;
}

// Launches the plan's blocks of so many warps, dependent and in clusters as it says.
template <typename Kernel, typename Plan, typename Params>
cudaError_t launch_planned(Kernel kernel, const Plan& plan, int64_t shared, cudaStream_t stream, const Params& params) {
  cudaLaunchAttribute attributes[2];
  const int count = find_attributes(kernel, plan, attributes);
  const cudaLaunchConfig_t config = launch_config(plan.blocks, 32 * plan.warps, shared, stream, attributes, count);
  return cudaLaunchKernelEx(&config, kernel, params);
}

// Launches a kernel that may begin while the launch before it ends, where the kernels are compiled to wait for its
// results (`can_wait`; ptx/dependent_launch.cuh).
template <typename Kernel, typename... Arguments>
cudaError_t launch_dependent(Kernel kernel, bool can_wait, int64_t blocks, int64_t threads, int64_t shared,
    cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute dependent = programmatic_serialization();
  const cudaLaunchConfig_t config = launch_config(blocks, threads, shared, stream, &dependent, can_wait ? 1 : 0);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace dcs
