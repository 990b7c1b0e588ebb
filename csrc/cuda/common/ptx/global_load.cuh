// Loads that are not put off until their first use: all of a thread's are on their way before it waits for
// one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

namespace dcs {

template <typename Word>
__device__ __forceinline__ Word load_now(const Word* from) {
  static_assert(sizeof(Word) == 16);
  uint4 words;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(from));
  Word to;
  memcpy(&to, &words, sizeof to);
  return to;
}

// The same where `wanted`, without a branch, behind which each load would be waited for; else `to` stays.
template <typename Word>
__device__ __forceinline__ void load_where(bool wanted, const Word* from, Word& to) {
  static_assert(sizeof(Word) == 16);
  uint4 words;
  memcpy(&words, &to, sizeof to);
  asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %5, 0;\n @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
      : "l"(from), "r"(static_cast<int>(wanted)));
  memcpy(&to, &words, sizeof to);
}

// The same of 1 to 16 bytes into words of 32 bits: registers of 16 are put together as soon as one is there, which
// waits for each load.
template <typename E>
__device__ __forceinline__ void load_words_where(bool wanted, const E* from, uint32_t* to) {
  const int is_wanted = wanted;
  if constexpr (sizeof(E) == 16) {
    asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %5, 0;\n @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "l"(from), "r"(is_wanted));
  } else if constexpr (sizeof(E) == 8) {
    asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %3, 0;\n @p ld.global.v2.u32 {%0, %1}, [%2];\n}"
        : "+r"(to[0]), "+r"(to[1])
        : "l"(from), "r"(is_wanted));
  } else if constexpr (sizeof(E) == 4) {
    asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %2, 0;\n @p ld.global.u32 %0, [%1];\n}"
        : "+r"(to[0])
        : "l"(from), "r"(is_wanted));
  } else if constexpr (sizeof(E) == 2) {
    asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %2, 0;\n @p ld.global.u16 %0, [%1];\n}"
        : "+r"(to[0])
        : "l"(from), "r"(is_wanted));
  } else {
    static_assert(sizeof(E) == 1);
    asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %2, 0;\n @p ld.global.u8 %0, [%1];\n}"
        : "+r"(to[0])
        : "l"(from), "r"(is_wanted));
  }
}

}  // namespace dcs
