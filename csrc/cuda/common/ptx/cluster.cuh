// Blocks of a cluster (compute capability 9.0 and later): their barrier, and stores into each other's shared memory. Nothing elsewhere: the planner asks
// for clusters only where the device has them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/ptx/bulk_copy.cuh"

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

// The same for what needs no order of memory, but that mail can be sent from here on.
__device__ __forceinline__ void arrive_in_cluster_relaxed() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// A place in shared memory (`shared_address`), and the same of block `rank`.
__device__ __forceinline__ uint32_t place_in_cluster(uint32_t place, uint32_t rank) {
  uint32_t there = place;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(rank));
#endif
  return there;
}

// Mail: words stored where another block has what this block has at `mine`, counted by that block's `arrivals`, which one of its threads has prepared for
// `bytes` of them. Without the fence over all memory that a barrier's release is.
__device__ __forceinline__ void open_mailbox(uint64_t* arrivals) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrivals)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Once; words can have arrived before.
__device__ __forceinline__ void expect_in_mailbox(uint64_t* arrivals, int bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrivals)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void expect_mail(uint64_t* arrivals, int bytes) {
  open_mailbox(arrivals);
  expect_in_mailbox(arrivals, bytes);
}
// To a place of another block, whose `arrivals` are at `counter`.
__device__ __forceinline__ void send_to(uint32_t place, uint32_t counter, float value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(place), "r"(__float_as_int(value)), "r"(counter) : "memory");
#endif
}
__device__ __forceinline__ void send_to(uint32_t place, uint32_t counter, double value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(place), "l"(__double_as_longlong(value)), "r"(counter) : "memory");
#endif
}
__device__ __forceinline__ void send_to(uint32_t place, uint32_t counter, float first, float second) {
  send_to(place, counter, __hiloint2double(__float_as_int(second), __float_as_int(first)));
}
template <typename Word>
__device__ __forceinline__ void send_in_cluster(const Word* mine, const uint64_t* arrivals, uint32_t rank, Word value) {
  send_to(place_in_cluster(shared_address(mine), rank), place_in_cluster(shared_address(arrivals), rank), value);
}
// All of it has arrived.
__device__ __forceinline__ void wait_for_mail(uint32_t arrivals) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(arrivals) : "memory");
  }
#endif
}
__device__ __forceinline__ void wait_for_mail(const uint64_t* arrivals) { wait_for_mail(shared_address(arrivals)); }

}  // namespace dcs
