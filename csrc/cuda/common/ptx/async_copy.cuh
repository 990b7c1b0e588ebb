// Copies from global into shared memory that the thread does not wait for.
#pragma once

#include <cstdint>

namespace dcs {

// kBytes bytes, 4, 8 or 16, both addresses aligned to them; of the source `valid` bytes are read and the rest becomes
// 0. `kWholeLines`: L2 fetches the whole line of memory, whose other half another block wants.
template <int kBytes, bool kWholeLines = false>
__device__ __forceinline__ void copy_async(void* to, const void* from, int valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16 && kWholeLines)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid)
        : "memory");
  else if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(address), "l"(from), "r"(valid), "n"(kBytes)
        : "memory");
}
// 16 bytes, all of which are there.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from)
      : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of the thread's groups are on their way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives at a barrier in shared memory once the thread's copies so far are there.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
      : "memory");
}

}  // namespace dcs
