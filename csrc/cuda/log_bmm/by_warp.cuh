// One output by a warp: neighboring lanes take neighboring k.
#pragma once

#include "log_bmm/semiring_ops.cuh"

namespace dcs {

constexpr unsigned kAllLanes = 0xffffffffu;

// The terms of one output.
template <typename T>
struct Terms {
  const T *a, *b;
  int64_t step_a, step_b;

  __device__ __forceinline__ Terms(const Vectors<T>& left, const Vectors<T>& right, int64_t i, int64_t j)
      : a(left.data + i * left.stride), b(right.data + j * right.stride), step_a(left.step), step_b(right.step) {}
  template <typename Acc>
  __device__ __forceinline__ Acc at(int64_t k) const {
    return cast<Acc>(a[k * step_a]) + cast<Acc>(b[k * step_b]);
  }
};

// The lanes' maxima become that of all.
template <typename Acc>
__device__ __forceinline__ void merge_lanes(MaxOp<Acc, 1>& op) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Acc value = __shfl_xor_sync(kAllLanes, op.max[0], offset);
    op.merge(0, value, __shfl_xor_sync(kAllLanes, op.index[0], offset));
  }
}

template <typename Acc>
__device__ __forceinline__ Acc warp_max(Acc value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = fmax(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

// logsumexp, of its maximum and the sum: in all lanes.
template <typename Acc, typename T>
__device__ __forceinline__ LseOp<Acc, 1> lse_by_warp(const Terms<T>& terms, int depth) {
  LseOp<Acc, 1> op;
  for (int k = threadIdx.x % 32; k < depth; k += 32) op.max[0] = fmax(op.max[0], terms.template at<Acc>(k));
  op.max[0] = warp_max(op.max[0]);
  op.between();
  for (int k = threadIdx.x % 32; k < depth; k += 32) op.sum[0] += fast_exp(terms.template at<Acc>(k) - op.max[0]);
  op.sum[0] = warp_sum(op.sum[0]);
  return op;
}

// The first n of [from, to) at which the sum of weight(n) passes `target`, and the sum up to it; the last of a positive
// weight if rounding lets none pass.
template <typename Acc, typename Weight>
__device__ __forceinline__ int quantile_index(const Weight& weight, int from, int to, Acc target, Acc& before) {
  const int lane = threadIdx.x % 32;
  int last = from;
  Acc sum = Acc(0), next = from + lane < to ? weight(from + lane) : Acc(0);
  before = Acc(0);
  for (int n = from; n < to; n += 32) {
    const Acc mine = next;
    next = n + 32 + lane < to ? weight(n + 32 + lane) : Acc(0);
    Acc up_to = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const Acc other = __shfl_up_sync(kAllLanes, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    const unsigned possible = __ballot_sync(kAllLanes, mine > Acc(0));
    const unsigned passed = possible & __ballot_sync(kAllLanes, sum + up_to > target);
    const int chosen = passed != 0 ? __ffs(passed) - 1 : 31 - __clz(possible);
    if (possible != 0) last = n + chosen, before = sum + __shfl_sync(kAllLanes, up_to - mine, chosen);
    if (passed != 0) break;
    sum += __shfl_sync(kAllLanes, up_to, 31);
  }
  return last;
}

// The first term of [0, depth) that is a NaN or +inf.
template <typename Acc, typename T>
__device__ __forceinline__ int first_special_by_warp(const Terms<T>& terms, int depth) {
  for (int k0 = 0; k0 < depth; k0 += 32) {
    const int k = k0 + threadIdx.x % 32;
    const unsigned found = __ballot_sync(kAllLanes, k < depth && !(terms.template at<Acc>(k) < infinity<Acc>()));
    if (found != 0) return k0 + __ffs(found) - 1;
  }
  return kNothing;
}
template <typename Acc, typename T>
__device__ __forceinline__ int first_special(const Terms<T>& terms, int depth) {
  for (int k = 0; k < depth; ++k)
    if (!(terms.template at<Acc>(k) < infinity<Acc>())) return k;
  return kNothing;
}

template <typename Acc, typename T>
__device__ __forceinline__ int sample_by_warp(const Terms<T>& terms, int depth, Acc u) {
  const int lane = threadIdx.x % 32;
  Acc max = -infinity<Acc>(), sum = Acc(0);
#pragma unroll 4
  for (int k = lane; k < depth; k += 32) max = fmax(max, terms.template at<Acc>(k));
  max = warp_max(max);
  if (max == -infinity<Acc>()) max = Acc(0);
  const auto weight = [&](int k) { return fast_exp(terms.template at<Acc>(k) - max); };
#pragma unroll 4
  for (int k = lane; k < depth; k += 32) sum += weight(k);
  sum = warp_sum(sum);
  if (sum == Acc(0)) return kNothing;
  if (!(sum > Acc(0))) return first_special_by_warp<Acc>(terms, depth);
  Acc before;
  return quantile_index(weight, 0, depth, quantile(u, sum), before);
}

}  // namespace dcs
