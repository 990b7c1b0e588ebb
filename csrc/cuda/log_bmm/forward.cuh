// log_bmm, forward: the product of shifted exponentials, a test of every sum, and the direct sum where the test fails.
//
// out = R + C + log S with S = sum_k exp(a - R) exp(b - C): all terms are positive, so only underflow can take
// something from S (ScaledSums tells whether it has). Both factors carry 2^exponent.
#pragma once

#include "log_bmm/by_warp.cuh"
#include "log_bmm/scaled_sums.cuh"
#include "log_bmm/semiring_tile.cuh"
#include "log_bmm/tf32_product.cuh"

namespace dcs {

template <typename T>
struct ForwardJob {
  Vectors<T> a, b;
  int64_t batches, depth;
  const Peak<float>*peaks_a, *peaks_b;
  Panel scaled_a, scaled_b;  // of batch 0
  ScaledSums sums;
  float *out, *log_s;  // (batches, a.count, b.count)
  // Where tiles are few their terms are split over several blocks, of which the last to arrive adds all sums up.
  int64_t splits, split_depth;
  float* parts;  // (tiles, splits, tile)
  int* arrived;  // (tiles), zeros
};

// Whether the block is the last of `count` that arrive here; it then sees what the others have written.
__device__ __forceinline__ bool is_last(int* arrived, int64_t count) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrived, 1) == count - 1;
  __syncthreads();
  __threadfence();
  return last;
}

// log(sum 2^-exponent), as exact as a float has it: log(sum) alone is near 80, whose last digit is 8e-6.
__device__ __forceinline__ float log_of(float sum, int exponent) {
  const int power = ((__float_as_int(sum) >> 23) & 0xff) - 127;  // sums that are certified are normal numbers
  const float digits = __int_as_float((__float_as_int(sum) & 0x007fffff) | 0x3f800000);
  return fmaf(static_cast<float>(power - exponent), 0.693147182f, logf(digits)) +
      static_cast<float>(power - exponent) * -1.90465421e-9f;
}

// The outputs of a tile that have failed.
template <typename T>
__device__ __forceinline__ void direct_tile(
    const ForwardJob<T>& job, TileMemory<float>& memory, const uint32_t (*failed)[kTile / 32], TilePlace place) {
  LseOp<float, kOwned> op;
  run_tile(op, memory, job.a.of_batch(place.batch), job.b.of_batch(place.batch), place.row, place.column, 0,
      static_cast<int>(job.depth));
  place.each(job.a.count, job.b.count, [&](int e, int64_t i, int64_t j) {
    const int c = static_cast<int>(j - place.column);
    if (!(failed[i - place.row][c / 32] >> c % 32 & 1)) return;
    const int64_t n = place.batch * job.a.count + i, m = place.batch * job.b.count + j, at = n * job.b.count + j;
    finish_lse(op.max[e], op.sum[e], job.peaks_a[n].shift, job.peaks_b[m].shift, job.out[at], job.log_s[at]);
  });
}

template <typename T, int kBlock, bool kSplit>
__global__ void __launch_bounds__(kProductThreads, 2) forward_kernel(ForwardJob<T> job) {
  using Product = Tf32Product<kBlock, kTile, true, true, kSplit>;
  constexpr int kParts = kBlock / kTile, kWords = kTile / 32;
  constexpr int kFew =
      kTile * kTile / 64;  // so many direct sums by warps, whose reads may be scattered, cost as much as the whole tile
  static_assert(
      kProductThreads == kTileThreads && sizeof(TileMemory<float>) <= Product::kSharedBytes, "tiles share the block");
  extern __shared__ __align__(16) float shared[];
  __shared__ uint32_t failed[kBlock][kWords];
  __shared__ int failures[kParts];
  const int64_t tiles_i = (job.a.count + kBlock - 1) / kBlock, tiles_j = (job.b.count + kTile - 1) / kTile;
  const int64_t unit = blockIdx.x;
  const int64_t tile = unit / job.splits, split = unit % job.splits;
  const int64_t batch = tile / (tiles_i * tiles_j), row = tile / tiles_j % tiles_i * kBlock,
                column = tile % tiles_j * kTile;
  for (int e = threadIdx.x; e < kBlock * kWords; e += kProductThreads) failed[e / kWords][e % kWords] = 0;
  if (threadIdx.x < kParts) failures[threadIdx.x] = 0;
  Panel scaled_a = job.scaled_a, scaled_b = job.scaled_b;
  scaled_a.data += batch * scaled_a.extent * scaled_a.ld + split * job.split_depth;
  scaled_b.data += batch * scaled_b.extent * scaled_b.ld + split * job.split_depth;
  scaled_a.depth = scaled_b.depth = min(job.split_depth, job.depth - split * job.split_depth);
  Product product;
  product.run(shared, scaled_a, scaled_b, row, column);
  __syncthreads();
  if (job.splits > 1) {
    product.store(job.parts + unit * kBlock * kTile);
    if (!is_last(job.arrived + tile, job.splits)) return;
    product.load_all(job.parts + tile * job.splits * kBlock * kTile, static_cast<int>(job.splits));
  }

  const Peak<float>*peaks_a = job.peaks_a + batch * job.a.count, *peaks_b = job.peaks_b + batch * job.b.count;
  const int64_t base = batch * job.a.count * job.b.count;
  product.each([&](int r, int c, float sum) {
    const int64_t i = row + r, j = column + c;
    if (i >= job.a.count || j >= job.b.count) return;
    const Peak<float> a = peaks_a[i], b = peaks_b[j];
    const Verdict verdict = job.sums.judge(a, b, sum);
    if (verdict == Verdict::kFailed) {
      atomicOr(&failed[r][c / 32], 1u << c % 32);
      atomicAdd(&failures[r / kTile], 1);
      return;
    }
    const float log_s = verdict == Verdict::kMasked ? -infinity<float>() : log_of(sum, 2 * job.sums.exponent);
    job.log_s[base + i * job.b.count + j] = log_s;
    job.out[base + i * job.b.count + j] = a.shift + b.shift + log_s;
  });
  __syncthreads();

  const Vectors<T> a = job.a.of_batch(batch), b = job.b.of_batch(batch);
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    const int top = part * kTile;
    if (failures[part] == 0) continue;
    if (failures[part] <= kFew) {
      for (int e = threadIdx.x / 32; e < kTile * 2; e += kProductThreads / 32) {
        const int r = top + e / 2, word = e % 2;
        for (uint32_t bits = failed[r][word]; bits != 0; bits &= bits - 1) {
          const int64_t i = row + r, j = column + word * 32 + __ffs(bits) - 1;
          const auto op = lse_by_warp<float>(Terms<T>(a, b, i, j), static_cast<int>(job.depth));
          const int64_t at = base + i * job.b.count + j;
          if (threadIdx.x % 32 == 0)
            finish_lse(op.max[0], op.sum[0], peaks_a[i].shift, peaks_b[j].shift, job.out[at], job.log_s[at]);
        }
      }
      continue;
    }
    direct_tile(job, *reinterpret_cast<TileMemory<float>*>(shared), failed + top, {batch, row + top, column});
  }
}

}  // namespace dcs
