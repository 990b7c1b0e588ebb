// Stores that have no branch around them, so that neither has what their addresses take.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dcs {

// Of 2, 4 or 8 bytes in words of 32 bits, where `wanted`.
template <typename E>
__device__ __forceinline__ void store_words_where(bool wanted, E* to, const uint32_t* from) {
  const int is_wanted = wanted;
  if constexpr (sizeof(E) == 8) {
    asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %3, 0;\n @p st.global.v2.u32 [%0], {%1, %2};\n}" ::"l"(to),
        "r"(from[0]), "r"(from[1]), "r"(is_wanted)
        : "memory");
  } else if constexpr (sizeof(E) == 4) {
    asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %2, 0;\n @p st.global.u32 [%0], %1;\n}" ::"l"(to), "r"(from[0]),
        "r"(is_wanted)
        : "memory");
  } else {
    static_assert(sizeof(E) == 2);
    asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %2, 0;\n @p st.global.u16 [%0], %1;\n}" ::"l"(to), "r"(from[0]),
        "r"(is_wanted)
        : "memory");
  }
}

}  // namespace dcs
