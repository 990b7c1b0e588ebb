// Vectors of which a part is a line's.
#pragma once

#include "common/vector.cuh"

namespace dcs {

// A line's elements are low ... high - 1, and a vector's begin at `first`. A vector at either end of a line is partly
// another line's: it is read whole, what is not the line's is made to add nothing, and the line's elements are written
// one by one.
struct Range {
  int low, high;
  template <int kVec>
  __device__ __forceinline__ bool has_any(int first) const {
    return first < high && first + kVec > low;
  }
  template <int kVec>
  __device__ __forceinline__ bool has_all(int first) const {
    return first >= low && first + kVec <= high;
  }
  __device__ __forceinline__ bool has(int index) const { return index >= low && index < high; }
};

template <typename T, int kVec>
__device__ __forceinline__ void store_in(T* to, int first, Range range, const Vector<T, kVec>& raw) {
  if (range.has_all<kVec>(first)) {
    *reinterpret_cast<Vector<T, kVec>*>(to) = raw;
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (range.has(first + i)) to[i] = raw.get(i);
  }
}

}  // namespace dcs
