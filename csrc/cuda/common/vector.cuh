// Neighboring elements that are read and written as one word.
#pragma once

#include <type_traits>

#include "common/element_types.cuh"

namespace dcs {

template <typename T, int kVec, typename Enable = void>
struct alignas(kVec * sizeof(T)) Vector {
  T elements[kVec];
  __device__ __forceinline__ T get(int i) const { return elements[i]; }
  __device__ __forceinline__ void set(int i, T value) { elements[i] = value; }
};

// Half-precision elements live in words of two: as elements of an array the compiler would take them apart at every
// copy.
template <typename T, int kVec>
struct alignas(kVec * sizeof(T)) Vector<T, kVec, std::enable_if_t<sizeof(T) == 2 && kVec % 2 == 0>> {
  uint32_t words[kVec / 2];
  __device__ __forceinline__ T get(int i) const {
    const unsigned short bits = static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16));
    return *reinterpret_cast<const T*>(&bits);
  }
  __device__ __forceinline__ void set(int i, T value) {
    const uint32_t bits = *reinterpret_cast<const unsigned short*>(&value);
    words[i / 2] = i % 2 ? (words[i / 2] & 0xffffu) | bits << 16 : (words[i / 2] & 0xffff0000u) | bits;
  }
};

// Two elements of half precision, as a word has them.
template <typename T>
using HalfPair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// The values of a vector in its accumulator, two half-precision values from each word at a time, and back.
template <typename Acc, typename T, int kVec>
__device__ __forceinline__ void unpack(const Vector<T, kVec>& from, Acc (&to)[kVec]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kVec % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      to[2 * i] = __uint_as_float(from.words[i] << 16);
      to[2 * i + 1] = __uint_as_float(from.words[i] & 0xffff0000u);
    }
  } else if constexpr (std::is_same_v<T, __half> && kVec % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&from.words[i]));
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = cast<Acc>(from.get(i));
  }
}

template <typename Acc, typename T, int kVec>
__device__ __forceinline__ Vector<T, kVec> pack(const Acc (&from)[kVec]) {
  Vector<T, kVec> to;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kVec % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
      to.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else if constexpr (std::is_same_v<T, __half> && kVec % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const __half2 pair = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
      to.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) to.set(i, cast<T>(from[i]));
  }
  return to;
}

// The largest magnitude among the elements of vectors; NaNs have none.
template <typename T, int kVec>
struct Largest {
  float largest = 0.f;
  __device__ __forceinline__ void take(const Vector<T, kVec>& from) {
    float values[kVec];
    unpack(from, values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) largest = fmaxf(largest, fabsf(values[i]));
  }
  __device__ __forceinline__ float magnitude() const { return largest; }
};
template <typename Pair, int kVec>
struct LargestOfPairs {
  Pair largest{};
  template <typename T>
  __device__ __forceinline__ void take(const Vector<T, kVec>& from) {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i)
      largest = __hmax2(largest, __habs2(*reinterpret_cast<const Pair*>(&from.words[i])));
  }
  __device__ __forceinline__ float magnitude() const { return fmaxf(cast<float>(largest.x), cast<float>(largest.y)); }
};
template <int kVec>
struct Largest<__nv_bfloat16, kVec> : LargestOfPairs<__nv_bfloat162, kVec> {};
template <int kVec>
struct Largest<__half, kVec> : LargestOfPairs<__half2, kVec> {};

// The same where the direction is fixed: turning the order around then costs nothing.
template <bool kReverse, typename Acc, typename T, int kVec>
__device__ __forceinline__ void unpack_in_order(const Vector<T, kVec>& from, Acc (&to)[kVec]) {
  Acc values[kVec];
  unpack(from, values);
#pragma unroll
  for (int i = 0; i < kVec; ++i) to[i] = values[kReverse ? kVec - 1 - i : i];
}
template <bool kReverse, typename T, typename Acc, int kVec>
__device__ __forceinline__ Vector<T, kVec> pack_in_order(const Acc (&from)[kVec]) {
  Acc values[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = from[kReverse ? kVec - 1 - i : i];
  return pack<Acc, T, kVec>(values);
}
// The same where the direction is a value: an instruction an element.
template <typename Acc, typename T, int kVec>
__device__ __forceinline__ void unpack_in_order(const Vector<T, kVec>& from, Acc (&to)[kVec], bool reverse) {
  Acc values[kVec];
  unpack(from, values);
#pragma unroll
  for (int i = 0; i < kVec; ++i) to[i] = reverse ? values[kVec - 1 - i] : values[i];
}
template <typename T, typename Acc, int kVec>
__device__ __forceinline__ Vector<T, kVec> pack_in_order(const Acc (&from)[kVec], bool reverse) {
  Acc values[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = reverse ? from[kVec - 1 - i] : from[i];
  return pack<Acc, T, kVec>(values);
}

// The kVec elements at memory positions first .. first + kVec - 1; positions outside [low, high) are 0.
template <typename T, int kVec>
__device__ __forceinline__ Vector<T, kVec> load_vector(const T* tile, int first, int low, int high) {
  using Acc = typename Types<T>::Acc;
  if (first >= low && first + kVec <= high) return *reinterpret_cast<const Vector<T, kVec>*>(tile + first);
  Vector<T, kVec> raw;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const int t = first + i;
    raw.set(i, t >= low && t < high ? tile[t] : cast<T>(cast<Acc>(0.0)));
  }
  return raw;
}

template <typename T, int kVec>
__device__ __forceinline__ void store_vector(T* tile, int first, int low, int high, const Vector<T, kVec>& raw) {
  if (first >= low && first + kVec <= high) {
    *reinterpret_cast<Vector<T, kVec>*>(tile + first) = raw;
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (first + i >= low && first + i < high) tile[first + i] = raw.get(i);
  }
}

// Memory order to scan order and back.
template <typename T, int kVec>
__device__ __forceinline__ void turn(Vector<T, kVec>& values, bool reverse) {
  if (!reverse) return;
  if constexpr (sizeof(T) == 2) {
    Vector<T, kVec> turned;
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) turned.words[i] = __byte_perm(values.words[kVec / 2 - 1 - i], 0, 0x1032);
    values = turned;
  } else {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const T other = values.get(i);
      values.set(i, values.get(kVec - 1 - i));
      values.set(kVec - 1 - i, other);
    }
  }
}

// Flags, four bytes at a time, to bits in the order of memory.
__device__ __forceinline__ uint32_t flag_bits(uint32_t bytes) {
  const uint32_t ones = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7 & 0x01010101u;  // any byte but 0 is set
  return ones * 0x01020408u >> 24 & 15u;
}

}  // namespace dcs
