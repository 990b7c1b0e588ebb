// Products over a semiring without tensor cores: every (i, k, j) is looked at. A tile of outputs a block, or an output
// a thread.
#pragma once

#include "log_bmm/operands.cuh"

namespace dcs {

constexpr int kTile = 64, kTileDepth = 16, kTileThreads = 256;
constexpr int kOwn = 4;  // a thread's outputs in either direction

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

// to[k - first_k][vector - first] for a tile; 0 outside. Neighboring threads read neighboring elements, whichever way
// they lie.
template <typename T, typename Acc>
__device__ __forceinline__ void fill_tile(
    Acc (*to)[kTile + 4], const Vectors<T>& from, int64_t first, int64_t first_k, int64_t depth) {
#pragma unroll
  for (int e = threadIdx.x; e < kTile * kTileDepth; e += kTileThreads) {
    const int k = from.step == 1 ? e % kTileDepth : e / kTile, v = from.step == 1 ? e / kTileDepth : e % kTile;
    const bool inside = first + v < from.count && first_k + k < depth;
    to[k][v] = inside ? from.template at<Acc>(first + v, first_k + k) : Acc(0);
  }
}

// One pass of an operation over k, for the kOwn x kOwn outputs of a thread of the tile at (row, column).
template <int kPass, typename T, typename Acc, typename Op>
__device__ __forceinline__ void tile_pass(Op& op, TileMemory<Acc>& memory, const Vectors<T>& a, const Vectors<T>& b,
    int64_t row, int64_t column, int64_t depth) {
  const int ty = threadIdx.x / (kTile / kOwn) * kOwn, tx = threadIdx.x % (kTile / kOwn) * kOwn;
  for (int64_t k0 = 0; k0 < depth; k0 += kTileDepth) {
    __syncthreads();
    fill_tile(memory.x, a, row, k0, depth);
    fill_tile(memory.y, b, column, k0, depth);
    __syncthreads();
    const int steps = static_cast<int>(depth - k0 < kTileDepth ? depth - k0 : kTileDepth);
    op.template begin<kPass>();
#pragma unroll 4
    for (int k = 0; k < steps; ++k) {
      Acc x[kOwn], y[kOwn];
      load_own(&memory.x[k][ty], x);
      load_own(&memory.y[k][tx], y);
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int j = 0; j < kOwn; ++j) op.template step<kPass>(i * kOwn + j, x[i] + y[j], k0 + k);
    }
    op.template end<kPass>();
  }
}

template <typename T, typename Acc, typename Op>
__device__ __forceinline__ void run_tile(Op& op, TileMemory<Acc>& memory, const Vectors<T>& a, const Vectors<T>& b,
    int64_t row, int64_t column, int64_t depth) {
  tile_pass<0>(op, memory, a, b, row, column, depth);
  if constexpr (Op::kPasses > 1) op.between(), tile_pass<1>(op, memory, a, b, row, column, depth);
  if constexpr (Op::kPasses > 2) op.before_last(), tile_pass<2>(op, memory, a, b, row, column, depth);
}

// The same for one output alone; sums are grouped alike, so that they are the same sums.
template <int kPass, typename T, typename Op>
__device__ __forceinline__ void single_pass(
    Op& op, const Vectors<T>& a, const Vectors<T>& b, int64_t i, int64_t j, int64_t depth) {
  using Acc = typename Op::Acc;
  for (int64_t k0 = 0; k0 < depth; k0 += kTileDepth) {
    const int64_t end = k0 + kTileDepth < depth ? k0 + kTileDepth : depth;
    op.template begin<kPass>();
#pragma unroll 4
    for (int64_t k = k0; k < end; ++k)
      op.template step<kPass>(0, a.template at<Acc>(i, k) + b.template at<Acc>(j, k), k);
    op.template end<kPass>();
  }
}
template <typename T, typename Op>
__device__ __forceinline__ void run_single(
    Op& op, const Vectors<T>& a, const Vectors<T>& b, int64_t i, int64_t j, int64_t depth) {
  single_pass<0>(op, a, b, i, j, depth);
  if constexpr (Op::kPasses > 1) op.between(), single_pass<1>(op, a, b, i, j, depth);
  if constexpr (Op::kPasses > 2) op.before_last(), single_pass<2>(op, a, b, i, j, depth);
}

// logsumexp: the maximum, then the sum. Sums are of kTileDepth terms, and of those: rounding errors then grow with K /
// 16 + 16, not K.
template <typename A, int kCount>
struct LseOp {
  using Acc = A;
  static constexpr int kPasses = 2;
  Acc max[kCount], sum[kCount], part[kCount];

  __device__ __forceinline__ LseOp() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) max[e] = -infinity<Acc>(), sum[e] = Acc(0);
  }
  template <int kPass>
  __device__ __forceinline__ void begin() {
    if constexpr (kPass > 0) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) part[e] = Acc(0);
    }
  }
  template <int kPass>
  __device__ __forceinline__ void step(int e, Acc value, int64_t) {
    if constexpr (kPass == 0) max[e] = fmax(max[e], value);
    else part[e] += fast_exp(value - max[e]);
  }
  template <int kPass>
  __device__ __forceinline__ void end() {
    if constexpr (kPass > 0) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) sum[e] += part[e];
    }
  }
  __device__ __forceinline__ void between() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) max[e] = safe_shift(max[e]);
  }
};

// The maximum and where it is: of equal ones the first, and a NaN above all.
template <typename A, int kCount>
struct MaxOp {
  using Acc = A;
  static constexpr int kPasses = 1;
  Acc max[kCount];
  int32_t index[kCount];

  __device__ __forceinline__ MaxOp() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) max[e] = -infinity<Acc>(), index[e] = 0;
  }
  template <int kPass>
  __device__ __forceinline__ void begin() {}
  template <int kPass>
  __device__ __forceinline__ void step(int e, Acc value, int64_t k) {
    if (value > max[e] || (value != value && max[e] == max[e])) max[e] = value, index[e] = static_cast<int32_t>(k);
  }
  template <int kPass>
  __device__ __forceinline__ void end() {}
};

// The first k at which the sum of weights passes u times the whole sum. Both sums are the same additions, so a weight
// of 0 is never drawn.
template <typename A, int kCount>
struct SampleOp {
  using Acc = A;
  static constexpr int kPasses = 3;
  Acc max[kCount], sum[kCount], part[kCount], target[kCount];  // target: u until the whole sum is known
  int32_t index[kCount], last[kCount];

  __device__ __forceinline__ SampleOp() {
#pragma unroll
    for (int e = 0; e < kCount; ++e)
      max[e] = -infinity<Acc>(), sum[e] = Acc(0), target[e] = Acc(0), index[e] = -1, last[e] = -1;
  }
  template <int kPass>
  __device__ __forceinline__ void begin() {
    if constexpr (kPass > 0) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) part[e] = Acc(0);
    }
  }
  template <int kPass>
  __device__ __forceinline__ void step(int e, Acc value, int64_t k) {
    if constexpr (kPass == 0) {
      max[e] = fmax(max[e], value);
      if (index[e] < 0 && !(value < infinity<Acc>()))
        index[e] = static_cast<int32_t>(k);  // a NaN or +inf has all the weight
    } else {
      const Acc weight = fast_exp(value - max[e]);
      part[e] += weight;
      if constexpr (kPass == 2) {
        if (weight > Acc(0)) last[e] = static_cast<int32_t>(k);
        if (index[e] < 0 && sum[e] + part[e] > target[e]) index[e] = static_cast<int32_t>(k);
      }
    }
  }
  template <int kPass>
  __device__ __forceinline__ void end() {
    if constexpr (kPass > 0) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) sum[e] += part[e];
    }
  }
  __device__ __forceinline__ void between() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) max[e] = safe_shift(max[e]);
  }
  __device__ __forceinline__ void before_last() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) target[e] *= sum[e], sum[e] = Acc(0);
  }
  __device__ __forceinline__ int32_t drawn(int e) const { return index[e] >= 0 ? index[e] : last[e]; }
};

}  // namespace dcs
