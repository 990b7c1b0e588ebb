// The temporal difference scan along a strided time over fewer columns than threads that fill the GPU. A block takes a
// tile, some steps of a span of cells, which are columns or pairs of columns of halves; each of its threads reads all
// operands of some neighboring steps of a cell, once and by the element, and holds their differences and what is
// carried over them. Totals meet in shared memory and, between the tiles of a strip, in global memory
// (scan/columns/tile_carries.cuh). It asks nothing of alignment or strides, and takes every option.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/known_address.cuh"
#include "returns/tile_columns/params.cuh"
#include "returns/tile_columns/steps.cuh"
#include "scan/columns/tile_carries.cuh"

namespace dcs {

template <typename T, int kUnit, ColumnForm kForm>
using TileColumnsSteps = TileSteps<T, kUnit, kForm, tile_column_steps(sizeof(T), kUnit, kForm)>;

template <typename T, int kUnit, ColumnForm kForm>
struct TileColumns : TileColumnsSteps<T, kUnit, kForm> {
  using Steps = TileColumnsSteps<T, kUnit, kForm>;
  using Steps::call, Steps::cuts, Steps::drops, Steps::rates, Steps::results, Steps::rhos, Steps::values;
  using Steps::kAll, Steps::kGates, Steps::kSteps;
  using typename Steps::Acc, typename Steps::Cell, typename Steps::Flags, typename Steps::Step, typename Steps::Wide;
  static constexpr int kBatch = std::min(kSteps, kTileBatch);
  static constexpr int kLoads = kAll ? kBatch : kSteps;  // on their way before the first use
  using Carries = TileCarries<T, kGates, kUnit, 2>;

  const TileColumnsParams<Acc>& params;
  const ResidentColumnsPlan& t = params.carries.plan;
  uint32_t tile, strip;
  int outer, first_column;
  int part, cell, width;  // cell of the block's `width`; a thread without one of its own does what another does
  bool works;
  int first_step, count;  // in the order of the scan

  __device__ __forceinline__ explicit TileColumns(const TileColumnsParams<Acc>& given)
      : Steps(given.call), params(given) {
    find_steps();
    this->find_rates(outer, first_column + cell * kUnit);
  }

  // The thread's part of the tile. Also after the exchange, which has no registers for what is quickly found again.
  __device__ __forceinline__ void find_steps() {
    uint32_t thread = threadIdx.x, block = blockIdx.x;
    asm volatile("" : "+r"(thread), "+r"(block));
    tile = params.carries.strips.of(block);
    strip = block - tile * params.carries.strips.divisor;
    outer = static_cast<int>(params.carries.spans.of(strip));
    first_column = (static_cast<int>(strip) - outer * t.spans) * t.span * kUnit;
    width = min(t.span, (static_cast<int>(params.carries.problem.inner) - first_column) / kUnit);
    const int own_part = static_cast<int>(thread * t.span_inverse >> 16);
    const int own_cell = static_cast<int>(thread) - own_part * t.span;
    works = own_part < t.parts && own_cell < width;
    part = min(own_part, t.parts - 1);
    cell = min(own_cell, width - 1);
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
        last_of_cell(tensor, static_cast<uint32_t>(outer), static_cast<uint32_t>(first_column / kUnit + cell)) +
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
      const ColumnTensor<const char>& tensor, bool is_bool, uint32_t (&bits)[kUnit]) const {
    if (!tensor.last) return;
    if (is_bool) {
      Flags flags[kSteps];
      read_or_zeros<kFull>(tensor, flags);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) this->add_flag(i, flags[i], bits);
      return;
    }
    Cell numbers[kSteps];
    read_or_zeros<kFull>(tensor, numbers);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) this->add_flag(i, numbers[i], bits);
  }
  template <bool kFull>
  __device__ __forceinline__ void read_all_flags() {
    uint32_t truncates[kUnit] = {};
    read_flags<kFull>(call.terminated, call.terminated_is_bool, drops);
    read_flags<kFull>(call.truncated, call.truncated_is_bool, truncates);
    this->set_flags(truncates, first_step == 0 ? 1u : 0u);
  }

  // The value of the state behind the part's first step.
  __device__ __forceinline__ Cell value_behind() const {
    Cell behind{};
    const bool is_last = first_step == 0;
    if (call.has_next_values || count == 0 || !(is_last ? call.bootstrap.last : call.values.last)) return behind;
    if (!is_last) {
      behind = *reinterpret_cast<const Cell*>(address_of(call.values, -1));
    } else {
      const char* const at = address_of(call.bootstrap, 0);
#pragma unroll
      for (int u = 0; u < kUnit; ++u)
        behind.set(u, *reinterpret_cast<const T*>(at + u * (call.bootstrap.cell / kUnit)));
    }
    return behind;
  }

  // Reads all operands.
  template <bool kFull>
  __device__ __forceinline__ void load() {
    const bool is_both = call.next_values.last;  // of next states beside the steps' own
    Cell behind = value_behind();
#pragma unroll
    for (int k = 0; k < kSteps; k += kLoads) {
      if (k >= t.part_steps) break;
      Cell rewards[kLoads], own[kLoads] = {}, ratios[kLoads];
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
            Cell following = behind;
            if (call.has_next_values) following = own[i - k];
            Acc own_gamma = 1, own_trace = 1;
            if constexpr (kAll) {
              own_gamma = rate_of_bits<T>(gammas[i - k], call.gamma_is_narrow);
              own_trace = rate_of_bits<T>(traces[i - k], call.trace_is_narrow);
            }
            Acc own_value[kUnit], next_value[kUnit];
            unpack(own[i - k], own_value);
            unpack(following, next_value);
            const bool takes_own = call.has_own_values && !is_both;
            this->set_step(i, rewards[i - k], takes_own, own_value, next_value, own_gamma, own_trace);
            behind = own[i - k];
          },
          k);
      if (is_both) {
        // In the registers of the next states' values.
        read<kFull>(call.values, k, own);
        each<kFull, kLoads>([&](int i) { this->take_from_difference(i, own[i - k]); }, k);
      }
#pragma unroll
      for (int i = k; i < k + kLoads; ++i) {
        values.set(i, own[i - k]);
        if constexpr (kGates) rhos.set(i, ratios[i - k]);
      }
    }
  }

  // The part's segments, from nothing.
  template <bool kFull>
  __device__ __forceinline__ void add_up(Segment<Wide> (&segments)[kUnit]) const {
    Acc y[kUnit] = {};
    Wide product[kUnit], some[kUnit];  // of a batch: four floats' product is within a double
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      product[u] = some[u] = 1.0;
      if constexpr (kGates)
        product[u] = call.row_rates ? whole_power(rates[u].carried, static_cast<unsigned>(t.part_steps)) : t.powers[0];
    }
    each<kFull>([&](int i) {
      this->visit_columns(i, [&](int u, const Step& step, Acc) {
        y[u] = i == 0 || step.is_cut ? step.delta : this->gated(u, step.delta, step.factor * y[u]);
        if constexpr (kGates) {
          const Wide factor = static_cast<Wide>(step.factor);
          if (!kFull || sizeof(T) > 4) {
            product[u] = power_mul(product[u], factor);
          } else {
            some[u] = i % kBatch == 0 ? factor : some[u] * factor;
            if (i % kBatch == kBatch - 1) product[u] = power_mul(product[u], some[u]);
          }
        }
      });
    });
#pragma unroll
    for (int u = 0; u < kUnit; ++u) segments[u] = {static_cast<Wide>(y[u]), product[u], cuts[u] != 0};
  }

  // What enters the thread's part.
  __device__ __forceinline__ void enter(const Carries& carries, Segment<Wide> (&segments)[kUnit], Acc (&y)[kUnit]) {
#pragma unroll
    for (int u = 0; u < kUnit; ++u)
      if (works) carries.put(part, cell * kUnit + u, segments[u]);
    carries.exchange({outer, first_column});
    find_steps();
#pragma unroll
    for (int u = 0; u < kUnit; ++u) y[u] = static_cast<Acc>(carries.entering(part, cell * kUnit + u));
  }

  // All results, from what enters the part.
  template <bool kFull>
  __device__ __forceinline__ void finish(Acc (&y)[kUnit]) {
    char* pg_at = nullptr;
    if constexpr (kGates) {
      if (call.pg_advantages.last) pg_at = address_of(call.pg_advantages, 0);
    }
    each<kFull>([&](int i) {
      Acc pg[kUnit];
      this->finish_step(i, y, pg);
      if constexpr (kGates) {
        if (pg_at) {
          *reinterpret_cast<Cell*>(pg_at) = pack<Acc, T, kUnit>(pg);
          pg_at += call.pg_advantages.back;
        }
      }
    });
    each_of<kFull, Cell, kSteps>(
        call.advantages, 0, [&](int i, Cell& element) { element = pack<Acc, T, kUnit>(results[i]); });
    each_of<kFull, Cell, kSteps>(call.targets, 0, [&](int i, Cell& element) { element = this->target_of(i); });
  }
};

template <typename T, int kUnit, ColumnForm kForm>
__global__ void __launch_bounds__(kColumnThreads, tile_column_blocks(sizeof(T)))
    tile_columns_kernel(const __grid_constant__ TileColumnsParams<typename Types<T>::Acc> params) {
  using Tile = TileColumns<T, kUnit, kForm>;
  using Wide = typename Tile::Wide;
  __shared__ CarryExchange<Wide, Tile::kGates, kUnit> exchange;
  overlap_launches();
  Tile tile(params);
  const bool full = tile.is_full();
  if (full) tile.template load<true>();
  else tile.template load<false>();
  const typename Tile::Carries carries(params.carries, exchange, tile.tile, tile.strip, tile.width);
  if (params.carries.plan.tiles > 1 && threadIdx.x == 0) exchange.tag = tag_of_launch(params.carries.tag);
  Wide carried[kUnit];
#pragma unroll
  for (int u = 0; u < kUnit; ++u) carried[u] = tile.rates[u].carried;
  carries.put_powers(tile.works, tile.part, tile.cell, carried);
  Segment<Wide> segments[kUnit];
  if (full) tile.template add_up<true>(segments);
  else tile.template add_up<false>(segments);
  typename Tile::Acc y[kUnit];
  tile.enter(carries, segments, y);
  if (full) tile.template finish<true>(y);
  else tile.template finish<false>(y);
}

}  // namespace dcs
