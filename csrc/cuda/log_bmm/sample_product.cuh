// sample_bmm by products of shifted exponentials (forward.cuh), which take an addition and a multiplication a term
// where the terms themselves take an exponential: a pass for every output's whole sum, a second to see in which
// kTileDepth terms it passes u times that, and those terms once more. Tiles whose sums the test does not certify take
// sums with exponents (shifted_sums.cuh), and what those do not certify is drawn term by term.
#pragma once

#include "log_bmm/by_warp.cuh"
#include "log_bmm/shifted_sums.cuh"

namespace dcs {

struct SampleProductJob {
  Vectors<float> a, b;
  int64_t batches;
  int depth, ld;
  const Peak<float>*peaks_a, *peaks_b;
  const float *scaled_a, *scaled_b;  // (batches, count, ld)
  ScaledSums sums;
  const float* uniforms;
  int64_t* indices;
};

// The k at which the sum passes its target, from the vectors x and y, whose length is a multiple of 4.
__device__ __forceinline__ int32_t drawn(
    const ProductOp<kOwned>& op, int e, const float* x, const float* y, int length) {
  int32_t index = (op.parts[e] < 0 ? ~op.parts[e] : op.parts[e]) * kTileDepth;
  float up_to = 0.f;
  const int first = index;
#pragma unroll
  for (int k = first; k < first + kTileDepth; k += 4) {
    if (k >= length) break;
    const float4 four_x = *reinterpret_cast<const float4*>(x + k), four_y = *reinterpret_cast<const float4*>(y + k);
    index += op.sum[e] + (up_to = fmaf(four_x.x, four_y.x, up_to)) <= op.target[e];
    index += op.sum[e] + (up_to = fmaf(four_x.y, four_y.y, up_to)) <= op.target[e];
    index += op.sum[e] + (up_to = fmaf(four_x.z, four_y.z, up_to)) <= op.target[e];
    index += op.sum[e] + (up_to = fmaf(four_x.w, four_y.w, up_to)) <= op.target[e];
  }
  return index;
}

// The same of elements as they are; kNothing where rounding lets no k pass.
__device__ __forceinline__ int32_t drawn(
    const ShiftedOp<kOwned>& op, int e, const Terms<float>& terms, int depth, int exponent) {
  if (op.parts[e] >= 0) return kNothing;
  const int from = ~op.parts[e] * kTileDepth, scale = 2 * exponent - static_cast<int>(op.top[e]);
  float values[kTileDepth], up_to = 0.f;
#pragma unroll
  for (int k = 0; k < kTileDepth; ++k)
    values[k] = from + k < depth ? terms.template at<float>(from + k) : -infinity<float>();
  int last = kNothing;
  bool passed = false;
#pragma unroll
  for (int k = 0; k < kTileDepth; ++k) {
    const float weight = scaled_exp(values[k], scale);
    if (!passed && weight > 0.f) last = from + k;
    passed |= op.sum[e] + (up_to += weight) > op.target[e];
  }
  return last;
}

// Every output of the tile, or those of a list, term by term.
template <int kCount, typename Outputs, typename Each>
__device__ __forceinline__ void sample_terms(const SampleProductJob& job, TileMemory<float>& memory,
    const TileOrigin& origin, const Outputs& outputs, const Each& each) {
  const Vectors<float> a = job.a.of_batch(origin.batch), b = job.b.of_batch(origin.batch);
  const int64_t base = origin.batch * a.count * b.count;
  SampleOp<float, kCount> op;
  each([&](int e, int64_t i, int64_t j) { op.target[e] = job.uniforms[base + i * b.count + j]; });
  run_tile(op, memory, a, b, origin.row, origin.column, 0, job.depth, outputs);
  each([&](int e, int64_t i, int64_t j) {
    int32_t index = op.drawn(e);
    if (index == kSpecialTerm) index = first_special<float>(Terms<float>(a, b, i, j), job.depth);
    job.indices[base + i * b.count + j] = index;
  });
}

// Every output of the tile, by sums with exponents. What they do not certify has failed.
__device__ __forceinline__ void sample_shifted(const SampleProductJob& job, ShiftedMemory& memory, Failures& failures,
    const TileOrigin& origin, const Peak<float>* peaks_a, const Peak<float>* peaks_b, uint32_t masked) {
  const Vectors<float> a = job.a.of_batch(origin.batch), b = job.b.of_batch(origin.batch);
  const int64_t base = origin.batch * a.count * b.count;
  const int exponent = job.sums.exponent;
  const ShiftedVector mine(a, b, peaks_a, peaks_b, origin);
  ShiftedOp<kOwned> op;
  shifted_pass<0>(op, memory, a, b, mine, origin, job.depth, exponent);
  failures.clear();
  __syncthreads();
  uint32_t done = masked;
  origin.each(a.count, b.count, [&](int e, int64_t i, int64_t j) {
    op.target[e] = quantile(job.uniforms[base + i * b.count + j], op.sum[e]);
    if ((masked >> e & 1) || job.sums.judge(peaks_a[i], peaks_b[j], op.sum[e]) == Verdict::kCertified) return;
    failures.add(static_cast<int>(i - origin.row), static_cast<int>(j - origin.column));
    done |= 1u << e;
  });
  __syncthreads();
  if (failures.are_many()) return;
  op.restart();
  shifted_pass<1>(op, memory, a, b, mine, origin, job.depth, exponent);
  origin.each(a.count, b.count, [&](int e, int64_t i, int64_t j) {
    if (done >> e & 1) return;
    const int32_t index = drawn(op, e, Terms<float>(a, b, i, j), job.depth, exponent);
    job.indices[base + i * b.count + j] = index;
    if (index == kNothing) failures.add(static_cast<int>(i - origin.row), static_cast<int>(j - origin.column));
  });
  __syncthreads();
}

__global__ void __launch_bounds__(kTileThreads, 2) sample_product_kernel(SampleProductJob job) {
  __shared__ ShiftedMemory memory;
  __shared__ Failures failures;
  const TileOrigin origin = TileOrigin::of(blockIdx.x, job.a.count, job.b.count);
  const int64_t rows = job.a.count, columns = job.b.count, ld = job.ld;
  const float *x = job.scaled_a + origin.batch * rows * ld, *y = job.scaled_b + origin.batch * columns * ld;
  const Vectors<float> scaled_a{x, 0, ld, 1, rows}, scaled_b{y, 0, ld, 1, columns};
  const Peak<float>*peaks_a = job.peaks_a + origin.batch * rows, *peaks_b = job.peaks_b + origin.batch * columns;
  const int64_t base = origin.batch * rows * columns;
  failures.clear();

  ProductOp<kOwned> op;
  tile_pass<0>(op, memory.tile, scaled_a, scaled_b, origin.row, origin.column, 0, job.ld);
  uint32_t masked = 0;
  origin.each(rows, columns, [&](int e, int64_t i, int64_t j) {
    const Verdict verdict = job.sums.judge(peaks_a[i], peaks_b[j], op.sum[e]);
    op.target[e] = quantile(job.uniforms[base + i * columns + j], op.sum[e]);
    if (verdict == Verdict::kMasked) masked |= 1u << e, job.indices[base + i * columns + j] = kNothing;
    if (verdict == Verdict::kFailed)
      failures.add(static_cast<int>(i - origin.row), static_cast<int>(j - origin.column));
  });
  __syncthreads();
  if (failures.are_many()) {
    sample_shifted(job, memory, failures, origin, peaks_a, peaks_b, masked);
    if (failures.are_many()) {
      sample_terms<kOwned>(job, memory.tile, origin, OwnOutputs(), [&](auto&& f) { origin.each(rows, columns, f); });
      return;
    }
  } else {
    op.restart();
    tile_pass<1>(op, memory.tile, scaled_a, scaled_b, origin.row, origin.column, 0, job.ld);
    origin.each(rows, columns, [&](int e, int64_t i, int64_t j) {
      if (!(masked >> e & 1)) job.indices[base + i * columns + j] = drawn(op, e, x + i * ld, y + j * ld, job.ld);
    });
    __syncthreads();  // what a thread writes now has been written by another
  }
  if (failures.count == 0) return;
  const ListedOutputs listed(failures);
  sample_terms<kListed>(job, memory.tile, origin, listed, [&](auto&& f) { listed.each(origin, f); });
}

}  // namespace dcs
