// Neighbouring elements that are read and written as one word.
#pragma once

#include "types.cuh"

namespace dcs {

template <typename T, int kVec>
struct alignas(kVec * sizeof(T)) Vector {
  T at[kVec];
};

// The values of a vector in its accumulator, two halves from each word at a time, and back.
template <typename Acc, typename T, int kVec>
__device__ __forceinline__ void unpack(const Vector<T, kVec>& from, Acc (&to)[kVec]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kVec % 2 == 0) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&from);
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else if constexpr (std::is_same_v<T, __half> && kVec % 2 == 0) {
    const __half2* words = reinterpret_cast<const __half2*>(&from);
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const float2 pair = __half22float2(words[i]);
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = cast<Acc>(from.at[i]);
  }
}

template <typename Acc, typename T, int kVec>
__device__ __forceinline__ Vector<T, kVec> pack(const Acc (&from)[kVec]) {
  Vector<T, kVec> to;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kVec % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) reinterpret_cast<__nv_bfloat162*>(&to)[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
  } else if constexpr (std::is_same_v<T, __half> && kVec % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) reinterpret_cast<__half2*>(&to)[i] = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) to.at[i] = cast<T>(from[i]);
  }
  return to;
}

}  // namespace dcs
