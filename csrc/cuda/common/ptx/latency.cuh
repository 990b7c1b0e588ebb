// For kernels whose time is latency: what is made before they wait for the launches before them (dependent_launch.cuh)
// and held in registers until it is needed. Of a constant or a thread's index the compiler knows that it can be read
// anew, and it does so at each use, one read behind the other: 0.25 us of 1.91 for a row of 100000 floats
// (long_rows/few_rows.cuh). What has been through a shuffle or through shared memory stays.
#pragma once

#include <cstring>

#include "common/ptx/cluster.cuh"

namespace dcs {

// Has a value computed here.
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void keep(int& value) { asm volatile("" : "+r"(value)); }
template <typename T>
__device__ __forceinline__ void keep(T*& value) {
  asm volatile("" : "+l"(value));
}

// The same, and not again later. Not for what is the same in all threads.
__device__ __forceinline__ void hold(float& value) {
  asm volatile("shfl.sync.bfly.b32 %0, %0, 0, 31, -1;" : "+f"(value));
}
__device__ __forceinline__ void hold(int& value) {
  asm volatile("shfl.sync.bfly.b32 %0, %0, 0, 31, -1;" : "+r"(value));
}
__device__ __forceinline__ void hold(uint32_t& value) {
  asm volatile("shfl.sync.bfly.b32 %0, %0, 0, 31, -1;" : "+r"(value));
}
// For what is: words that have been left in shared memory.
template <typename Words>
__device__ __forceinline__ Words in_registers(const Words& from) {
  constexpr int kWords = sizeof(Words) / 4;
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const volatile uint32_t*>(&from)[i];
  Words to;
  memcpy(&to, words, sizeof(Words));
  return to;
}

// False, as `some` bits are set. To find out, a thread reads the lines of a kernel's parameters from one byte to
// another: at its first use a line is waited for as any memory is, behind loads that have come, too.
template <size_t kFrom, size_t kUntil, typename Params>
__device__ __forceinline__ bool lines_are_zero(const Params& p, uint32_t some) {
  constexpr size_t kLine = 64;
#pragma unroll
  for (size_t at = kFrom; at < kUntil; at += kLine) some |= reinterpret_cast<const uint32_t*>(&p)[at / 4];
  return some == 0;
}

// Shared memory at 32-bit addresses (cluster.cuh): with pointers the compiler would make an address anew at each use.
__device__ __forceinline__ void store_at(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void store_at(uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}
template <int kCount>
__device__ __forceinline__ void load_at(uint32_t address, float (&to)[kCount]) {
  static_assert(kCount <= 2 || kCount % 4 == 0);
  if constexpr (kCount == 1) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to[0]) : "r"(address) : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(address) : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
          : "=f"(to[i]), "=f"(to[i + 1]), "=f"(to[i + 2]), "=f"(to[i + 3])
          : "r"(address + 4 * i)
          : "memory");
  }
}

// Loads where `wanted`, else `other`s: without a branch, behind which each load would be waited for.
template <typename Word>
__device__ __forceinline__ void load_if(bool wanted, const Word* from, Word& to, uint32_t other = 0) {
  static_assert(sizeof(Word) == 16);
  uint32_t words[4] = {other, other, other, other};
  asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %5, 0;\n @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
  memcpy(&to, words, 16);
}

}  // namespace dcs
