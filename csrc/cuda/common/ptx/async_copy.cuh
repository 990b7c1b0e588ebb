// Copies from global into shared memory that the thread does not wait for.
#pragma once

#include <cstdint>
#include <type_traits>

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
// The first `bytes` of kSize, and zeros, by elements of kElement bytes. Rare, so it is not inlined.
template <int kSize, int kElement>
__device__ __noinline__ void copy_partial(void* to, const void* from, int bytes) {
  using Bits = std::conditional_t<kElement == 8, uint64_t,
      std::conditional_t<kElement == 4, uint32_t, std::conditional_t<kElement == 2, uint16_t, uint8_t>>>;
  for (int i = 0; i < kSize / kElement; ++i)
    static_cast<Bits*>(to)[i] = i * kElement < bytes ? static_cast<const Bits*>(from)[i] : Bits(0);
}
// kSize bytes, of which `bytes` exist; zeros for the others. An asynchronous copy of a part is one of all of it to
// compute-sanitizer, beyond the end.
template <int kSize, int kElement>
__device__ __forceinline__ void copy_existing(void* to, const void* from, int bytes) {
  if (bytes >= kSize || bytes <= 0) copy_async<kSize>(to, from, bytes > 0 ? kSize : 0);
  else copy_partial<kSize, kElement>(to, from, bytes);
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
