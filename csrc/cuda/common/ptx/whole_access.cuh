// Accesses of 16 bytes in global memory, which come whole: no thread sees a part of one.
#pragma once

#include <cstdint>

namespace dcs {

__device__ __forceinline__ void store_whole(void* to, uint64_t low, uint64_t high) {
  asm volatile("{\n .reg .b128 word;\n mov.b128 word, {%1, %2};\n st.relaxed.gpu.global.b128 [%0], word;\n}" ::"l"(to),
      "l"(low), "l"(high)
      : "memory");
}
__device__ __forceinline__ void load_whole(const void* from, uint64_t& low, uint64_t& high) {
  asm volatile("{\n .reg .b128 word;\n ld.relaxed.gpu.global.b128 word, [%2];\n mov.b128 {%0, %1}, word;\n}"
      : "=l"(low), "=l"(high)
      : "l"(from)
      : "memory");
}
// The same where `wanted`, else what is there, by a predicate.
__device__ __forceinline__ void load_whole_if(bool wanted, const void* from, uint64_t& low, uint64_t& high) {
  asm volatile(
      "{\n .reg .b128 word;\n .reg .pred wanted;\n setp.ne.s32 wanted, %3, 0;\n mov.b128 word, {%0, %1};\n"
      " @wanted ld.relaxed.gpu.global.b128 word, [%2];\n mov.b128 {%0, %1}, word;\n}"
      : "+l"(low), "+l"(high)
      : "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
}

}  // namespace dcs
