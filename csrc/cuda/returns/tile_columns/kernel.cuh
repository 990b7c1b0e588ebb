// The temporal difference scan along a strided time over fewer columns than threads that fill the GPU. A block takes a
// tile, some steps of a span of columns; each of its threads reads all operands of some neighboring steps of a column,
// once and by the element, and holds their differences and what is carried over them. Totals meet in shared memory and,
// between the tiles of a strip, in global memory (scan/columns/tile_carries.cuh). It asks nothing of alignment or
// strides, and takes every option.
#pragma once

#include "returns/tile_columns/small.cuh"
#include "returns/tile_columns/steps.cuh"
#include "returns/tile_columns/tile_scan.cuh"

namespace dcs {

template <typename T, ColumnForm kForm, int kCount, typename Place>
struct TileColumns : TileScan<TileSteps<T, kForm, kCount>, Place> {
  using Scan = TileScan<TileSteps<T, kForm, kCount>, Place>;
  using Scan::call, Scan::count, Scan::drops, Scan::first_step, Scan::results, Scan::rhos, Scan::values;
  using Scan::kAll, Scan::kGates, Scan::kLoads, Scan::kSteps;
  using Scan::Scan;
  using typename Scan::Acc;

  template <bool kFull>
  __device__ __forceinline__ void read_all_flags() {
    uint32_t truncates = 0;
    this->template read_flags<kFull>(call.terminated, call.terminated_is_bool, drops);
    this->template read_flags<kFull>(call.truncated, call.truncated_is_bool, truncates);
    this->set_flags(truncates, first_step == 0 ? 1u : 0u);
  }

  // The value of the state behind the part's first step.
  __device__ __forceinline__ T value_behind() const {
    const bool is_last = first_step == 0;
    if (call.has_next_values || count == 0 || !(is_last ? call.bootstrap.last : call.values.last)) return T{};
    if (is_last) return *reinterpret_cast<const T*>(this->address_of(call.bootstrap, 0));
    return *reinterpret_cast<const T*>(this->address_of(call.values, -1));
  }

  // Reads all operands.
  template <bool kFull>
  __device__ __forceinline__ void load() {
    const bool is_both = call.next_values.last;  // of next states beside the steps' own
    T behind = value_behind();
#pragma unroll
    for (int k = 0; k < kSteps; k += kLoads) {
      if (k >= this->part_steps()) break;
      T rewards[kLoads], own[kLoads] = {}, ratios[kLoads];
      RateBits<T> gammas[kLoads] = {}, traces[kLoads] = {};
      this->template read<kFull>(call.rewards, k, rewards);
      this->template read<kFull>(is_both ? call.next_values : call.values, k, own);
      if constexpr (kGates) this->template read<kFull>(call.rhos, k, ratios);
      if constexpr (kAll) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) gammas[i] = traces[i] = bits_of_one<T>();
        this->template read_rates<kFull>(call.gamma, call.gamma_is_narrow, k, gammas);
        this->template read_rates<kFull>(call.trace, call.trace_is_narrow, k, traces);
      }
      if (k == 0) this->template read_all_flags<kFull>();
      this->template each<kFull, kLoads>(
          [&](int i) {
            T following = behind;
            if (call.has_next_values) following = own[i - k];
            Acc own_gamma = 1, own_trace = 1;
            if constexpr (kAll) {
              own_gamma = rate_of_bits<T>(gammas[i - k], call.gamma_is_narrow);
              own_trace = rate_of_bits<T>(traces[i - k], call.trace_is_narrow);
            }
            this->set_step(i, cast<Acc>(rewards[i - k]), call.has_own_values && !is_both, cast<Acc>(own[i - k]),
                cast<Acc>(following), own_gamma, own_trace);
            behind = own[i - k];
          },
          k);
      if (is_both) {
        // In the registers of the next states' values.
        this->template read<kFull>(call.values, k, own);
        this->template each<kFull, kLoads>([&](int i) { this->take_from_difference(i, cast<Acc>(own[i - k])); }, k);
      }
#pragma unroll
      for (int i = k; i < k + kLoads; ++i) {
        values.set(i, own[i - k]);
        if constexpr (kGates) rhos.set(i, ratios[i - k]);
      }
    }
  }

  // All results, from what enters the part.
  template <bool kFull>
  __device__ __forceinline__ void finish(Acc y) {
    char* pg_at = nullptr;
    if constexpr (kGates) {
      if (call.pg_advantages.last) pg_at = this->address_of(call.pg_advantages, 0);
    }
    this->template each<kFull>([&](int i) {
      const Acc pg = this->finish_step(i, y);
      if constexpr (kGates) {
        if (pg_at) {
          *reinterpret_cast<T*>(pg_at) = cast<T>(pg);
          pg_at += call.pg_advantages.back;
        }
      }
    });
    this->template each_of<kFull, T, kSteps>(
        call.advantages, 0, [&](int i, T& element) { element = cast<T>(results[i]); });
    this->template each_of<kFull, T, kSteps>(
        call.targets, 0, [&](int i, T& element) { element = cast<T>(this->target_of(i)); });
  }
};

template <typename T, ColumnForm kForm>
__global__ void __launch_bounds__(kColumnThreads, tile_column_blocks(sizeof(T)))
    tile_columns_kernel(const __grid_constant__ TileColumnsParams<typename Types<T>::Acc> params) {
  run_tile<TileColumns<T, kForm, tile_column_steps(sizeof(T), kForm), TilePlace>>(params);
}

template <typename T>
__global__ void __launch_bounds__(32 * kSmallTileWarps, kSmallTileBlocks)
    small_tile_columns_kernel(const __grid_constant__ SmallTileParams<typename Types<T>::Acc> params) {
  run_small_tile<TileColumns<T, ColumnForm::kPlain, kSmallTileSteps, SmallTilePlace>>(params);
}

}  // namespace dcs
