// Products over a semiring without tensor cores: every (i, k, j) is looked at. A tile of outputs a block, or an output
// a thread.
#pragma once

#include "log_bmm/semiring_ops.cuh"

namespace dcs {

constexpr int kTile = 64, kTileThreads = 256;
constexpr int kOwn = 4;  // a thread's outputs in either direction
constexpr int kOwned = kOwn * kOwn;

// kOwn neighboring elements of shared memory, 16-byte aligned.
__device__ __forceinline__ void load_own(const float* from, float (&to)[kOwn]) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
__device__ __forceinline__ void load_own(const double* from, double (&to)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) to[i] = from[i];
}

template <typename Acc>
struct alignas(16) TileMemory {
  Acc x[kTileDepth][kTile + 4], y[kTileDepth][kTile + 4];
};

// The tile's first output, and a thread's ones.
struct TileOrigin {
  int64_t batch, row, column;

  static __device__ __forceinline__ TileOrigin of(int64_t tile, int64_t rows, int64_t columns) {
    const int64_t tiles_i = (rows + kTile - 1) / kTile, tiles_j = (columns + kTile - 1) / kTile;
    return {tile / (tiles_i * tiles_j), tile / tiles_j % tiles_i * kTile, tile % tiles_j * kTile};
  }
  // f(e, i, j) for the thread's outputs that there are.
  template <typename F>
  __device__ __forceinline__ void each(int64_t rows, int64_t columns, F&& f) const {
    const int ty = threadIdx.x / (kTile / kOwn) * kOwn, tx = threadIdx.x % (kTile / kOwn) * kOwn;
#pragma unroll
    for (int e = 0; e < kOwned; ++e) {
      const int64_t i = row + ty + e / kOwn, j = column + tx + e % kOwn;
      if (i < rows && j < columns) f(e, i, j);
    }
  }
};

// A thread's part of a tile of 64 vectors and kTileDepth k, on its way to shared memory: asked for a tile early.
// Neighboring threads take neighboring elements, whichever way they lie.
template <typename T, typename Acc>
struct TileFetch {
  static constexpr int kEach = kTile * kTileDepth / kTileThreads;
  const T* next;
  int64_t apart, advance;  // to the thread's next element, to the next tile's
  int bound[kEach];        // the element is in the operand while the tile's first k is below
  int slot, slots_apart;
  T values[kEach];

  __device__ __forceinline__ TileFetch(const Vectors<T>& from, int64_t first, int first_k, int depth) {
    const bool along = from.step == 1;
    const int at = threadIdx.x, k = along ? at % kTileDepth : at / kTile, v = along ? at / kTileDepth : at % kTile;
    constexpr int kVectors = kTileThreads / kTileDepth, kSteps = kTileThreads / kTile;
    next = from.data + (first + v) * from.stride + (first_k + k) * from.step;
    apart = along ? kVectors * from.stride : kSteps * from.step;
    advance = kTileDepth * from.step;
    slot = k * (kTile + 4) + v, slots_apart = along ? kVectors : kSteps * (kTile + 4);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      bound[i] = first + v + (along ? i * kVectors : 0) < from.count ? depth - k - (along ? 0 : i * kSteps) : 0;
  }
  __device__ __forceinline__ void load(int k0) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (k0 < bound[i]) values[i] = next[i * apart];
    next += advance;
  }
  // Whether one of them is a NaN or +inf.
  __device__ __forceinline__ bool store(Acc (*to)[kTile + 4], int k0, Acc outside) const {
    bool special = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Acc value = k0 < bound[i] ? cast<Acc>(values[i]) : outside;
      (&to[0][0])[slot + i * slots_apart] = value;
      special |= !(value < infinity<Acc>());
    }
    return special;
  }
};

// The kOwn x kOwn outputs of a thread.
struct OwnOutputs {
  // The terms in shared memory, of which the first is k0.
  template <int kPass, bool kExact, typename Acc, typename Op>
  __device__ __forceinline__ void steps(Op& op, const TileMemory<Acc>& memory, int k0) const {
    const int ty = threadIdx.x / (kTile / kOwn) * kOwn, tx = threadIdx.x % (kTile / kOwn) * kOwn;
#pragma unroll 4
    for (int k = 0; k < kTileDepth; ++k) {
      Acc x[kOwn], y[kOwn];
      load_own(&memory.x[k][ty], x);
      load_own(&memory.y[k][tx], y);
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int j = 0; j < kOwn; ++j) op.template step<kPass, kExact>(i * kOwn + j, x[i], y[j], k0 + k);
    }
  }
};

// One pass of an operation over k in [from, depth), for a thread's outputs of the tile at (row, column). Beyond depth
// are terms that change nothing.
template <int kPass, typename T, typename Acc, typename Op, typename Outputs = OwnOutputs>
__device__ __forceinline__ void tile_pass(Op& op, TileMemory<Acc>& memory, const Vectors<T>& a, const Vectors<T>& b,
    int64_t row, int64_t column, int from, int depth, const Outputs& outputs = {}) {
  TileFetch<T, Acc> fetch_a(a, row, from, depth), fetch_b(b, column, from, depth);
  fetch_a.load(from), fetch_b.load(from);
  for (int k0 = from; k0 < depth; k0 += kTileDepth) {
    __syncthreads();
    const Acc outside = Op::outside();
    bool special = fetch_a.store(memory.x, k0, outside);
    special |= fetch_b.store(memory.y, k0, outside);
    if constexpr (Op::kMindsSpecial) special = __syncthreads_or(special);
    else __syncthreads();
    fetch_a.load(k0 + kTileDepth), fetch_b.load(k0 + kTileDepth);
    op.template begin<kPass>();
    if (Op::kMindsSpecial && special) outputs.template steps<kPass, true>(op, memory, k0);
    else outputs.template steps<kPass, false>(op, memory, k0);
    op.template end<kPass>();
  }
}

template <typename T, typename Acc, typename Op, typename Outputs = OwnOutputs>
__device__ __forceinline__ void run_tile(Op& op, TileMemory<Acc>& memory, const Vectors<T>& a, const Vectors<T>& b,
    int64_t row, int64_t column, int from, int depth, const Outputs& outputs = {}) {
  tile_pass<0>(op, memory, a, b, row, column, from, depth, outputs);
  if constexpr (Op::kPasses > 1) op.between(), tile_pass<1>(op, memory, a, b, row, column, from, depth, outputs);
  if constexpr (Op::kPasses > 2) op.before_last(), tile_pass<2>(op, memory, a, b, row, column, from, depth, outputs);
}

// The same for one output alone; sums are grouped alike, so that they are the same sums.
template <int kPass, typename T, typename Op>
__device__ __forceinline__ void single_pass(
    Op& op, const Vectors<T>& a, const Vectors<T>& b, int64_t i, int64_t j, int depth) {
  using Acc = typename Op::Acc;
  const T *at_a = a.data + i * a.stride, *at_b = b.data + j * b.stride;
  for (int k0 = 0; k0 < depth; k0 += kTileDepth) {
    const int end = k0 + kTileDepth < depth ? k0 + kTileDepth : depth;
    op.template begin<kPass>();
#pragma unroll 4
    for (int k = k0; k < end; ++k, at_a += a.step, at_b += b.step)
      op.template step<kPass, true>(0, cast<Acc>(*at_a), cast<Acc>(*at_b), k);
    op.template end<kPass>();
  }
}
template <typename T, typename Op>
__device__ __forceinline__ void run_single(
    Op& op, const Vectors<T>& a, const Vectors<T>& b, int64_t i, int64_t j, int depth) {
  single_pass<0>(op, a, b, i, j, depth);
  if constexpr (Op::kPasses > 1) op.between(), single_pass<1>(op, a, b, i, j, depth);
  if constexpr (Op::kPasses > 2) op.before_last(), single_pass<2>(op, a, b, i, j, depth);
}

}  // namespace dcs
