// The row kernel's (tile_rows.cuh) gammas, and its scan across the lanes of a warp.
#pragma once

#include "scan/rows/tile.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

// The gammas that are no tensor of steps: one, or one of each packed row.
template <typename Kind>
struct RowsGammas {
  using Acc = typename Kind::Acc;
  using Wide = typename Kind::Wide;
  static constexpr int kVec = Kind::kVec, kChunks = Kind::kChunks;
  static constexpr bool kShort = Kind::kShort, kGeneral = Kind::kGeneral, kPackedEach = Kind::kPackedEach;
  // Packed rows do not share a gamma when each has its own; their vectors do not cross rows then.
  bool one_gamma;
  Gate<Acc, kShort> gate{};
  Wide gamma = cast<Wide>(1.0);
  Gate<Acc, kShort> own_gate[kPackedEach ? kChunks : 1];  // each row's gamma, and its power over a vector
  Acc vector_power[kPackedEach ? kChunks : 1];
  Wide own_gamma[kGeneral && !Kind::kStep ? kChunks : 1];  // packed rows with a gamma each

  __device__ __forceinline__ explicit RowsGammas(const RowsTile<Kind>& at)
      : one_gamma(!kPackedEach && (!kGeneral || !at.is_packed() || at.params.one_gamma)) {
    if constexpr (!Kind::kStep) {
      if (one_gamma) set(at, 0);
    }
  }

  // That at a position.
  __device__ __forceinline__ void set(const RowsTile<Kind>& at, int s) {
    const ScanProblem& p = at.p;
    gamma = p.gamma_kind == GammaKind::kNumber
        ? cast<Wide>(p.gamma_value)
        : load_gamma<Wide>(p.gamma, p.gamma_dtype, at.row_offset(at.row_of(s), p.gamma_strides), p.conjugate_gamma);
    gate = make_gate<Acc, kShort>(gamma);
  }

  __device__ __forceinline__ void load_each(const RowsTile<Kind>& at) {
    if constexpr (kPackedEach) {
      const ScanProblem& p = at.p;
      const auto load = [&](const auto* gammas) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          const int r = min(at.position(k) / at.time, at.rows_here - 1);
          const Wide own = cast<Wide>(gammas[at.row_offset(at.packed_row(r), p.gamma_strides)]);
          own_gate[k] = make_gate<Acc, kShort>(own);
          vector_power[k] = static_cast<Acc>(power_of<kVec>(own));
        }
      };
      switch (p.gamma_dtype) {
        case ElementType::Half: load(static_cast<const __half*>(p.gamma)); break;
        case ElementType::BFloat16: load(static_cast<const __nv_bfloat16*>(p.gamma)); break;
        case ElementType::Float: load(static_cast<const float*>(p.gamma)); break;
        default: load(static_cast<const double*>(p.gamma));
      }
    }
  }
};

// The vectors of each chunk across the warp, from their totals.
template <typename Kind>
struct LaneScan {
  using Acc = typename Kind::Acc;
  using Wide = typename Kind::Wide;
  static constexpr int kVec = Kind::kVec, kChunks = Kind::kChunks;
  static constexpr bool kStep = Kind::kStep, kGeneral = Kind::kGeneral, kPackedEach = Kind::kPackedEach,
                        kByChunk = Kind::kByChunk;
  static constexpr bool kTwoScans = std::is_same_v<Acc, float>;
  using Held = std::conditional_t<kTwoScans, float, Wide>;
  Acc vector_total[kChunks];
  Held carry_in[kChunks];  // from the lanes before in the chunk
  Held chunk_total[kChunks];
  Wide lane_gates[kByChunk ? kChunks : 1];  // products of the gates of the lanes before
  Wide chunk_gates[kByChunk ? kChunks : 1];
  // In float where its range holds the products of a chunk's gates in full precision, else in the wide type. `bounded`:
  // no product can overflow. Carries of the wide scan may lie beyond float's range, where only the recurrence comes
  // back from: they wait in local memory, which costs the float scan nothing.
  bool narrow = false, bounded = false;
  Wide* wide_carries;  // 2 * kChunks of them where there are two scans

  __device__ __forceinline__ Wide total_of(int k) const {
    return kTwoScans && !narrow ? wide_carries[2 * k + 1] : cast<Wide>(chunk_total[k]);
  }
  __device__ __forceinline__ Wide carry_into(int k) const {
    return kTwoScans && !narrow ? wide_carries[2 * k] : cast<Wide>(carry_in[k]);
  }
  __device__ __forceinline__ Piece<Wide> chunk_piece(int k, uint32_t closed) const {
    return {total_of(k), chunk_gates[kByChunk ? k : 0], (closed >> k & 1) != 0};
  }

  // `carry_gates(k, to)`: a vector's step gates as factors of the carry's products.
  template <typename CarryGates>
  __device__ __forceinline__ void run(const RowsTile<Kind>& at, const RowsCuts<Kind>& cuts,
      const RowsGammas<Kind>& gammas, const CarryGates& carry_gates) {
    if constexpr (kTwoScans) {
      choose(at, gammas, carry_gates);
      if (narrow) scan(Acc{}, at, cuts, gammas, carry_gates);
      else scan(Wide{}, at, cuts, gammas, carry_gates);
    } else {
      scan(Wide{}, at, cuts, gammas, carry_gates);
    }
  }

 private:
  template <typename CarryGates>
  __device__ __forceinline__ void choose(
      const RowsTile<Kind>& at, const RowsGammas<Kind>& gammas, const CarryGates& carry_gates) {
    if constexpr (kStep) {
      float most = 0.f;
      bool fits = true;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        float product = 1.f;
        Acc factors[kVec];
        carry_gates(k, factors);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const float factor = fabsf(factors[i]);
          most = fmaxf(most, factor);
          product *= factor;
        }
        const int exponent = static_cast<int>(__float_as_uint(product) >> 23) - 127;  // floor(log2), far below for 0
        fits = fits && __reduce_add_sync(0xffffffffu, exponent) >= -100;
      }
      bounded = __all_sync(0xffffffffu, most <= 1.f);
      narrow = bounded && fits;
    } else {
      const auto fits = [](double size) {
        return size > (kVec == 8 ? 0.77 : 0.6) && size <= 1.0;
      };  // size^(32 * kVec) >= 1e-30
      if constexpr (kPackedEach) {
        const int span = at.span();
        narrow = true;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          Acc most = fabsf(gammas.vector_power[k]);
          narrow = narrow && most <= 1.f;
          for (int d = 1; d < 32 && d < span; d *= 2) most *= most;
          narrow = narrow && most >= 1e-30f;
        }
        narrow = __all_sync(0xffffffffu, narrow);
      } else {
        narrow = fits(fabs(gammas.gamma));
      }
      if (kGeneral && !gammas.one_gamma) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) narrow = narrow && fits(fabs(gammas.own_gamma[k]));
        narrow = __all_sync(0xffffffffu, narrow);
      }
      bounded = narrow;
    }
  }

  template <typename V, typename CarryGates>
  __device__ __forceinline__ void scan(V, const RowsTile<Kind>& at, const RowsCuts<Kind>& cuts,
      const RowsGammas<Kind>& gammas, const CarryGates& carry_gates) {
    const int lane = at.lane;
    V total[kChunks];
    V across[kByChunk ? kChunks : 1];
    Wide squared = cast<Wide>(1.0), lane_power = cast<Wide>(1.0);  // of one gamma
    const auto power_to = [&](Wide base) {                         // base^kVec
#pragma unroll
      for (int e = 1; e < kVec; e *= 2) base = std::is_same_v<V, Wide> ? power_mul(base, base) : base * base;
      return base;
    };
    const auto times = [&](V a, V b) {
      if constexpr (std::is_same_v<V, Wide>) {
        if (!bounded) return clamped_mul(a, b);
      }
      return a * b;
    };
    if constexpr (!kStep && !kPackedEach) {
      squared = power_to(gammas.gamma);
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      total[k] = cast<V>(vector_total[k]);
      if constexpr (kStep) {
        Acc factors[kVec];
        carry_gates(k, factors);
        V product = cast<V>(factors[0]);
#pragma unroll
        for (int i = 1; i < kVec; ++i) product = times(product, cast<V>(factors[i]));
        across[k] = product;
      } else if constexpr (kGeneral) {
        across[k] = cast<V>(power_to(gammas.own_gamma[k]));
      } else if constexpr (kPackedEach) {
        if constexpr (std::is_same_v<V, Wide>) across[k] = power_to(whole_gamma(gammas.own_gate[k]));
        else across[k] = gammas.vector_power[k];
        lane_gates[k] = cast<Wide>(1.0);
      }
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      if (Kind::kAtVectors && d >= at.span()) break;  // no row reaches farther
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const V other = shuffle_up(total[k], d);
        V factor;
        if constexpr (kByChunk) factor = across[k];
        else factor = cast<V>(squared);
        if (cuts.reach[k] >= d) total[k] = fold(total[k], factor, other);
        if constexpr (kStep) {
          const V other_gates = shuffle_up(across[k], d);
          if (lane >= d) across[k] = times(across[k], other_gates);
        } else if constexpr (kGeneral || kPackedEach) {
          if (kGeneral && d == 1) lane_gates[k] = cast<Wide>(1.0);
          if (lane & d) lane_gates[k] = clamped_mul(lane_gates[k], cast<Wide>(across[k]));
          across[k] = times(across[k], across[k]);
        }
      }
      if constexpr (!kByChunk) {
        if (lane & d) lane_power = std::is_same_v<V, Wide> ? power_mul(lane_power, squared) : lane_power * squared;
        squared = std::is_same_v<V, Wide> ? power_mul(squared, squared) : squared * squared;
      }
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const V previous = shuffle_up(total[k], 1);
      const V entering = lane == 0 ? cast<V>(0.0) : previous;
      const V leaving = shuffle(total[k], 31);
      if constexpr (std::is_same_v<V, Held>) {
        carry_in[k] = entering;
        chunk_total[k] = leaving;
      } else {
        wide_carries[2 * k] = entering;
        wide_carries[2 * k + 1] = leaving;
      }
      if constexpr (kStep) {
        const V previous_gates = shuffle_up(across[k], 1);
        lane_gates[k] = lane == 0 ? cast<Wide>(1.0) : cast<Wide>(previous_gates);
        chunk_gates[k] = cast<Wide>(shuffle(across[k], 31));
      } else if constexpr (kGeneral || kPackedEach) {
        chunk_gates[k] =
            cast<Wide>(across[k]);  // a chunk that the carry passes lies in one row: any lane has its gamma
      }
    }
    if constexpr (!kByChunk) {
      lane_gates[0] = lane_power;
      chunk_gates[0] = squared;
    }
  }
};

}  // namespace dcs
