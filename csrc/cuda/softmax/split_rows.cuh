// Softmax of contiguous rows that no cluster holds: the rows are cut into chunks, one kernel finds the part of each
// chunk, a second joins a row's parts and writes. Two reads and one write.
#pragma once

#include "softmax/rows.cuh"

namespace dcs {

constexpr int kSplitThreads = 256, kSplitVectors = 4;
constexpr int kSplitTile = kSplitThreads * kSplitVectors;  // vectors

template <typename T>
struct SoftmaxSplit {
  SoftmaxRows<T> rows;
  int64_t chunk;  // vectors, a multiple of kSplitTile
  int64_t chunks;
  Part<typename Types<T>::Acc>* parts;  // (rows, chunks)
};

// Calls `visit` with every tile of the block's chunk.
template <typename T, typename Visit>
__device__ __forceinline__ void for_each_tile(const SoftmaxSplit<T>& params, const Visit& visit) {
  using Tile = Place<T, kSplitVectors, false>;
  const int64_t row = blockIdx.x / params.chunks, begin = (blockIdx.x - row * params.chunks) * params.chunk;
  const int64_t end = min(begin + params.chunk, params.rows.columns / Tile::kVec + 2);
  for (int64_t at = begin; at < end; at += kSplitTile) visit(Tile(params.rows, row, at, kSplitTile));
}

template <typename T, bool kBackward>
__device__ __forceinline__ void load_tile(
    const T* tensor, const Place<T, kSplitVectors, false>& tile, Vector<T, 16 / sizeof(T)> (&raw)[kSplitVectors]) {
  if (tile.all_plain()) {
#pragma unroll
    for (int k = 0; k < kSplitVectors; ++k) raw[k] = tile.load_plain(tensor, k);
  } else {
#pragma unroll
    for (int k = 0; k < kSplitVectors; ++k) raw[k] = tile.template load_any<kBackward>(tensor, k);
  }
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kSplitThreads) softmax_part_kernel(const __grid_constant__ SoftmaxSplit<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  Part<Acc> part;
  for_each_tile(params, [&](const Place<T, kSplitVectors, false>& tile) {
    Vector<T, kVec> raw[kSplitVectors], saved[kBackward ? kSplitVectors : 1];
    load_tile<T, kBackward>(params.rows.input, tile, raw);
    Acc x[kVec];
    if constexpr (kBackward) {
      load_tile<T, true>(params.rows.saved, tile, saved);
#pragma unroll
      for (int k = 0; k < kSplitVectors; ++k) {
        Acc y[kVec];
        unpack(raw[k], x);
        unpack(saved[k], y);
        Acc total = 0;
#pragma unroll
        for (int i = 0; i < kVec; ++i) total += x[i] * y[i];
        part.total += total;
      }
    } else {
      Acc largest = part.largest;
#pragma unroll
      for (int k = 0; k < kSplitVectors; ++k) largest = largest_of(raw[k], largest);
      part.total *= shifted_power(part.largest, largest);
      part.largest = largest;
#pragma unroll
      for (int k = 0; k < kSplitVectors; ++k) {
        unpack(raw[k], x);
        Acc total = 0;
#pragma unroll
        for (int i = 0; i < kVec; ++i) total += shifted_power(x[i], largest);
        part.total += total;
      }
    }
  });
  part = join_warps<kBackward>(join_lanes<kBackward>(part));
  if (threadIdx.x == 0) params.parts[blockIdx.x] = part;
}

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kSplitThreads) softmax_finish_kernel(const __grid_constant__ SoftmaxSplit<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  const int64_t row = blockIdx.x / params.chunks;
  Part<Acc> part;
  for (int64_t chunk = threadIdx.x; chunk < params.chunks; chunk += kSplitThreads)
    part = join_two<kBackward>(part, params.parts[row * params.chunks + chunk]);
  part = join_warps<kBackward>(join_lanes<kBackward>(part));
  const Acc scale = Acc(1) / part.total;
  for_each_tile(params, [&](const Place<T, kSplitVectors, false>& tile) {
    Vector<T, kVec> raw[kSplitVectors], saved[kBackward ? kSplitVectors : 1];
    load_tile<T, kBackward>(params.rows.input, tile, raw);
    if constexpr (kBackward) load_tile<T, true>(params.rows.saved, tile, saved);
#pragma unroll
    for (int k = 0; k < kSplitVectors; ++k) {
      Acc x[kVec];
      unpack(raw[k], x);
      if constexpr (kBackward) {
        Acc y[kVec];
        unpack(saved[k], y);
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] = (x[i] - part.total) * y[i];
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] = shifted_power(x[i], part.largest) * scale;
      }
      tile.store(params.rows.output, k, pack<Acc, T, kVec>(x));
    }
  });
}

}  // namespace dcs
