// Softmax along a dimension that few others lie inside of, at any alignment. A slab, (length, columns), is contiguous,
// and is read so, in vectors: the block's `width` threads take vectors side by side, and theirs are `width` vectors
// apart, a multiple of the columns. So each element of a thread's vectors has one column, which is numbered from the
// aligned vector that the slab begins in.
//
// Slabs that a block's registers hold are read once. Longer ones, rows (one column) among them, are cut into chunks:
// one kernel finds the parts of each chunk, where these are many a second one joins them, and the last one writes, from
// the end to the beginning, because what was read last is still in L2.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "softmax/lines.cuh"

namespace dcs {

constexpr int kSlabThreads = 512;  // of a block that holds its slab, at most
constexpr int kSlabVectors = 8;    // of a thread of one, at most
constexpr int kChunkThreads = 256;
constexpr int kChunkVectors = 4;  // of a thread at once
constexpr int kJoinColumns = 8;

template <typename T>
struct SoftmaxSlabs {
  const T* input;
  const T* saved;
  T* output;
  int64_t elements, size;  // of the tensor, of a slab
  int columns, width;
  int64_t chunk, chunks;                 // vectors of a chunk, a multiple of `width`; chunks of a slab
  Part<typename Types<T>::Acc>* parts;   // (slabs, chunks, columns)
  Part<typename Types<T>::Acc>* joined;  // (slabs, columns), or null
  uint32_t zero;
};

// A thread's vectors of a slab, those of `chunk`: number k is k * width vectors from the first.
template <typename T>
struct SlabVectors {
  static constexpr int kVec = 16 / sizeof(T);
  using Vec = Vector<T, kVec>;
  int64_t at;    // the first vector, in elements
  Range range;   // the slab's elements in this chunk, relative to the first vector
  int apart;     // elements from vector to vector
  int64_t left;  // elements from the first vector to the tensor's end

  __device__ __forceinline__ SlabVectors(const SoftmaxSlabs<T>& params, int64_t slab, int64_t chunk) {
    constexpr int64_t kFar = 1 << 30;
    const int shift = static_cast<int>(slab * params.size % kVec);
    const int64_t begin = (chunk * params.chunk + threadIdx.x) * kVec, end = (chunk + 1) * params.chunk * kVec;
    at = slab * params.size - shift + begin;
    apart = params.width * kVec;
    range.low = static_cast<int>(max(shift - begin, -kFar));
    range.high = static_cast<int>(min(min(shift + params.size, end) - begin, kFar));
    if (threadIdx.x >= params.width) range.high = -static_cast<int>(kFar);
    left = params.elements - at;
  }

  template <bool kBackward, int kCount>
  __device__ __forceinline__ void load(const T* tensor, int first, Vec (&raw)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int element = (first + k) * apart;
      raw[k] = neutral<T, kVec, kBackward>();
      load_where(element < range.high, tensor + at + element, left - element, raw[k]);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int element = (first + k) * apart;
      if (element < range.high) mask<kBackward>(raw[k], element, range);
    }
  }
  __device__ __forceinline__ void store(T* tensor, int k, const Vec& raw) const {
    const int element = k * apart;
    if (element < range.high) store_in(tensor + at + element, element, range, raw);
  }
};

// Joins `count` parts, of which number p is of column p % columns, by all threads. Shared memory: joined_parts. The
// result is the parts of the columns.
template <bool kBackward, typename Acc, typename Load>
__device__ __forceinline__ const Part<Acc>* join_all(int count, int columns, const Load& load, Part<Acc>* shared) {
  int copies = 1;  // of a column, where there are few of them
  while (copies < 32 && 64 * copies * columns <= static_cast<int>(blockDim.x)) copies *= 2;
  const int all = copies * columns;
  join_rows<kBackward, Acc>((count + all - 1) / all, all,
      [&](int row, int column) { return row * all + column < count ? load(row * all + column) : Part<Acc>{}; },
      [&](int column, Part<Acc> part) { shared[column] = part; });
  __syncthreads();
  if (copies == 1) return shared;
  join_rows<kBackward, Acc>(
      copies, columns, [&](int row, int column) { return shared[row * columns + column]; },
      [&](int column, Part<Acc> part) { shared[all + column] = part; });
  __syncthreads();
  return shared + all;
}
__host__ __device__ constexpr int64_t joined_parts(int64_t columns, int64_t threads) {
  return 2 * columns + threads / 32;
}

// The parts of the columns of a thread's elements, joined over the block. Shared memory: slab_shared_bytes.
template <bool kBackward, typename Acc, int kVec>
__device__ __forceinline__ const Part<Acc>* join_slab(const Part<Acc> (&parts)[kVec], int columns, int width) {
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  Part<Acc>* const of_threads = reinterpret_cast<Part<Acc>*>(softmax_shared);
  const int stride = width + 1, thread = threadIdx.x;
  if (thread < width) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) of_threads[i * stride + thread] = parts[i];
  }
  __syncthreads();
  return join_all<kBackward, Acc>(
      width * kVec, columns, [&](int p) { return of_threads[p % kVec * stride + p / kVec]; },
      of_threads + kVec * stride);
}
template <typename T>
int64_t slab_shared_bytes(int64_t columns, int64_t width, int64_t threads) {
  constexpr int kVec = 16 / sizeof(T);
  return (kVec * (width + 1) + joined_parts(columns, threads)) *
      static_cast<int64_t>(sizeof(Part<typename Types<T>::Acc>));
}
// Each of the thread's elements takes its column's part.
template <typename Acc, int kVec>
__device__ __forceinline__ void take_parts(const Part<Acc>* of_columns, int columns, Part<Acc> (&parts)[kVec]) {
  int column = threadIdx.x * kVec % columns;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    parts[i] = of_columns[column];
    column = column + 1 == columns ? 0 : column + 1;
  }
}

template <typename T, int kVectors, bool kBackward>
__global__ void __launch_bounds__(kSlabThreads) softmax_slab_kernel(const __grid_constant__ SoftmaxSlabs<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  using Vec = Vector<T, kVec>;
  const SlabVectors<T> mine(params, blockIdx.x, 0);
  Vec raw[kVectors], saved[kBackward ? kVectors : 1];
  mine.template load<kBackward>(params.input, 0, raw);
  if constexpr (kBackward) mine.template load<true>(params.saved, 0, saved);
  Part<Acc> parts[kVec];
  Acc own[kVec], x[kVec];
  if constexpr (kBackward) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Acc y[kVec];
      unpack(raw[k], x);
      unpack(saved[k], y);
#pragma unroll
      for (int i = 0; i < kVec; ++i) parts[i].total += x[i] * y[i];
    }
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      unpack(raw[k], x);
#pragma unroll
      for (int i = 0; i < kVec; ++i) parts[i].largest = larger(parts[i].largest, x[i]);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) own[i] = parts[i].largest;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      unpack(renewed(raw[k], params.zero), x);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        x[i] = shifted_power(x[i], own[i]);
        parts[i].total += x[i];
      }
      // Powers of float and double take no more room than the elements.
      if constexpr (sizeof(T) > 2) raw[k] = pack<Acc, T, kVec>(x);
    }
  }
  take_parts(join_slab<kBackward>(parts, params.columns, params.width), params.columns, parts);
  Acc scale[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if constexpr (sizeof(T) > 2) scale[i] = shifted_power(own[i], parts[i].largest) / parts[i].total;
    else scale[i] = Acc(1) / parts[i].total;
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    unpack(renewed(raw[k], params.zero), x);
    if constexpr (kBackward) {
      Acc y[kVec];
      unpack(renewed(saved[k], params.zero), y);
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[i] = (x[i] - parts[i].total) * y[i];
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[i] = (sizeof(T) > 2 ? x[i] : shifted_power(x[i], parts[i].largest)) * scale[i];
    }
    mine.store(params.output, k, pack<Acc, T, kVec>(x));
  }
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kChunkThreads, 4)
    softmax_chunk_kernel(const __grid_constant__ SoftmaxSlabs<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T), kVectors = kChunkVectors;
  using Vec = Vector<T, kVec>;
  launch_dependents();
  const int64_t slab = blockIdx.x / params.chunks;
  const SlabVectors<T> mine(params, slab, blockIdx.x - slab * params.chunks);
  Part<Acc> parts[kVec];
  for (int first = 0; first * mine.apart < mine.range.high; first += kVectors) {
    Vec raw[kVectors], saved[kBackward ? kVectors : 1];
    mine.template load<kBackward>(params.input, first, raw);
    if constexpr (kBackward) mine.template load<true>(params.saved, first, saved);
    Acc x[kVectors][kVec];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) unpack(raw[k], x[k]);
    if constexpr (kBackward) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        Acc y[kVec];
        unpack(saved[k], y);
#pragma unroll
        for (int i = 0; i < kVec; ++i) parts[i].total += x[k][i] * y[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        Acc largest = parts[i].largest;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) largest = larger(largest, x[k][i]);
        parts[i].total *= shifted_power(parts[i].largest, largest);
        parts[i].largest = largest;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) parts[i].total += shifted_power(x[k][i], largest);
      }
    }
  }
  const Part<Acc>* const of_columns = join_slab<kBackward>(parts, params.columns, params.width);
  for (int column = threadIdx.x; column < params.columns; column += kChunkThreads)
    params.parts[static_cast<int64_t>(blockIdx.x) * params.columns + column] = of_columns[column];
}

// The parts of kJoinColumns columns of a slab, joined over its chunks.
template <typename T, bool kBackward>
__global__ void __launch_bounds__(kChunkThreads)
    softmax_join_chunks_kernel(const __grid_constant__ SoftmaxSlabs<T> params) {
  using Acc = typename Types<T>::Acc;
  griddepcontrol_wait();
  launch_dependents();
  const int groups = (params.columns + kJoinColumns - 1) / kJoinColumns;
  const int64_t slab = blockIdx.x / groups;
  const int begin = static_cast<int>(blockIdx.x - slab * groups) * kJoinColumns;
  const Part<Acc>* const from = params.parts + slab * params.chunks * params.columns + begin;
  Part<Acc>* const to = params.joined + slab * params.columns + begin;
  join_rows<kBackward, Acc>(
      static_cast<int>(params.chunks), min(kJoinColumns, params.columns - begin),
      [&](int chunk, int column) { return from[static_cast<int64_t>(chunk) * params.columns + column]; },
      [&](int column, Part<Acc> part) { to[column] = part; });
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kChunkThreads, 4)
    softmax_finish_kernel(const __grid_constant__ SoftmaxSlabs<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T), kVectors = kChunkVectors;
  using Vec = Vector<T, kVec>;
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  const int64_t block = gridDim.x - 1 - blockIdx.x, slab = block / params.chunks;
  const SlabVectors<T> mine(params, slab, block - slab * params.chunks);
  const int count = params.columns * static_cast<int>(params.joined ? 1 : params.chunks);
  const Part<Acc>* const from = (params.joined ? params.joined : params.parts) + slab * count;
  griddepcontrol_wait();
  const Part<Acc>* const of_columns = join_all<kBackward, Acc>(
      count, params.columns, [&](int p) { return from[p]; }, reinterpret_cast<Part<Acc>*>(softmax_shared));
  Part<Acc> parts[kVec];
  take_parts(of_columns, params.columns, parts);
  if constexpr (!kBackward) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) parts[i].total = Acc(1) / parts[i].total;
  }
  const int rounds = (mine.range.high + mine.apart * kVectors - 1) / (mine.apart * kVectors);
  for (int round = rounds - 1; round >= 0; --round) {
    const int first = round * kVectors;
    Vec raw[kVectors], saved[kBackward ? kVectors : 1];
    mine.template load<kBackward>(params.input, first, raw);
    if constexpr (kBackward) mine.template load<true>(params.saved, first, saved);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Acc x[kVec];
      unpack(raw[k], x);
      if constexpr (kBackward) {
        Acc y[kVec];
        unpack(saved[k], y);
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] = (x[i] - parts[i].total) * y[i];
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] = shifted_power(x[i], parts[i].largest) * parts[i].total;
      }
      mine.store(params.output, first + k, pack<Acc, T, kVec>(x));
    }
  }
}

}  // namespace dcs
