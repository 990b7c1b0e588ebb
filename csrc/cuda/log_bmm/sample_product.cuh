// sample_bmm by products of shifted exponentials (forward.cuh), which take an addition and a multiplication a term
// where the terms themselves take an exponential: a pass for every output's whole sum, a second to see in which
// kTileDepth terms it passes u times that, and those terms once more. Outputs whose sums the test does not certify are
// drawn term by term.
#pragma once

#include "log_bmm/by_warp.cuh"
#include "log_bmm/scaled_sums.cuh"
#include "log_bmm/semiring_tile.cuh"

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

// All three times the sums are the same additions.
template <int kCount>
struct ProductSampleOp {
  static constexpr bool kMindsSpecial = false;
  float sum[kCount], part[kCount], target[kCount];  // in the second pass the sum stays as it is before the part that
  int32_t parts[kCount];                            // passes; that it has is said by the complement of their number

  static __device__ __forceinline__ float outside() { return 0.f; }
  __device__ __forceinline__ ProductSampleOp() { restart(); }
  __device__ __forceinline__ void restart() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) sum[e] = 0.f, parts[e] = 0;
  }
  template <int kPass>
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) part[e] = 0.f;
  }
  template <int kPass, bool kExact>
  __device__ __forceinline__ void step(int e, float x, float y, int) {
    part[e] = fmaf(x, y, part[e]);
  }
  template <int kPass>
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const float after = sum[e] + part[e];
      if constexpr (kPass == 0) sum[e] = after;
      else if (parts[e] >= 0 && after <= target[e]) sum[e] = after, ++parts[e];
      else if (parts[e] >= 0) parts[e] = ~parts[e];
    }
  }
  // From the vectors x and y, whose length is a multiple of 4.
  __device__ __forceinline__ int32_t drawn(int e, const float* x, const float* y, int length) const {
    int32_t index = (parts[e] < 0 ? ~parts[e] : parts[e]) * kTileDepth;
    float up_to = 0.f;
    const int first = index;
#pragma unroll
    for (int k = first; k < first + kTileDepth; k += 4) {
      if (k >= length) break;
      const float4 four_x = *reinterpret_cast<const float4*>(x + k), four_y = *reinterpret_cast<const float4*>(y + k);
      index += sum[e] + (up_to = fmaf(four_x.x, four_y.x, up_to)) <= target[e];
      index += sum[e] + (up_to = fmaf(four_x.y, four_y.y, up_to)) <= target[e];
      index += sum[e] + (up_to = fmaf(four_x.z, four_y.z, up_to)) <= target[e];
      index += sum[e] + (up_to = fmaf(four_x.w, four_y.w, up_to)) <= target[e];
    }
    return index;
  }
};

// Every output of the tile, term by term.
__device__ __forceinline__ void sample_tile(
    const SampleProductJob& job, TileMemory<float>& memory, const TilePlace& place) {
  const Vectors<float> a = job.a.of_batch(place.batch), b = job.b.of_batch(place.batch);
  const int64_t base = place.batch * a.count * b.count;
  SampleOp<float, kOwned> op;
  place.each(
      a.count, b.count, [&](int e, int64_t i, int64_t j) { op.target[e] = job.uniforms[base + i * b.count + j]; });
  run_tile(op, memory, a, b, place.row, place.column, 0, job.depth);
  place.each(a.count, b.count, [&](int e, int64_t i, int64_t j) {
    int32_t index = op.drawn(e);
    if (index == kSpecialTerm) index = first_special<float>(Terms<float>(a, b, i, j), job.depth);
    job.indices[base + i * b.count + j] = index;
  });
}

__global__ void __launch_bounds__(kTileThreads, 2) sample_product_kernel(SampleProductJob job) {
  constexpr int kFew = kTile * kTile / 64;  // so many outputs by warps cost as much as the whole tile
  __shared__ TileMemory<float> memory;
  __shared__ uint32_t failed[kTile][kTile / 32];
  __shared__ int failures;
  const TilePlace place = TilePlace::of(blockIdx.x, job.a.count, job.b.count);
  const int64_t rows = job.a.count, columns = job.b.count, ld = job.ld;
  const float *x = job.scaled_a + place.batch * rows * ld, *y = job.scaled_b + place.batch * columns * ld;
  const Vectors<float> scaled_a{x, 0, ld, 1, rows}, scaled_b{y, 0, ld, 1, columns};
  const Peak<float>*peaks_a = job.peaks_a + place.batch * rows, *peaks_b = job.peaks_b + place.batch * columns;
  const int64_t base = place.batch * rows * columns;
  if (threadIdx.x < kTile * 2) failed[threadIdx.x / 2][threadIdx.x % 2] = 0;
  if (threadIdx.x == 0) failures = 0;

  ProductSampleOp<kOwned> op;
  tile_pass<0>(op, memory, scaled_a, scaled_b, place.row, place.column, 0, job.ld);
  uint32_t masked = 0;
  place.each(rows, columns, [&](int e, int64_t i, int64_t j) {
    const Verdict verdict = job.sums.judge(peaks_a[i], peaks_b[j], op.sum[e]);
    op.target[e] = quantile(job.uniforms[base + i * columns + j], op.sum[e]);
    if (verdict == Verdict::kMasked) masked |= 1u << e;
    if (verdict != Verdict::kFailed) return;
    const int r = static_cast<int>(i - place.row), c = static_cast<int>(j - place.column);
    atomicOr(&failed[r][c / 32], 1u << c % 32);
    atomicAdd(&failures, 1);
  });
  __syncthreads();
  if (failures > kFew) {
    sample_tile(job, memory, place);
    return;
  }

  op.restart();
  tile_pass<1>(op, memory, scaled_a, scaled_b, place.row, place.column, 0, job.ld);
  place.each(rows, columns, [&](int e, int64_t i, int64_t j) {
    const int32_t index = op.drawn(e, x + i * ld, y + j * ld, job.ld);
    job.indices[base + i * columns + j] = masked >> e & 1 ? kNothing : index;
  });
  if (failures == 0) return;
  __syncthreads();  // what a warp writes now has been written by another
  const Vectors<float> a = job.a.of_batch(place.batch), b = job.b.of_batch(place.batch);
  for (int e = threadIdx.x / 32; e < kTile * 2; e += kTileThreads / 32)
    for (uint32_t bits = failed[e / 2][e % 2]; bits != 0; bits &= bits - 1) {
      const int64_t i = place.row + e / 2, j = place.column + e % 2 * 32 + __ffs(bits) - 1;
      const int64_t at = base + i * columns + j;
      const int index = sample_by_warp<float>(Terms<float>(a, b, i, j), job.depth, job.uniforms[at]);
      if (threadIdx.x % 32 == 0) job.indices[at] = index;
    }
}

}  // namespace dcs
