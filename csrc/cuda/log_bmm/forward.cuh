// log_bmm, forward: the product of shifted exponentials, a test of every sum, and the direct sum where the test fails.
//
// out = R + C + log S with S = sum_k exp(a - R) exp(b - C): all terms are positive, so only underflow can take
// something from S (ScaledSums tells whether it has). Both factors carry 2^exponent.
#pragma once

#include "log_bmm/shifted_sums.cuh"
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

// The outputs of a tile that have failed, by sums with exponents; what those certify has not.
template <typename T>
__device__ __forceinline__ void shifted_tile(
    const ForwardJob<T>& job, ShiftedMemory& memory, Failures& failures, const TileOrigin& origin) {
  const Vectors<T> a = job.a.of_batch(origin.batch), b = job.b.of_batch(origin.batch);
  const Peak<float>*peaks_a = job.peaks_a + origin.batch * a.count, *peaks_b = job.peaks_b + origin.batch * b.count;
  const int exponent = job.sums.exponent;
  ShiftedOp<kOwned> op;
  shifted_pass<0>(
      op, memory, a, b, ShiftedVector(a, b, peaks_a, peaks_b, origin), origin, static_cast<int>(job.depth), exponent);
  origin.each(a.count, b.count, [&](int e, int64_t i, int64_t j) {
    if (job.sums.judge(peaks_a[i], peaks_b[j], op.sum[e]) != Verdict::kCertified) return;
    if (!failures.remove(static_cast<int>(i - origin.row), static_cast<int>(j - origin.column))) return;
    const int64_t at = (origin.batch * a.count + i) * b.count + j;
    const float out = log_of(op.sum[e], 2 * exponent - static_cast<int>(op.top[e]));
    job.out[at] = out;
    job.log_s[at] = (out - peaks_a[i].shift) - peaks_b[j].shift;
  });
  __syncthreads();
}

// Every output of the tile, or those of a list, term by term.
template <int kCount, typename T, typename Outputs, typename Each>
__device__ __forceinline__ void sum_terms(const ForwardJob<T>& job, TileMemory<float>& memory, const TileOrigin& origin,
    const Outputs& outputs, const Each& each) {
  LseOp<float, kCount> op;
  run_tile(op, memory, job.a.of_batch(origin.batch), job.b.of_batch(origin.batch), origin.row, origin.column, 0,
      static_cast<int>(job.depth), outputs);
  each([&](int e, int64_t i, int64_t j) {
    const int64_t n = origin.batch * job.a.count + i, m = origin.batch * job.b.count + j, at = n * job.b.count + j;
    finish_lse(op.max[e], op.sum[e], job.peaks_a[n].shift, job.peaks_b[m].shift, job.out[at], job.log_s[at]);
  });
}

template <typename T, int kBlock, bool kSplit>
__global__ void __launch_bounds__(kProductThreads, 2) forward_kernel(ForwardJob<T> job) {
  using Product = Tf32Product<kBlock, kTile, true, true, kSplit>;
  constexpr int kParts = kBlock / kTile;
  static_assert(
      kProductThreads == kTileThreads && sizeof(ShiftedMemory) <= Product::kSharedBytes, "tiles share the block");
  extern __shared__ __align__(16) float shared[];
  __shared__ Failures failures[kParts];
  const int64_t tiles_i = (job.a.count + kBlock - 1) / kBlock, tiles_j = (job.b.count + kTile - 1) / kTile;
  const int64_t unit = blockIdx.x;
  const int64_t tile = unit / job.splits, split = unit % job.splits;
  const int64_t batch = tile / (tiles_i * tiles_j), row = tile / tiles_j % tiles_i * kBlock,
                column = tile % tiles_j * kTile;
#pragma unroll
  for (int part = 0; part < kParts; ++part) failures[part].clear();
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
      failures[r / kTile].add(r % kTile, c);
      return;
    }
    const float log_s = verdict == Verdict::kMasked ? -infinity<float>() : log_of(sum, 2 * job.sums.exponent);
    job.log_s[base + i * job.b.count + j] = log_s;
    job.out[base + i * job.b.count + j] = a.shift + b.shift + log_s;
  });
  __syncthreads();

#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    Failures& left = failures[part];
    const TileOrigin origin{batch, row + part * kTile, column};
    ShiftedMemory& memory = *reinterpret_cast<ShiftedMemory*>(shared);
    if (left.are_many()) shifted_tile(job, memory, left, origin);
    if (left.are_many()) {
      sum_terms<kOwned>(job, memory.tile, origin, OwnOutputs(), [&](auto&& f) {
        origin.each(job.a.count, job.b.count, [&](int e, int64_t i, int64_t j) {
          if (left.remove(static_cast<int>(i - origin.row), static_cast<int>(j - origin.column))) f(e, i, j);
        });
      });
    } else if (left.count > 0) {
      const ListedOutputs listed(left);
      sum_terms<kListed>(job, memory.tile, origin, listed, [&](auto&& f) { listed.each(origin, f); });
    }
  }
}

}  // namespace dcs
