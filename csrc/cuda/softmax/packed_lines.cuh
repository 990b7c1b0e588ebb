// Softmax of short lines at any alignment, through shared memory: a block loads some KB in whole vectors, a
// power of two of lanes takes a line, element by element, and the vectors go back. Lines lie packed: rows of less than
// some vectors, or (outer, length, inner) with little inside an outer, of which a block takes whole slabs. Lines of a
// view come with the gaps between their runs.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/ptx/dependent_launch.cuh"
#include "softmax/lines.cuh"

namespace dcs {

constexpr int kPackedThreads = 256;
constexpr int kPackedBytes = 8 << 10;  // of a block, about
constexpr int kPackedElements = 8;     // of a line to a lane, at most

template <typename T>
struct SoftmaxPacked {
  const T* input;
  const T* saved;
  T* output;
  int64_t elements;  // of the tensor
  int length;
  // Slabs: (length, columns); elements of a block, whole slabs and whole vectors; lanes of a line, a power of two.
  int columns, tile, lane_bits;
  RunIndex runs;
};

// Memory of a view from element `first` to element `last`, in whole vectors, and what lies between its runs with them.
// The result is where `first` is in `span`.
template <typename T>
__device__ __forceinline__ int load_span(const SoftmaxPacked<T>& params, int64_t first, int64_t last, T* span) {
  constexpr int kVec = 16 / sizeof(T);
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(params.input + first) / sizeof(T) % kVec);
  const int count = static_cast<int>(last - first) + 1 + shift;
  for (int at = threadIdx.x * kVec; at < count; at += kPackedThreads * kVec) {
    const int64_t number = first - shift + at;
    if (number >= 0 && number + kVec <= params.runs.span) {
      copy_async(span + at, params.input + number);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (number + i >= 0 && number + i < params.runs.span) span[at + i] = params.input[number + i];
    }
  }
  return shift;
}

// Bytes of a vector that are inside of the tensor.
template <typename T>
__device__ __forceinline__ int valid_bytes(const SoftmaxPacked<T>& params, int64_t from) {
  return static_cast<int>(min(params.elements - from, static_cast<int64_t>(16 / sizeof(T))) * sizeof(T));
}

// A lane's elements of a line, in shared memory: number i, of those below `count`, is at `at(i)` of all three. A lane
// has the first kSure, or none.
template <int kElements, bool kBackward, int kSure, typename T, typename At>
__device__ __forceinline__ void packed_softmax(
    const T* input, const T* saved, T* tile, int count, int lanes, const At& at) {
  using Acc = typename Types<T>::Acc;
  const auto has = [&](int i) { return i < kSure ? count > 0 : i < count; };
  Acc x[kElements], total = 0;
  if constexpr (kBackward) {
    Acc y[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x[i] = has(i) ? cast<Acc>(input[at(i)]) : Acc(0);
      y[i] = has(i) ? cast<Acc>(saved[at(i)]) : Acc(0);
      total += x[i] * y[i];
    }
    total = lanes_total(total, lanes);
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] = (x[i] - total) * y[i];
  } else {
    Acc largest = kLowest<Acc>;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x[i] = has(i) ? cast<Acc>(input[at(i)]) : Acc(-INFINITY);
      largest = larger(largest, x[i]);
    }
    largest = lanes_largest(largest, lanes);
#pragma unroll
    for (int i = 0; i < kElements; ++i) total += x[i] = shifted_power(x[i], largest);
    total = lanes_total(total, lanes);
    const Acc scale = inverse(total);
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] *= scale;
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i)
    if (has(i)) tile[at(i)] = cast<T>(x[i]);
}

// kElements: of a line to a lane.
template <typename T, int kElements, bool kBackward>
__global__ void __launch_bounds__(kPackedThreads)
    softmax_packed_kernel(const __grid_constant__ SoftmaxPacked<T> params) {
  constexpr int kVec = 16 / sizeof(T);
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  T* const tile = reinterpret_cast<T*>(softmax_shared);
  T* const saved = tile + params.tile;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * params.tile;
  const int count = static_cast<int>(min(params.elements - begin, static_cast<int64_t>(params.tile)));
  overlap_launches();
  // Of a view the memory of the block's elements, from `saved` on.
  const bool is_view = !kBackward && params.runs.span > 0;
  const int64_t gaps = is_view ? params.runs.beyond(begin) : 0;
  const T* input = tile;
  if (is_view) {
    const int64_t last = begin + count - 1;
    input = saved + load_span(params, begin + gaps, last + params.runs.beyond(last), saved);
  } else {
    for (int first = threadIdx.x * kVec; first < count; first += kPackedThreads * kVec) {
      const int valid = valid_bytes(params, begin + first);
      copy_existing<16, sizeof(T)>(tile + first, params.input + begin + first, valid);
      if constexpr (kBackward) copy_existing<16, sizeof(T)>(saved + first, params.saved + begin + first, valid);
    }
  }
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();

  const int lanes = 1 << params.lane_bits, lane = threadIdx.x & (lanes - 1), lines = count / params.length;
  for (int first = 0; first < lines; first += kPackedThreads >> params.lane_bits) {
    const int line = first + (threadIdx.x >> params.lane_bits);
    const int slab = params.columns == 1 ? line : line / params.columns;
    const int at = slab * params.columns * (params.length - 1) + line + lane * params.columns,
              apart = lanes * params.columns;
    const int64_t number = begin + slab * params.columns * params.length;
    const int64_t beyond = is_view && line < lines ? params.runs.beyond(number) - gaps : 0;
    packed_softmax<kElements, kBackward, 0>(input + beyond, saved, tile,
        line < lines ? (params.length - lane + lanes - 1) >> params.lane_bits : 0, lanes,
        [&](int i) { return at + i * apart; });
  }
  __syncthreads();
  for (int first = threadIdx.x * kVec; first < count; first += kPackedThreads * kVec)
    store_in(
        params.output + begin + first, first, Range{0, count}, *reinterpret_cast<const Vector<T, kVec>*>(tile + first));
}

}  // namespace dcs
