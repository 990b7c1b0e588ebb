// Softmax along a dimension that others lie inside of: neighboring threads have neighboring columns, in vectors where
// these are aligned. A block has `across` column vectors and `down` threads for each, which take the steps in turn.
// Where these hold all steps there is one read; longer columns are cut into chunks, of which one kernel finds the parts
// and a second one joins them and writes.
#pragma once

#include "softmax/values.cuh"

namespace dcs {

// Of a block, at most: with eight half-precision elements or two doubles a vector, a thread has more than 64 registers.
template <int kVec>
constexpr int kColumnThreads = kVec == 8 || kVec == 2 ? 512 : 1024;
// Steps that a thread holds: 32 registers of them, 16 elements where they come one by one.
template <int kVec>
constexpr int kColumnSteps = kVec == 1 ? 16
    : kVec == 8                        ? 4
                                       : 8;

template <typename T>
struct SoftmaxColumns {
  const T* input;
  const T* saved;
  T* output;
  int64_t outer, length, inner;
  int across, down;  // powers of two
  int64_t chunk, chunks;
  Part<typename Types<T>::Acc>* parts;  // (chunks, outer, inner)
};

// A thread's column vector.
template <typename T, int kVec>
struct Column {
  using Vec = Vector<T, kVec>;
  int64_t at, index, apart;  // its first element; its first column; elements from step to step
  bool exists;

  __device__ __forceinline__ Column(const SoftmaxColumns<T>& params, int64_t tile) {
    const int64_t vectors = params.inner / kVec, number = tile * params.across + (threadIdx.x & (params.across - 1));
    const int64_t outer = number / vectors;
    exists = outer < params.outer;
    apart = params.inner;
    index = number * kVec;
    at = outer * params.length * params.inner + (number - outer * vectors) * kVec;
  }
  template <bool kBackward>
  __device__ __forceinline__ Vec load(const T* tensor, int64_t step, int64_t end) const {
    return exists && step < end ? *reinterpret_cast<const Vec*>(tensor + at + step * apart)
                                : neutral<T, kVec, kBackward>();
  }
  template <typename Acc>
  __device__ __forceinline__ void store(T* tensor, int64_t step, int64_t end, const Acc (&values)[kVec]) const {
    if (exists && step < end) *reinterpret_cast<Vec*>(tensor + at + step * apart) = pack<Acc, T, kVec>(values);
  }
};

// Parts of the columns, joined over the `down` threads of each: over a warp's lanes, then over the warps. `down` and
// `across` are powers of two, the block has whole warps. Shared memory: column_shared_bytes.
template <bool kBackward, typename Acc, int kVec>
__device__ __forceinline__ void join_columns(Part<Acc> (&parts)[kVec], int across, int down) {
  for (int d = across; d < 32 && d < across * down; d *= 2) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Part<Acc> other{
          __shfl_xor_sync(kAllLanes, parts[i].largest, d), __shfl_xor_sync(kAllLanes, parts[i].total, d)};
      parts[i] = join_two<kBackward>(parts[i], other);
    }
  }
  const int warps = blockDim.x / 32, groups = across < 32 ? warps : down;
  if (groups == 1) return;
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  Part<Acc>* const of_groups = reinterpret_cast<Part<Acc>*>(softmax_shared);
  const int columns = across * kVec, stride = columns + 1;  // a lane's parts are in banks of their own
  Part<Acc>* const joined = of_groups + groups * stride;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, x = threadIdx.x & (across - 1);
  const int group = across < 32 ? warp : threadIdx.x / across;
  if (across >= 32 || lane < across) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) of_groups[group * stride + i * across + x] = parts[i];
  }
  __syncthreads();
  for (int column = warp; column < columns; column += warps) {
    const Part<Acc> part = join_lanes<kBackward>(lane < groups ? of_groups[lane * stride + column] : Part<Acc>{});
    if (lane == 0) joined[column] = part;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVec; ++i) parts[i] = joined[i * across + x];
}

template <typename T, int kVec>
constexpr int64_t column_shared_bytes(int64_t across, int64_t down) {
  const int64_t groups = across < 32 ? across * down / 32 : down;
  return groups <= 1
      ? 0
      : (groups * (across * kVec + 1) + across * kVec) * static_cast<int64_t>(sizeof(Part<typename Types<T>::Acc>));
}

template <typename T, int kVec, bool kBackward>
__global__ void __launch_bounds__(kColumnThreads<kVec>)
    softmax_columns_kernel(const __grid_constant__ SoftmaxColumns<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kSteps = kBackward ? kColumnSteps<kVec> / 2 : kColumnSteps<kVec>;
  const Column<T, kVec> column(params, blockIdx.x);
  const int y = threadIdx.x / params.across;
  Acc x[kSteps][kVec], saved[kBackward ? kSteps : 1][kVec];
  Vector<T, kVec> raw[kSteps], raw_saved[kBackward ? kSteps : 1];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    raw[k] = column.template load<kBackward>(params.input, y + k * params.down, params.length);
    if constexpr (kBackward)
      raw_saved[k] = column.template load<true>(params.saved, y + k * params.down, params.length);
  }
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
  join_columns<kBackward>(parts, params.across, params.down);
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

// Calls `visit` with the block's steps, a few of the thread's at a time: (first of them, end of the chunk).
template <int kSteps, typename T, typename Visit>
__device__ __forceinline__ void for_each_steps(const SoftmaxColumns<T>& params, const Visit& visit) {
  const int64_t begin = blockIdx.x % params.chunks * params.chunk, end = min(begin + params.chunk, params.length);
  for (int64_t step = begin + threadIdx.x / params.across; step < end; step += kSteps * params.down) visit(step, end);
}

template <typename T, int kVec, bool kBackward>
__global__ void __launch_bounds__(kColumnThreads<kVec>)
    softmax_columns_part_kernel(const __grid_constant__ SoftmaxColumns<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kSteps = 4;
  const Column<T, kVec> column(params, blockIdx.x / params.chunks);
  Part<Acc> parts[kVec];
  for_each_steps<kSteps>(params, [&](int64_t first, int64_t end) {
    Vector<T, kVec> raw[kSteps], raw_saved[kBackward ? kSteps : 1];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      raw[k] = column.template load<kBackward>(params.input, first + k * params.down, end);
      if constexpr (kBackward) raw_saved[k] = column.template load<true>(params.saved, first + k * params.down, end);
    }
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
  });
  join_columns<kBackward>(parts, params.across, params.down);
  if (threadIdx.x < params.across && column.exists) {
    const int64_t to = blockIdx.x % params.chunks * params.outer * params.inner + column.index;
#pragma unroll
    for (int i = 0; i < kVec; ++i) params.parts[to + i] = parts[i];
  }
}

template <typename T, int kVec, bool kBackward>
__global__ void __launch_bounds__(kColumnThreads<kVec>)
    softmax_columns_finish_kernel(const __grid_constant__ SoftmaxColumns<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kSteps = 4;
  const Column<T, kVec> column(params, blockIdx.x / params.chunks);
  Part<Acc> parts[kVec];
  for (int64_t chunk = threadIdx.x / params.across; chunk < params.chunks && column.exists; chunk += params.down) {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      parts[i] = join_two<kBackward>(parts[i], params.parts[chunk * params.outer * params.inner + column.index + i]);
  }
  join_columns<kBackward>(parts, params.across, params.down);
  if constexpr (!kBackward) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) parts[i].total = Acc(1) / parts[i].total;
  }
  for_each_steps<kSteps>(params, [&](int64_t first, int64_t end) {
    Vector<T, kVec> raw[kSteps], raw_saved[kBackward ? kSteps : 1];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      raw[k] = column.template load<kBackward>(params.input, first + k * params.down, end);
      if constexpr (kBackward) raw_saved[k] = column.template load<true>(params.saved, first + k * params.down, end);
    }
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
  });
}

}  // namespace dcs
