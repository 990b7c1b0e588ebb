// Bulk copies between global and shared memory (compute capability 9.0 and later; nothing elsewhere).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "common/ptx/mbarrier.cuh"

namespace dcs {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define DCS_HAS_BULK_COPIES 1
#else
#define DCS_HAS_BULK_COPIES 0
#endif

// Multiples of 16 bytes between aligned addresses.
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
#if DCS_HAS_BULK_COPIES
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}
// The same of what nobody will read again: in L2 it makes room first.
__device__ __forceinline__ void bulk_load_once(void* to, const void* from, int bytes, uint64_t* barrier) {
#if DCS_HAS_BULK_COPIES
  asm volatile(
      "{\n .reg .b64 policy;\n createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n}" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}
template <typename Chunk>
__device__ __forceinline__ Chunk load_once(const Chunk* from) {
  static_assert(sizeof(Chunk) == 16);
  uint4 words{};
#if DCS_HAS_BULK_COPIES
  asm volatile(
      "{\n .reg .b64 policy;\n createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], policy;\n}"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(from));
#endif
  Chunk chunk;
  memcpy(&chunk, &words, 16);
  return chunk;
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
#if DCS_HAS_BULK_COPIES
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
      : "memory");
#endif
}
__device__ __forceinline__ void commit_stores() {
#if DCS_HAS_BULK_COPIES
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Until the stores committed so far have read shared memory.
__device__ __forceinline__ void wait_for_stores_to_read() {
#if DCS_HAS_BULK_COPIES
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
// Until they are done.
__device__ __forceinline__ void wait_for_stores() {
#if DCS_HAS_BULK_COPIES
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
// Before bulk stores, by every thread that wrote what they read.
__device__ __forceinline__ void show_to_bulk_stores() {
#if DCS_HAS_BULK_COPIES
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace dcs
