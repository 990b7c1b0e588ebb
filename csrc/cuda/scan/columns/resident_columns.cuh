// Scans along a strided time over fewer columns than threads that fill the GPU. A block takes a tile, some steps of a
// span of columns; some neighboring steps of a column are resident in each of its threads, read once: in registers, and
// where there are many tiles the first of them in shared memory. Totals are folded in shared memory and, between the
// tiles of a span, in global memory (tile_carries.cuh). Where all columns are few (kFlat) a tile is contiguous and
// copied to shared memory and back in whole vectors; elsewhere neighboring lanes read neighboring columns, whatever
// their alignment.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/wait.cuh"
#include "scan/columns/resident_index.cuh"
#include "scan/columns/tile_carries.cuh"
#include "scan/columns/tile_copy.cuh"

namespace dcs {

template <typename T, bool kStep, bool kBackward, bool kFlat>
struct ResidentColumns : ResidentIndex<T, kStep, kBackward, kFlat> {
  using Index = ResidentIndex<T, kStep, kBackward, kFlat>;
  using Index::block_index, Index::early_cells, Index::early_cuts, Index::early_step, Index::early_steps;
  using Index::column, Index::count, Index::early, Index::first_step, Index::p, Index::part, Index::t, Index::tile;
  using Index::in_memory, Index::in_tile, Index::late_steps, Index::index, Index::starts, Index::works;
  using Index::kBatch, Index::kCommon, Index::kEarly, Index::kGates, Index::kInput, Index::kSaved, Index::kSize,
      Index::kSteps;
  using typename Index::Cell, typename Index::Operand;
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  using Sum = std::conditional_t<sizeof(T) == 2, float, Wide>;
  using Values = ColumnValues<T, kStep>;
  static constexpr int kMostSpan = resident_span(sizeof(Wide), kFlat);
  using Carries = TileCarries<T, kStep, kFlat || kBackward || kSize != 4 ? 2 : 4, kMostSpan>;
  static constexpr bool kHalf = sizeof(T) == 2, kShort = std::is_same_v<T, __nv_bfloat16>;
  // Loads in flight before the first use: packing waits for them.
  static constexpr int kLoads = kSize > 2 || (kFlat && !kStep && !kBackward) ? std::min(kSteps, kResidentWords)
                                                                             : std::min(kSteps, kResidentWords / 2);

  Wide gamma;
  Gate<float, kShort> gate;
  using Cells = ResidentCells<Cell, kSteps>;
  Cells x;
  std::conditional_t<kStep, Cells, NoCells> gates;
  std::conditional_t<kBackward, Cells, NoCells> saved;
  // A bit a step, before which the scan starts anew. Backward (the adjoint is shifted) the reset flag of a step is the
  // next one's bit.
  using Bits = std::conditional_t<(kSteps + (kBackward ? 1 : 0) > 32), uint64_t, uint32_t>;
  Bits cuts = 0;
  bool has_early_cuts = false, has_any_flags = false;

  __device__ __forceinline__ explicit ResidentColumns(const ResidentColumnsParams& params) : Index(params) {
    gamma = Values::gamma_of(p, index(), 0);
    if constexpr (kHalf && !kStep) gate = make_gate<float, kShort>(gamma);
  }

  // Batches of a part's steps, or of kCount from one on.
  template <int kCount = kSteps, typename Visit>
  __device__ __forceinline__ void each(const Visit& visit, int from = 0) const {
#pragma unroll
    for (int k = 0; k < kCount; k += kBatch) {
      if (from + k >= late_steps()) break;
#pragma unroll
      for (int i = k; i < k + kBatch && i < kCount; ++i) visit(from + i);
    }
  }
  // Whether the warp's threads have all of their steps, and neighbors in time on both sides where they ask for them.
  __device__ __forceinline__ bool is_full() const {
    const bool asks_before = p.shifted && (kStep || p.reset);
    const bool full =
        count == late_steps() && !(asks_before && early_step() == 0) && (!kBackward || first_step + count < p.length);
    return __all_sync(0xffffffffu, full);
  }

  // Addresses in global memory, from the part's first step on.
  struct Sources {
    CellSteps<const char> input, gates, saved;
  };
  template <bool kFull>
  __device__ __forceinline__ void load_resident(const TileMemory& memory, const Sources& from) {
    const auto load_operand = [&](const auto& part, int later, auto& to) {
      auto from = part.after(early_steps());
      const int least = first_step + later < 0 ? 1 : 0,
                most = static_cast<int>(min(int64_t{count}, p.length - first_step - later));
#pragma unroll
      for (int k = 0; k < kSteps; k += kLoads) {
        Cell loaded[kLoads];
        const auto load_cell = [&](int i) {
          if (kFull || (i >= least && i < most)) loaded[i - k] = *reinterpret_cast<const Cell*>(from.at);
          else loaded[i - k] = Cell{};
          from.next();
        };
        each<kLoads>(load_cell, k);
#pragma unroll
        for (int i = k; i < k + kLoads; ++i) to.set(i, loaded[i - k]);
      }
    };
    if constexpr (kFlat) load_operand(in_tile(memory.tile_of(0)), 0, x);
    else load_operand(from.input, 0, x);
    if constexpr (kStep) {
      if (kFlat && !p.shifted) load_operand(in_tile(memory.tile_of(1)), 0, gates);
      else load_operand(from.gates, p.shifted ? -1 : 0, gates);
    }
    if constexpr (kBackward) load_operand(from.saved, 1, saved);
  }
  // The same for the early steps, where they are not in a tile.
  __device__ __forceinline__ void load_early(const TileMemory& memory, const Sources& from) const {
    if constexpr (kEarly && !kFlat) {
      if (t.early_steps == 0) return;
      const auto load_operand = [&](const CellSteps<const char>& part, int later, Operand operand) {
        const int64_t first = early_step() + later;
        const int least = first < 0 ? 1 : 0, most = static_cast<int>(min(int64_t{kMostEarlySteps}, p.length - first));
        early_cells(memory, operand).load(part, t.early_steps, least, most);
      };
      load_operand(from.input, 0, kInput);
      if constexpr (kStep) load_operand(from.gates, p.shifted ? -1 : 0, kGates);
      if constexpr (kBackward) load_operand(from.saved, 1, kSaved);
      commit_copies();
    }
  }

  // All that the thread reads.
  __device__ __forceinline__ void load(bool is_full, const TileMemory& memory) {
    Sources from;
    const auto find = [&](const void* pointer, const Strides& strides, int later) {
      return in_memory(static_cast<const char*>(pointer), strides, early_step() + later);
    };
    if constexpr (!kFlat) from.input = find(p.input, p.input_strides, 0);
    if constexpr (kStep) from.gates = find(p.gamma, p.gamma_strides, p.shifted ? -1 : 0);
    if constexpr (kBackward) from.saved = find(p.saved, p.saved_strides, 1);
    load_early(memory, from);
    if (is_full) load_resident<true>(memory, from);
    else load_resident<false>(memory, from);
  }

  __device__ __forceinline__ void read_flags(const TileMemory& memory) {
    has_early_cuts = early_steps() > 0 && starts();
    if (early_steps() == 0 && starts()) cuts = 1;
    if (!p.reset || early + count == 0) return;
    // The flag of the step before is the first bit where gates are those before.
    const int lead = kBackward || p.shifted ? 1 : 0, least = lead && early_step() == 0 ? 1 : 0;
    const auto flags = in_memory(reinterpret_cast<const char*>(p.reset), p.reset_strides, early_step() - lead, 1);
    const int steps = early + count;
#pragma unroll 1
    for (int k = 0; k < steps; k += kFlagBatch) {
      // That of the step after, too.
      const uint32_t bits =
          flags_of<kFlagBatch + 1>(flags.after(k), k == 0 ? least : 0, min(steps - k, kFlagBatch) + lead);
      const int from = k - early_steps();  // in `cuts`
      if constexpr (kEarly) {
        const int some = min(early - k, kFlagBatch);
        if (some > 0) has_early_cuts = has_early_cuts || (bits & ((1u << some) - 1)) != 0;
#pragma unroll
        for (int i = 0; i < kFlagBatch; i += kEarlyBatch)
          if (i < some) *early_cuts(memory, k + i) = static_cast<uint16_t>(bits >> i);
      }
      if (from >= 0) cuts |= Bits{bits} << from;
      else if (from + kFlagBatch >= 0) cuts |= bits >> -from;
      has_any_flags = has_any_flags || bits != 0;
    }
  }
  __device__ __forceinline__ bool has_flags() const {
    return __any_sync(0xffffffffu, has_early_cuts || has_any_flags || cuts != 0);
  }
  // Whether the scan starts anew before a step of the part.
  __device__ __forceinline__ bool is_cut() const {
    constexpr int kBits = 8 * sizeof(Bits);
    const Bits there = count < kBits ? (Bits{1} << count) - 1 : ~Bits{0};
    return has_early_cuts || (cuts & there) != 0;
  }

  // A step's elements, whether the scan starts anew before it, or does at the next step, and whether it is there.
  struct Step {
    Cell input, gates, saved;
    bool cut, cut_after, exists;
  };
  // Visits the part's steps in the order of the scan, with their numbers in it, in a batch, and whether it is the first
  // one, which the compiler knows of most that are not: the early ones, then those in registers. kPlain: all are there
  // and none is cut off. Else some are not there, which a branch a step would take several times the code for.
  template <bool kPlain, typename Visit>
  __device__ __forceinline__ void each_step(const TileMemory& memory, const Visit& visit) const {
    if constexpr (kEarly) {
      auto inputs = early_cells(memory, kInput), gate_cells = early_cells(memory, kGates),
           saved_cells = early_cells(memory, kSaved);
#pragma unroll 1
      for (int k = 0; k < (kPlain ? t.early_steps : early); k += kEarlyBatch) {
        uint32_t bits = 0;
        if constexpr (!kPlain) bits = (p.reset ? *early_cuts(memory, k) : 0) | (k == 0 && starts() ? 1 : 0);
#pragma unroll
        for (int i = 0; i < kEarlyBatch; ++i) {
          Step step{};
          step.exists = kPlain || k + i < early;
          if (step.exists) {
            step.input = inputs.get(i);
            if constexpr (kStep) step.gates = gate_cells.get(i);
            if constexpr (kBackward) step.saved = saved_cells.get(i);
          }
          set_cuts<kPlain>(step, bits, i);
          visit(step, k + i, i % kBatch, i == 0 && k == 0);
        }
        inputs.move(kEarlyBatch), gate_cells.move(kEarlyBatch), saved_cells.move(kEarlyBatch);
      }
    }
    each([&](int i) {
      Step step{x.get(i)};
      step.exists = kPlain || i < count;
      if constexpr (kStep) step.gates = gates.get(i);
      if constexpr (kBackward) step.saved = saved.get(i);
      set_cuts<kPlain>(step, cuts, i);
      visit(step, i + early_steps(), i % kBatch, i == 0 && early_steps() == 0);
    });
  }
  template <bool kPlain, typename Some>
  static __device__ __forceinline__ void set_cuts(Step& step, Some bits, int i) {
    step.cut = !kPlain && (bits >> i & 1);
    step.cut_after = !kPlain && kBackward && (bits >> (i + 1) & 1);
  }

  static __device__ __forceinline__ Sum sum_of(const Cell& cell) {
    Sum value[1];
    values_of(cell, value);
    return value[0];
  }
  // From y before a step y after it. `factor` is its gate, as it was read.
  __device__ __forceinline__ Sum advanced(bool cut, Sum value, Sum factor, Sum y) const {
    Sum sum;
    if constexpr (kStep) sum = plain_step(value, factor, y);
    else if constexpr (kHalf) sum = gate.step(value, y);
    else sum = fold(value, gamma, y);
    return cut ? value : sum;
  }
  __device__ __forceinline__ Sum factor_of(const Step& step) const {
    if constexpr (kStep) return conj_if(p.conjugate_gamma, sum_of(step.gates));
    else return Sum{};
  }

  // The part's segment, with a zero carry.
  template <bool kPlain>
  __device__ __forceinline__ Segment<Wide> add_up(const TileMemory& memory) const {
    Sum y = cast<Sum>(0.0);
    Wide product = cast<Wide>(1.0), some = product;  // of a batch: four floats' product is within a double
    each_step<kPlain>(memory, [&](const Step& step, int, int in_batch, bool is_first) {
      const Sum factor = step.exists ? factor_of(step) : cast<Sum>(1.0),
                next = advanced(is_first || step.cut, sum_of(step.input), factor, y);
      y = step.exists ? next : y;
      if constexpr (kStep) {
        if (sizeof(T) > 4) {
          product = power_mul(product, cast<Wide>(factor));
        } else {
          some = in_batch == 0 ? cast<Wide>(factor) : some * cast<Wide>(factor);
          if (in_batch == kBatch - 1) product = power_mul(product, some);
        }
      }
    });
    return {cast<Wide>(y), product, !kPlain && is_cut()};
  }

  __device__ __forceinline__ auto results(const TileMemory& memory) const {
    if constexpr (kFlat) return in_tile(memory.tile_of(0));
    else return in_memory(static_cast<char*>(p.output), p.output_strides, early_step());
  }
  // The results from the carry into the part; of gamma's gradient, the sum.
  template <bool kPlain>
  __device__ __forceinline__ void finish(const TileMemory& memory, Sum y, Wide& sum) const {
    auto to = results(memory);
    CellSteps<char> gates_to{};
    if constexpr (kBackward && kStep)
      gates_to = in_memory(static_cast<char*>(p.grad_gamma), p.grad_gamma_strides, early_step());
    // grad_gamma[t] = output[t] * conj(saved[next(t)]), where after the last step comes `initial`.
    int last = -1;  // its number
    Sum beyond{};
    if constexpr (kBackward && !kPlain) {
      const int steps = early + count;
      if (steps > 0 && early_step() + steps == p.length)
        last = steps - 1, beyond = cast<Sum>(Values::initial_of(p, index(), 0));
    }
    each_step<kPlain>(memory, [&](const Step& step, int number, int, bool) {
      y = advanced(step.cut, sum_of(step.input), factor_of(step), y);
      if (step.exists) *reinterpret_cast<Cell*>(to.at) = packed<T>({y});
      to.next();
      if constexpr (kBackward) {
        const Sum other = !kPlain && number == last ? beyond : sum_of(step.saved);
        const Sum term = step.cut_after ? cast<Sum>(0.0) : plain_step(cast<Sum>(0.0), conj_if(true, other), y);
        if constexpr (kStep) {
          if (step.exists) *reinterpret_cast<Cell*>(gates_to.at) = packed<T>({term});
          gates_to.next();
        } else {
          const Wide with = sum + cast<Wide>(term);
          sum = step.exists ? with : sum;
        }
      }
    });
  }

  // The carry into the thread's part.
  __device__ __forceinline__ Sum enter(const Carries& carries, const Segment<Wide>& segment) const {
    if (works) carries.store(part, column, segment);
    carries.exchange(block_index());
    return cast<Sum>(carries.entering(part, column));
  }
  __device__ __forceinline__ void add_sums(const Carries& carries, Wide sum) const {
    __syncthreads();  // others may still read the carries into their parts
    if (works) carries.store(part, column, {sum, cast<Wide>(1.0), false});
    carries.add_sums([&](int column, Wide sum) { Values::store_sum(p, block_index(), column, tile, t.tiles, sum); });
  }
};

// The first blocks of a multiprocessor begin one after the other, where multiprocessors get blocks in turn.
template <int kBlocks>
__device__ __forceinline__ void begin_apart(int64_t together) {
  const unsigned turn = blockIdx.x / static_cast<unsigned>(together);
  if (turn > 0 && turn < kBlocks) wait_cycles(turn * kApartCycles);
}

template <typename T, bool kStep, bool kBackward, bool kFlat>
__global__ void __launch_bounds__(kColumnThreads, resident_blocks(sizeof(T)))
    resident_columns_kernel(const __grid_constant__ ResidentColumnsParams params) {
  using Resident = ResidentColumns<T, kStep, kBackward, kFlat>;
  using Wide = typename Resident::Wide;
  extern __shared__ __align__(16) unsigned char columns_shared[];
  __shared__ CarryExchange<Wide, kStep, Resident::kMostSpan> exchange;
  static_assert(sizeof(exchange) <= resident_exchange_bytes(sizeof(Wide), kStep, Resident::kMostSpan));
  overlap_launches();
  if (params.plan.apart > 0) begin_apart<resident_blocks(sizeof(T))>(params.plan.apart);
  Resident resident(params);
  const TileMemory memory(params, columns_shared);
  const auto copy = [&] {
    return TileCopy(params, memory, resident.tile, resident.outer, params.plan.span * Resident::kSize);
  };
  const bool asks_tag = params.plan.tiles > 1 && threadIdx.x == 0;
  uint32_t launch = 0;  // its number is on its way while elements are
  if (asks_tag) launch = launch_of(params.tag);
  if constexpr (kFlat) copy().template fetch<kStep>();
  const bool full = resident.is_full();
  resident.load(full, memory);
  resident.read_flags(memory);
  const typename Resident::Carries carries(params, exchange, resident.tile, resident.strip, resident.width);
  if (asks_tag) exchange.tag = tag_of(params.tag, launch);
  carries.store_powers(resident.works, resident.part, resident.column, resident.gamma);
  const bool cuts = resident.has_flags();
  if constexpr (Resident::kEarly && !kFlat) wait_for_copies<0>();
  const bool plain = full && !cuts;
  const Segment<Wide> segment =
      plain ? resident.template add_up<true>(memory) : resident.template add_up<false>(memory);
  const typename Resident::Sum y = resident.enter(carries, segment);
  resident.find_steps();
  Wide sum{};
  // A thread without a column of its own would read, as input, results that another thread has stored there.
  if (!kFlat || resident.works) {
    if (plain) resident.template finish<true>(memory, y, sum);
    else resident.template finish<false>(memory, y, sum);
  }
  if constexpr (kFlat) copy().copy_back();
  if constexpr (kBackward && !kStep) resident.add_sums(carries, sum);
}

}  // namespace dcs
