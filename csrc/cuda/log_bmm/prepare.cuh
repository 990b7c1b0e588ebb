// First step of a log-semiring product: the maximum of every vector and, for the tensor cores, exp(x - maximum).
#pragma once

#include "log_bmm/operands.cuh"

namespace dcs {

constexpr int kPrepareLanes = 16;  // along k, beside 32 vectors; or so many warps of a vector each

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
    const int64_t groups = by_columns() ? (from.count + 31) / 32 : (from.count + kPrepareLanes - 1) / kPrepareLanes;
    return groups * batches;
  }
  __host__ __device__ bool by_columns() const { return from.stride == 1 && from.step != 1; }
};

constexpr int kColumnDepth = 128;
constexpr float kFloor = 0x1p-60f;

// e^x 2^exponent for x <= 0, to float's last digit but one: every term has the error of its factors. x = n log 2 + g,
// and e^g by its series to the seventh power (|g| < 0.35: what is left out is below 1e-8). The exponent is added to n:
// inside the argument it would cost digits.
__device__ __forceinline__ float scaled_exp(float x, int exponent) {
  if (!(x > -infinity<float>())) return 0.f;
  const float whole = rintf(x * 1.44269504f);
  const float g = fmaf(-whole, 1.42860677e-6f, fmaf(-whole, 0.693145752f, x));
  float power = fmaf(g, 1.f / 5040, 1.f / 720);
  power = fmaf(g, power, 1.f / 120);
  power = fmaf(g, power, 1.f / 24);
  power = fmaf(g, power, 1.f / 6);
  power = fmaf(g, power, 0.5f);
  power = fmaf(g, power, 1.f);
  power = fmaf(g, power, 1.f);
  const int shift = static_cast<int>(whole) + exponent;
  return shift < -126 ? 0.f : power * __int_as_float((shift + 127) << 23);
}

template <typename Acc>
struct PeakScan {
  Acc max = -infinity<Acc>();
  bool masked = false, special = false;

  __device__ __forceinline__ void see(Acc x) {
    max = x > max ? x : max;
    masked |= x == -infinity<Acc>();
    special |= !(x < infinity<Acc>());
  }
  __device__ __forceinline__ void merge(const PeakScan& other) {
    max = other.max > max ? other.max : max;
    masked |= other.masked;
    special |= other.special;
  }
  __device__ __forceinline__ Peak<Acc> peak() const {
    const bool all = max == -infinity<Acc>() && !special;
    return {
        special || all ? Acc(0) : max, (masked ? kHasMasked : 0) | (all ? kAllMasked : 0) | (special ? kSpecial : 0)};
  }
};

template <typename T>
__device__ __forceinline__ float scaled_element(const PrepareJob<T, float>& job, const Peak<float>& peak, float x) {
  if (peak.flags & (kSpecial | kAllMasked)) return 0.f;  // a direct sum serves it; here it must not touch its neighbors
  const float e = scaled_exp(x - peak.shift, job.exponent);
  return job.floored && (peak.flags & kHasMasked) && x > -infinity<float>() ? fmaxf(e, kFloor) : e;
}

// A warp a vector: neighboring lanes are neighboring k.
template <typename T, typename Acc>
__device__ void prepare_rows(const PrepareJob<T, Acc>& job, int64_t block) {
  const int64_t groups = (job.from.count + kPrepareLanes - 1) / kPrepareLanes;
  const int64_t batch = block / groups, vector = block % groups * kPrepareLanes + threadIdx.y;
  if (vector >= job.from.count) return;
  const T* from = job.from.of_batch(batch).data + vector * job.from.stride + threadIdx.x * job.from.step;
  const int64_t advance = 32 * job.from.step;
  const int depth = static_cast<int>(job.depth), lane = threadIdx.x;
  PeakScan<Acc> scan;
  const T* at_k = from;
#pragma unroll 8
  for (int k = lane; k < depth; k += 32, at_k += advance) scan.see(cast<Acc>(*at_k));
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    PeakScan<Acc> other;
    other.max = __shfl_xor_sync(0xffffffffu, scan.max, offset);
    const int flags = __shfl_xor_sync(0xffffffffu, scan.masked | scan.special << 1, offset);
    other.masked = flags & 1, other.special = flags & 2;
    scan.merge(other);
  }
  const Peak<Acc> peak = scan.peak();
  const int64_t at = batch * job.from.count + vector;
  if (lane == 0) job.peaks[at] = peak;
  if constexpr (sizeof(Acc) == sizeof(float)) {
    if (job.scaled == nullptr) return;
    float* to = job.scaled + at * job.ld;
    at_k = from;
#pragma unroll 8
    for (int k = lane; k < depth; k += 32, at_k += advance) to[k] = scaled_element(job, peak, cast<Acc>(*at_k));
    if (depth + lane < job.ld) to[depth + lane] = 0.f;
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
        tile[y + i * kPrepareLanes][x] = scaled_element(job, peak, values[i]);
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
