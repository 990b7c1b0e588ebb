// Loads of 16 bytes that are not put off until their first use: all of a thread's are on their way before it waits for
// one.
#pragma once

#include <cuda_runtime_api.h>

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

}  // namespace dcs
