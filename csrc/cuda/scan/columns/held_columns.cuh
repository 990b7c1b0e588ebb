// Scans along a strided time over fewer columns than threads that fill the GPU. A block takes a tile, some steps of a
// span of cells, which are columns or pairs of columns of halves; each of its threads holds some neighboring steps of a
// cell in registers, which are read once. Totals meet in shared memory and, between the tiles of a walk, in global
// memory (tile_carries.cuh). Where all columns are few (kFlat) a tile is one piece of memory, which goes through shared
// memory in whole vectors; elsewhere neighboring lanes read neighboring cells, whatever their alignment.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/known_address.cuh"
#include "common/vector.cuh"
#include "scan/columns/column_values.cuh"
#include "scan/columns/tile_carries.cuh"
#include "scan/columns/tile_copy.cuh"

namespace dcs {

// A thread's cells in registers: those of two bytes in twos.
template <typename Cell, int kCount, bool kPacked = sizeof(Cell) == 2>
struct HeldCells {
  Cell cells[kCount];
  __device__ __forceinline__ Cell get(int i) const { return cells[i]; }
  __device__ __forceinline__ void set(int i, const Cell& cell) { cells[i] = cell; }
};
template <typename Cell, int kCount>
struct HeldCells<Cell, kCount, true> {
  uint32_t words[kCount / 2];
  __device__ __forceinline__ Cell get(int i) const {
    const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
    return *reinterpret_cast<const Cell*>(&bits);
  }
  __device__ __forceinline__ void set(int i, const Cell& cell) {
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(&cell);
    words[i / 2] = i % 2 ? words[i / 2] | bits << 16 : bits;
  }
};
struct NoCells {};

template <typename T, bool kStep, bool kBackward, int kUnit, bool kFlat>
struct HeldColumns {
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  using Sum = std::conditional_t<sizeof(T) == 2, float, Wide>;
  using Values = ColumnValues<T, kStep>;
  using Cell = Vector<T, kUnit>;
  using Carries = TileCarries<T, kStep, kUnit>;
  static constexpr bool kHalf = sizeof(T) == 2, kShort = std::is_same_v<T, __nv_bfloat16>;
  static constexpr int kSize = sizeof(T), kCellBytes = kUnit * kSize;
  static constexpr int kSteps = held_steps(kCellBytes, kStep, kBackward),
                       kBatch = kSteps < kHeldBatch ? kSteps : kHeldBatch;
  // Cells on their way before the first use: packing waits for them.
  static constexpr int kLoads = kCellBytes > 2 || (kFlat && !kStep && !kBackward) ? std::min(kSteps, kHeldWords)
                                                                                  : std::min(kSteps, kHeldWords / 2);

  const ScanProblem& p;
  const HeldColumnsPlan& t;
  uint32_t tile, walk;  // of the walk's tiles
  int outer, first_column;
  int part, cell, width;  // cell of the block's `width`; a thread without one of its own does what another does
  bool works;
  int count;           // steps
  int64_t first_step;  // in the order of the scan
  Wide gamma[kUnit];
  Gate<float, kShort> gate[kHalf && !kStep ? kUnit : 1];
  using Cells = HeldCells<Cell, kSteps>;
  Cells x;
  std::conditional_t<kStep, Cells, NoCells> gates;
  std::conditional_t<kBackward, Cells, NoCells> saved;
  // A bit a step, before which the scan starts anew. Backward (the adjoint is shifted) the reset flag of a step is the
  // next one's bit.
  using Bits = std::conditional_t<(kSteps + (kBackward ? 1 : 0) > 32), uint64_t, uint32_t>;
  Bits cuts[kUnit] = {};

  __device__ __forceinline__ explicit HeldColumns(const HeldColumnsParams& params) : p(params.problem), t(params.plan) {
    const auto walks = static_cast<uint32_t>(t.walks), spans = static_cast<uint32_t>(t.spans);
    if (t.cluster) {
      walk = walks == 1 ? 0 : blockIdx.x / static_cast<uint32_t>(t.tiles);
      tile = blockIdx.x - walk * static_cast<uint32_t>(t.tiles);
    } else {
      tile = walks == 1 ? blockIdx.x : blockIdx.x / walks;
      walk = blockIdx.x - tile * walks;
    }
    outer = static_cast<int>(kFlat || spans == 1 ? walk : walk / spans);
    first_column = kFlat ? 0 : static_cast<int>(walk - outer * spans) * t.span * kUnit;
    find_steps();
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      gamma[u] = Values::gamma_of(p, place(), u);
      if constexpr (kHalf && !kStep) gate[u] = make_gate<float, kShort>(gamma[u]);
    }
  }

  // The thread's place in the tile. Also after the exchange, which has no registers for what is quickly found again.
  __device__ __forceinline__ void find_steps() {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread), "+r"(tile), "+r"(first_column));
    width = min(t.span, (static_cast<int>(p.inner) - first_column) / kUnit);
    const int own_part = static_cast<int>(thread * t.span_inverse >> 16);
    const int own_cell = static_cast<int>(thread) - own_part * t.span;
    works = own_part < t.parts && own_cell < width;
    part = min(own_part, t.parts - 1);
    cell = min(own_cell, width - 1);
    first_step = (int64_t{tile} * t.parts + part) * t.part_steps;
    count = static_cast<int>(max(int64_t{0}, min(int64_t{t.part_steps}, p.length - first_step)));
  }
  __device__ __forceinline__ ColumnPlace block_place() const { return {outer, first_column}; }
  __device__ __forceinline__ ColumnPlace place() const { return {outer, first_column + cell * kUnit}; }

  // Batches of the steps that there are, or of kCount from one on; kFull: all of a part's.
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
  __device__ __forceinline__ Steps<Byte> in_memory(Byte* pointer, const Strides& strides, int later) const {
    const int sign = p.reverse ? -1 : 1;
    const int64_t row = row_of(first_step) + sign * later;
    const ColumnPlace at = place();
    return {
        known_address(pointer + (at.outer * strides.outer + at.column * strides.inner + row * strides.time) * kSize),
        sign * static_cast<int>(strides.time) * kSize};
  }
  template <typename Byte>
  __device__ __forceinline__ Steps<Byte> in_tile(Byte* tile_memory) const {
    const int row_bytes = t.span * kCellBytes, from_part = p.reverse ? t.parts - 1 - part : part;
    return {tile_memory + from_part * t.part_pitch * 16 + (p.reverse ? t.part_steps - 1 : 0) * row_bytes +
            cell * kCellBytes,
        p.reverse ? -row_bytes : row_bytes};
  }

  template <bool kFull>
  __device__ __forceinline__ void load(const TileMemory& memory) {
    const auto bring = [&](const auto& from, int later, auto& to) {
      const int least = first_step + later < 0 ? 1 : 0,
                most = static_cast<int>(min(int64_t{kSteps}, p.length - first_step - later));
      const char* at = from.at;
#pragma unroll
      for (int k = 0; k < kSteps; k += kLoads) {
        Cell loaded[kLoads];
        const auto bring_one = [&](int i) {
          if (kFull || (i >= least && i < most)) loaded[i - k] = *reinterpret_cast<const Cell*>(at);
          else loaded[i - k] = Cell{};
          at += from.apart;
        };
        each<kFull, kLoads>(bring_one, k);
#pragma unroll
        for (int i = k; i < k + kLoads; ++i) to.set(i, loaded[i - k]);
      }
    };
    const auto bring_from_memory = [&](const void* pointer, const Strides& strides, int later, auto& to) {
      bring(in_memory(static_cast<const char*>(pointer), strides, later), later, to);
    };
    if constexpr (kFlat) bring(in_tile<const char>(memory.tile_of(0)), 0, x);
    else bring_from_memory(p.input, p.input_strides, 0, x);
    if constexpr (kStep) {
      if (kFlat && !p.shifted) bring(in_tile<const char>(memory.tile_of(1)), 0, gates);
      else bring_from_memory(p.gamma, p.gamma_strides, p.shifted ? -1 : 0, gates);
    }
    if constexpr (kBackward) bring_from_memory(p.saved, p.saved_strides, 1, saved);
  }

  __device__ __forceinline__ void read_flags() {
    const bool starts = first_step == 0 && !(p.initial && !p.backward);
    const int64_t apart = p.reverse ? -p.reset_strides.time : p.reset_strides.time;
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      if (starts) cuts[u] = 1;
      if (!p.reset || count == 0) continue;
      const ColumnPlace at = place();
      const bool* const flags = p.reset + at.outer * p.reset_strides.outer + (at.column + u) * p.reset_strides.inner +
          row_of(first_step) * p.reset_strides.time;
      Bits bits = 0;
      each<false>([&](int i) { bits |= Bits{flags[i * apart]} << i; });
      cuts[u] |= kBackward || p.shifted ? bits << 1 | Bits{first_step > 0 && flags[-apart]} : bits;
    }
  }
  __device__ __forceinline__ bool has_flags() const {
    Bits any = 0;
#pragma unroll
    for (int u = 0; u < kUnit; ++u) any |= cuts[u];
    return __any_sync(0xffffffffu, any != 0);
  }

  // From y before a step y after it. `factors` are its gates, as they were read.
  template <bool kCuts>
  __device__ __forceinline__ void advance(
      int i, const Sum (&values)[kUnit], const Sum (&factors)[kUnit], Sum (&y)[kUnit]) const {
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      Sum sum;
      if constexpr (kStep) sum = plain_step(values[u], factors[u], y[u]);
      else if constexpr (kHalf) sum = gate[u].step(values[u], y[u]);
      else sum = fold(values[u], gamma[u], y[u]);
      y[u] = kCuts && (cuts[u] >> i & 1) ? values[u] : sum;
    }
  }
  __device__ __forceinline__ void factors_of(int i, Sum (&to)[kUnit]) const {
    if constexpr (kStep) {
      values_of(gates.get(i), to);
#pragma unroll
      for (int u = 0; u < kUnit; ++u) to[u] = conj_if(p.conjugate_gamma, to[u]);
    }
  }

  // The part's pieces, from nothing.
  template <bool kFull, bool kCuts>
  __device__ __forceinline__ void add_up(Piece<Wide> (&pieces)[kUnit]) const {
    Sum y[kUnit];
    Wide product[kUnit], some[kUnit];  // of a batch: four floats' product is within a double
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      y[u] = cast<Sum>(0.0);
      product[u] = some[u] = cast<Wide>(1.0);
    }
    each<kFull>([&](int i) {
      Sum values[kUnit], factors[kUnit] = {};
      values_of(x.get(i), values);
      factors_of(i, factors);
      if (i > 0) advance<kCuts>(i, values, factors, y);
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        if (i == 0) y[u] = values[u];
        if constexpr (kStep) {
          const bool is_first = i % kBatch == 0, is_last = i % kBatch == kBatch - 1;
          if (!kFull || sizeof(T) > 4) {
            product[u] = power_mul(product[u], cast<Wide>(factors[u]));
          } else {
            some[u] = is_first ? cast<Wide>(factors[u]) : some[u] * cast<Wide>(factors[u]);
            if (is_last) product[u] = power_mul(product[u], some[u]);
          }
        }
      }
    });
#pragma unroll
    for (int u = 0; u < kUnit; ++u) pieces[u] = {cast<Wide>(y[u]), product[u], kCuts && cuts[u] != 0};
  }

  // The results from what enters the part; of gamma's gradient, the sums.
  template <bool kFull, bool kCuts>
  __device__ __forceinline__ void finish(const TileMemory& memory, Sum (&y)[kUnit], Wide (&sums)[kUnit]) const {
    Steps<char> to, gates_to{nullptr, 0};
    if constexpr (kFlat) to = in_tile<char>(memory.tile_of(0));
    else to = in_memory(static_cast<char*>(p.output), p.output_strides, 0);
    if constexpr (kBackward && kStep) gates_to = in_memory(static_cast<char*>(p.grad_gamma), p.grad_gamma_strides, 0);
    each<kFull>([&](int i) {
      Sum values[kUnit], factors[kUnit] = {};
      values_of(x.get(i), values);
      factors_of(i, factors);
      advance<kCuts>(i, values, factors, y);
      *reinterpret_cast<Cell*>(to.at) = packed<T>(y);
      to.at += to.apart;
      if constexpr (kBackward) {
        // grad_gamma[t] = output[t] * conj(saved[next(t)]), where after the last step comes `initial`.
        const bool is_last = !kFull && first_step + i + 1 == p.length;
        Sum others[kUnit], terms[kUnit];
        values_of(saved.get(i), others);
#pragma unroll
        for (int u = 0; u < kUnit; ++u) {
          const Sum other = is_last ? cast<Sum>(Values::initial_of(p, place(), u)) : others[u];
          const bool is_dropped = kCuts && (cuts[u] >> (i + 1) & 1);
          terms[u] = is_dropped ? cast<Sum>(0.0) : plain_step(cast<Sum>(0.0), conj_if(true, other), y[u]);
          if constexpr (!kStep) sums[u] = sums[u] + cast<Wide>(terms[u]);
        }
        if constexpr (kStep) {
          *reinterpret_cast<Cell*>(gates_to.at) = packed<T>(terms);
          gates_to.at += gates_to.apart;
        }
      }
    });
  }

  // What enters the thread's part.
  __device__ __forceinline__ void enter(const Carries& carries, Piece<Wide> (&pieces)[kUnit], Sum (&y)[kUnit]) const {
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      if constexpr (!kStep) pieces[u].gates = carries.over_parts(part, gamma[u]);
      if (works) carries.put(part, cell * kUnit + u, pieces[u]);
    }
    carries.exchange(block_place());
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      const int column = cell * kUnit + u;
      y[u] = cast<Sum>(after(carries.get(part, column), carries.shared.carries[column]));
    }
  }
  __device__ __forceinline__ void add_sums(const Carries& carries, const Wide (&sums)[kUnit]) const {
    __syncthreads();  // others may still read what is before a part
#pragma unroll
    for (int u = 0; u < kUnit; ++u)
      if (works) carries.put(part, cell * kUnit + u, {sums[u], cast<Wide>(1.0), false});
    carries.add_sums([&](int column, Wide sum) { Values::put_sum(p, block_place(), column, tile, t.tiles, sum); });
  }
};

template <typename T, bool kStep, bool kBackward, int kUnit, bool kFlat>
__global__ void __launch_bounds__(kColumnThreads, held_blocks(sizeof(T)))
    held_columns_kernel(const __grid_constant__ HeldColumnsParams params) {
  using Held = HeldColumns<T, kStep, kBackward, kUnit, kFlat>;
  using Wide = typename Held::Wide;
  extern __shared__ __align__(16) unsigned char columns_shared[];
  __shared__ CarryExchange<Wide, kStep, kUnit> exchange;
  overlap_launches();
  Held held(params);
  const TileMemory memory(params, columns_shared);
  const auto copy = [&] {
    return TileCopy(params, memory, held.tile, held.outer, params.plan.span * Held::kCellBytes);
  };
  if constexpr (kFlat) copy().template bring<kStep>();
  const bool full = held.is_full();
  if (full) held.template load<true>(memory);
  else held.template load<false>(memory);
  const typename Held::Carries carries(params, exchange, held.tile, held.walk, held.width);
  carries.put_powers(held.works, held.part, held.cell, held.gamma);
  held.read_flags();
  const bool plain = full && !held.has_flags();
  Piece<Wide> pieces[kUnit];
  if (plain) held.template add_up<true, false>(pieces);
  else held.template add_up<false, true>(pieces);
  typename Held::Sum y[kUnit];
  held.enter(carries, pieces, y);
  held.find_steps();
  Wide sums[kUnit] = {};
  if (plain) held.template finish<true, false>(memory, y, sums);
  else held.template finish<false, true>(memory, y, sums);
  if constexpr (kFlat) copy().put();
  if constexpr (kBackward && !kStep) held.add_sums(carries, sums);
  carries.leave();
}

}  // namespace dcs
