// Blocks of a cluster (compute capability 9.0 and later): their barrier, and loads from and stores into each other's
// shared memory. Nothing elsewhere: the planner asks for clusters only where the device has them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/ptx/mbarrier.cuh"

namespace dcs {

__device__ __forceinline__ uint32_t cluster_rank() {  // of this block
  uint32_t rank = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ uint32_t cluster_blocks() {
  uint32_t blocks = 1;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
#endif
  return blocks;
}
__device__ __forceinline__ uint32_t cluster_index() {  // in the grid
  uint32_t index = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return index;
}

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

// The same by lanes that need not come together.
__device__ __forceinline__ void arrive_in_cluster_unaligned() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster_unaligned() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Where block `rank` has what this block has at an address in shared memory (`shared_address`).
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t remote = address;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
#endif
  return remote;
}

// Stores where block `rank` has what this block has at `local`, in shared memory; and loads from there.
__device__ __forceinline__ void store_in_cluster(uint32_t* local, uint32_t rank, uint32_t value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const uint32_t address = cluster_address(shared_address(local), rank);
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#endif
}
__device__ __forceinline__ uint32_t load_in_cluster(const uint32_t* local, uint32_t rank) {
  uint32_t value = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const uint32_t address = cluster_address(shared_address(local), rank);
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
#endif
  return value;
}

// What block `rank` has at the address of `local` in its shared memory.
template <typename T>
__device__ __forceinline__ const T& in_cluster(const T& local, uint32_t rank) {
  const T* remote = &local;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(&local), "r"(rank));
#endif
  return *remote;
}

// Arrives without an order of memory: remote stores can be made from here on.
__device__ __forceinline__ void arrive_in_cluster_relaxed() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// A barrier that counts the bytes which other blocks store here (`store_async`); waiting for it takes no fence over all
// memory, as a cluster barrier's release is.
__device__ __forceinline__ void init_transaction_barrier(uint64_t* barrier) {
  mbarrier_init(barrier, 1);
  mbarrier_fence_init();
}
__device__ __forceinline__ void init_transaction_barrier(uint64_t* barrier, int bytes) {
  init_transaction_barrier(barrier);
  mbarrier_arrive_expect_tx(barrier, bytes);
}
// To an address of another block, counted by that block's barrier at `barrier`.
__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, float value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
      "r"(__float_as_int(value)), "r"(barrier)
      : "memory");
#endif
}
__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, double value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address),
      "l"(__double_as_longlong(value)), "r"(barrier)
      : "memory");
#endif
}
__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, float first, float second) {
  store_async(address, barrier, __hiloint2double(__float_as_int(second), __float_as_int(first)));
}
// To where block `rank` has what this block has at `local`.
template <typename Word>
__device__ __forceinline__ void store_async_in_cluster(
    const Word* local, const uint64_t* barrier, uint32_t rank, Word value) {
  store_async(cluster_address(shared_address(local), rank), cluster_address(shared_address(barrier), rank), value);
}

}  // namespace dcs
