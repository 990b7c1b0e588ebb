// What long_rows.cuh is made of: its arguments, a row's parts, and a thread's sums over its vectors.
#pragma once

#include <cuda_runtime.h>

#include "common/ptx/async_copy.cuh"
#include "cross_entropy/launch.h"
#include "cross_entropy/long_rows_values.cuh"
#include "cross_entropy/gradient_slices.cuh"
#include "cross_entropy/target_assertion.cuh"

namespace dcs {

constexpr int kLongBatch = 4;    // vectors that a thread has before it uses the first
constexpr int kLongWarps = 128;  // of a cluster, at most

struct LongParams {
  RowsProblem problem;
  int staged = 0;                           // vectors that a block keeps in shared memory, a multiple of its threads
  float scale = 1, factor = 1, squash = 0;  // see Exponents
  SavedSlices saved;                        // in vectors, for rows that start at one; or nothing
};

// A row's elements before the first whole vector of 16 bytes, the vectors, the elements behind, which come to a warp's
// at most.
template <typename T>
struct LongRow {
  static constexpr int kVec = 16 / sizeof(T);
  T* start;
  int head, vectors, tail;

  __device__ __forceinline__ LongRow(const RowsProblem& problem, int row) {
    start = static_cast<T*>(problem.logits) + row * problem.stride;
    head = static_cast<int>((0 - reinterpret_cast<uintptr_t>(start)) % 16 / sizeof(T));
    vectors = (static_cast<int>(problem.columns) - head) / kVec;
    tail = static_cast<int>(problem.columns) - head - vectors * kVec;
  }
};

// A block's share of a row's vectors.
template <typename T, bool kCluster>
struct LongShare {
  static constexpr int kVec = 16 / sizeof(T);
  Vector<T, kVec>* body;
  int begin, count;

  __device__ __forceinline__ explicit LongShare(const LongRow<T>& row) {
    begin = 0;
    count = row.vectors;
    if constexpr (kCluster) {
      const int blocks = static_cast<int>(cluster_blocks()), share = (count + blocks - 1) / blocks;
      begin = static_cast<int>(cluster_rank()) * share;
      count = max(min(share, count - begin), 0);
    }
    body = reinterpret_cast<Vector<T, kVec>*>(row.start + row.head) + begin;
  }
};

// A row as a block has it: its class, -1 for an ignored one; the block's vectors, and how many of them lie in shared
// memory.
template <typename T>
struct LongTurn {
  int row, index;
  Vector<T, 16 / sizeof(T)>* body;
  int count, staged;
};

// What the gradient of a row takes: (scaled + linear * exponent) * base^exponent, with exponents relative to
// `reference` or, far away, of values relative to `far`.
struct LongGradient {
  float scaled = 0, linear = 0, reference = 0, far = 0;
  float target = 0;
  bool is_far = false, owns_target = false;

  template <bool kEntropy>
  __device__ __forceinline__ float at(float exponent) const {
    return power(exponent) * (kEntropy ? fmaf(linear, bounded(exponent), scaled) : scaled);
  }
};

// The class of a row, -1 for an ignored one.
__device__ __forceinline__ int read_class(const RowsProblem& problem, int row) {
  const int64_t index = problem.target[row * problem.target_stride];
  if (index == problem.ignore_index) return -1;
  if (index < 0 || index >= problem.columns) fail_target(__FILE__, __LINE__);
  return static_cast<int>(index);
}

template <int kMost = 7>
__device__ __forceinline__ void wait_for_all_but(int pending) {
  if (pending >= kMost) {
    wait_for_copies<kMost>();
  } else {
    if constexpr (kMost > 0) wait_for_all_but<kMost - 1>(pending);
  }
}

// One row's sums, as one thread makes them.
template <typename T, bool kSoftcap, bool kEntropy, bool kFixed, int kThreads>
struct LongAdder {
  static constexpr int kVec = 16 / sizeof(T);
  using Vec = Vector<T, kVec>;
  Exponents<T, kSoftcap> exponents;
  LongSums<kEntropy> sums;
  float reference;
  bool with_indices;
  int first_index;               // of the block's first vector
  int skipped, skipped_element;  // the target's vector among this thread's, and its element there

  __device__ __forceinline__ void raise(float largest) {
    const float to = exponents.reference(largest);
    shift(sums, exponents.rise(reference, to));
    reference = to;
    sums.largest = largest;
  }

  // Vectors v, v + kThreads, ...
  template <int kMany>
  __device__ __forceinline__ void add(Vec* raw, int v) {
    Vector<T, kVec * kMany> all;
    memcpy(&all, raw, sizeof all);
    const float largest = largest_of(all);
    if (is_larger(largest, sums.largest)) {
      raise(largest);
      if (with_indices) {
#pragma unroll
        for (int u = kMany - 1; u >= 0; --u)
          if (is_same(largest_of(raw[u]), largest)) sums.largest_at = first_index + v + u * kThreads;
      }
    }
    float totals[2] = {0, 0}, weighted[2] = {0, 0};
#pragma unroll
    for (int u = 0; u < kMany; ++u) {
      float y[kVec];
      unpack(raw[u], y);
#pragma unroll
      for (int i = 0; i < kVec; i += 4) exponents.values(y + i);
      if constexpr (kFixed) raw[u] = pack_fixed<Vec>(y);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float exponent = exponents.exponent(y[i], reference), p = power(exponent);
        totals[i % 2] += p;
        if constexpr (kEntropy) weighted[i % 2] = fmaf(p, bounded(exponent), weighted[i % 2]);
      }
    }
    sums.total += totals[0] + totals[1];
    if constexpr (kEntropy) sums.weighted += weighted[0] + weighted[1];
  }

  __device__ __forceinline__ void add_element(float logit, uint32_t largest_at) {
    if (is_larger(logit, sums.largest)) {
      raise(logit);
      sums.largest_at = largest_at;
    }
    add_power(sums, exponents.exponent(exponents.value(logit), reference));
  }

  // The target's vector, without the target.
  __device__ __forceinline__ void add_around(const T* elements, uint32_t largest_at) {
#pragma unroll 1
    for (int i = 0; i < kVec; ++i)
      if (i != skipped_element) add_element(cast<float>(elements[i]), largest_at);
  }
};

}  // namespace dcs
