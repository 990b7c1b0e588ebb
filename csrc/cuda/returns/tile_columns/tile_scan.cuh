// What a thread of a tile of columns does whatever it makes of its steps (kernel.cuh): it finds them, reads operands by
// the element, and scans them.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/known_address.cuh"
#include "returns/tile_columns/params.cuh"
#include "scan/columns/tile_carries.cuh"

namespace dcs {

// Where a thread's steps are in a tile that leaves the next ones what they carry in global memory, and the place of the
// tile.
struct TilePlace {
  const ResidentColumnsParams& carries;
  const ResidentColumnsPlan& t = carries.plan;
  uint32_t tile, strip;
  int outer, first_column;
  int part, column, width;  // column of the block's `width`; a thread without one of its own does what another does
  bool works;
  int first_step, count;  // in the order of the scan

  __device__ __forceinline__ explicit TilePlace(const ResidentColumnsParams& given) : carries(given) {}
  __device__ __forceinline__ int part_steps() const { return t.part_steps; }
  __device__ __forceinline__ double over_part() const { return t.powers[0]; }  // of a number gamma * trace

  // The thread's part of the tile. Also after the exchange, which has no registers for what is quickly found again.
  __device__ __forceinline__ void find_steps(int length) {
    uint32_t thread = threadIdx.x, block = blockIdx.x;
    asm volatile("" : "+r"(thread), "+r"(block));
    tile = carries.strips.of(block);
    strip = block - tile * carries.strips.divisor;
    outer = static_cast<int>(carries.spans.of(strip));
    first_column = (static_cast<int>(strip) - outer * t.spans) * t.span;
    width = min(t.span, static_cast<int>(carries.problem.inner) - first_column);
    const int own_part = static_cast<int>(thread * t.span_inverse >> 16);
    const int own_column = static_cast<int>(thread) - own_part * t.span;
    works = own_part < t.parts && own_column < width;
    part = min(own_part, t.parts - 1);
    column = min(own_column, width - 1);
    first_step = (static_cast<int>(tile) * t.parts + part) * t.part_steps;
    count = max(0, min(t.part_steps, length - first_step));
  }
};

// What Steps knows of a thread's steps (steps.cuh, gradients/tile_columns.cuh), and where they are.
template <typename Steps, typename Place>
struct TileScan : Steps, Place {
  using Place::column, Place::count, Place::first_column, Place::first_step, Place::outer, Place::part_steps;
  using Steps::call, Steps::cuts, Steps::rates;
  using Steps::kAll, Steps::kGates, Steps::kSteps;
  using typename Steps::Acc, typename Steps::Wide;
  using T = typename Steps::Element;
  static constexpr int kBatch = std::min(kSteps, kTileBatch);
  static constexpr int kLoads = kAll ? kBatch : kSteps;  // on their way before the first use

  template <typename Params>
  __device__ __forceinline__ explicit TileScan(const Params& given) : Steps(given.call), Place(given.carries) {
    this->find_steps(call.length);
    this->find_rates(outer, first_column + column);
  }

  // Whether the warp's threads have all of their steps. Not by `count`: nvcc 13.0 takes a predicate of the instruction
  // that bounds it for count == part_steps, and that is true of a part behind the last step, too.
  __device__ __forceinline__ bool is_full() const {
    return __all_sync(0xffffffffu, first_step + part_steps() <= call.length);
  }

  // Batches of the steps that there are, of kCount from one on; kFull: all of a part's.
  template <bool kFull, int kCount = kSteps, typename Visit>
  __device__ __forceinline__ void each(const Visit& visit, int from = 0) const {
#pragma unroll
    for (int k = 0; k < kCount; k += kBatch) {
      if (from + k >= (kFull ? part_steps() : count)) break;
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
      const bool exists = kFull ? i / kBatch * kBatch < part_steps() : i < count;
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

  // The part's segment, from nothing.
  template <bool kFull>
  __device__ __forceinline__ Segment<Wide> add_up() const {
    Acc y = 0;
    Wide product = 1.0, some = 1.0;  // of a batch: four floats' product is within a double
    if constexpr (kGates)
      product = call.row_rates ? whole_power(rates.carried, static_cast<unsigned>(part_steps())) : this->over_part();
    each<kFull>([&](int i) {
      const auto step = this->step_of(i);
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
};

// A tile that loads its steps and, from what enters a thread's part, finishes them.
template <typename Tile, typename Params>
__device__ __forceinline__ void run_tile(const Params& params) {
  using Wide = typename Tile::Wide;
  using Carries = TileCarries<typename Tile::T, Tile::kGates, 2>;
  __shared__ CarryExchange<Wide, Tile::kGates> exchange;
  overlap_launches();
  Tile tile(params);
  const bool full = tile.is_full();
  if (full) tile.template load<true>();
  else tile.template load<false>();
  const Carries carries(params.carries, exchange, tile.tile, tile.strip, tile.width);
  if (params.carries.plan.tiles > 1 && threadIdx.x == 0) exchange.tag = tag_of_launch(params.carries.tag);
  carries.store_powers(tile.works, tile.part, tile.column, static_cast<Wide>(tile.rates.carried));
  const Segment<Wide> segment = full ? tile.template add_up<true>() : tile.template add_up<false>();
  if (tile.works) carries.store(tile.part, tile.column, segment);
  carries.exchange({tile.outer, tile.first_column});
  tile.find_steps(params.call.length);
  const auto y = static_cast<typename Tile::Acc>(carries.entering(tile.part, tile.column));
  if (full) tile.template finish<true>(y);
  else tile.template finish<false>(y);
}

}  // namespace dcs
