// The temporal difference scan along a strided time over fewer columns than threads that fill the GPU. A block takes a
// tile, some steps of a span of columns; each of its threads reads all operands of some neighboring steps of a column,
// once and by the element, and holds their differences and what is carried over them. Totals meet in shared memory and,
// between the tiles of a strip, in global memory (scan/columns/tile_carries.cuh). It asks nothing of alignment or
// strides, and takes every option.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/known_address.cuh"
#include "returns/tile_columns/params.cuh"
#include "returns/tile_columns/steps.cuh"
#include "scan/columns/tile_carries.cuh"

namespace dcs {

template <typename T, ColumnForm kForm>
using TileColumnsSteps = TileSteps<T, kForm, tile_column_steps(sizeof(T), kForm)>;

template <typename T, ColumnForm kForm>
struct TileColumns : TileColumnsSteps<T, kForm> {
  using Steps = TileColumnsSteps<T, kForm>;
  using Steps::call, Steps::cuts, Steps::drops, Steps::rates, Steps::results, Steps::rhos, Steps::values;
  using Steps::kAll, Steps::kGates, Steps::kSteps;
  using typename Steps::Acc, typename Steps::Step, typename Steps::Wide;
  static constexpr int kBatch = std::min(kSteps, kTileBatch);
  static constexpr int kLoads = kAll ? kBatch : kSteps;  // on their way before the first use
  using Carries = TileCarries<T, kGates, 1, 2>;

  const TileColumnsParams<Acc>& params;
  const ResidentColumnsPlan& t = params.carries.plan;
  uint32_t tile, strip;
  int outer, first_column;
  int part, column, width;  // column of the block's `width`; a thread without one of its own does what another does
  bool works;
  int first_step, count;  // in the order of the scan

  __device__ __forceinline__ explicit TileColumns(const TileColumnsParams<Acc>& given)
      : Steps(given.call), params(given) {
    find_steps();
    this->find_rates(outer, first_column + column);
  }

  // The thread's part of the tile. Also after the exchange, which has no registers for what is quickly found again.
  __device__ __forceinline__ void find_steps() {
    uint32_t thread = threadIdx.x, block = blockIdx.x;
    asm volatile("" : "+r"(thread), "+r"(block));
    tile = params.carries.strips.of(block);
    strip = block - tile * params.carries.strips.divisor;
    outer = static_cast<int>(params.carries.spans.of(strip));
    first_column = (static_cast<int>(strip) - outer * t.spans) * t.span;
    width = min(t.span, static_cast<int>(params.carries.problem.inner) - first_column);
    const int own_part = static_cast<int>(thread * t.span_inverse >> 16);
    const int own_column = static_cast<int>(thread) - own_part * t.span;
    works = own_part < t.parts && own_column < width;
    part = min(own_part, t.parts - 1);
    column = min(own_column, width - 1);
    first_step = (static_cast<int>(tile) * t.parts + part) * t.part_steps;
    count = max(0, min(t.part_steps, call.length - first_step));
  }
  // Whether the warp's threads have all of their steps. Not by `count`: nvcc 13.0 takes a predicate of the instruction
  // that bounds it for count == part_steps, and that is true of a part behind the last step, too.
  __device__ __forceinline__ bool is_full() const {
    return __all_sync(0xffffffffu, first_step + t.part_steps <= call.length);
  }

  // Batches of the steps that there are, of kCount from one on; kFull: all of a part's.
  template <bool kFull, int kCount = kSteps, typename Visit>
  __device__ __forceinline__ void each(const Visit& visit, int from = 0) const {
#pragma unroll
    for (int k = 0; k < kCount; k += kBatch) {
      if (from + k >= (kFull ? t.part_steps : count)) break;
#pragma unroll
      for (int i = k; i < k + kBatch && i < kCount; ++i)
        if (kFull || from + i < count) visit(from + i);
    }
  }

  // A tensor's element of the part's step `step`.
  template <typename Byte>
  __device__ __forceinline__ Byte* address_of(const ColumnTensor<Byte>& tensor, int step) const {
    return known_address(
        last_of_cell(tensor, static_cast<uint32_t>(outer), static_cast<uint32_t>(first_column + column)) +
        static_cast<int64_t>(first_step + step) * tensor.back);
  }
  // visit(step, its element) in the order of the scan; the first of them is `from` the part's first.
  template <bool kFull, typename Element, int kCount, typename Byte, typename Visit>
  __device__ __forceinline__ void each_of(const ColumnTensor<Byte>& tensor, int from, const Visit& visit) const {
    using Own = std::conditional_t<std::is_const_v<Byte>, const Element, Element>;
    if (!tensor.last) return;
    Byte* at = address_of(tensor, from);
    each<kFull, kCount>(
        [&](int i) {
          visit(i - from, *reinterpret_cast<Own*>(at));
          at += tensor.back;
        },
        from);
  }
  template <bool kFull, typename Element>
  __device__ __forceinline__ void read(const ColumnTensor<const char>& tensor, int from, Element (&to)[kLoads]) const {
    each_of<kFull, Element, kLoads>(tensor, from, [&](int i, const Element& element) { to[i] = element; });
  }
  template <bool kFull>
  __device__ __forceinline__ void read_rates(
      const ColumnTensor<const char>& tensor, bool is_narrow, int from, RateBits<T> (&to)[kLoads]) const {
    read_rate_bits<T>(is_narrow, [&](auto bits) {
      each_of<kFull, decltype(bits), kLoads>(tensor, from, [&](int i, const auto& element) { to[i] = element; });
    });
  }
  // Without branches between the batches, where those that have come would be waited for and used.
  template <bool kFull, typename Element>
  __device__ __forceinline__ void read_or_zeros(const ColumnTensor<const char>& tensor, Element (&to)[kSteps]) const {
    const char* at = address_of(tensor, 0);
#pragma unroll
    for (int i = 0; i < kSteps; ++i, at += tensor.back) {
      const bool exists = kFull ? i / kBatch * kBatch < t.part_steps : i < count;
      to[i] = exists ? *reinterpret_cast<const Element*>(at) : Element{};
    }
  }
  template <bool kFull>
  __device__ __forceinline__ void read_flags(
      const ColumnTensor<const char>& tensor, bool is_bool, uint32_t& bits) const {
    if (!tensor.last) return;
    if (is_bool) {
      uint8_t flags[kSteps];
      read_or_zeros<kFull>(tensor, flags);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) this->add_flag(i, flags[i], bits);
      return;
    }
    T numbers[kSteps];
    read_or_zeros<kFull>(tensor, numbers);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) this->add_flag(i, numbers[i], bits);
  }
  template <bool kFull>
  __device__ __forceinline__ void read_all_flags() {
    uint32_t truncates = 0;
    read_flags<kFull>(call.terminated, call.terminated_is_bool, drops);
    read_flags<kFull>(call.truncated, call.truncated_is_bool, truncates);
    this->set_flags(truncates, first_step == 0 ? 1u : 0u);
  }

  // The value of the state behind the part's first step.
  __device__ __forceinline__ T value_behind() const {
    const bool is_last = first_step == 0;
    if (call.has_next_values || count == 0 || !(is_last ? call.bootstrap.last : call.values.last)) return T{};
    if (is_last) return *reinterpret_cast<const T*>(address_of(call.bootstrap, 0));
    return *reinterpret_cast<const T*>(address_of(call.values, -1));
  }

  // Reads all operands.
  template <bool kFull>
  __device__ __forceinline__ void load() {
    const bool is_both = call.next_values.last;  // of next states beside the steps' own
    T behind = value_behind();
#pragma unroll
    for (int k = 0; k < kSteps; k += kLoads) {
      if (k >= t.part_steps) break;
      T rewards[kLoads], own[kLoads] = {}, ratios[kLoads];
      RateBits<T> gammas[kLoads] = {}, traces[kLoads] = {};
      read<kFull>(call.rewards, k, rewards);
      read<kFull>(is_both ? call.next_values : call.values, k, own);
      if constexpr (kGates) read<kFull>(call.rhos, k, ratios);
      if constexpr (kAll) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) gammas[i] = traces[i] = bits_of_one<T>();
        read_rates<kFull>(call.gamma, call.gamma_is_narrow, k, gammas);
        read_rates<kFull>(call.trace, call.trace_is_narrow, k, traces);
      }
      if (k == 0) read_all_flags<kFull>();
      each<kFull, kLoads>(
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
        read<kFull>(call.values, k, own);
        each<kFull, kLoads>([&](int i) { this->take_from_difference(i, cast<Acc>(own[i - k])); }, k);
      }
#pragma unroll
      for (int i = k; i < k + kLoads; ++i) {
        values.set(i, own[i - k]);
        if constexpr (kGates) rhos.set(i, ratios[i - k]);
      }
    }
  }

  // The part's segment, from nothing.
  template <bool kFull>
  __device__ __forceinline__ Segment<Wide> add_up() const {
    Acc y = 0;
    Wide product = 1.0, some = 1.0;  // of a batch: four floats' product is within a double
    if constexpr (kGates)
      product = call.row_rates ? whole_power(rates.carried, static_cast<unsigned>(t.part_steps)) : t.powers[0];
    each<kFull>([&](int i) {
      const Step step = this->step_of(i);
      y = i == 0 || step.is_cut ? step.delta : this->gated(step.delta, step.factor * y);
      if constexpr (kGates) {
        const Wide factor = static_cast<Wide>(step.factor);
        if (!kFull || sizeof(T) > 4) {
          product = power_mul(product, factor);
        } else {
          some = i % kBatch == 0 ? factor : some * factor;
          if (i % kBatch == kBatch - 1) product = power_mul(product, some);
        }
      }
    });
    return {static_cast<Wide>(y), product, cuts != 0};
  }

  // What enters the thread's part.
  __device__ __forceinline__ Acc enter(const Carries& carries, const Segment<Wide>& segment) {
    if (works) carries.store(part, column, segment);
    carries.exchange({outer, first_column});
    find_steps();
    return static_cast<Acc>(carries.entering(part, column));
  }

  // All results, from what enters the part.
  template <bool kFull>
  __device__ __forceinline__ void finish(Acc y) {
    char* pg_at = nullptr;
    if constexpr (kGates) {
      if (call.pg_advantages.last) pg_at = address_of(call.pg_advantages, 0);
    }
    each<kFull>([&](int i) {
      const Acc pg = this->finish_step(i, y);
      if constexpr (kGates) {
        if (pg_at) {
          *reinterpret_cast<T*>(pg_at) = cast<T>(pg);
          pg_at += call.pg_advantages.back;
        }
      }
    });
    each_of<kFull, T, kSteps>(call.advantages, 0, [&](int i, T& element) { element = cast<T>(results[i]); });
    each_of<kFull, T, kSteps>(call.targets, 0, [&](int i, T& element) { element = this->target_of(i); });
  }
};

template <typename T, ColumnForm kForm>
__global__ void __launch_bounds__(kColumnThreads, tile_column_blocks(sizeof(T)))
    tile_columns_kernel(const __grid_constant__ TileColumnsParams<typename Types<T>::Acc> params) {
  using Tile = TileColumns<T, kForm>;
  using Wide = typename Tile::Wide;
  __shared__ CarryExchange<Wide, Tile::kGates, 1> exchange;
  overlap_launches();
  Tile tile(params);
  const bool full = tile.is_full();
  if (full) tile.template load<true>();
  else tile.template load<false>();
  const typename Tile::Carries carries(params.carries, exchange, tile.tile, tile.strip, tile.width);
  if (params.carries.plan.tiles > 1 && threadIdx.x == 0) exchange.tag = tag_of_launch(params.carries.tag);
  const Wide carried[] = {tile.rates.carried};
  carries.store_powers(tile.works, tile.part, tile.column, carried);
  const Segment<Wide> segment = full ? tile.template add_up<true>() : tile.template add_up<false>();
  const typename Tile::Acc y = tile.enter(carries, segment);
  if (full) tile.template finish<true>(y);
  else tile.template finish<false>(y);
}

}  // namespace dcs
