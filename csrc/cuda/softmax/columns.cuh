// Softmax along a dimension that many others lie inside of: neighboring threads have neighboring columns, in vectors. A
// block has `across` column vectors and `down` threads for each, which take the steps in turn. Where these hold all
// steps there is one read; longer columns are cut into chunks, of which one kernel finds the parts and a second one
// joins them and writes, from the end to the beginning, because what was read last is still in L2.
//
// Where a step's columns are no whole vectors, steps begin at different offsets in a vector, but those of a thread at
// the same: `down` steps are whole vectors. A block's window is a vector narrower than its threads, so that these cover
// it from any offset.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "softmax/lines.cuh"

namespace dcs {

// Of a block, at most: with eight half-precision elements or two doubles a vector, a thread has more than 64 registers.
template <typename T>
constexpr int kColumnThreads = sizeof(T) == 4 ? 1024 : 512;
template <typename T>
constexpr int kColumnSteps = sizeof(T) == 2 ? 4 : 8;  // that a thread holds: 32 registers of them

template <typename T>
struct SoftmaxColumns {
  const T* input;
  const T* saved;
  T* output;
  int64_t outer, length, inner;
  int across, down;                     // powers of two
  int64_t windows;                      // of an outer; 0 where the columns are whole vectors
  int64_t chunk, chunks;                // steps of a chunk, a multiple of `down`
  Part<typename Types<T>::Acc>* parts;  // (chunks, outer, inner)
};

// A thread's column vector.
template <typename T>
struct Column {
  static constexpr int kVec = 16 / sizeof(T);
  using Vec = Vector<T, kVec>;
  int64_t at, index, apart;  // its first element; its first column; elements from step to step
  Range range;               // its elements that are of the block's columns
  int position;              // of its first element among the block's columns
  int64_t end;               // of the tensor

  __device__ __forceinline__ Column(const SoftmaxColumns<T>& params, int64_t tile) {
    const int x = threadIdx.x & (params.across - 1);
    apart = params.inner;
    end = params.outer * params.length * params.inner;
    position = x * kVec;
    if (params.windows == 0) {
      const int64_t vectors = params.inner / kVec, number = tile * params.across + x, outer = number / vectors;
      range = {0, outer < params.outer ? kVec : 0};
      index = number * kVec;
      at = outer * params.length * params.inner + (number - outer * vectors) * kVec;
    } else {
      const int64_t outer = tile / params.windows, width = (params.across - 1) * kVec,
                    begin = (tile - outer * params.windows) * width;
      at = outer * params.length * params.inner + begin;
      const int shift = static_cast<int>((at + threadIdx.x / params.across * params.inner) % kVec);
      position -= shift;
      at += position;
      index = outer * params.inner + begin + position;
      range = {-position, static_cast<int>(min(width, params.inner - begin)) - position};
    }
  }
  template <bool kBackward, int kCount>
  __device__ __forceinline__ void load(
      const T* tensor, int64_t first, int down, int64_t last, Vec (&raw)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int64_t step = first + k * down;
      raw[k] = neutral<T, kVec, kBackward>();
      const int64_t from = at + step * apart;
      load_where(step < last && range.has_any<kVec>(0), tensor + from, end - from, raw[k]);
    }
    if (range.has_all<kVec>(0)) return;
#pragma unroll
    for (int k = 0; k < kCount; ++k) mask<kBackward>(raw[k], 0, range);
  }
  template <typename Acc>
  __device__ __forceinline__ void store(T* tensor, int64_t step, int64_t end, const Acc (&values)[kVec]) const {
    if (step < end) store_in(tensor + at + step * apart, 0, range, pack<Acc, T, kVec>(values));
  }
  // Where the parts of element i are in shared memory: an element of all vectors side by side.
  __device__ __forceinline__ int part_index(int i, int across) const {
    const int column = position + i;
    return (column & (kVec - 1)) * across + column / kVec;
  }
};

// Parts of the columns, joined over the `down` threads of each. Shared memory: column_shared_bytes.
template <bool kBackward, typename T, typename Acc, int kVec>
__device__ __forceinline__ void join_columns(Part<Acc> (&parts)[kVec], const Column<T>& column, int across, int down) {
  if (down == 1) return;
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  Part<Acc>* const of_threads = reinterpret_cast<Part<Acc>*>(softmax_shared);
  const int columns = across * kVec, stride = columns + 1, y = threadIdx.x / across;
  Part<Acc>* const joined = of_threads + down * stride;
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (column.range.has(i)) of_threads[y * stride + column.part_index(i, across)] = parts[i];
  __syncthreads();
  join_rows<kBackward, Acc>(
      down, columns, [&](int row, int part_index) { return of_threads[row * stride + part_index]; },
      [&](int part_index, Part<Acc> part) { joined[part_index] = part; });
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (column.range.has(i)) parts[i] = joined[column.part_index(i, across)];
}

template <typename T>
int64_t column_shared_bytes(int64_t across, int64_t down) {
  const int64_t columns = across * (16 / sizeof(T));
  return down == 1 ? 0 : (down * (columns + 1) + columns) * static_cast<int64_t>(sizeof(Part<typename Types<T>::Acc>));
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kColumnThreads<T>)
    softmax_columns_kernel(const __grid_constant__ SoftmaxColumns<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T), kSteps = kBackward ? kColumnSteps<T> / 2 : kColumnSteps<T>;
  const Column<T> column(params, blockIdx.x);
  const int y = threadIdx.x / params.across;
  Acc x[kSteps][kVec], saved[kBackward ? kSteps : 1][kVec];
  Vector<T, kVec> raw[kSteps], raw_saved[kBackward ? kSteps : 1];
  column.template load<kBackward>(params.input, y, params.down, params.length, raw);
  if constexpr (kBackward) column.template load<true>(params.saved, y, params.down, params.length, raw_saved);
  Part<Acc> parts[kVec];
  Acc own[kVec];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    unpack(raw[k], x[k]);
    if constexpr (kBackward) unpack(raw_saved[k], saved[k]);
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if constexpr (kBackward) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) parts[i].total += x[k][i] * saved[k][i];
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) parts[i].largest = larger(parts[i].largest, x[k][i]);
      own[i] = parts[i].largest;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) parts[i].total += x[k][i] = shifted_power(x[k][i], own[i]);
    }
  }
  join_columns<kBackward>(parts, column, params.across, params.down);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const Acc scale = kBackward ? Acc(0) : shifted_power(own[i], parts[i].largest) / parts[i].total;
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      x[k][i] = kBackward ? (x[k][i] - parts[i].total) * saved[kBackward ? k : 0][i] : x[k][i] * scale;
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) column.store(params.output, y + k * params.down, params.length, x[k]);
}

// A block's chunk: number `block % chunks` of a tile of columns.
struct Steps {
  int64_t begin, end;
  template <typename T>
  __device__ __forceinline__ Steps(const SoftmaxColumns<T>& params, int64_t block)
      : begin(block % params.chunks * params.chunk), end(min(begin + params.chunk, params.length)) {}
};

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kColumnThreads<T>)
    softmax_columns_part_kernel(const __grid_constant__ SoftmaxColumns<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T), kSteps = 4;
  launch_dependents();
  const Column<T> column(params, blockIdx.x / params.chunks);
  Part<Acc> parts[kVec];
  const Steps steps(params, blockIdx.x);
  const int64_t end = steps.end, round = kSteps * params.down;
  for (int64_t first = steps.begin + threadIdx.x / params.across; first < end; first += round) {
    Vector<T, kVec> raw[kSteps], raw_saved[kBackward ? kSteps : 1];
    column.template load<kBackward>(params.input, first, params.down, end, raw);
    if constexpr (kBackward) column.template load<true>(params.saved, first, params.down, end, raw_saved);
    Acc x[kSteps][kVec];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) unpack(raw[k], x[k]);
    if constexpr (kBackward) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        Acc saved[kVec];
        unpack(raw_saved[k], saved);
#pragma unroll
        for (int i = 0; i < kVec; ++i) parts[i].total += x[k][i] * saved[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        Acc largest = parts[i].largest;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) largest = larger(largest, x[k][i]);
        parts[i].total *= shifted_power(parts[i].largest, largest);
        parts[i].largest = largest;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) parts[i].total += shifted_power(x[k][i], largest);
      }
    }
  }
  join_columns<kBackward>(parts, column, params.across, params.down);
  if (threadIdx.x < params.across) {
    const int64_t to = blockIdx.x % params.chunks * params.outer * params.inner + column.index;
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (column.range.has(i)) params.parts[to + i] = parts[i];
  }
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kColumnThreads<T>)
    softmax_columns_finish_kernel(const __grid_constant__ SoftmaxColumns<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T), kSteps = 4;
  const int64_t block = gridDim.x - 1 - blockIdx.x;
  const Column<T> column(params, block / params.chunks);
  Part<Acc> parts[kVec];
  griddepcontrol_wait();
  for (int64_t chunk = threadIdx.x / params.across; chunk < params.chunks; chunk += params.down) {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (column.range.has(i))
        parts[i] = join_two<kBackward>(parts[i], params.parts[chunk * params.outer * params.inner + column.index + i]);
  }
  join_columns<kBackward>(parts, column, params.across, params.down);
  if constexpr (!kBackward) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) parts[i].total = Acc(1) / parts[i].total;
  }
  const Steps steps(params, block);
  const int64_t end = steps.end, round = kSteps * params.down, y = threadIdx.x / params.across;
  for (int64_t begin = steps.begin + (end - 1 - steps.begin) / round * round; begin >= steps.begin; begin -= round) {
    const int64_t first = begin + y;
    Vector<T, kVec> raw[kSteps], raw_saved[kBackward ? kSteps : 1];
    column.template load<kBackward>(params.input, first, params.down, end, raw);
    if constexpr (kBackward) column.template load<true>(params.saved, first, params.down, end, raw_saved);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Acc x[kVec], saved[kVec];
      unpack(raw[k], x);
      if constexpr (kBackward) unpack(raw_saved[k], saved);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if constexpr (kBackward) x[i] = (x[i] - parts[i].total) * saved[i];
        else x[i] = shifted_power(x[i], parts[i].largest) * parts[i].total;
      }
      column.store(params.output, first + k * params.down, end, x);
    }
  }
}

}  // namespace dcs
