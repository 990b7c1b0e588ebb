// Scans along a strided time over fewer columns than threads that fill the GPU. A block takes a tile, some steps of a
// span of columns; each of its threads holds some neighboring steps of a cell in registers, which are read once. Totals
// meet in shared memory and, between the tiles of a walk, in global memory (tile_carries.cuh). Where all columns are
// few a tile is one piece of memory, which goes through shared memory in whole vectors; elsewhere neighboring lanes
// read neighboring cells, whatever their alignment.
#pragma once

#include "scan/columns/column_values.cuh"
#include "scan/columns/tile_carries.cuh"
#include "scan/columns/tile_copy.cuh"

namespace dcs {

template <typename T, bool kStep, bool kBackward>
struct HeldColumns {
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  using Sum = std::conditional_t<sizeof(T) == 2, float, Wide>;
  using Values = ColumnValues<T, kStep>;
  static constexpr bool kShort = std::is_same_v<T, __nv_bfloat16>, kSums = kBackward && !kStep;
  static constexpr int kSteps = held_steps(sizeof(T), kStep, kBackward),
                       kBatch = kSteps < kHeldBatch ? kSteps : kHeldBatch;
  static constexpr int kSize = sizeof(T);

  const ScanProblem& p;
  const HeldColumnsPlan& t;
  uint32_t tile, walk;  // of the walk's tiles
  int64_t first_step;   // in the order of the scan
  ColumnPlace at;
  int part, column, width, count;  // column of the block's `width`; steps
  Wide gamma;
  Gate<float, kShort> gate;
  T x[kSteps], gates[kStep ? kSteps : 1], saved[kBackward ? kSteps : 1];
  uint32_t cuts = 0, drops = 0;  // a bit a step

  __device__ __forceinline__ explicit HeldColumns(const HeldColumnsParams& params) : p(params.problem), t(params.plan) {
    const auto walks = static_cast<uint32_t>(t.walks), spans = static_cast<uint32_t>(t.spans);
    tile = blockIdx.x / walks;
    walk = blockIdx.x - tile * walks;
    const uint32_t outer = spans == 1 ? walk : walk / spans;
    const int64_t first = int64_t{walk - outer * spans} * t.span;
    width = static_cast<int>(min(int64_t{t.span}, p.inner - first));
    part = static_cast<int>(threadIdx.x) / t.span;
    column = static_cast<int>(threadIdx.x) - part * t.span;
    const bool works = part < t.parts && column < width;
    at = {int64_t{outer}, first + (column < width ? column : 0)};
    first_step = (int64_t{tile} * t.parts + part) * t.part_steps;
    count = works ? static_cast<int>(max(int64_t{0}, min(int64_t{t.part_steps}, p.length - first_step))) : 0;
    gamma = Values::gamma_of(p, at, 0);
    if constexpr (!kStep && sizeof(T) == 2) gate = make_gate<float, kShort>(gamma);
  }

  // Batches of the steps that there are; kFull: all of a part's.
  template <bool kFull, typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll
    for (int k = 0; k < kSteps; k += kBatch) {
      if (k >= (kFull ? t.part_steps : count)) break;
#pragma unroll
      for (int i = k; i < k + kBatch && i < kSteps; ++i)
        if (kFull || i < count) visit(i);
    }
  }
  // Whether the warp's threads have all of their steps, and neighbors in time on both sides where they ask for them.
  __device__ __forceinline__ bool is_full() const {
    const bool full =
        count == t.part_steps && (!p.shifted || first_step > 0) && (!kBackward || first_step + count < p.length);
    return __all_sync(0xffffffffu, full);
  }

  __device__ __forceinline__ int64_t row_of(int64_t position) const {
    return p.reverse ? p.length - 1 - position : position;
  }
  // An operand `later` steps after the thread's first one: in memory, or in a tile of shared memory.
  template <typename Byte>
  __device__ __forceinline__ Steps<Byte> in_memory(Byte* pointer, const Strides& strides, int64_t later) const {
    const int64_t sign = p.reverse ? -1 : 1, row = row_of(first_step) + sign * later;
    return {pointer + (at.outer * strides.outer + at.column * strides.inner + row * strides.time) * kSize,
        sign * strides.time * kSize};
  }
  template <typename Byte>
  __device__ __forceinline__ Steps<Byte> in_tile(Byte* memory) const {
    const int rows = t.parts * t.part_steps, row = part * t.part_steps, pitch = t.span * kSize;
    return {memory + (p.reverse ? rows - 1 - row : row) * pitch + column * kSize, p.reverse ? -pitch : pitch};
  }

  template <bool kFull>
  __device__ __forceinline__ void load(const TileCopy& copy) {
    const auto bring = [&](int which, const void* pointer, const Strides& strides, int later, auto& to) {
      const Steps<const char> from = t.flat && later == 0
          ? in_tile<const char>(copy.tile_of(which))
          : in_memory(static_cast<const char*>(pointer), strides, later);
      const int least = first_step + later < 0 ? 1 : 0,
                most = static_cast<int>(min(int64_t{kSteps}, p.length - first_step - later));
      each<kFull>([&](int i) {
        if (kFull || (i >= least && i < most)) to[i] = *reinterpret_cast<const T*>(from.at + i * from.apart);
        else to[i] = T{};
      });
    };
    bring(0, p.input, p.input_strides, 0, x);
    if constexpr (kStep) bring(1, p.gamma, p.gamma_strides, p.shifted ? -1 : 0, gates);
    if constexpr (kBackward) bring(2, p.saved, p.saved_strides, 1, saved);
  }

  __device__ __forceinline__ void read_flags() {
    if (first_step == 0 && !(p.initial && !p.backward)) cuts = 1;
    if (!p.reset || count == 0) return;
    const int64_t apart = p.reverse ? -p.reset_strides.time : p.reset_strides.time;
    const bool* const flags = p.reset + at.outer * p.reset_strides.outer + at.column * p.reset_strides.inner +
        row_of(first_step) * p.reset_strides.time;
    each<false>([&](int i) { drops |= (flags[i * apart] ? 1u : 0u) << i; });
    cuts |= p.shifted ? drops << 1 | (first_step > 0 && flags[-apart] ? 1u : 0u) : drops;
  }

  static __device__ __forceinline__ Sum value_of(T from) { return cast<Sum>(cast<Acc>(from)); }
  __device__ __forceinline__ Sum factor_of(int i) const {
    if constexpr (kStep) return conj_if(p.conjugate_gamma, value_of(gates[i]));
    else return cast<Sum>(0.0);
  }
  template <bool kCuts>
  __device__ __forceinline__ Sum next(int i, Sum value, Sum factor, Sum y) const {
    Sum sum;
    if constexpr (kStep) sum = plain_step(value, factor, y);
    else if constexpr (sizeof(T) == 2) sum = gate.step(value, y);
    else sum = fold(value, gamma, y);
    return kCuts && (cuts >> i & 1) ? value : sum;
  }

  // The part's piece, from nothing.
  template <bool kFull, bool kCuts>
  __device__ __forceinline__ Piece<Wide> add_up() const {
    Sum y = cast<Sum>(0.0);
    Wide product = cast<Wide>(1.0), some = product;  // of a batch: four floats' product is within a double
    each<kFull>([&](int i) {
      const Sum value = value_of(x[i]), factor = factor_of(i);
      y = i == 0 ? value : next<kCuts>(i, value, factor, y);
      if constexpr (kStep) {
        const bool is_first = i % kBatch == 0, is_last = i % kBatch == kBatch - 1;
        if (!kFull || sizeof(T) > 4) {
          product = power_mul(product, cast<Wide>(factor));
        } else {
          some = is_first ? cast<Wide>(factor) : some * cast<Wide>(factor);
          if (is_last) product = power_mul(product, some);
        }
      }
    });
    return {cast<Wide>(y), product, kCuts && cuts != 0};
  }

  // The results from what enters the part; of gamma's gradient, the sum.
  template <bool kFull, bool kCuts>
  __device__ __forceinline__ Wide finish(const TileCopy& copy, Wide carry) const {
    Sum y = cast<Sum>(carry);
    Wide all = cast<Wide>(0.0);
    const Steps<char> to =
        t.flat ? in_tile<char>(copy.tile_of(0)) : in_memory(static_cast<char*>(p.output), p.output_strides, 0);
    Steps<char> gates_to{nullptr, 0};
    if constexpr (kBackward && kStep) gates_to = in_memory(static_cast<char*>(p.grad_gamma), p.grad_gamma_strides, 0);
    each<kFull>([&](int i) {
      y = next<kCuts>(i, value_of(x[i]), factor_of(i), y);
      *reinterpret_cast<T*>(to.at + i * to.apart) = cast<T>(cast<Acc>(y));
      if constexpr (kBackward) {
        // grad_gamma[t] = output[t] * conj(saved[next(t)]), where after the last step comes `initial`.
        const bool is_last = !kFull && first_step + i + 1 == p.length;
        const Sum other = is_last ? cast<Sum>(Values::initial_of(p, at, 0)) : value_of(saved[i]);
        const bool is_dropped = kCuts && (drops >> i & 1);
        const Sum term = is_dropped ? cast<Sum>(0.0) : plain_step(cast<Sum>(0.0), conj_if(true, other), y);
        if constexpr (kStep) *reinterpret_cast<T*>(gates_to.at + i * gates_to.apart) = cast<T>(cast<Acc>(term));
        else all = all + cast<Wide>(term);
      }
    });
    return all;
  }
};

template <typename T, bool kStep, bool kBackward>
__global__ void __launch_bounds__(kColumnThreads, held_blocks(sizeof(T)))
    held_columns_kernel(const __grid_constant__ HeldColumnsParams params) {
  using Held = HeldColumns<T, kStep, kBackward>;
  using Wide = typename Held::Wide;
  extern __shared__ __align__(16) unsigned char columns_shared[];
  __shared__ CarryExchange<Wide, kStep> exchange;
  const ScanProblem& p = params.problem;
  Held held(params);
  const TileCopy copy(params, columns_shared, held.tile, held.at.outer);
  if (params.plan.flat) copy.template bring<T, kStep>();
  const bool full = held.is_full();
  if (full) held.template load<true>(copy);
  else held.template load<false>(copy);
  const TileCarries<Wide, kStep> carries(
      params, exchange, held.tile, held.walk, held.part, held.column, held.width, held.gamma);
  held.read_flags();
  const bool plain = full && !__any_sync(0xffffffffu, (held.cuts | held.drops) != 0);
  const Piece<Wide> piece = plain ? held.template add_up<true, false>() : held.template add_up<false, true>();
  const Wide initial = kBackward ? cast<Wide>(0.0) : Held::Values::initial_of(p, held.at, 0);
  const Wide carry = carries.exchange(piece, initial);
  Wide sum = plain ? held.template finish<true, false>(copy, carry) : held.template finish<false, true>(copy, carry);
  if (params.plan.flat) copy.template put<T>();
  if constexpr (Held::kSums) {
    sum = carries.add_sums(sum);
    if (held.part == 0 && held.column < held.width)
      Held::Values::put_sum(p, held.at, 0, held.tile, params.plan.tiles, sum);
  }
}

}  // namespace dcs
