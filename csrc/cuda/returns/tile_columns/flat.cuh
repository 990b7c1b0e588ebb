// The temporal difference scan along a strided time whose steps lie one behind the other, of fewer columns than a line
// of memory has room for: some steps of all columns are one range of memory, of every operand. It comes to shared
// memory in whole vectors whatever its alignment; threads go through their steps there twice, for their totals and
// from what enters them; results overwrite the operands and go back as they came. A row of few steps is cut off the
// one behind it in time, as one sequence.
#pragma once

#include "returns/tile_columns/flat_memory.cuh"
#include "returns/tile_columns/steps.cuh"

namespace dcs {

template <typename T, ColumnForm kForm>
using FlatTileSteps = TileSteps<T, kForm, flat_tile_batch(kForm)>;

template <typename T, ColumnForm kForm>
struct FlatTile : FlatTileMemory<FlatTileSteps<T, kForm>, true> {
  using Memory = FlatTileMemory<FlatTileSteps<T, kForm>, true>;
  using Memory::at, Memory::column, Memory::count, Memory::first_step, Memory::params, Memory::read, Memory::read_flags,
      Memory::read_rates, Memory::strip, Memory::t;
  using Memory::call, Memory::cuts, Memory::drops, Memory::rates, Memory::results, Memory::rhos, Memory::values;
  using Memory::kAll, Memory::kGates;
  using Memory::Memory;
  using typename Memory::Acc, typename Memory::Step, typename Memory::Wide;

  // Of the steps to come.
  int next_step;   // in the order of the scan
  int until_last;  // how many before one that is its row's last
  Acc behind;      // the value of the state behind the next

  // The value behind a row whose last step this is.
  __device__ __forceinline__ Acc bootstrap_of(int step) const {
    if (!call.bootstrap.last) return 0;
    const uint32_t line = (strip + 1) * static_cast<uint32_t>(params.lines) - 1 - static_cast<uint32_t>(step);
    return cast<Acc>(*reinterpret_cast<const T*>(
        last_of_cell(call.bootstrap, params.length.of(line), static_cast<uint32_t>(column))));
  }

  // Before the first step.
  __device__ __forceinline__ void begin() {
    const uint32_t into = this->into_row();
    next_step = first_step;
    until_last = this->until_row(into);
    this->find_addresses();
    T value{};
    if (into != 0 && count > 0 && !call.has_next_values && call.values.last)
      value = *reinterpret_cast<const T*>(at[kValuesTensor] + params.tensors.of[kValuesTensor].row_bytes);
    behind = cast<Acc>(value);
  }
  // The next steps.
  template <int kSome>
  __device__ __forceinline__ void load() {
    T rewards[kSome], own[kSome] = {}, ratios[kSome];
    Acc own_values[kSome], following[kSome];
    RateBits<T> gammas[kSome], traces[kSome];
    read(kRewardsTensor, rewards);
    if (call.values.last) read(kValuesTensor, own);
    if constexpr (kGates) {
      if (call.rhos.last) read(kRhosTensor, ratios);
    }
    if constexpr (kAll) {
#pragma unroll
      for (int i = 0; i < kSome; ++i) gammas[i] = traces[i] = bits_of_one<T>();
      if (call.gamma.last) read_rates(kGammaTensor, call.gamma_is_narrow, gammas);
      if (call.trace.last) read_rates(kTraceTensor, call.trace_is_narrow, traces);
    }
    uint32_t truncates = 0;
    const uint32_t lasts = until_last < kSome ? 1u << until_last : 0;
    drops = 0;
    this->template read_flags<kSome>(kTerminatedTensor, call.terminated.last, call.terminated_is_bool, drops);
    this->template read_flags<kSome>(kTruncatedTensor, call.truncated.last, call.truncated_is_bool, truncates);
    this->set_flags(truncates, lasts);
#pragma unroll
    for (int i = 0; i < kSome; ++i) own_values[i] = cast<Acc>(own[i]);
    if (call.has_next_values) {
      T next[kSome];
#pragma unroll
      for (int i = 0; i < kSome; ++i) next[i] = own[i];
      if (call.next_values.last) read(kNextTensor, next);
#pragma unroll
      for (int i = 0; i < kSome; ++i) following[i] = cast<Acc>(next[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSome; ++i) following[i] = i == 0 ? behind : own_values[i - 1];
      if (lasts) {
        const Acc last = bootstrap_of(next_step + until_last);
#pragma unroll
        for (int i = 0; i < kSome; ++i) following[i] = lasts & 1u << i ? last : following[i];
      }
      behind = own_values[kSome - 1];
    }
    next_step += kSome;
    this->move_on(until_last, kSome);
#pragma unroll
    for (int i = 0; i < kSome; ++i) {
      Acc own_gamma = 1, own_trace = 1;
      if constexpr (kAll) {
        own_gamma = rate_of_bits<T>(gammas[i], call.gamma_is_narrow);
        own_trace = rate_of_bits<T>(traces[i], call.trace_is_narrow);
      }
      this->set_step(i, cast<Acc>(rewards[i]), call.has_own_values, own_values[i], following[i], own_gamma, own_trace);
      values.set(i, own[i]);
      if constexpr (kGates) rhos.set(i, ratios[i]);
    }
  }
  // The part's segment, from nothing.
  __device__ __forceinline__ Segment<Wide> add_up() {
    begin();
    const int first_until_last = until_last;
    const Acc first_behind = behind;  // results take its place
    Acc y = 0;
    Wide product = 1.0;
    uint32_t closed = 0;
    if constexpr (kGates)
      product = call.row_rates ? whole_power(rates.carried, static_cast<unsigned>(t.part_steps)) : t.powers[0];
    this->each_batch([&](auto some, bool is_first) {
      load<some()>();
      [[maybe_unused]] Wide of_some;  // four floats' product is within a double
#pragma unroll
      for (int i = 0; i < some(); ++i) {
        const Step step = this->step_of(i);
        const bool begins = i == 0 && is_first;
        y = begins || step.is_cut ? step.delta : this->gated(step.delta, step.factor * y);
        if constexpr (kGates) {
          const Wide factor = static_cast<Wide>(step.factor);
          of_some = i % kTileBatch == 0 ? factor : of_some * factor;
          if (sizeof(T) > 4 || i % kTileBatch == kTileBatch - 1 || i + 1 == some())
            product = power_mul(product, sizeof(T) > 4 ? factor : of_some);
        }
      }
      closed |= cuts;
    });
    behind = first_behind;
    next_step = first_step;
    until_last = first_until_last;
    return {static_cast<Wide>(y), product, closed != 0};
  }

  // All results, from what enters the part.
  __device__ __forceinline__ void finish(Acc y) {
    this->find_addresses();
    char *advantages = this->template address_in<T>(kAdvantagesTensor),
         *targets = this->template address_in<T>(kTargetsTensor),
         *pg_advantages = kGates ? this->template address_in<T>(kPgTensor) : nullptr;
    this->each_batch([&](auto some, bool) {
      load<some()>();
      Acc pg[some()];
#pragma unroll
      for (int i = 0; i < some(); ++i) pg[i] = this->finish_step(i, y);
      if constexpr (kGates)
        this->template write<some()>(pg_advantages, call.pg_advantages.last, [&](int i) { return cast<T>(pg[i]); });
      this->template write<some()>(advantages, call.advantages.last, [&](int i) { return cast<T>(results[i]); });
      this->template write<some()>(targets, call.targets.last, [&](int i) { return this->target_of(i); });
    });
  }
};

template <typename T, ColumnForm kForm>
__global__ void __launch_bounds__(kColumnThreads, tile_column_blocks(sizeof(T)))
    flat_columns_kernel(const __grid_constant__ TileColumnsParams<typename Types<T>::Acc> params) {
  run_flat_tile<FlatTile<T, kForm>>(params);
}

}  // namespace dcs
