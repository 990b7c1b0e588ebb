// Barriers in shared memory (mbarrier). A phase ends when all its arrivals have come and, from compute capability 9.0
// on, all bytes that it expects have been written by bulk copies (bulk_copy.cuh) or by other blocks of a cluster
// (cluster.cuh). By address in shared memory, or by pointer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dcs {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialized barriers known to bulk copies and to the other blocks of a cluster.
__device__ __forceinline__ void mbarrier_fence_init() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// Arrives, and has the phase expect `bytes` more. Some can have been written before.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// Until the phase of this parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    // Sleeps a while where it has not.
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#endif
  }
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  mbarrier_init(shared_address(barrier), arrivals);
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) { mbarrier_arrive(shared_address(barrier)); }
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
  mbarrier_arrive_expect_tx(shared_address(barrier), bytes);
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  mbarrier_wait(shared_address(barrier), parity);
}

}  // namespace dcs
