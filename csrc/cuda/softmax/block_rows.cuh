// Softmax of contiguous rows that a block, or a cluster of blocks, takes, one read and one write. Each thread loads all
// its vectors before it uses the first, and keeps them. Forward they stay in registers, in float as their powers, or,
// eight vectors of half precision, as they came (64 registers of powers would leave room for half as many threads; the
// powers are then made twice, and the exponential unit is busy for 0.6 of the time that the traffic takes on an H200).
// Backward the gradient stays in registers, and the output goes to shared memory behind the registers' back: each
// thread reads there what it has itself asked for, so this takes no barrier.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "softmax/rows.cuh"

namespace dcs {

constexpr int kBlockVectors = 8;     // a thread's, at most
constexpr int kBlockThreads = 1024;  // at most

// A thread's vectors of the row that its block, or its cluster, takes: 32 apart, so that their distances are constants.
template <typename T, int kVectors, RowKind kKind>
struct RowVectors {
  static constexpr int kVec = 16 / sizeof(T), kApart = 32 * kVec;
  static constexpr bool kWhole = kKind == RowKind::kWhole;
  using Vec = Vector<T, kVec>;
  int64_t at;   // of the first vector, in elements
  int left;     // vectors from there to the end of the block's share
  Range range;  // the row's elements, relative to the first vector
  int end;      // the tensor's, likewise

  // A block takes the row's vectors begin ... begin + share - 1.
  __device__ __forceinline__ RowVectors(const SoftmaxRows<T>& params, int64_t row, int64_t begin, int share) {
    constexpr int64_t kFar = 1 << 30;  // beyond all of a block's elements
    const int shift = kWhole ? 0 : static_cast<int>(row * params.columns % kVec);
    const int64_t vectors = (shift + params.columns + kVec - 1) / kVec;
    const int64_t first =
        begin + static_cast<int>(threadIdx.x / 32) * (32 * kVectors) + static_cast<int>(threadIdx.x % 32);
    left = static_cast<int>(min(min(begin + share, vectors) - first, kFar));
    at = row * params.columns - shift + first * kVec;
    range.low = static_cast<int>(max(shift - first * kVec, -kFar));
    range.high = static_cast<int>(min(shift + params.columns - first * kVec, kFar));
    end = static_cast<int>(min(params.rows * params.columns - at, kFar));
  }

  __device__ __forceinline__ bool has(int k) const { return k * 32 < left; }
  template <bool kBackward>
  __device__ __forceinline__ void load(const T* tensor, Vec (&raw)[kVectors]) const {
    // As nearly all threads' are: without a test for each, and without the values of those that are not there.
    constexpr int kLast = kVectors - 1;
    if (has(kLast) && (kWhole || (range.has_all<kVec>(0) && range.has_all<kVec>(kLast * kApart)))) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) raw[k] = load_now(reinterpret_cast<const Vec*>(tensor + at) + k * 32);
      return;
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      raw[k] = neutral<T, kVec, kBackward>();
      load_where(has(k), tensor + at + k * kApart, kWhole ? kVec : end - k * kApart, raw[k]);
    }
    if constexpr (!kWhole) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) mask<kBackward>(raw[k], k * kApart, range);
    }
  }
  // Of a view.
  __device__ __forceinline__ void load_view(const SoftmaxRows<T>& params, int64_t row, Vec (&raw)[kVectors]) const {
    const T* const from = params.input + at + params.runs.beyond(row * params.columns);
    const bool is_aligned = reinterpret_cast<uintptr_t>(from) % sizeof(Vec) == 0;
    const auto is_there = [&](int k) { return has(k) && is_within(from + k * kApart, params.input, params.runs.span); };
    if (is_aligned) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        raw[k] = Vec{};
        load_where(is_there(k), reinterpret_cast<const Vec*>(from + k * kApart), raw[k]);
      }
    } else {
      // As many at once as there are registers for.
      constexpr int kAtOnce = std::min(kVectors, sizeof(T) == 2 ? 4 : 8);
#pragma unroll
      for (int first = 0; first < kVectors; first += kAtOnce) {
        AnyVector<T> pieces[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) pieces[k].ask(is_there(first + k), from + (first + k) * kApart);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) raw[first + k] = pieces[k].get(from + (first + k) * kApart);
      }
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!has(k)) raw[k] = neutral<T, kVec, false>();
      else if (!is_there(k)) load_existing(from + k * kApart, params.input, params.runs.span, raw[k]);
      mask<false>(raw[k], k * kApart, range);
    }
  }
  __device__ __forceinline__ void store(T* tensor, int k, const Vec& raw) const {
    if (!has(k)) return;
    if constexpr (kWhole) reinterpret_cast<Vec*>(tensor + at)[k * 32] = raw;
    else store_in(tensor + at + k * kApart, k * kApart, range, raw);
  }
};

template <typename T, int kVectors, RowKind kKind>
__global__ void __launch_bounds__(kBlockThreads) softmax_block_kernel(const __grid_constant__ SoftmaxRows<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  constexpr bool kTwice = sizeof(T) == 2 && kVectors > 4;  // the powers are made twice
  using Vec = Vector<T, kVec>;
  __shared__ ClusterExchange<Acc> exchange;
  launch_dependents();
  const int blocks = static_cast<int>(cluster_blocks());
  const int64_t row = blocks > 1 ? cluster_index() : blockIdx.x,
                begin = blocks > 1 ? static_cast<int64_t>(cluster_rank()) * params.share : 0;
  const RowVectors<T, kVectors, kKind> mine(params, row, begin, params.share);
  griddepcontrol_wait();

  Vec raw[kVectors];
  if constexpr (kKind == RowKind::kView) mine.load_view(params, row, raw);
  else mine.template load<false>(params.input, raw);
  if (blocks > 1) meet_cluster(exchange.arrivals, blocks * static_cast<int>(sizeof(Part<Acc>)));
  Part<Acc> part;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) part.largest = largest_of(raw[k], part.largest);
  part.largest = lanes_largest(part.largest, 32);
  const Acc own_largest = part.largest;
  Acc x[kTwice ? 1 : kVectors][kVec];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Acc(&to)[kVec] = x[kTwice ? 0 : k];
    unpack(raw[k], to);
    Acc total = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) total += to[i] = shifted_power(to[i], own_largest);
    part.total += total;
  }
  part.total = lanes_total(part.total, 32);
  part = join_cluster<false>(join_warps<false>(part), blocks, exchange);
  const Acc scale = kTwice ? Acc(1) / part.total : shifted_power(own_largest, part.largest) / part.total;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Acc(&to)[kVec] = x[kTwice ? 0 : k];
    if constexpr (kTwice) {
      unpack(renewed(raw[k], params.zero), to);
#pragma unroll
      for (int i = 0; i < kVec; ++i) to[i] = shifted_power(to[i], part.largest);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] *= scale;
    mine.store(params.output, k, pack<Acc, T, kVec>(to));
  }
}

template <typename T, int kVectors, RowKind kKind>
__global__ void __launch_bounds__(kBlockThreads)
    softmax_backward_block_kernel(const __grid_constant__ SoftmaxRows<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  using Vec = Vector<T, kVec>;
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  __shared__ ClusterExchange<Acc> exchange;
  launch_dependents();
  const int blocks = static_cast<int>(cluster_blocks());
  const int64_t row = blocks > 1 ? cluster_index() : blockIdx.x,
                begin = blocks > 1 ? static_cast<int64_t>(cluster_rank()) * params.share : 0;
  const RowVectors<T, kVectors, kKind> mine(params, row, begin, params.share);
  griddepcontrol_wait();
  Vec* const saved = reinterpret_cast<Vec*>(softmax_shared) + threadIdx.x / 32 * (32 * kVectors) + threadIdx.x % 32;

#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int left = mine.kWhole ? kVec : min(kVec, mine.end - k * mine.kApart);
    if (mine.has(k))
      copy_existing<16, sizeof(T)>(
          &saved[k * 32], params.saved + mine.at + k * mine.kApart, left * static_cast<int>(sizeof(T)));
    else saved[k * 32] = neutral<T, kVec, true>();
  }
  Vec raw[kVectors];
  mine.template load<true>(params.input, raw);
  commit_copies();
  if (blocks > 1) meet_cluster(exchange.arrivals, blocks * static_cast<int>(sizeof(Part<Acc>)));
  wait_for_copies<0>();
  if constexpr (!mine.kWhole) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
      if (!mine.range.template has_all<kVec>(k * mine.kApart)) mask<true>(saved[k * 32], k * mine.kApart, mine.range);
  }
  Part<Acc> part;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Acc g[kVec], y[kVec];
    unpack(raw[k], g);
    unpack(saved[k * 32], y);
    Acc total = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) total += g[i] * y[i];
    part.total += total;
  }
  part.total = lanes_total(part.total, 32);
  part = join_cluster<true>(join_warps<true>(part), blocks, exchange);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Acc g[kVec], y[kVec];
    unpack(renewed(raw[k], params.zero), g);
    unpack(saved[k * 32], y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) g[i] = (g[i] - part.total) * y[i];
    mine.store(params.output, k, pack<Acc, T, kVec>(g));
  }
}

}  // namespace dcs
