// A row or a few, too short to fill the GPU and too long for a block, with a number gamma: what counts is latency. A
// row is shared out among clusters of blocks, a vector of 16 bytes a thread, and no cluster waits for another: its
// blocks read all that lies before it again, a share each, and store one number in each other's shared memory: what the
// carry of a block has from the sender's own vectors and from its share of the row before. 400 KB read again by seven
// clusters cost less than a trip from one multiprocessor to another through memory. Everything is in float, with powers
// of gamma that come rounded from the host; constants and indices are in registers before the wait (ptx/latency.cuh).
// By programmatic dependent launch (ptx/dependent_launch.cuh) a kernel has its blocks resident and its transaction
// barriers ready when the launch before it ends, which is 1.5 us of 3.4 where one such call follows another; what it
// does before the wait should stay short.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/latency.cuh"
#include "dcs/scan/plan/kernel_plans.h"
#include "common/element_types.cuh"
#include "common/vector.cuh"
#include "scan/lines/float_powers.cuh"

namespace dcs {

// Powers of gamma, of at most 1 in size, as floats that all threads need.
struct FewRowsPowers {
  Gate<float> gate;
  float steps[8];          // 1 .. 8 steps
  float doubled_lanes[5];  // 1, 2, 4, 8, 16 vectors
  float doubled_warps[3];  // 1, 2, 4 warps
};

struct FewRowsParams {
  const void* input;
  void* output;
  int64_t input_outer, input_inner, output_outer, output_inner;  // strides of rows
  int64_t inner;
  int length;
  int clusters;  // of a row, each of kMaxCluster blocks
  FewRowsPowers powers;
  float blocks[2 * kMaxCluster - 1];         // 0 .. blocks
  double lanes[32];                          // 0 .. vectors
  double warps[kFewRowsWarps];               // 0 .. warps
  double clusters_of[kFewRowsClusters - 1];  // 0 .. clusters
};

inline void set_powers(FewRowsParams& params, double gamma, int vec, int warps) {
  const auto times = [&](double a, double b) { return product_of_powers(gamma, a, b); };
  params.powers.gate = split_gamma(gamma);
  double power = gamma;  // of a step, a vector, a warp, a block, a cluster
  for (int i = 0; i < 8; ++i, power = times(power, gamma)) params.powers.steps[i] = rounded(power);
  power = gamma;
  for (int i = 1; i < vec; i *= 2) power = times(power, power);
  params.lanes[0] = params.warps[0] = params.clusters_of[0] = 1.0;
  for (int i = 1; i < 32; ++i) params.lanes[i] = times(params.lanes[i - 1], power);
  for (int i = 0; i < 5; ++i, power = times(power, power)) params.powers.doubled_lanes[i] = rounded(power);
  double doubled = power;
  for (int i = 0; i < 3; ++i, doubled = times(doubled, doubled)) params.powers.doubled_warps[i] = rounded(doubled);
  for (int i = 1; i < kFewRowsWarps; ++i) params.warps[i] = times(params.warps[i - 1], power);
  power = times(params.warps[warps - 1], power);
  double blocks = 1.0;
  for (int i = 0; i < 2 * kMaxCluster - 1; ++i, blocks = times(blocks, power)) params.blocks[i] = rounded(blocks);
  for (int i = 1; i < kMaxCluster; i *= 2) power = times(power, power);
  for (int i = 1; i < kFewRowsClusters - 1; ++i) params.clusters_of[i] = times(params.clusters_of[i - 1], power);
}

// `kMost` clusters of a row, a power of two.
template <typename T, bool kReverse, int kMost>
__global__ void __launch_bounds__(32 * kFewRowsWarps, 2) few_rows_kernel(const __grid_constant__ FewRowsParams params) {
  constexpr int kVec = 16 / sizeof(T), kEarlier = kMost - 1;
  constexpr unsigned kAll = 0xffffffffu;
  static_assert(kFewRowsWarps == 8);
  using Word = Vector<T, kVec>;
  int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int rank = blockIdx.x % kMaxCluster, number = static_cast<int>(blockIdx.x) / kMaxCluster;
  const int row = number / params.clusters, cluster = number - row * params.clusters;
  struct Addresses {
    uint32_t received, arrivals, totals, shares;
  };
  __shared__ alignas(16) float received[kMaxCluster];
  __shared__ alignas(8) uint64_t arrivals;
  __shared__ alignas(16) float totals[2 * kFewRowsWarps];  // of warps, the last one first, then 0
  __shared__ alignas(
      16) float shares[kFewRowsWarps];  // what is left at the block's end of a warp's share of the row before
  __shared__ FewRowsPowers shared_powers;
  __shared__ Addresses shared_addresses;
  launch_dependents();
  constexpr int kPowers = sizeof(FewRowsPowers) / sizeof(float);
  if (threadIdx.x < kPowers)
    reinterpret_cast<float*>(&shared_powers)[threadIdx.x] = reinterpret_cast<const float*>(&params.powers)[threadIdx.x];
  if (threadIdx.x < 2 * kFewRowsWarps) totals[threadIdx.x] = 0.f;
  if (threadIdx.x < kFewRowsWarps) shares[threadIdx.x] = 0.f;
  if (threadIdx.x == 0) {
    init_transaction_barrier(&arrivals, sizeof(received));
    shared_addresses = {
        shared_address(received), shared_address(&arrivals), shared_address(totals), shared_address(shares)};
  }
  __syncthreads();
  arrive_in_cluster_relaxed();

  const int64_t outer = params.inner == 1 ? row : row / params.inner, inner = row - outer * params.inner;
  const T* const input = static_cast<const T*>(params.input) + outer * params.input_outer + inner * params.input_inner;
  T* const output = static_cast<T*>(params.output) + outer * params.output_outer + inner * params.output_inner;
  const int length = params.length, vectors = (length + kVec - 1) / kVec;
  const int first = rank * blockDim.x + threadIdx.x, stride = kMaxCluster * blockDim.x, own = first + cluster * stride;
  const auto address = [&](int v) {
    return (kReverse ? vectors - 1 - v : v) * kVec;
  };  // of the v-th vector of the scan
  const int at = address(own);
  // A vector that is not whole is the last in memory: the row's first, or its last.
  T* to = output + at;
  int whole = own < vectors && at + kVec <= length, cut = own < vectors && !whole;
  int first_whole = !kReverse || address(first) + kVec <= length, first_cut = cluster > 0 && !first_whole;
  const Word* own_from = reinterpret_cast<const Word*>(input + at);
  const Word* froms[kMost];
  float weights[kMost];  // of the thread's vectors at the block's end, as if the block began its cluster's segment
  const double lane_power = params.lanes[lane];
  const float left = rounded(params.lanes[31 - lane] * params.warps[warps - 1 - warp]);
  float before = rounded(lane_power), block_before = rounded(lane_power * params.warps[warp]);
#pragma unroll
  for (int j = 0; j < kEarlier; ++j) {
    froms[j] = reinterpret_cast<const Word*>(input + address(first + min(j, cluster) * stride));
    weights[j] = power_times(left, rounded(params.clusters_of[max(cluster - 1 - j, 0)]));
    keep(froms[j]);
    keep(weights[j]);
  }
  // In the carry of block `lane`; a lane beyond the blocks sends nothing, one whose block lies before this one nothing
  // of this block's own.
  float own_weight = 0.f, share_weight = 0.f;
  if (lane < kMaxCluster) {
    own_weight = params.blocks[max(lane - 1 - rank, 0)];
    share_weight = params.blocks[lane + kMaxCluster - 1 - rank];
  }
  int sends = warp == 0 && lane<kMaxCluster, sends_own = lane> rank;
  keep(before);
  keep(block_before);
  keep(own_weight);
  keep(share_weight);
  keep(first_whole);
  keep(own_from);
  keep(to);
  const FewRowsPowers powers = in_registers(shared_powers);
  const Addresses addresses = in_registers(shared_addresses);
  uint32_t total_at = addresses.totals + 4 * (warps - 1 - warp), share_at = addresses.shares + 4 * warp;
  uint32_t remote_at = cluster_address(addresses.received + 4 * rank, lane % kMaxCluster),
           counter = cluster_address(addresses.arrivals, lane % kMaxCluster);
  hold(lane);
  hold(whole);
  hold(cut);
  hold(first_cut);
  hold(sends);
  hold(sends_own);
  hold(total_at);
  hold(share_at);
  hold(remote_at);
  hold(counter);
  const auto gate = gate_of<T>(powers.gate);
  const float doubled_steps[3] = {powers.steps[0], powers.steps[1], powers.steps[3]};
  wait_for_cluster();
  griddepcontrol_wait();

  Word here, earlier[kMost];
  load_if(whole, own_from, here);
#pragma unroll
  for (int j = 0; j < kEarlier; ++j) load_if(j < cluster && (j > 0 || first_whole), froms[j], earlier[j]);
  if (cut) here = load_vector<T, kVec>(input, at, 0, length);
  if (kEarlier > 0 && kReverse && first_cut) earlier[0] = load_vector<T, kVec>(input, address(first), 0, length);
  const auto total_of = [&](const Word& word) {
    float values[kVec];
    unpack_in_order<kReverse>(word, values);
    return weighed<kVec>(values, doubled_steps);
  };
  float total = total_of(here);
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const float other = __shfl_up_sync(kAll, total, 1 << i);
    if (lane >= 1 << i) total = fmaf(powers.doubled_lanes[i], other, total);
  }
  float lanes_before = __shfl_up_sync(kAll, total, 1);
  if (lane == 0) lanes_before = 0.f;
  if (lane == 31) store_at(total_at, total);
  if constexpr (kEarlier > 0) {
    // What has not been loaded is 0: without a branch, all vectors' sums are made side by side.
    float share = total_of(earlier[0]) * weights[0];
#pragma unroll
    for (int j = 1; j < kEarlier; ++j) share = fmaf(total_of(earlier[j]), weights[j], share);
#pragma unroll
    for (int i = 0; i < 5; ++i) share += __shfl_xor_sync(kAll, share, 1 << i);
    if (lane == 0) store_at(share_at, share);
  }
  __syncthreads();
  if (sends) {
    float of_warps[kFewRowsWarps], in_turn[kFewRowsWarps], of_shares[kFewRowsWarps] = {};
    load_at(addresses.totals, of_warps);
    if (kEarlier > 0) load_at(addresses.shares, of_shares);
#pragma unroll
    for (int w = 0; w < kFewRowsWarps; ++w) in_turn[w] = of_warps[kFewRowsWarps - 1 - w];
    float message = sum_of<kFewRowsWarps>(of_shares) * share_weight;
    if (sends_own)
      message = fmaf(own_weight, weighed<kFewRowsWarps>(in_turn, powers.doubled_warps),
          message);  // a total of no weight may be infinite
    store_async(remote_at, counter, message);
  }
  // The block's values, as if nothing lay before it.
  float warps_before[kFewRowsWarps];
  warps_before[0] = 0.f;
#pragma unroll
  for (int w = 1; w < kFewRowsWarps; ++w) {
    float value[1];
    load_at(total_at + 4 * (kFewRowsWarps - w), value);
    warps_before[w] = value[0];
  }
  float values[kVec];
  unpack_in_order<kReverse>(here, values);
  float y = fmaf(before, weighed<kFewRowsWarps>(warps_before, powers.doubled_warps), lanes_before);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = y = gate.step(values[i], y);
  hold(values[kVec - 1]);

  mbarrier_wait(addresses.arrivals, 0);
  float of_blocks[kMaxCluster];
  load_at(addresses.received, of_blocks);
  const float carry = sum_of<kMaxCluster>(of_blocks) * block_before;
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = fmaf(powers.steps[i], carry, values[i]);
  const Word result = pack_in_order<kReverse, T>(values);
  if (whole) *reinterpret_cast<Word*>(to) = result;
  if (cut) store_vector<T, kVec>(output, at, 0, length, result);
}

}  // namespace dcs
