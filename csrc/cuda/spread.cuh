// A few rows, too few to fill the GPU, each spread over the blocks of one cluster and held in registers. What such a call costs is latency: a block mails its
// total to the blocks behind it as soon as it knows it, and a block that has all its mail folds it in the order of the row.
#pragma once

#include "cluster.cuh"
#include "lookback.cuh"
#include "types.cuh"
#include "vector.cuh"

namespace dcs {

constexpr int kSpreadThreads = 512, kSpreadWarps = kSpreadThreads / 32, kSpreadBlocks = 16;  // of a cluster at most

struct SpreadParams {
  ScanProblem problem;
  uint32_t blocks;  // of a cluster
  int64_t padded;   // a row in whole vectors
};

template <typename T, bool kStep, bool kReverse, int kVectors>
__global__ void __launch_bounds__(kSpreadThreads, 1) spread_kernel(const __grid_constant__ SpreadParams params) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr bool kShort = sizeof(T) == 2;
  using Chunk = Vector<T, kVec>;
  const ScanProblem& p = params.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t row = blockIdx.x / params.blocks, rank = blockIdx.x - row * params.blocks;
  __shared__ double warp_totals[kSpreadWarps], warp_gates[kStep ? kSpreadWarps : 1];
  __shared__ double mailed_totals[kSpreadBlocks], mailed_gates[kStep ? kSpreadBlocks : 1];
  __shared__ uint64_t arrivals;
  if (threadIdx.x == 0) expect_mail(&arrivals, static_cast<int>(rank) * (kStep ? 16 : 8));
  arrive_in_cluster_relaxed();

  const auto offset_of = [&](const Strides& strides) {
    if (p.inner == 1) return row * strides.outer;
    const uint32_t inner = static_cast<uint32_t>(p.inner), outer = row / inner;
    return outer * strides.outer + (row - outer * inner) * strides.inner;
  };
  // Vectors in the order of the scan, counted from the warp's first, and where they lie in memory. Lanes read and write neighbouring vectors and scan kVectors
  // each; between the two they pass through shared memory, without a conflict of banks.
  constexpr int kSlice = 32 * kVectors;
  __shared__ Chunk passed[kSpreadWarps][kSlice];
  const auto slot = [&](int i) -> Chunk& { return passed[warp][i ^ (i >> 3 & (kVectors - 1))]; };
  const int vectors = static_cast<int>(params.padded / kVec), first = (static_cast<int>(rank) * kSpreadWarps + warp) * kSlice;
  const int pad = kReverse ? static_cast<int>(params.padded - p.length) : 0, length = static_cast<int>(p.length);
  const auto memory = [&](int i) { return (kReverse ? vectors - 1 - first - i : first + i) * kVec; };
  const int low = memory(kReverse ? kSlice - 1 : 0);
  const bool whole = low >= 0 && low + kSlice * kVec <= length;
  Chunk x[kVectors], g[kStep ? kVectors : 1];
  const auto load = [&](const T* from, Chunk(&to)[kVectors]) {
    if (whole) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) to[k] = *reinterpret_cast<const Chunk*>(from + memory(k * 32 + lane));
    } else {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) to[k] = load_vector<T, kVec>(from, memory(k * 32 + lane), 0, length);
    }
  };
  const auto to_own = [&](Chunk(&of)[kVectors]) {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kVectors; ++k) slot(k * 32 + lane) = of[k];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kVectors; ++k) of[k] = slot(lane * kVectors + k);
  };
  load(static_cast<const T*>(p.input) + offset_of(p.input_strides), x);
  float gate_before = 1.f;  // of the step before this thread's
  if constexpr (kStep) {
    const T* gates = static_cast<const T*>(p.gamma) + offset_of(p.gamma_strides);
    load(gates, g);
    if (p.shifted) {
      const int own = memory(lane * kVectors), before = kReverse ? own + kVec : own - 1;
      if (before >= 0 && before < length) gate_before = cast<float>(gates[before]);
    }
  }

  // Powers of one gamma: of a thread's steps 1, 2, 4, ... and `lane` times, of a warp's, of a block's.
  Gate<float, kShort> gate{};
  double lane_powers[5], lane_power = 1.0, warps_before = 1.0, warp_weight = 1.0, block_weight = 1.0;
  if constexpr (!kStep) {
    double gamma = p.gamma_value;
    if (p.gamma_kind != GammaKind::kNumber) gamma = load_gamma<double>(p.gamma, p.gamma_dtype, offset_of(p.gamma_strides), false);
    gate = make_gate<float, kShort>(gamma);
    double power = gamma;
#pragma unroll
    for (int e = 1; e < kVec; e *= 2) power = clamped_mul(power, power);
    const double vector_power = power;
#pragma unroll
    for (int k = 1; k < kVectors; ++k) power = clamped_mul(power, vector_power);
#pragma unroll
    for (int d = 0; d < 5; ++d) {
      lane_powers[d] = power;
      if (lane >> d & 1) lane_power = clamped_mul(lane_power, power);
      power = clamped_mul(power, power);
    }
    // Lane l takes warp l into this one, and block l into this.
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      if (lane < warp && (warp - 1 - lane) >> d & 1) warp_weight = clamped_mul(warp_weight, power);
      if (warp >> d & 1) warps_before = clamped_mul(warps_before, power);
      power = clamped_mul(power, power);
    }
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      if (lane < static_cast<int>(rank) && (rank - 1 - lane) >> d & 1) block_weight = clamped_mul(block_weight, power);
      power = clamped_mul(power, power);
    }
  }
  to_own(x);
  if constexpr (kStep) to_own(g);
  const auto advance = [&](float value, float factor, float y) { return kStep ? plain_step(value, factor, y) : gate.step(value, y); };
  const int first_step = rank == 0 && threadIdx.x == 0 ? pad : -1;
  const auto gates_of = [&](int k, float& before, float(&to)[kVec]) {
    float gates[kVec];
    unpack_in_order<kReverse>(g[kStep ? k : 0], gates);
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = !p.shifted ? gates[i] : i == 0 ? before : gates[(i + kVec - 1) % kVec];
    before = gates[kVec - 1];
  };

  float y = 0.f, product = 1.f, most = 0.f, before = gate_before;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float values[kVec], factors[kVec];
    unpack_in_order<kReverse>(x[k], values);
    if constexpr (kStep) gates_of(k, before, factors);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      y = k == 0 && (i == 0 || i == first_step) ? values[i] : advance(values[i], factors[i], y);
      if constexpr (kStep) {
        const float factor = k == 0 && i <= first_step ? 1.f : factors[i];
        most = fmaxf(most, fabsf(factor));
        product *= factor;
      }
    }
  }
  double total = y, gates = 1.0;
  if constexpr (kStep) {
    gates = product;
    if (!(most <= 1.f && fabsf(product) >= 0x1p-100f)) {
      gates = 1.0;
      before = gate_before;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        float factors[kVec];
        gates_of(k, before, factors);
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          if (k > 0 || i > first_step) gates = clamped_mul(gates, static_cast<double>(factors[i]));
      }
    }
  }
  const auto join = [&](int d, double& total, double& gates, double power) {  // with what lies d lanes before
    const double other = shuffle_up(total, d);
    if constexpr (kStep) {
      const double other_gates = shuffle_up(gates, d);
      if (lane >= d) {
        total = fold(total, gates, other);
        gates = clamped_mul(gates, other_gates);
      }
    } else {
      if (lane >= d) total = fold(total, power, other);
    }
  };
#pragma unroll
  for (int d = 0; d < 5; ++d) join(1 << d, total, gates, lane_powers[d]);
  if (lane == 31) {
    warp_totals[warp] = total;
    if constexpr (kStep) warp_gates[warp] = gates;
  }
  double entering = shuffle_up(total, 1), entering_gates = kStep ? shuffle_up(gates, 1) : lane_power;
  if (lane == 0) entering = 0.0, entering_gates = 1.0;
  __syncthreads();
  // The warps before this one; the last warp mails what its block has in all.
  double block_total = 0.0, block_gates = kStep ? 1.0 : warps_before;
  const auto fold_over = [&](int count, const double* totals, const double* of_gates, double weight, double& into, double& into_gates) {
    double all = lane < count ? totals[lane] : 0.0;
    if constexpr (kStep) {
      double product = lane < count ? of_gates[lane] : 1.0;
#pragma unroll
      for (int d = 1; d < 16; d *= 2) {
        const double later = __shfl_down_sync(0xffffffffu, all, d), later_gates = __shfl_down_sync(0xffffffffu, product, d);
        if ((lane & (2 * d - 1)) == 0) {
          all = fold(later, later_gates, all);
          product = clamped_mul(product, later_gates);
        }
      }
      into = shuffle(all, 0);
      into_gates = shuffle(product, 0);
    } else {
      all *= weight;
#pragma unroll
      for (int d = 8; d > 0; d /= 2) all += __shfl_xor_sync(0xffffffffu, all, d);
      into = shuffle(all, 0);
    }
  };
  fold_over(warp, warp_totals, warp_gates, warp_weight, block_total, block_gates);
  wait_for_cluster();  // all blocks have started
  if (warp == kSpreadWarps - 1) {
    const double own_power = kStep ? gates : clamped_mul(lane_power, lane_powers[0]);  // lane 31: of its warp
    const double whole_total = fold(total, own_power, block_total), whole_gates = clamped_mul(own_power, block_gates);
    const double sent = shuffle(whole_total, 31), sent_gates = kStep ? shuffle(whole_gates, 31) : 0.0;
    if (lane > static_cast<int>(rank) && lane < static_cast<int>(params.blocks)) {
      send_in_cluster(&mailed_totals[rank], &arrivals, lane, sent);
      if constexpr (kStep) send_in_cluster(&mailed_gates[rank], &arrivals, lane, sent_gates);
    }
  }
  double carry = 0.0;
  if (rank > 0) {
    wait_for_mail(&arrivals);
    double unused = 1.0;
    fold_over(static_cast<int>(rank), mailed_totals, mailed_gates, block_weight, carry, unused);
  }
  carry = fold(block_total, block_gates, carry);

  y = static_cast<float>(fold(entering, entering_gates, carry));
  before = gate_before;
  T* output = static_cast<T*>(p.output) + offset_of(p.output_strides);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float values[kVec], factors[kVec];
    unpack_in_order<kReverse>(x[k], values);
    if constexpr (kStep) gates_of(k, before, factors);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      y = k == 0 && i == first_step ? values[i] : advance(values[i], factors[i], y);
      values[i] = y;
    }
    slot(lane * kVectors + k) = pack_in_order<kReverse, T>(values);
  }
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Chunk result = slot(k * 32 + lane);
    if (whole) *reinterpret_cast<Chunk*>(output + memory(k * 32 + lane)) = result;
    else store_vector<T, kVec>(output, memory(k * 32 + lane), 0, length, result);
  }
}

}  // namespace dcs
