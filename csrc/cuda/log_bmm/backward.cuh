// log_bmm, backward: grad_a = E * (G F^T) and grad_b = F * (E^T G) with E = exp(a - R), F = exp(b - C), G = grad / S.
//
// Only outputs with log S >= -64 are in G: 1 / S is then below 2^93, and what exp(a - R) or exp(b - C) lost to
// underflow stays below 2^-33 of a weight. For the others grad exp((a - R) + (b - C) - log S) is added term by term, in
// the kernel that multiplies. Outputs of -inf have no gradient.
#pragma once

#include "log_bmm/prepare.cuh"
#include "log_bmm/semiring_tile.cuh"
#include "log_bmm/tf32_product.cuh"

namespace dcs {

// Upstream gradients and log S, as matrices (batch, n, m): n the side whose gradient is made. Transposed where that is
// b.
template <typename Acc>
struct Upstream {
  const Acc* grad;
  int64_t grad_batch, grad_n, grad_m;
  const Acc* log_s;
  int64_t log_s_batch, log_s_n, log_s_m;

  __device__ __forceinline__ void load(int64_t batch, int64_t n, int64_t m, Acc& g, Acc& s) const {
    g = grad[batch * grad_batch + n * grad_n + m * grad_m];
    s = log_s[batch * log_s_batch + n * log_s_n + m * log_s_m];
  }
};

// grad / S where the tensor cores may have it, else 0; `direct`: the term-by-term sum must have it.
__device__ __forceinline__ float certified_gradient(float g, float log_s, bool& direct) {
  const float scaled = log_s >= -64.f && log_s < infinity<float>() ? g * expf(-log_s) : infinity<float>();
  const bool certified = fabsf(scaled) <= 1e30f;
  direct = !certified && log_s != -infinity<float>();
  return certified ? scaled : 0.f;
}

// G, tile by tile, and whether a tile has outputs that need the term-by-term sum.
struct GradientTiles {
  Upstream<float> upstream;  // n = i, m = j
  int64_t batches, rows, columns, ld;
  float* scaled;          // (batches, rows, ld), zeros from columns on
  unsigned char* direct;  // (batches, tiles of rows, tiles of columns)
};

__global__ void __launch_bounds__(kTileThreads) gradient_tiles_kernel(GradientTiles job) {
  const int64_t tiles_i = (job.rows + kTile - 1) / kTile, tiles_j = (job.ld + kTile - 1) / kTile;
  const int64_t tile = blockIdx.x, batch = tile / (tiles_i * tiles_j), row = tile / tiles_j % tiles_i * kTile,
                column = tile % tiles_j * kTile;
  constexpr int kEach = kTile * kTile / kTileThreads;
  float g[kEach], log_s[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {  // all reads before the first use
    const int64_t i = row + (threadIdx.x + e * kTileThreads) / kTile, j = column + threadIdx.x % kTile;
    g[e] = 0.f, log_s[e] = -infinity<float>();
    if (i < job.rows && j < job.columns) job.upstream.load(batch, i, j, g[e], log_s[e]);
  }
  bool any = false;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int64_t i = row + (threadIdx.x + e * kTileThreads) / kTile, j = column + threadIdx.x % kTile;
    bool direct;
    const float scaled = certified_gradient(g[e], log_s[e], direct);
    any |= direct;
    if (i < job.rows && j < job.ld) job.scaled[(batch * job.rows + i) * job.ld + j] = scaled;
  }
  any = __syncthreads_or(any);
  if (threadIdx.x == 0) job.direct[tile] = any;
}

template <typename T>
struct BackwardJob {
  Vectors<T> own, other;  // own: the operand whose gradient is made, its vectors counted by n; other's by m
  int64_t batches, depth;
  const Peak<float>*peaks_own, *peaks_other;
  Panel gradient, scaled_other;  // of batch 0; gradient: n (extent) by m (depth)
  int64_t gradient_batch;
  Upstream<float> upstream;
  const unsigned char* direct;  // of (n tile, m tile) by these strides
  int64_t direct_batch, direct_n, direct_m;
  float* grad;  // the result, at (n, k) by these strides
  int64_t grad_batch, grad_n, grad_k;
};

struct alignas(16) DirectMemory {
  float other[kTileDepth][kTile + 4];                               // (m, k): the other operand less its peak
  float log_s[kTileDepth][kTile + 4], grad[kTileDepth][kTile + 4];  // (m, n)
};

// Adds the term-by-term gradients to the kTile x kTile elements of the result at (n, k).
template <typename T>
__device__ void add_direct(
    const BackwardJob<T>& job, DirectMemory& memory, int64_t batch, int64_t first_n, int64_t first_k) {
  const Vectors<T> own = job.own.of_batch(batch), other = job.other.of_batch(batch);
  const int ty = threadIdx.x / (kTile / kOwn) * kOwn, tx = threadIdx.x % (kTile / kOwn) * kOwn;
  float mine[kOwn][kOwn], sum[kOwn][kOwn] = {};
#pragma unroll
  for (int r = 0; r < kOwn; ++r)
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const int64_t n = first_n + ty + r, k = first_k + tx + c;
      mine[r][c] = n < own.count && k < job.depth
          ? own.template at<float>(n, k) - job.peaks_own[batch * own.count + n].shift
          : 0.f;
    }
  const unsigned char* direct = job.direct + batch * job.direct_batch + first_n / kTile * job.direct_n;
  for (int64_t m0 = 0; m0 < other.count; m0 += kTileDepth) {
    if (!direct[m0 / kTile * job.direct_m]) continue;
    __syncthreads();
#pragma unroll
    for (int e = threadIdx.x; e < kTileDepth * kTile; e += kTileThreads) {
      const bool by_vector = other.stride == 1;  // neighboring threads take neighboring elements
      const int y = by_vector ? e % kTileDepth : e / kTile, x = by_vector ? e / kTileDepth : e % kTile;
      const int64_t m = m0 + y, k = first_k + x;
      memory.other[y][x] = m < other.count && k < job.depth
          ? other.template at<float>(m, k) - job.peaks_other[batch * other.count + m].shift
          : 0.f;
    }
#pragma unroll
    for (int e = threadIdx.x; e < kTileDepth * kTile; e += kTileThreads) {
      const bool by_m = job.upstream.log_s_m == 1;
      const int y = by_m ? e % kTileDepth : e / kTile, x = by_m ? e / kTileDepth : e % kTile;
      const int64_t m = m0 + y, n = first_n + x;
      float g = 0.f, log_s = infinity<float>();
      if (m < other.count && n < own.count) {
        bool is_direct;
        job.upstream.load(batch, n, m, g, log_s);
        certified_gradient(g, log_s, is_direct);
        if (!is_direct) g = 0.f, log_s = infinity<float>();  // a weight of 0, not of infinity
      }
      memory.log_s[y][x] = log_s;
      memory.grad[y][x] = g;
    }
    __syncthreads();
#pragma unroll 4
    for (int m = 0; m < kTileDepth; ++m) {
      float g[kOwn], log_s[kOwn], theirs[kOwn];
      load_own(&memory.grad[m][ty], g);
      if (g[0] == 0.f && g[1] == 0.f && g[2] == 0.f && g[3] == 0.f)
        continue;  // where few sums need this, it is soon done
      load_own(&memory.log_s[m][ty], log_s);
      load_own(&memory.other[m][tx], theirs);
#pragma unroll
      for (int r = 0; r < kOwn; ++r)
#pragma unroll
        for (int c = 0; c < kOwn; ++c) sum[r][c] += g[r] * fast_exp(mine[r][c] + theirs[c] - log_s[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kOwn; ++r)
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const int64_t n = first_n + ty + r, k = first_k + tx + c;
      if (n < own.count && k < job.depth)
        job.grad[batch * job.grad_batch + n * job.grad_n + k * job.grad_k] += sum[r][c];
    }
}

template <typename T, int kBlock, bool kAlong, bool kSplit>
__global__ void __launch_bounds__(kProductThreads, 2) backward_kernel(BackwardJob<T> job) {
  using Product = Tf32Product<kBlock, kTile, kAlong, false, kSplit>;
  static_assert(kOwn == 4 && sizeof(DirectMemory) <= Product::kSharedBytes, "the direct sums share the block's memory");
  extern __shared__ __align__(16) float shared[];
  const int64_t tiles_n = (job.own.count + kBlock - 1) / kBlock, tiles_k = (job.depth + kTile - 1) / kTile;
  const int64_t tiles_m = (job.other.count + kTile - 1) / kTile;
  for (int64_t tile = blockIdx.x; tile < job.batches * tiles_n * tiles_k; tile += gridDim.x) {
    const int64_t batch = tile / (tiles_n * tiles_k), first_n = tile / tiles_k % tiles_n * kBlock,
                  first_k = tile % tiles_k * kTile;
    Panel gradient = job.gradient, scaled_other = job.scaled_other;
    gradient.data += batch * job.gradient_batch;
    scaled_other.data += batch * job.other.count * scaled_other.ld;
    Product product;
    product.run(shared, gradient, scaled_other, first_n, first_k);

    const Vectors<T> own = job.own.of_batch(batch);
    float* grad = job.grad + batch * job.grad_batch;
    product.each([&](int r, int c, float sum) {
      const int64_t n = first_n + r, k = first_k + c;
      if (n >= own.count || k >= job.depth) return;
      const Peak<float> peak = job.peaks_own[batch * own.count + n];
      const float factor =
          peak.flags & (kSpecial | kAllMasked) ? 0.f : scaled_exp(own.template at<float>(n, k) - peak.shift, 0);
      grad[n * job.grad_n + k * job.grad_k] = factor * sum;
    });
    __syncthreads();  // and the block sees what it has written
    for (int top = 0; top < kBlock && first_n + top < own.count; top += kTile) {
      bool any = false;
      const unsigned char* direct = job.direct + batch * job.direct_batch + (first_n + top) / kTile * job.direct_n;
      for (int64_t m = threadIdx.x; m < tiles_m; m += kProductThreads) any |= direct[m * job.direct_m] != 0;
      if (!__syncthreads_or(any)) continue;
      add_direct(job, *reinterpret_cast<DirectMemory*>(shared), batch, first_n + top, first_k);
    }
    __syncthreads();
  }
}

}  // namespace dcs
