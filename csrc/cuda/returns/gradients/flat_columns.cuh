// Gradients of columns whose steps lie one behind the other, on the way of returns/tile_columns/flat.cuh, from a row's
// first step on. The carry is the scan's result at the step before.
#pragma once

#include "returns/gradients/weights.cuh"
#include "returns/tile_columns/flat_memory.cuh"
#include "returns/tile_columns/steps.cuh"

namespace dcs {

template <typename T, ColumnForm kForm>
using FlatGradientMemory = FlatTileMemory<TileColumn<T, kForm, flat_tile_batch(kForm)>, false>;

// Symbols: torch_dcs_ops/ops/returns/gradients.py.
template <typename T, ColumnForm kForm>
struct FlatGradientTile : FlatGradientMemory<T, kForm> {
  using Memory = FlatGradientMemory<T, kForm>;
  using Memory::at, Memory::call, Memory::column, Memory::count, Memory::first_line, Memory::gated, Memory::own_line,
      Memory::params, Memory::rates, Memory::ratio, Memory::read, Memory::strip, Memory::t;
  using Memory::kAll;
  using Memory::Memory;
  using typename Memory::Acc, typename Memory::Wide;
  using Weights = GradientWeights<Acc>;

  // What a step leaves to the next: what it makes of s, the discounts of v', and flags: it ends; it lacks v'.
  struct Left {
    Weights weights;
    Acc gamma, rest;
    bool ends, lacks;
  };
  Left before;      // of the part's first step
  int until_first;  // of the steps to come, how many before one that is its row's first

  // An element of the part's first step's predecessor, from memory where another tile has it.
  template <typename Element>
  __device__ __forceinline__ Element found_before(TileTensorOf which, Element otherwise) const {
    const TileTensor& tensor = params.tensors.of[which];
    if (!tensor.data) return otherwise;
    if (own_line > 0) return *reinterpret_cast<const Element*>(at[which] - tensor.row_bytes);
    return *reinterpret_cast<const Element*>(
        tensor.data + (this->lines_before() - 1) * tensor.row_bytes + column * static_cast<int>(sizeof(Element)));
  }
  __device__ __forceinline__ Left left_of(T rho, T of_pg, Acc step_gamma, Acc step_trace, bool ends, bool lacks) const {
    Left left{{}, rates.gamma, rates.rest, ends, lacks};
    if constexpr (kAll) {
      const Acc known = cast<Acc>(rho);
      Acc factor = 1;
      take_step_rates(
          call, rates, [&] { return ColumnStepRates<Acc>{step_gamma, step_trace}; }, left.gamma, left.rest, factor);
      const Acc policy = call.next_values.last ? ratio(known, call.clip_pg) * cast<Acc>(of_pg) : Acc(0);
      left.weights = gradient_weights(ratio(known, call.clip_rho), ratio(known, call.clip_c), policy, factor);
    }
    return left;
  }
  // The gradient of v' of the step that has left this, whose b is `base`. `is_last`: of its row.
  __device__ __forceinline__ Acc of_next(const Left& left, bool is_last, Acc base) const {
    const bool is_heavy = call.has_own_values || left.ends || is_last;
    return left.lacks ? Acc(0) : (is_heavy ? left.gamma : left.rest) * base;
  }

  // What the step before the part's first one has left, of the same row.
  __device__ __forceinline__ void find_before() {
    T rho{}, of_pg{};
    Acc gamma = 1, trace = 1;
    if constexpr (kAll) {
      rho = found_before(kRhosTensor, rho);
      of_pg = found_before(kNextTensor, of_pg);
      gamma = found_before(kGammaTensor, gamma);
      trace = found_before(kTraceTensor, trace);
    }
    const bool ends = found_before(kTerminatedTensor, uint8_t{}),
               lacks = call.ends_lack ? ends : found_before(kTruncatedTensor, uint8_t{});
    before = left_of(rho, of_pg, gamma, trace, ends, lacks);
  }
  // Asks for all operands, and for what another tile has of them.
  __device__ __forceinline__ void fetch() {
    Memory::fetch();
    until_first = this->until_row(this->into_row());
    before = {};
    if (own_line == 0 && has_before()) find_before();
  }
  __device__ __forceinline__ bool has_before() const { return until_first > 0 && count > 0; }

  // Some steps: what is scanned, and what they leave.
  template <int kSome>
  struct Batch {
    T given[kSome], other[kSome], rhos[kSome], of_pg[kSome];
    Acc gammas[kSome], traces[kSome];
    uint32_t ends, lacks, firsts, lasts;  // bits
  };
  template <int kSome>
  __device__ __forceinline__ void load(Batch<kSome>& b) {
#pragma unroll
    for (int i = 0; i < kSome; ++i) {
      b.given[i] = b.other[i] = b.rhos[i] = b.of_pg[i] = T{};
      b.gammas[i] = b.traces[i] = 1;
    }
    if (call.rewards.last) read(kRewardsTensor, b.given);
    if (call.values.last) read(kValuesTensor, b.other);
    if constexpr (kAll) {
      if (call.rhos.last) read(kRhosTensor, b.rhos);
      if (call.next_values.last) read(kNextTensor, b.of_pg);
      if (call.gamma.last) read(kGammaTensor, b.gammas);
      if (call.trace.last) read(kTraceTensor, b.traces);
    }
    b.ends = b.lacks = 0;
    this->template read_flags<kSome>(kTerminatedTensor, call.terminated.last, true, b.ends);
    this->template read_flags<kSome>(kTruncatedTensor, call.truncated.last, true, b.lacks);
    if (call.ends_lack) b.lacks = b.ends;
    // A row has more steps than a batch: one of them at most is a first one, and the one before it a last one.
    b.firsts = until_first < kSome ? 1u << until_first : 0;
    b.lasts = until_first > 0 && until_first <= kSome ? 1u << (until_first - 1) : 0;
    this->move_on(until_first, kSome);
  }
  template <int kSome>
  __device__ __forceinline__ Acc given_of(const Batch<kSome>& b, int i) const {
    return cast<Acc>(b.given[i]) + cast<Acc>(b.other[i]);
  }
  template <int kSome>
  __device__ __forceinline__ Left left_of(const Batch<kSome>& b, int i) const {
    return left_of(b.rhos[i], b.of_pg[i], b.gammas[i], b.traces[i], b.ends >> i & 1, b.lacks >> i & 1);
  }
  // s of a step that is not cut off the one before it, whose s is `y`.
  __device__ __forceinline__ Acc with_carry(const Left& left, Acc given, Acc y) const {
    return gated(given, kAll ? left.weights.carry(y) : y);
  }
  static __device__ __forceinline__ Acc base_of(const Left& left, Acc y) { return kAll ? left.weights.base(y) : y; }

  // The part's segment, from nothing.
  __device__ __forceinline__ Segment<Wide> add_up() {
    this->find_addresses();
    if (own_line > 0 && has_before()) find_before();
    const int first_until = until_first;
    Acc y = 0;
    Wide product = 1.0;
    if constexpr (kAll)
      product = call.row_rates ? whole_power(rates.carried, static_cast<unsigned>(t.part_steps)) : t.powers[0];
    bool closed = false;
    Left left = before;
    this->each_batch([&](auto some, bool is_first) {
      Batch<some()> b;
      load(b);
      [[maybe_unused]] Wide of_some = 1.0;  // four floats' product is within a double
#pragma unroll
      for (int i = 0; i < some(); ++i) {
        const Acc given = given_of(b, i), first = kAll ? gated(given, left.weights.carried) : given;
        const bool is_cut = left.ends || b.firsts >> i & 1;
        y = is_cut ? given : i == 0 && is_first ? first : with_carry(left, given, y);
        if constexpr (kAll) {
          const Wide factor = static_cast<Wide>(left.weights.factor);
          if (sizeof(T) > 4) product = power_mul(product, factor);
          else of_some *= factor;
        }
        closed = closed || is_cut;
        left = left_of(b, i);
      }
      if constexpr (kAll && sizeof(T) <= 4) product = power_mul(product, of_some);
    });
    until_first = first_until;
    return {static_cast<Wide>(y), product, closed};
  }

  // All gradients, from the result of the step before the part.
  __device__ __forceinline__ void finish(Acc y) {
    this->find_addresses();
    char *of_rewards = this->template address_in<T>(kAdvantagesTensor),
         *of_values = this->template address_in<T>(kTargetsTensor),
         *of_next_values = this->template address_in<T>(kPgTensor);
    Left left = before;
    Acc after = until_first == 0 ? Acc(0) : of_next(left, false, base_of(left, y));
    int line = static_cast<int>(strip) * params.lines + first_line + own_line;
    this->each_batch([&](auto some, bool) {
      Batch<some()> b;
      load(b);
      Acc rewards[some()], values[some()], next[some()];
#pragma unroll
      for (int i = 0; i < some(); ++i) {
        const bool is_first = b.firsts >> i & 1, is_last = b.lasts >> i & 1;
        const Acc given = given_of(b, i);
        y = left.ends || is_first ? given : with_carry(left, given, y);
        left = left_of(b, i);
        rewards[i] = base_of(left, y);
        const Acc of_target = call.of_targets ? cast<Acc>(b.given[i]) : Acc(0);
        values[i] = call.has_own_values ? of_target - rewards[i] : Acc(0);
        if (!call.has_next_values) values[i] += after;
        next[i] = of_next(left, is_last, rewards[i]);
        after = is_last ? Acc(0) : next[i];
        if (is_last && call.bootstrap_gradient.last)
          *reinterpret_cast<T*>(last_of_cell(call.bootstrap_gradient, params.length.of(static_cast<uint32_t>(line + i)),
              static_cast<uint32_t>(column))) = cast<T>(next[i]);
      }
      line += some();
      this->template write<some()>(of_rewards, call.advantages.last, [&](int i) { return cast<T>(rewards[i]); });
      this->template write<some()>(of_values, call.targets.last, [&](int i) { return cast<T>(values[i]); });
      this->template write<some()>(of_next_values, call.pg_advantages.last, [&](int i) { return cast<T>(next[i]); });
    });
  }
};

template <typename T, ColumnForm kForm>
__global__ void __launch_bounds__(kColumnThreads, tile_column_blocks(sizeof(T)))
    flat_gradient_columns_kernel(const __grid_constant__ TileColumnsParams<typename Types<T>::Acc> params) {
  run_flat_tile<FlatGradientTile<T, kForm>>(params);
}

}  // namespace dcs
