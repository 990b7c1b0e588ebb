// Gradients along a strided time over fewer columns than threads that fill the GPU: what is scanned is carried from a
// tile to the next as in returns/tile_columns. Nothing of the step before a thread's first one is another thread's: the
// carry is the scan's result there, s, and what else the first step asks of it is read again.
#pragma once

#include "returns/serial_columns/column.cuh"
#include "returns/tile_columns/small.cuh"
#include "returns/tile_columns/steps.cuh"
#include "returns/tile_columns/tile_scan.cuh"

namespace dcs {

// What a thread makes of some neighboring steps (symbols: torch_dcs_ops/ops/returns/gradients.py). Bit i of a mask, and
// place i of what factors make, are of step i - 1, whose b step i's gradients ask for, too.
template <typename T, ColumnForm kForm, int kCount>
struct GradientSteps : TileColumn<T, kForm, kCount> {
  using Column = TileColumn<T, kForm, kCount>;
  using Column::call, Column::rates, Column::gated, Column::ratio;
  using Column::Column;
  using Column::kAll, Column::kSteps;
  using typename Column::Acc, typename Column::Resident;

  Acc results[kSteps];  // what is added to the carry, then b
  Resident of_targets;
  uint32_t cuts = 0;              // nothing is carried on
  uint32_t drops = 0, heavy = 0;  // v' is not read; it counts gamma, not what the next target leaves of it
  // Of what is carried on; of b, what is added to it; of v'.
  Acc gates[kAll ? kSteps : 1], ratios[kAll ? kSteps + 1 : 1], policies[kAll ? kSteps + 1 : 1],
      weights[kAll ? kSteps + 1 : 1];

  struct Step {
    Acc delta, factor;
    bool is_cut;
  };
  __device__ __forceinline__ Step step_of(int i) const {
    return {results[i], kAll ? gates[i] : Acc(1), (cuts & 1u << i) != 0};
  }
  // b of s, of step i - 1.
  __device__ __forceinline__ Acc base_of(int i, Acc s) const {
    if constexpr (kAll) return ratios[i] * s + policies[i];
    else return s;
  }
  // The gradient of v' of step i - 1, whose b is `base`.
  __device__ __forceinline__ Acc of_next(int i, Acc base) const {
    const bool is_heavy = heavy & 1u << i;
    Acc weight = is_heavy ? rates.gamma : rates.rest;
    if constexpr (kAll) weight = weights[i];
    return drops & 1u << i ? Acc(0) : weight * base;
  }
};

template <typename T, ColumnForm kForm, int kCount, typename Place>
struct GradientColumns : TileScan<GradientSteps<T, kForm, kCount>, Place> {
  using Scan = TileScan<GradientSteps<T, kForm, kCount>, Place>;
  using Scan::call, Scan::count, Scan::cuts, Scan::drops, Scan::first_step, Scan::heavy, Scan::rates, Scan::results;
  using Scan::gates, Scan::of_targets, Scan::policies, Scan::ratios, Scan::weights;
  using Scan::kAll, Scan::kLoads, Scan::kSteps;
  using Scan::Scan;
  using typename Scan::Acc;

  __device__ __forceinline__ bool has_one_before() const { return first_step > 0 && count > 0; }
  // A tensor's element of the step before the part's first.
  template <typename Element>
  __device__ __forceinline__ Element before(const ColumnTensor<const char>& tensor, Element otherwise) const {
    if (!tensor.last || !has_one_before()) return otherwise;
    return *reinterpret_cast<const Element*>(this->address_of(tensor, -1));
  }

  // The mask of flags of the step before the first and those of the part.
  template <bool kFull>
  __device__ __forceinline__ uint32_t read_mask(const ColumnTensor<const char>& tensor) const {
    uint32_t bits = 0;
    this->template read_flags<kFull>(tensor, true, bits);
    return bits << 1 | (first_step == 0 || before<uint8_t>(tensor, 0) ? 1u : 0u);
  }
  template <bool kFull>
  __device__ __forceinline__ void read_all_flags() {
    const uint32_t ends = read_mask<kFull>(call.terminated);
    drops = call.ends_lack ? ends : read_mask<kFull>(call.truncated);
    cuts = ends & ((1u << count) - 1);
    const int behind_last = call.length - first_step;
    heavy = call.has_own_values ? ~0u : ends | (behind_last <= kSteps && count > 0 ? 1u << behind_last : 0u);
  }

  // What step i - 1 leaves behind: the weights of its b, and of its v'.
  __device__ __forceinline__ void set_weights(int i, T rho, T of_pg, const ColumnStepRates<Acc>& own) {
    if constexpr (kAll) {
      const Acc known = cast<Acc>(rho);
      ratios[i] = this->ratio(known, call.clip_rho);
      policies[i] = call.next_values.last ? this->ratio(known, call.clip_pg) * cast<Acc>(of_pg) : Acc(0);
      Acc gamma = rates.gamma, rest = rates.rest, gate = 1;
      take_step_rates(call, rates, [&] { return own; }, gamma, rest, gate);
      weights[i] = heavy & 1u << i ? gamma : rest;
      if (i >= kSteps) return;
      gates[i] = gate * this->ratio(known, call.clip_c);
      if (call.next_values.last && !(cuts & 1u << i)) results[i] = this->gated(results[i], gate * policies[i]);
    }
  }
  __device__ __forceinline__ Acc rate_before(const ColumnTensor<const char>& tensor, bool is_narrow) const {
    Acc rate = 1;
    read_rate_bits<T>(is_narrow, [&](auto bits) {
      if (tensor.last && has_one_before()) rate = rate_of_bits<T>(before<decltype(bits)>(tensor, bits), is_narrow);
    });
    return rate;
  }

  // Reads all operands.
  template <bool kFull>
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int k = 0; k < kSteps; k += kLoads) {
      if (k >= this->part_steps()) break;
      T first[kLoads] = {}, other[kLoads] = {};
      this->template read<kFull>(call.rewards, k, first);
      this->template read<kFull>(call.values, k, other);
      if (k == 0) read_all_flags<kFull>();
#pragma unroll
      for (int i = k; i < k + kLoads; ++i) {
        results[i] = cast<Acc>(first[i - k]) + cast<Acc>(other[i - k]);
        of_targets.set(i, first[i - k]);
      }
    }
    if constexpr (kAll) load_factors<kFull>();
  }
  template <bool kFull>
  __device__ __forceinline__ void load_factors() {
    set_weights(0, before(call.rhos, T{}), before(call.next_values, T{}),
        {rate_before(call.gamma, call.gamma_is_narrow), rate_before(call.trace, call.trace_is_narrow)});
#pragma unroll
    for (int k = 0; k < kSteps; k += kLoads) {
      if (k >= this->part_steps()) break;
      T rhos[kLoads] = {}, of_pg[kLoads] = {};
      RateBits<T> gammas[kLoads], traces[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) gammas[i] = traces[i] = bits_of_one<T>();
      this->template read<kFull>(call.rhos, k, rhos);
      this->template read<kFull>(call.next_values, k, of_pg);
      this->template read_rates<kFull>(call.gamma, call.gamma_is_narrow, k, gammas);
      this->template read_rates<kFull>(call.trace, call.trace_is_narrow, k, traces);
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        set_weights(k + i + 1, rhos[i], of_pg[i],
            {rate_of_bits<T>(gammas[i], call.gamma_is_narrow), rate_of_bits<T>(traces[i], call.trace_is_narrow)});
    }
  }

  // All gradients, from the result of the step before the part.
  template <bool kFull>
  __device__ __forceinline__ void finish(Acc s) {
    const Acc of_next_before = this->of_next(0, this->base_of(0, s));
    Acc of_last = 0;
    this->template each<kFull>([&](int i) {
      const auto step = this->step_of(i);
      s = step.is_cut ? step.delta : this->gated(step.delta, step.factor * s);
      results[i] = this->base_of(i + 1, s);
      if constexpr (kAll) of_last = this->of_next(i + 1, results[i]);
    });
    if (call.bootstrap_gradient.last && count > 0 && first_step + count == call.length) {
      if constexpr (!kAll) of_last = this->of_next(count, s);
      *reinterpret_cast<T*>(this->address_of(call.bootstrap_gradient, 0)) = cast<T>(of_last);
    }
    this->template each_of<kFull, T, kSteps>(
        call.advantages, 0, [&](int i, T& element) { element = cast<T>(results[i]); });
    this->template each_of<kFull, T, kSteps>(call.targets, 0, [&](int i, T& element) {
      const Acc of_target = call.of_targets ? cast<Acc>(of_targets.get(i)) : Acc(0);
      Acc gradient = call.has_own_values ? of_target - results[i] : Acc(0);
      if (!call.has_next_values) gradient += i == 0 ? of_next_before : this->of_next(i, results[i - 1]);
      element = cast<T>(gradient);
    });
    this->template each_of<kFull, T, kSteps>(
        call.pg_advantages, 0, [&](int i, T& element) { element = cast<T>(this->of_next(i + 1, results[i])); });
  }
};

template <typename T, ColumnForm kForm>
__global__ void __launch_bounds__(kColumnThreads, tile_column_blocks(sizeof(T)))
    gradients_tile_columns_kernel(const __grid_constant__ TileColumnsParams<typename Types<T>::Acc> params) {
  run_tile<GradientColumns<T, kForm, tile_column_steps(sizeof(T), kForm), TilePlace>>(params);
}

template <typename T>
__global__ void __launch_bounds__(32 * kSmallTileWarps, kSmallTileBlocks)
    small_gradient_columns_kernel(const __grid_constant__ SmallTileParams<typename Types<T>::Acc> params) {
  run_small_tile<GradientColumns<T, ColumnForm::kGradients, kSmallTileSteps, SmallTilePlace>>(params);
}

}  // namespace dcs
