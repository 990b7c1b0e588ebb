// A row or a few, too short to fill the GPU and too long for a block, with one number gamma: what counts is latency. A row is shared out among clusters of
// blocks, a vector of 16 bytes a thread, and no cluster waits for another: its blocks read all that lies before it again, a share each, and mail one number
// to each other: what the carry of a block has from the sender's own piece and from its share of the row before. 400 KB read again by seven clusters cost
// less than a trip from one multiprocessor to another through memory. Everything is in float, with powers of gamma that come rounded from the host: with
// sums of warps and blocks in double, powers made here and fewer values held before the wait it took 2.25 us, not 1.89. Launched early (early.cuh), a kernel
// has its blocks in place and its mailboxes ready when the launch before it ends, which is 1.5 us of 3.4 where one such call follows another.
#pragma once

#include <cmath>
#include <cstring>

#include "cluster.cuh"
#include "early.cuh"
#include "plan.h"
#include "types.cuh"
#include "vector.cuh"

namespace dcs {

struct RereadParams {
  const void* input;
  void* output;
  int64_t input_outer, input_inner, output_outer, output_inner;  // strides of rows
  int64_t inner;
  int length;
  int clusters;  // of a row, each of kMaxCluster blocks
  // Powers of gamma, of at most 1 in size.
  Gate<float> gate;
  float steps[8];                           // 1 .. 8 steps
  float doubled_lanes[5];                   // 1, 2, 4, 8, 16 vectors
  float warp;                               // a warp's 32
  float blocks[2 * kMaxCluster - 1];        // 0 .. blocks
  double lanes[32];                         // 0 .. vectors
  double warps[kRereadWarps];               // 0 .. warps
  double clusters_of[kRereadClusters - 1];  // 0 .. clusters
};

// A power that leaves float's range stays above 0, so that what was infinite stays infinite; what else comes of it is less than float can tell.
__host__ __device__ inline float rounded(double power) {
  const float nearest = static_cast<float>(power);
  return nearest != 0.f || power == 0.0 ? nearest : copysignf(0x1p-149f, nearest);
}

inline void set_powers(RereadParams& params, double gamma, int vec, int warps) {
  // As above, and so that the product of three stays in range.
  const auto times = [&](double a, double b) {
    const double product = a * b;
    return gamma == 0.0 || std::abs(product) >= 1e-100 ? product : std::copysign(1e-100, product);
  };
  params.gate = split_gamma(gamma);
  double power = gamma;  // of a step, a vector, a warp, a block, a cluster
  for (int i = 0; i < 8; ++i, power = times(power, gamma)) params.steps[i] = rounded(power);
  power = gamma;
  for (int i = 1; i < vec; i *= 2) power = times(power, power);
  params.lanes[0] = params.warps[0] = params.clusters_of[0] = 1.0;
  for (int i = 1; i < 32; ++i) params.lanes[i] = times(params.lanes[i - 1], power);
  for (int i = 0; i < 5; ++i, power = times(power, power)) params.doubled_lanes[i] = rounded(power);
  params.warp = rounded(power);
  for (int i = 1; i < kRereadWarps; ++i) params.warps[i] = times(params.warps[i - 1], power);
  power = times(params.warps[warps - 1], power);
  double blocks = 1.0;
  for (int i = 0; i < 2 * kMaxCluster - 1; ++i, blocks = times(blocks, power)) params.blocks[i] = rounded(blocks);
  for (int i = 1; i < kMaxCluster; i *= 2) power = times(power, power);
  for (int i = 1; i < kRereadClusters - 1; ++i) params.clusters_of[i] = times(params.clusters_of[i - 1], power);
}

// Loads where `wanted`: without a branch, behind which each load would be waited for.
template <typename Word>
__device__ __forceinline__ void load_if(bool wanted, const Word* from, Word& to) {
  static_assert(sizeof(Word) == 16);
  uint32_t words[4] = {};
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.s32 p, %5, 0;\n @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(from), "r"(static_cast<int>(wanted))
      : "memory");
  memcpy(&to, words, 16);
}

// Has a value computed here, before the wait, and not where it is needed.
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void keep(int& value) { asm volatile("" : "+r"(value)); }
template <typename T>
__device__ __forceinline__ void keep(T*& value) {
  asm volatile("" : "+l"(value));
}

template <int kCount>
__device__ __forceinline__ float sum_of(const float* from) {
  if constexpr (kCount == 1) return from[0];
  else return sum_of<kCount / 2>(from) + sum_of<kCount / 2>(from + kCount / 2);
}

template <typename T, bool kReverse>
__global__ void __launch_bounds__(32 * kRereadWarps) reread_kernel(const __grid_constant__ RereadParams params) {
  constexpr int kVec = 16 / sizeof(T), kEarlier = kRereadClusters - 1;
  constexpr unsigned kAll = 0xffffffffu;
  using Word = Vector<T, kVec>;
  const int lane = threadIdx.x % 32;
  int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  keep(warp);
  keep(warps);
  const int rank = blockIdx.x % kMaxCluster, place = static_cast<int>(blockIdx.x) / kMaxCluster;
  const int row = place / params.clusters, cluster = place - row * params.clusters;
  __shared__ alignas(16) float mail[kMaxCluster];
  __shared__ alignas(8) uint64_t arrivals;
  __shared__ alignas(16) float totals[kRereadWarps];  // of warps
  __shared__ alignas(16) float shares[kRereadWarps];  // what is left at the block's end of a warp's share of the row before
  __shared__ float power_of_warp;  // from the parameters the compiler would read it at every use again, one read behind the other
  let_next_launch_begin();
  if (threadIdx.x == 0) {
    expect_mail(&arrivals, kMaxCluster * static_cast<int>(sizeof(float)));
    power_of_warp = params.warp;
  }
  if (threadIdx.x < kRereadWarps) totals[threadIdx.x] = shares[threadIdx.x] = 0.f;
  __syncthreads();
  arrive_in_cluster_relaxed();

  const int64_t outer = params.inner == 1 ? row : row / params.inner, inner = row - outer * params.inner;
  const T* const input = static_cast<const T*>(params.input) + outer * params.input_outer + inner * params.input_inner;
  T* const output = static_cast<T*>(params.output) + outer * params.output_outer + inner * params.output_inner;
  const int length = params.length, vectors = (length + kVec - 1) / kVec;
  const int first = rank * blockDim.x + threadIdx.x, stride = kMaxCluster * blockDim.x, own = first + cluster * stride;
  const auto address = [&](int v) { return (kReverse ? vectors - 1 - v : v) * kVec; };  // of the v-th vector of the scan
  const int at = address(own);
  // A vector that is not whole is the last in memory: the row's first, or its last.
  T* to = output + at;
  int whole = own < vectors && at + kVec <= length, first_whole = !kReverse || address(first) + kVec <= length;
  const Word* own_from = reinterpret_cast<const Word*>(input + at);
  const Word* froms[kEarlier];
  float weights[kEarlier];  // of the thread's vectors at the block's end, as if the block began its cluster's piece
  const double lane_power = params.lanes[lane], left = params.lanes[31 - lane] * params.warps[warps - 1 - warp];
  float before = rounded(lane_power), block_before = rounded(lane_power * params.warps[warp]);
#pragma unroll
  for (int j = 0; j < kEarlier; ++j) {
    froms[j] = reinterpret_cast<const Word*>(input + address(first + min(j, cluster) * stride));
    weights[j] = rounded(left * params.clusters_of[max(cluster - 1 - j, 0)]);
    keep(froms[j]);
    keep(weights[j]);
  }
  const float warp_power = power_of_warp;
  float own_weight = 0.f, share_weight = 0.f;  // in the carry of block `lane`
  if (lane < kMaxCluster) {
    own_weight = params.blocks[max(lane - 1 - rank, 0)];
    share_weight = params.blocks[lane + kMaxCluster - 1 - rank];
  }
  keep(before);
  keep(block_before);
  keep(own_weight);
  keep(share_weight);
  keep(whole);
  keep(first_whole);
  keep(own_from);
  keep(to);
  Gate<float, sizeof(T) == 2> gate;
  if constexpr (sizeof(T) == 2) gate = {params.gate.value};
  else gate = params.gate;
  keep(gate.value);
  if constexpr (sizeof(T) == 4) keep(gate.rest);
  wait_for_cluster();
  wait_for_launches_before();

  Word here, earlier[kEarlier];
  load_if(whole, own_from, here);
#pragma unroll
  for (int j = 0; j < kEarlier; ++j) load_if(j < cluster && (j > 0 || first_whole), froms[j], earlier[j]);
  if (!whole && own < vectors) here = load_vector<T, kVec>(input, at, 0, length);
  if (kReverse && cluster > 0 && !first_whole) earlier[0] = load_vector<T, kVec>(input, address(first), 0, length);
  const auto total_of = [&](const Word& word) {
    float values[kVec];
    unpack_in_order<kReverse>(word, values);
    float y = values[0];
#pragma unroll
    for (int i = 1; i < kVec; ++i) y = gate.step(values[i], y);
    return y;
  };
  float total = total_of(here);
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const float other = __shfl_up_sync(kAll, total, 1 << i);
    const float more = fmaf(params.doubled_lanes[i], other, total);
    total = lane >= 1 << i ? more : total;
  }
  const float lanes_before = __shfl_up_sync(kAll, total, 1);
  if (lane == 31) totals[warp] = total;
  if (cluster > 0) {
    float share = total_of(earlier[0]) * weights[0];
#pragma unroll
    for (int j = 1; j < kEarlier; ++j)
      if (j < cluster) share = fmaf(total_of(earlier[j]), weights[j], share);
#pragma unroll
    for (int i = 0; i < 5; ++i) share += __shfl_xor_sync(kAll, share, 1 << i);
    if (lane == 0) shares[warp] = share;
  }
  __syncthreads();
  if (warp == 0) {
    float block = totals[0];
#pragma unroll
    for (int w = 1; w < kRereadWarps; ++w) block = w < warps ? fmaf(warp_power, block, totals[w]) : block;
    float message = sum_of<kRereadWarps>(shares) * share_weight;
    if (lane > rank) message = fmaf(own_weight, block, message);  // a total of no weight may be infinite
    if (lane < kMaxCluster) send_in_cluster(&mail[rank], &arrivals, lane, message);
  }
  // The block's values, as if nothing lay before it.
  float in_block = 0.f;
#pragma unroll
  for (int w = 0; w < kRereadWarps - 1; ++w) in_block = w < warp ? fmaf(warp_power, in_block, totals[w]) : in_block;
  float values[kVec];
  unpack_in_order<kReverse>(here, values);
  float y = lane == 0 ? in_block : fmaf(before, in_block, lanes_before);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = y = gate.step(values[i], y);

  wait_for_mail(&arrivals);
  const float carry = sum_of<kMaxCluster>(mail) * block_before;
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = fmaf(params.steps[i], carry, values[i]);
  const Word result = pack_in_order<kReverse, T>(values);
  if (whole) *reinterpret_cast<Word*>(to) = result;
  else if (own < vectors) store_vector<T, kVec>(output, at, 0, length, result);
}

}  // namespace dcs
