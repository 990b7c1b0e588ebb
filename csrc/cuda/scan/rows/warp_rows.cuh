// Rows of whole vectors that a warp holds whole (kRowPerWarp), up to 32 kChunks of them, or a block: packed_rows.cuh's
// way with rows of several chunks.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "scan/rows/packed_rows.cuh"

namespace dcs {

struct WarpRowsParams {
  ScanProblem problem;
  int64_t rows;
  int vectors;  // of a row
  float least;  // as of short rows, for powers over a warp's 32 vectors
};

// A number or a per-row gamma.
template <typename T, bool kBackward, bool kReverse, int kChunks, bool kRowPerWarp>
__global__ void __launch_bounds__(
    kRowPerWarp ? kPackedThreads : 32 * kTileWarps, kRowPerWarp ? (kBackward ? 12 : 16) : (kBackward ? 3 : 5))
    warp_rows_kernel(const __grid_constant__ WarpRowsParams params) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr bool kShort = sizeof(T) == 2;
  constexpr unsigned kAll = 0xffffffffu;
  using Word = Vector<T, kVec>;
  const ScanProblem& p = params.problem;
  overlap_launches();
  const int lane = threadIdx.x % 32, warp = kRowPerWarp ? 0 : threadIdx.x / 32,
            warps = kRowPerWarp ? 1 : blockDim.x / 32;
  const int lane_order = kReverse ? 31 - lane : lane;
  const int64_t row =
      kRowPerWarp ? static_cast<int64_t>(blockIdx.x) * (kPackedThreads / 32) + threadIdx.x / 32 : blockIdx.x;
  if (kRowPerWarp && row >= params.rows) return;
  const int64_t outer = p.inner == 1 ? row : row / p.inner, inner = p.inner == 1 ? 0 : row - outer * p.inner;
  const int first = warp * kChunks * 32 + lane;
  const auto offset = [&](const Strides& strides) { return strides.at(outer, inner); };
  const Word* const input =
      reinterpret_cast<const Word*>(static_cast<const T*>(p.input) + offset(p.input_strides)) + first;
  const bool whole = first - lane + 32 * kChunks <= params.vectors;
  const auto inside = [&](int k) { return whole || first + 32 * k < params.vectors; };
  Word x[kChunks], saved[kBackward ? kChunks : 1];
  float saved_after[kBackward ? kChunks : 1];  // the last lane's: the step after its vector
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    x[k] = Word{};
    if (inside(k)) x[k] = input[32 * k];
  }
  if constexpr (kBackward) {
    const T* const from = static_cast<const T*>(p.saved) + offset(p.saved_strides);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      saved[k] = Word{};
      if (inside(k)) saved[k] = reinterpret_cast<const Word*>(from)[first + 32 * k];
      const int after = kReverse ? (first + 32 * k) * kVec - 1 : (first + 32 * k + 1) * kVec;
      saved_after[k] = 0.f;
      if (lane_order == 31 && after >= 0 && after < params.vectors * kVec) saved_after[k] = cast<float>(from[after]);
    }
  }
  const double gamma = p.gamma_kind == GammaKind::kNumber
      ? p.gamma_value
      : load_gamma<double>(p.gamma, p.gamma_dtype, offset(p.gamma_strides), false);
  const Gate<float, kShort> gate = make_gate<float, kShort>(gamma);
  const bool narrow = fabsf(gate.value) <= 1.f && fabsf(gate.value) >= params.least;

  // Vectors of the row that the scan meets before this lane's, and how many of them lie in its own 32.
  const auto order = [&](int k) { return kReverse ? params.vectors - 1 - first - 32 * k : first + 32 * k; };
  const auto reach = [&](int k) { return kReverse ? min(lane_order, order(k)) : lane_order; };
  // Whether the row's first step lies in these 32 vectors, or in those after them: what came before is no part of the
  // row.
  const auto starts = [&](int k) {
    return kReverse ? first - lane + 32 * k + 32 >= params.vectors : first - lane + 32 * k == 0;
  };
  const auto from_before = [&](auto value, int distance) {
    return kReverse ? __shfl_down_sync(kAll, value, distance) : __shfl_up_sync(kAll, value, distance);
  };
  const auto in_scan_order = [](int j) { return kReverse ? kChunks - 1 - j : j; };
  float total[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    float values[kVec];
    unpack_in_order<kReverse>(x[k], values);
    float y = values[0];
#pragma unroll
    for (int i = 1; i < kVec; ++i) y = gate.step(values[i], y);
    total[k] = y;
  }

  __shared__ double warp_totals[kTileWarps];
  // The carry into this warp, given its total from nothing and gamma's power over it.
  const auto exchange = [&](double own, double power) {
    double carry = 0.0;
    if (kRowPerWarp || warps == 1) return carry;
    if (lane == 0) warp_totals[warp] = own;
    __syncthreads();
    if constexpr (kReverse) {
      for (int w = warps - 1; w > warp; --w)
        carry = w == warps - 1 ? warp_totals[w] : fold(warp_totals[w], power, carry);
    } else {
      for (int w = 0; w < warp; ++w) carry = w == 0 ? warp_totals[w] : fold(warp_totals[w], power, carry);
    }
    return carry;
  };
  if (narrow) {
    FloatPair power = pair_of(gate);
#pragma unroll
    for (int e = 1; e < kVec; e *= 2) power = squared(power);
    float lane_power = 1.f;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const float other = from_before(total[k], d);
        if (reach(k) >= d) total[k] = fmaf(power.high, other, total[k]);
      }
      if (lane_order & d) lane_power *= power.high;
      power = squared(power);
    }
    float chunk_total[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      chunk_total[k] = __shfl_sync(kAll, total[k], kReverse ? 0 : 31);
      const float before = from_before(total[k], 1);
      total[k] = lane_order == 0 ? 0.f : before;
    }
    float own = 0.f;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) own = fmaf(power.high, own, chunk_total[in_scan_order(j)]);
    double warp_power = static_cast<double>(power.high) + static_cast<double>(power.low);
#pragma unroll
    for (int e = 1; e < kChunks; e *= 2) warp_power *= warp_power;
    float carry = static_cast<float>(exchange(own, warp_power));
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int k = in_scan_order(j);
      total[k] = fmaf(lane_power, carry, total[k]);
      carry = fmaf(power.high, carry, chunk_total[k]);
    }
  } else {
    // In double throughout, chunk after chunk, in local memory: carries may lie beyond float's range, where the
    // recurrence comes back from.
    double entering[kChunks], chunk_total[kChunks], power = power_of<kVec>(gamma), lane_power = 1.0;
    for (int d = 1; d < 32; d *= 2) {
      if (lane_order & d) lane_power = power_mul(lane_power, power);
      power = power_mul(power, power);
    }
    double own = 0.0;
#pragma unroll 1
    for (int j = 0; j < kChunks; ++j) {
      const int k = in_scan_order(j);
      float mine = total[0];
#pragma unroll
      for (int i = 1; i < kChunks; ++i)
        if (i == k) mine = total[i];
      double sum = mine, factor = power_of<kVec>(gamma);
      for (int d = 1; d < 32; d *= 2) {
        const double other = from_before(sum, d);
        if (reach(k) >= d) sum = fold(sum, factor, other);
        factor = power_mul(factor, factor);
      }
      chunk_total[k] = shuffle(sum, kReverse ? 0 : 31);
      const double before = from_before(sum, 1);
      entering[k] = lane_order == 0 ? 0.0 : before;
      own = j == 0 || starts(k) ? chunk_total[k] : fold(chunk_total[k], power, own);
    }
    double carry = exchange(own, power_of<kChunks>(power));
#pragma unroll 1
    for (int j = 0; j < kChunks; ++j) {
      const int k = in_scan_order(j);
      const double into = order(k) > lane_order ? fold(entering[k], lane_power, carry) : entering[k];
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        if (i == k) total[i] = static_cast<float>(into);
      carry = starts(k) ? chunk_total[k] : fold(chunk_total[k], power, carry);
    }
  }

  float sum = 0.f;
  Word* const output = reinterpret_cast<Word*>(static_cast<T*>(p.output) + offset(p.output_strides)) + first;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const Word result = scan_vector<kReverse>(x[k], gate, total[k], order(k) == 0);
    if (inside(k)) output[32 * k] = result;
    if constexpr (kBackward) {
      const float part = gamma_terms<kReverse>(result, saved[k], lane_order == 31, saved_after[k]);
      if (inside(k)) sum += part;
    }
  }
  if constexpr (kBackward) {
    sum = warp_sum(sum);
    if constexpr (!kRowPerWarp) {
      __shared__ float sums[kTileWarps];
      if (lane == 0) sums[warp] = sum;
      __syncthreads();
      sum = sums[0];
      for (int w = 1; w < warps; ++w) sum += sums[w];
    }
    if (lane == 0 && warp == 0) {
      float* const to = static_cast<float*>(p.grad_gamma) + offset(p.grad_gamma_strides);
      to[0] = sum;
      for (int64_t j = 1; j < p.partials; ++j) to[j] = 0.f;
    }
  }
}

}  // namespace dcs
