// First step of a log-semiring product: the maximum of every vector and, for the tensor cores, exp(x - maximum).
#pragma once

#include "log_bmm/scaled_sums.cuh"

namespace dcs {

constexpr int kPrepareLanes = 16;  // along k, beside 32 vectors; or so many warps of a vector each, or of one

template <typename T, typename Acc>
struct PrepareJob {
  Vectors<T> from;
  int64_t batches, depth;
  Peak<Acc>* peaks;  // (batches, count)
  float* scaled;     // (batches, count, ld): exp(x - maximum) 2^exponent, zeros from depth on; null: the maxima alone
  int64_t ld;
  int exponent;
  bool floored;  // finite elements of a vector with -inf stay above 0: at least kFloor

  __host__ __device__ int64_t blocks() const {
    const int vectors = by_columns() ? 32 : is_long() ? 1 : kPrepareLanes;
    return (from.count + vectors - 1) / vectors * batches;
  }
  __host__ __device__ bool by_columns() const { return from.stride == 1 && from.step != 1 && from.count >= 8; }
  __host__ __device__ bool is_long() const { return depth >= 2048; }
};

constexpr int kColumnDepth = 128;

// A warp a vector, or all of the block's warps: neighboring lanes are neighboring k.
template <typename T, typename Acc>
__device__ void prepare_rows(const PrepareJob<T, Acc>& job, int64_t block) {
  __shared__ PeakScan<Acc> scans[kPrepareLanes];
  const bool is_long = job.is_long();
  const int64_t groups = is_long ? job.from.count : (job.from.count + kPrepareLanes - 1) / kPrepareLanes;
  const int64_t batch = block / groups,
                vector = is_long ? block % groups : block % groups * kPrepareLanes + threadIdx.y;
  if (vector >= job.from.count) return;
  const int depth = static_cast<int>(job.depth), lane = threadIdx.x, step = is_long ? 32 * kPrepareLanes : 32,
            first = is_long ? threadIdx.y * 32 + lane : lane;
  const T* from = job.from.of_batch(batch).data + vector * job.from.stride + first * job.from.step;
  const int64_t advance = step * job.from.step;
  PeakScan<Acc> scan;
  const T* at_k = from;
#pragma unroll 8
  for (int k = first; k < depth; k += step, at_k += advance) scan.see(cast<Acc>(*at_k));
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    PeakScan<Acc> other;
    other.max = __shfl_xor_sync(0xffffffffu, scan.max, offset);
    const int flags = __shfl_xor_sync(0xffffffffu, scan.masked | scan.special << 1, offset);
    other.masked = flags & 1, other.special = flags & 2;
    scan.merge(other);
  }
  if (is_long) {
    if (lane == 0) scans[threadIdx.y] = scan;
    __syncthreads();
    for (int i = 0; i < kPrepareLanes; ++i) scan.merge(scans[i]);
  }
  const Peak<Acc> peak = scan.peak();
  const int64_t at = batch * job.from.count + vector;
  if (first == 0) job.peaks[at] = peak;
  if constexpr (sizeof(Acc) == sizeof(float)) {
    if (job.scaled == nullptr) return;
    float* to = job.scaled + at * job.ld;
    at_k = from;
#pragma unroll 8
    for (int k = first; k < depth; k += step, at_k += advance)
      to[k] = scaled_element(peak, cast<Acc>(*at_k), job.exponent, job.floored);
    if (depth + first < job.ld) to[depth + first] = 0.f;
  }
}

// 32 vectors a block: neighboring lanes are neighboring vectors; written through shared memory, along k again.
template <typename T, typename Acc>
__device__ void prepare_columns(const PrepareJob<T, Acc>& job, int64_t block) {
  __shared__ PeakScan<Acc> scans[kPrepareLanes][32];
  __shared__ Peak<Acc> peaks[32];
  __shared__ float tile[kColumnDepth][33];
  const int64_t groups = (job.from.count + 31) / 32;
  const int64_t batch = block / groups, first = block % groups * 32;
  const Vectors<T> from = job.from.of_batch(batch);
  const int x = threadIdx.x, y = threadIdx.y;
  const bool inside = first + x < job.from.count;
  const int depth = static_cast<int>(job.depth), ld = static_cast<int>(job.ld);
  const T* mine = from.data + (first + x) * from.stride + y * from.step;
  const int64_t advance = kPrepareLanes * from.step;
  PeakScan<Acc> scan;
  if (inside) {
    const T* at_k = mine;
#pragma unroll 8
    for (int k = y; k < depth; k += kPrepareLanes, at_k += advance) scan.see(cast<Acc>(*at_k));
  }
  scans[y][x] = scan;
  __syncthreads();
  if (y == 0) {
    for (int i = 1; i < kPrepareLanes; ++i) scan.merge(scans[i][x]);
    peaks[x] = scan.peak();
    if (inside) job.peaks[batch * job.from.count + first + x] = peaks[x];
  }
  __syncthreads();
  if constexpr (sizeof(Acc) == sizeof(float)) {
    if (job.scaled == nullptr) return;
    const Peak<Acc> peak = peaks[x];
    float* to = job.scaled + (batch * job.from.count + first + y) * job.ld + x;
    for (int k0 = 0; k0 < ld; k0 += kColumnDepth) {
      Acc values[kColumnDepth / kPrepareLanes];
#pragma unroll
      for (int i = 0; i < kColumnDepth / kPrepareLanes; ++i) {
        values[i] = inside && k0 + y + i * kPrepareLanes < depth ? cast<Acc>(*mine)
                                                                 : -infinity<Acc>();  // whose exponential is 0
        mine += advance;
      }
#pragma unroll
      for (int i = 0; i < kColumnDepth / kPrepareLanes; ++i)
        tile[y + i * kPrepareLanes][x] = scaled_element(peak, values[i], job.exponent, job.floored);
      __syncthreads();
#pragma unroll
      for (int v = 0; v < 32; v += kPrepareLanes)
#pragma unroll
        for (int k = 0; k < kColumnDepth; k += 32)
          if (first + y + v < job.from.count && k0 + k + x < ld) to[v * job.ld + k0 + k] = tile[k + x][y + v];
      __syncthreads();
    }
  }
}

template <typename T, typename Acc>
__global__ void __launch_bounds__(32 * kPrepareLanes) prepare_kernel(PrepareJob<T, Acc> a, PrepareJob<T, Acc> b) {
  const auto run = [](const PrepareJob<T, Acc>& job, int64_t block) {
    if (job.by_columns()) prepare_columns(job, block);
    else prepare_rows(job, block);
  };
  const int64_t blocks_a = a.blocks();
  if (blockIdx.x < blocks_a) run(a, blockIdx.x);
  else run(b, blockIdx.x - blocks_a);
}

}  // namespace dcs
