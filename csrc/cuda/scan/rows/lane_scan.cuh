// The row kernel's (tile_rows.cuh) gammas, and its scan across the lanes of a warp.
#pragma once

#include "scan/rows/tile.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

// The gamma of the tile's row, where there is none a step.
template <typename Kind>
struct RowsGammas {
  static constexpr bool kShort = Kind::kShort;
  Gate<float, kShort> gate{};
  double gamma = 1.0;

  __device__ __forceinline__ explicit RowsGammas(const RowsTile<Kind>& at) {
    if constexpr (!Kind::kStep) {
      const ScanProblem& p = at.p;
      gamma = p.gamma_kind == GammaKind::kNumber
          ? p.gamma_value
          : load_gamma<double>(p.gamma, p.gamma_dtype, row_offset(at.row, p.inner, p.gamma_strides), false);
      gate = make_gate<float, kShort>(gamma);
    }
  }
};

// The vectors of each chunk across the warp, from their totals.
template <typename Kind>
struct LaneScan {
  static constexpr int kVec = Kind::kVec, kChunks = Kind::kChunks;
  static constexpr bool kStep = Kind::kStep;
  float vector_total[kChunks];
  float carry_in[kChunks];  // from the lanes before in the chunk
  float chunk_total[kChunks];
  double lane_gates[kStep ? kChunks : 1];  // products of the gates of the lanes before
  double chunk_gates[kStep ? kChunks : 1];
  // In float where its range holds the products of a chunk's gates in full precision, else in double. `bounded`: no
  // product can overflow. Carries of the scan in double may lie beyond float's range, where only the recurrence comes
  // back from: they wait in local memory, which costs the float scan nothing.
  bool narrow = false, bounded = false;
  double* wide_carries;  // 2 * kChunks of them

  __device__ __forceinline__ double total_of(int k) const {
    return narrow ? static_cast<double>(chunk_total[k]) : wide_carries[2 * k + 1];
  }
  __device__ __forceinline__ double carry_into(int k) const {
    return narrow ? static_cast<double>(carry_in[k]) : wide_carries[2 * k];
  }
  __device__ __forceinline__ double gates_of(int k) const { return chunk_gates[kStep ? k : 0]; }

  // `carry_gates(k, to)`: a vector's step gates as factors of the carry's products.
  template <typename CarryGates>
  __device__ __forceinline__ void run(
      const RowsTile<Kind>& at, const RowsGammas<Kind>& gammas, const CarryGates& carry_gates) {
    choose(gammas, carry_gates);
    if (narrow) scan(float{}, at, gammas, carry_gates);
    else scan(double{}, at, gammas, carry_gates);
  }

 private:
  template <typename CarryGates>
  __device__ __forceinline__ void choose(const RowsGammas<Kind>& gammas, const CarryGates& carry_gates) {
    if constexpr (kStep) {
      float most = 0.f;
      bool fits = true;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        float product = 1.f, least = 1.f;
        float factors[kVec];
        carry_gates(k, factors);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float factor = fabsf(factors[i]);
          most = fmaxf(most, factor);
          least = fminf(least, factor);
          product *= factor;
        }
        // floor(log2), far below for a product that vanished. One with a gate of 0 is exact.
        const int exponent = least == 0.f ? 0 : static_cast<int>(__float_as_uint(product) >> 23) - 127;
        fits = fits && __reduce_add_sync(0xffffffffu, exponent) >= -100;
      }
      bounded = __all_sync(0xffffffffu, most <= 1.f);
      narrow = bounded && fits;
    } else {
      const auto fits = [](double size) {
        return size > (kVec == 8 ? 0.77 : 0.6) && size <= 1.0;
      };  // size^(32 * kVec) >= 1e-30
      narrow = fits(fabs(gammas.gamma));
      bounded = narrow;
    }
  }

  template <typename V, typename CarryGates>
  __device__ __forceinline__ void scan(
      V, const RowsTile<Kind>& at, const RowsGammas<Kind>& gammas, const CarryGates& carry_gates) {
    constexpr bool kWide = std::is_same_v<V, double>;
    const int lane = at.lane;
    V total[kChunks];
    V across[kStep ? kChunks : 1];
    double squared = 1.0, lane_power = 1.0;   // of a shared gamma
    const auto power_to = [&](double base) {  // base^kVec
#pragma unroll
      for (int e = 1; e < kVec; e *= 2) base = kWide ? power_mul(base, base) : base * base;
      return base;
    };
    const auto times = [&](V a, V b) {
      if constexpr (kWide) {
        if (!bounded) return clamped_mul(a, b);
      }
      return a * b;
    };
    if constexpr (!kStep) squared = power_to(gammas.gamma);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      total[k] = static_cast<V>(vector_total[k]);
      if constexpr (kStep) {
        float factors[kVec];
        carry_gates(k, factors);
        V product = static_cast<V>(factors[0]);
#pragma unroll
        for (int i = 1; i < kVec; ++i) product = times(product, static_cast<V>(factors[i]));
        across[k] = product;
      }
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const V other = shuffle_up(total[k], d);
        V factor;
        if constexpr (kStep) factor = across[k];
        else factor = static_cast<V>(squared);
        if (lane >= d) total[k] = fold(total[k], factor, other);
        if constexpr (kStep) {
          const V other_gates = shuffle_up(across[k], d);
          if (lane >= d) across[k] = times(across[k], other_gates);
        }
      }
      if constexpr (!kStep) {
        if (lane & d) lane_power = kWide ? power_mul(lane_power, squared) : lane_power * squared;
        squared = kWide ? power_mul(squared, squared) : squared * squared;
      }
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const V previous = shuffle_up(total[k], 1);
      const V entering = lane == 0 ? static_cast<V>(0.0) : previous;
      const V leaving = shuffle(total[k], 31);
      if constexpr (std::is_same_v<V, float>) {
        carry_in[k] = entering;
        chunk_total[k] = leaving;
      } else {
        wide_carries[2 * k] = entering;
        wide_carries[2 * k + 1] = leaving;
      }
      if constexpr (kStep) {
        const V previous_gates = shuffle_up(across[k], 1);
        lane_gates[k] = lane == 0 ? 1.0 : static_cast<double>(previous_gates);
        chunk_gates[k] = static_cast<double>(shuffle(across[k], 31));
      }
    }
    if constexpr (!kStep) {
      lane_gates[0] = lane_power;
      chunk_gates[0] = squared;
    }
  }
};

}  // namespace dcs
