// log_bmm where the tensor cores do not pay, or cannot serve: small matrices, K < 16, matrix times vector, float64.
#pragma once

#include "log_bmm/backward.cuh"
#include "log_bmm/by_warp.cuh"
#include "log_bmm/prepare.cuh"
#include "log_bmm/semiring_tile.cuh"

namespace dcs {

template <typename T, typename Acc>
struct DirectJob {
  Vectors<T> a, b;
  int64_t batches, depth;
  Acc *out, *log_s;
};

// The shift of one vector alone.
template <typename T, typename Acc>
__device__ __forceinline__ void see_vector(
    PeakScan<Acc>& scan, const Vectors<T>& from, int64_t vector, int64_t first_k, int64_t step_k, int64_t depth) {
  for (int64_t k = first_k; k < depth; k += step_k) scan.see(from.template at<Acc>(vector, k));
}

// An output a thread.
template <typename T, typename Acc>
__global__ void __launch_bounds__(256) direct_small_kernel(DirectJob<T, Acc> job) {
  const int64_t total = job.batches * job.a.count * job.b.count;
  for (int64_t at = blockIdx.x * 256ll + threadIdx.x; at < total; at += gridDim.x * 256ll) {
    const int64_t j = at % job.b.count, i = at / job.b.count % job.a.count, batch = at / job.b.count / job.a.count;
    const Vectors<T> a = job.a.of_batch(batch), b = job.b.of_batch(batch);
    PeakScan<Acc> scan_a, scan_b;
    see_vector(scan_a, a, i, 0, 1, job.depth);
    see_vector(scan_b, b, j, 0, 1, job.depth);
    LseOp<Acc, 1> op;
    run_single(op, a, b, i, j, static_cast<int>(job.depth));
    finish_lse(op.max[0], op.sum[0], scan_a.peak().shift, scan_b.peak().shift, job.out[at], job.log_s[at]);
  }
}

// An output a warp.
template <typename T, typename Acc>
__global__ void __launch_bounds__(256)
    direct_warp_kernel(DirectJob<T, Acc> job, const Peak<Acc>* peaks_a, const Peak<Acc>* peaks_b) {
  const int64_t total = job.batches * job.a.count * job.b.count;
  for (int64_t at = (blockIdx.x * 256ll + threadIdx.x) / 32; at < total; at += gridDim.x * 256ll / 32) {
    const int64_t j = at % job.b.count, n = at / job.b.count, i = n % job.a.count, batch = n / job.a.count;
    const auto op =
        lse_by_warp<Acc>(Terms<T>(job.a.of_batch(batch), job.b.of_batch(batch), i, j), static_cast<int>(job.depth));
    if (threadIdx.x % 32 == 0)
      finish_lse(
          op.max[0], op.sum[0], peaks_a[n].shift, peaks_b[batch * job.b.count + j].shift, job.out[at], job.log_s[at]);
  }
}

// A tile of outputs a block.
template <typename T, typename Acc>
__global__ void __launch_bounds__(kTileThreads)
    direct_tile_kernel(DirectJob<T, Acc> job, const Peak<Acc>* peaks_a, const Peak<Acc>* peaks_b) {
  __shared__ TileMemory<Acc> memory;
  const TileOrigin origin = TileOrigin::of(blockIdx.x, job.a.count, job.b.count);
  LseOp<Acc, kOwned> op;
  run_tile(op, memory, job.a.of_batch(origin.batch), job.b.of_batch(origin.batch), origin.row, origin.column, 0,
      static_cast<int>(job.depth));
  origin.each(job.a.count, job.b.count, [&](int e, int64_t i, int64_t j) {
    const int64_t n = origin.batch * job.a.count + i, m = origin.batch * job.b.count + j, at = n * job.b.count + j;
    finish_lse(op.max[e], op.sum[e], peaks_a[n].shift, peaks_b[m].shift, job.out[at], job.log_s[at]);
  });
}

// Matrix times vector: 32 outputs a block where neighboring vectors of the matrix are neighbors in memory (kAcross),
// else an output a warp. A matrix of which every element is read twice, the second time from a cache.
constexpr int kVectorWarps = 8;

template <typename T, typename Acc, bool kAcross>
__global__ void __launch_bounds__(32 * kVectorWarps)
    direct_vector_kernel(Vectors<T> matrix, Vectors<T> vector, int64_t batches, int64_t depth, Acc* out, Acc* log_s) {
  struct Row {
    Acc max, sum;
    PeakScan<Acc> scan_m, scan_v;
  };
  __shared__ Row rows[kAcross ? kVectorWarps : 1][32];
  constexpr int kPerBlock = kAcross ? 32 : kVectorWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t groups = (matrix.count + kPerBlock - 1) / kPerBlock, batch = blockIdx.x / groups;
  const int64_t n = blockIdx.x % groups * kPerBlock + (kAcross ? lane : warp);
  const Vectors<T> m = matrix.of_batch(batch), v = vector.of_batch(batch);
  const bool inside = n < matrix.count;
  const int64_t first = kAcross ? warp : lane, step = kAcross ? kVectorWarps : 32;
  PeakScan<Acc> scan_m, scan_v;
  Acc max = -infinity<Acc>();
  if (inside) {
#pragma unroll 4
    for (int64_t k = first; k < depth; k += step) {
      const Acc x = m.template at<Acc>(n, k), y = v.template at<Acc>(0, k);
      scan_m.see(x);
      scan_v.see(y);
      max = fmax(max, x + y);
    }
  }
  if constexpr (kAcross) {
    rows[warp][lane] = {max, Acc(0), scan_m, scan_v};
    __syncthreads();
    for (int w = 0; w < kVectorWarps; ++w) {
      max = fmax(max, rows[w][lane].max);
      scan_m.merge(rows[w][lane].scan_m);
      scan_v.merge(rows[w][lane].scan_v);
    }
    __syncthreads();
  } else {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      max = fmax(max, __shfl_xor_sync(0xffffffffu, max, offset));
      PeakScan<Acc> other_m, other_v;
      other_m.max = __shfl_xor_sync(0xffffffffu, scan_m.max, offset);
      other_v.max = __shfl_xor_sync(0xffffffffu, scan_v.max, offset);
      const int flags = __shfl_xor_sync(0xffffffffu, scan_m.special | scan_v.special << 1, offset);
      other_m.special = flags & 1, other_v.special = flags & 2;
      scan_m.merge(other_m);
      scan_v.merge(other_v);
    }
  }
  max = safe_shift(max);
  Acc sum = 0;
  if (inside) {
#pragma unroll 4
    for (int64_t k = first; k < depth; k += step)
      sum += fast_exp(m.template at<Acc>(n, k) + v.template at<Acc>(0, k) - max);
  }
  if constexpr (kAcross) {
    rows[warp][lane].sum = sum;
    __syncthreads();
    if (warp != 0) return;
    for (int w = 1; w < kVectorWarps; ++w) sum += rows[w][lane].sum;
  } else {
    sum = warp_sum(sum);
    if (lane != 0) return;
  }
  if (!inside) return;
  finish_lse(max, sum, scan_m.peak().shift, scan_v.peak().shift, out[batch * matrix.count + n],
      log_s[batch * matrix.count + n]);
}

template <typename T, typename Acc>
struct DirectBackwardJob {
  Vectors<T> own, other;
  int64_t batches, depth;
  const Peak<Acc>*peaks_own, *peaks_other;
  Upstream<Acc> upstream;
  Acc* grad;
  int64_t grad_batch, grad_n, grad_k;
};

// The gradient of own, an element a thread or, where they are few, a warp.
template <typename T, typename Acc, bool kWarp>
__global__ void __launch_bounds__(256) direct_backward_kernel(DirectBackwardJob<T, Acc> job) {
  const int64_t total = job.batches * job.own.count * job.depth;
  const int lane = kWarp ? threadIdx.x % 32 : 0;
  const bool along_n = job.grad_n == 1;  // neighboring threads write neighboring elements
  for (int64_t at = (blockIdx.x * 256ll + threadIdx.x) / (kWarp ? 32 : 1); at < total;
      at += gridDim.x * 256ll / (kWarp ? 32 : 1)) {
    const int64_t batch = at / (job.own.count * job.depth), rest = at % (job.own.count * job.depth);
    const int64_t n = along_n ? rest % job.own.count : rest / job.depth,
                  k = along_n ? rest / job.own.count : rest % job.depth;
    const Vectors<T> other = job.other.of_batch(batch);
    const Acc mine = job.own.of_batch(batch).template at<Acc>(n, k) - job.peaks_own[batch * job.own.count + n].shift;
    Acc sum = 0, part = 0;
    int terms = 0;
    for (int64_t m = lane; m < other.count; m += kWarp ? 32 : 1) {
      Acc g, log_s;
      job.upstream.load(batch, n, m, g, log_s);
      if (log_s == -infinity<Acc>()) continue;
      part +=
          g * fast_exp(mine + (other.template at<Acc>(m, k) - job.peaks_other[batch * other.count + m].shift) - log_s);
      if (++terms % kTileDepth == 0) sum += part, part = 0;
    }
    sum += part;
    if constexpr (kWarp) {
      sum = warp_sum(sum);
      if (lane != 0) continue;
    }
    job.grad[batch * job.grad_batch + n * job.grad_n + k * job.grad_k] = sum;
  }
}

}  // namespace dcs
