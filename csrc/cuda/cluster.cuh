// Blocks of a cluster (compute capability 9.0 and later): their barrier, and stores into each other's shared memory. Nothing elsewhere: the planner asks
// for clusters only where the device has them.
#pragma once

#include <cstdint>

namespace dcs {

__device__ __forceinline__ void arrive_in_cluster() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores where block `rank` has what this block has at `mine`, in shared memory.
__device__ __forceinline__ void store_in_cluster(double* mine, uint32_t rank, double value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(mine))), "r"(rank));
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
#endif
}

}  // namespace dcs
