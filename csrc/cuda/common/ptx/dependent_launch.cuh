// Launches that begin while the launch before them ends (programmatic dependent launch, compute capability 9.0 and
// later).
#pragma once

#include <cuda_runtime_api.h>

namespace dcs {

// Waits until the launches before this one have ended and their results can be read. Launched by programmatic dependent
// launch (cudaLaunchAttributeProgrammaticStreamSerialization), a kernel has its blocks resident and its parameters read
// by then, which hides 0.3 us; without, this does nothing.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// More blocks do not say so: each that does takes some 40 ns of its multiprocessor's, in all more than the next launch
// gains.
constexpr unsigned kMostDependedOn = 1024;

// Once all blocks have come here, the launch after this one may begin, up to its own wait.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (gridDim.x <= kMostDependedOn) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// At a kernel's start: the launch after this one may begin, and those before it have ended.
__device__ __forceinline__ void overlap_launches() {
  launch_dependents();
  griddepcontrol_wait();
}

}  // namespace dcs
