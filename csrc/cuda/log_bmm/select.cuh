// max_bmm and sample_bmm, term by term: an output a thread, an output a warp, or tiles of outputs, whose terms are
// split over several blocks where there are few tiles.
#pragma once

#include "common/divisor.cuh"
#include "log_bmm/by_warp.cuh"
#include "log_bmm/semiring_tile.cuh"

namespace dcs {

constexpr int kSelectThreads = 256, kSelectWarps = kSelectThreads / 32;

template <typename T>
struct SelectJob {
  using Acc = typename Types<T>::Acc;
  // What a part of the terms comes to: max_bmm's maximum and the k of it, sample_bmm's maximum and sum of weights.
  struct Part {
    Acc max;
    union {
      Acc sum;
      int32_t index;
    };
  };
  Vectors<T> a, b;
  int64_t batches;
  int depth, splits, split_depth;
  const Acc* uniforms;  // of sample_bmm
  T* values;            // of max_bmm
  int64_t* indices;
  Part* parts;  // (outputs, splits)
  Divisor by_columns, by_rows;
  bool is_narrow;  // the outputs are fewer than 2^31

  __device__ __forceinline__ int64_t total() const { return batches * a.count * b.count; }
  // f(a, b, i, j) for an output.
  template <typename F>
  __device__ __forceinline__ void at_output(int64_t at, F&& f) const {
    int64_t j, i, batch;
    if (is_narrow) {
      const uint32_t row = by_columns.of(static_cast<uint32_t>(at)), matrix = by_rows.of(row);
      j = static_cast<uint32_t>(at) - row * by_columns.divisor, i = row - matrix * by_rows.divisor, batch = matrix;
    } else {
      j = at % b.count, i = at / b.count % a.count, batch = at / b.count / a.count;
    }
    f(a.of_batch(batch), b.of_batch(batch), i, j);
  }
  // f(output) for the warp's outputs.
  template <typename F>
  __device__ __forceinline__ void each_by_warp(F&& f) const {
    for (int64_t at = blockIdx.x * int64_t{kSelectWarps} + threadIdx.x / 32; at < total();
        at += gridDim.x * int64_t{kSelectWarps})
      f(at);
  }

  template <int kCount>
  __device__ __forceinline__ void prepare(MaxOp<Acc, kCount>&, int, int64_t) const {}
  template <int kCount>
  __device__ __forceinline__ void prepare(LseOp<Acc, kCount>&, int, int64_t) const {}
  template <int kCount>
  __device__ __forceinline__ void prepare(SampleOp<Acc, kCount>& op, int e, int64_t at) const {
    op.target[e] = uniforms[at];
  }
  template <int kCount>
  __device__ __forceinline__ void write(const MaxOp<Acc, kCount>& op, int e, int64_t at) const {
    values[at] = cast<T>(op.max[e]);
    indices[at] = op.index[e];
  }
  template <int kCount>
  __device__ __forceinline__ void write(const SampleOp<Acc, kCount>& op, int e, int64_t at) const {
    int32_t index = op.drawn(e);
    if (index == kSpecialTerm)
      at_output(at, [&](const Vectors<T>& a, const Vectors<T>& b, int64_t i, int64_t j) {
        index = first_special<Acc>(Terms<T>(a, b, i, j), depth);
      });
    indices[at] = index;
  }
  template <int kCount>
  __device__ __forceinline__ void write_part(const MaxOp<Acc, kCount>& op, int e, int64_t at) const {
    parts[at].max = op.max[e], parts[at].index = op.index[e];
  }
  template <int kCount>
  __device__ __forceinline__ void write_part(const LseOp<Acc, kCount>& op, int e, int64_t at) const {
    parts[at].max = op.max[e], parts[at].sum = op.sum[e];
  }
};

template <typename T, template <typename, int> class Op>
__global__ void __launch_bounds__(kSelectThreads) select_by_thread_kernel(SelectJob<T> job) {
  using Acc = typename SelectJob<T>::Acc;
  for (int64_t at = blockIdx.x * int64_t{kSelectThreads} + threadIdx.x; at < job.total();
      at += gridDim.x * int64_t{kSelectThreads}) {
    Op<Acc, 1> op;
    job.prepare(op, 0, at);
    job.at_output(at,
        [&](const Vectors<T>& a, const Vectors<T>& b, int64_t i, int64_t j) { run_single(op, a, b, i, j, job.depth); });
    job.write(op, 0, at);
  }
}

template <typename T>
__global__ void __launch_bounds__(kSelectThreads) max_by_warp_kernel(SelectJob<T> job) {
  using Acc = typename SelectJob<T>::Acc;
  job.each_by_warp([&](int64_t at) {
    MaxOp<Acc, 1> op;
    job.at_output(at, [&](const Vectors<T>& a, const Vectors<T>& b, int64_t i, int64_t j) {
      const Terms<T> terms(a, b, i, j);
#pragma unroll 4
      for (int k = threadIdx.x % 32; k < job.depth; k += 32)
        op.template step<0, true>(0, terms.template at<Acc>(k), Acc(-0.0), k);
    });
    merge_lanes(op);
    if (threadIdx.x % 32 == 0) job.write(op, 0, at);
  });
}

template <typename T>
__global__ void __launch_bounds__(kSelectThreads) sample_by_warp_kernel(SelectJob<T> job) {
  using Acc = typename SelectJob<T>::Acc;
  job.each_by_warp([&](int64_t at) {
    job.at_output(at, [&](const Vectors<T>& a, const Vectors<T>& b, int64_t i, int64_t j) {
      const int index = sample_by_warp<Acc>(Terms<T>(a, b, i, j), job.depth, job.uniforms[at]);
      if (threadIdx.x % 32 == 0) job.indices[at] = index;
    });
  });
}

// A part of the terms of a tile, or, with kSplit false, all of them.
template <typename T, template <typename, int> class Op, bool kSplit>
__global__ void __launch_bounds__(kTileThreads, Op<float, 1>::kBlocks - (sizeof(T) == 8))
    select_tile_kernel(SelectJob<T> job) {
  using Acc = typename SelectJob<T>::Acc;
  __shared__ TileMemory<Acc> memory;
  const int split = kSplit ? blockIdx.x % job.splits : 0;
  const TileOrigin origin = TileOrigin::of(kSplit ? blockIdx.x / job.splits : blockIdx.x, job.a.count, job.b.count);
  const auto each = [&](auto&& f) {
    origin.each(job.a.count, job.b.count,
        [&](int e, int64_t i, int64_t j) { f(e, (origin.batch * job.a.count + i) * job.b.count + j); });
  };
  const int from = split * job.split_depth, to = min(job.depth, from + job.split_depth);
  Op<Acc, kOwned> op;
  each([&](int e, int64_t at) { job.prepare(op, e, at); });
  run_tile(op, memory, job.a.of_batch(origin.batch), job.b.of_batch(origin.batch), origin.row, origin.column, from, to);
  each([&](int e, int64_t at) {
    if constexpr (kSplit) job.write_part(op, e, at * job.splits + split);
    else job.write(op, e, at);
  });
}

template <typename T>
__global__ void __launch_bounds__(kSelectThreads) merge_max_kernel(SelectJob<T> job) {
  using Acc = typename SelectJob<T>::Acc;
  job.each_by_warp([&](int64_t at) {
    MaxOp<Acc, 1> op;
    for (int split = threadIdx.x % 32; split < job.splits; split += 32) {
      const auto part = job.parts[at * job.splits + split];
      op.merge(0, part.max, part.index);
    }
    merge_lanes(op);
    if (threadIdx.x % 32 == 0) job.write(op, 0, at);
  });
}

// The part in which the quantile lies, then the term in it.
template <typename T>
__global__ void __launch_bounds__(kSelectThreads) merge_sample_kernel(SelectJob<T> job) {
  using Acc = typename SelectJob<T>::Acc;
  job.each_by_warp([&](int64_t at) {
    const auto* parts = job.parts + at * job.splits;
    Acc max = -infinity<Acc>(), sum = Acc(0);
    for (int split = threadIdx.x % 32; split < job.splits; split += 32)
      if (parts[split].sum > Acc(0)) max = fmax(max, parts[split].max);
    max = warp_max(max);
    // A part of no possible term has a sum of 0 and a maximum of 0, one with a NaN or +inf a sum that is none.
    const auto scale = [&](int split) {
      return parts[split].sum == Acc(0) ? Acc(0) : fast_exp(parts[split].max - max);
    };
    const auto weight = [&](int split) { return parts[split].sum * scale(split); };
    for (int split = threadIdx.x % 32; split < job.splits; split += 32) sum += weight(split);
    sum = warp_sum(sum);
    job.at_output(at, [&](const Vectors<T>& a, const Vectors<T>& b, int64_t i, int64_t j) {
      const Terms<T> terms(a, b, i, j);
      int index = kNothing;
      if (!(sum >= Acc(0) && sum < infinity<Acc>())) {
        index = first_special_by_warp<Acc>(terms, job.depth);
      } else if (sum > Acc(0)) {
        const Acc target = quantile(job.uniforms[at], sum);
        Acc before;
        const int split = quantile_index(weight, 0, job.splits, target, before);
        const int from = split * job.split_depth;
        // Beside the largest of all terms: what underflows there is not drawn, though its part might have it.
        index = quantile_index([&](int k) { return fast_exp(terms.template at<Acc>(k) - max); }, from,
            min(job.depth, from + job.split_depth), target - before, before);
      }
      if (threadIdx.x % 32 == 0) job.indices[at] = index;
    });
  });
}

}  // namespace dcs
