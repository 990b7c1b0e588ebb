// The temporal difference scan along contiguous time. A warp takes rows (of short rows, packs of several), a block
// takes a row where rows are few. A warp's tile is kPer steps a lane; it goes through the tiles of its rows from the
// last step back, and the next kStages - 1 tiles are on their way into shared memory meanwhile, across the ends of rows
// too. Within a tile a lane goes through its steps twice: from nothing for its total, and, once the lanes after it in
// time are known, from its carry. Between lanes everything is in double. Results take their operands' place in shared
// memory, so that global memory sees whole lines both ways.
#pragma once

#include "returns/rows_operands.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

// One tile, from its loads to its stores.
template <typename T, int kForm, ReturnsRows kRows>
struct ReturnsRowsTile {
  using Operands = ReturnsRowsOperands<T, kForm, kRows>;
  using Acc = typename Operands::Acc;
  using Given = typename Operands::Given;
  using Factors = typename Operands::Factors;
  using Word = Vector<T, 16 / sizeof(T)>;
  using Segments =
      Segment<double>[Operands::kBlock ? 2 : 1]
                     [Operands::kBlock ? returns_warps(kRows, kForm) : 1];  // two in turn: a warp may be one tile ahead
  static constexpr bool kFull = Operands::kFull, kGates = Operands::kGates, kPacked = Operands::kPacked,
                        kBlock = Operands::kBlock;
  static constexpr int kPer = Operands::kPer, kSteps = Operands::kSteps, kVec = Operands::kVec,
                       kChunks = Operands::kChunks;
  static constexpr int kLaneBytes = Operands::kLaneBytes;
  // Arrays are no members: beside one that a loop indexes the compiler keeps no member in a register until the loop is
  // unrolled.
  using Bootstraps = T[kPacked ? kPer : 1];
  using Differences = Acc[kPer];

  const Operands& operands;
  const ReturnsRowsCall<Acc>& params;
  const ReturnsProblem& p;
  const int lane;
  const ReturnsTileIndex at;
  unsigned char* const here;  // its stage
  const int64_t base, left;   // the first step, and those from there to the end of the lot
  const int count;
  const T bootstrap;
  uint32_t lasts, cuts,
      drops;  // bit i: the lane's step i is the row's last; takes no carry; leaves the next state's value out
  Acc clip_rho, clip_c, clip_pg;

  __device__ __forceinline__ ReturnsRowsTile(
      const Operands& operands, const ReturnsTileIndex& at, int stage, T bootstrap)
      : operands(operands),
        params(operands.params),
        p(operands.p),
        lane(operands.lane),
        at(at),
        here(operands.ring + stage * params.stage_bytes),
        base(operands.base_of(at)),
        left(operands.length_of(at) - base),
        count(static_cast<int>(max(int64_t{0}, min(left, int64_t{kSteps})))),
        bootstrap(bootstrap),
        lasts(operands.pack_lasts) {}

  // Of packed rows, where a step is the last of one.
  __device__ __forceinline__ void load_bootstraps(Bootstraps& bootstraps) const {
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        bootstraps[i] = cast<T>(Acc(0));
        if (operands.has_bootstrap && lasts >> i & 1 && lane * kPer + i < count)
          bootstraps[i] = operands.bootstrap_of(operands.packed_row(at, i));
      }
    }
  }

  __device__ __forceinline__ void read(StagedTensor which, int c, Acc (&to)[kVec]) const {
    operands.read(here, which, c, to);
  }
  __device__ __forceinline__ void read_factors(int c, Factors& to) const {
    operands.read_factors(c, at, here, count, to);
  }

  // Once the tile is there.
  __device__ __forceinline__ void load_flags() {
    unsigned char* const values = here + params.staged[kStagedValues].slot;
    if constexpr (!kFull && !kPacked && !(kForm & kWithNext)) {
      // The step behind the row's last has no other use.
      if (operands.has_bootstrap && left > 0 && left <= kSteps) {
        const int step = static_cast<int>(left);
        if (lane == 0) {
          unsigned char* const to = values +
              (step == kSteps ? 32 * kLaneBytes : chunk_offset<kLaneBytes>(step / kVec)) + step % kVec * sizeof(T);
          *reinterpret_cast<T*>(to) = bootstrap;
        }
        __syncwarp();
      }
    }
    const uint32_t terminates = operands.flags_of(p.terminated, p.terminated_is_bool, kStagedTerminated, here);
    const uint32_t truncates = operands.flags_of(p.truncated, p.truncated_is_bool, kStagedTruncated, here);
    if constexpr (!kPacked) {
      const int64_t last = left - 1 - lane * kPer;
      if (last >= 0 && last < kPer) lasts = 1u << last;
    }
    const uint32_t ends = terminates | truncates;
    cuts = ends | lasts;
    drops = operands.given.next ? terminates : ends;
    if constexpr (!kFull) drops = left_out(operands.given.own_values, operands.rates(), drops, cuts);
    const bool has_rhos = operands.given.rhos;
    clip_rho = has_rhos ? static_cast<Acc>(p.clip_rho) : Acc(1),
    clip_c = has_rhos ? static_cast<Acc>(p.clip_c) : Acc(1);
    clip_pg = has_rhos ? static_cast<Acc>(p.clip_pg) : Acc(1);
  }

  // The value of the state after the lane's last step.
  __device__ __forceinline__ Acc value_behind() const {
    if (!operands.given.values) return 0;
    unsigned char* const values = here + params.staged[kStagedValues].slot;
    return cast<Acc>(*reinterpret_cast<const T*>(
        lane == 31 ? values + 32 * kLaneBytes : values + chunk_offset<kLaneBytes>((lane + 1) * kChunks)));
  }

  // The lane's total from a carry of nothing; in `gates`, where gates differ, their product.
  __device__ __forceinline__ Acc scan_local(
      const Bootstraps& bootstraps, Differences& differences, double& gates) const {
    const Rates<Acc>& rates = operands.rates();
    const bool has_values = operands.given.values, has_own = operands.given.own_values, has_next = operands.given.next;
    Acc y = 0, after = value_behind(), product = 1;
#pragma unroll
    for (int c = kChunks - 1; c >= 0; --c) {
      Acc rewards[kVec], own[kVec] = {}, next[kVec];
      read(kStagedRewards, c, rewards);
      if (has_values) read(kStagedValues, c, own);
#pragma unroll
      for (int j = 0; j < kVec; ++j) next[j] = j + 1 < kVec ? own[(j + 1) % kVec] : after;
      after = own[0];
      Factors factors;
      read_factors(c, factors);
      if (has_next) read(kStagedNext, c, next);
#pragma unroll
      for (int j = kVec - 1; j >= 0; --j) {
        const int i = c * kVec + j;
        const bool cut = cuts >> i & 1;
        if constexpr (kPacked || kFull)
          if (!has_next && lasts >> i & 1) next[j] = cast<Acc>(kPacked ? bootstraps[kPacked ? i : 0] : bootstrap);
        Acc weight = factors.gamma[j];
        if (!has_own && !cut)
          weight = operands.each_gamma || operands.each_trace ? weight - weight * factors.trace[j] : rates.rest;
        const bool dropped = drops >> i & 1 || (kFull && !has_own && weight == Acc(0));
        differences[i] = (dropped ? rewards[j] : rewards[j] + weight * next[j]) - (has_own ? own[j] : Acc(0));
        const Acc factor = factors.steps[j] * clipped(factors.rho[j], clip_c),
                  delta = clipped(factors.rho[j], clip_rho) * differences[i];
        y = cut ? delta : rates.gate.step(delta, factor * y);
        if (kGates) product *= factor;
      }
    }
    if constexpr (kGates)
      gates = clamped_mul(in_range(product) ? static_cast<double>(product) : gates_in_double(), operands.lane_power);
    return y;
  }
  // The product of the lane's factors, one that has left Acc's range.
  __device__ __forceinline__ double gates_in_double() const {
    double gates = 1.0;
#pragma unroll 1
    for (int c = kChunks - 1; c >= 0; --c) {
      Factors factors;
      read_factors(c, factors);
#pragma unroll
      for (int j = kVec - 1; j >= 0; --j)
        gates = clamped_mul(gates, static_cast<double>(factors.steps[j] * clipped(factors.rho[j], clip_c)));
    }
    return gates;
  }

  // The carry into the lane's steps, from the last one back; `carry` becomes that into the warp's (the block's) next
  // tile. `after_power`: c over the lanes after this one.
  __device__ __forceinline__ Acc exchange_carries(
      double total, double gates, double after_power, Segments& segments, int& parity, double& carry) const {
    // A cut in [lane, lane + d) keeps out what lies behind.
    const uint32_t cut_lanes = __ballot_sync(0xffffffffu, cuts != 0);
#pragma unroll
    for (int s = 0; s < 5; ++s) {
      const int d = 1 << s;
      const double other = shuffle_down(total, d), other_gates = kGates ? shuffle_down(gates, d) : 1.0;
      if (lane + d < 32 && (cut_lanes >> lane & ((1u << d) - 1)) == 0) {
        total = fold(total, kGates ? gates : params.powers[s], other);
        if (kGates) gates = clamped_mul(gates, other_gates);
      }
    }
    double behind = shuffle_down(total, 1), behind_gates = kGates ? shuffle_down(gates, 1) : after_power;
    if (lane == 31) {
      behind = 0.0;
      behind_gates = 1.0;
    }
    const Segment<double> whole{shuffle(total, 0), kGates ? shuffle(gates, 0) : params.powers[5], cut_lanes != 0};
    double entering = carry;
    if constexpr (kBlock) {
      if (lane == 0) segments[parity][operands.warp] = whole;
      __syncthreads();
      double all = carry;
      for (int w = operands.warps - 1; w >= 0; --w) {
        if (w == operands.warp) entering = all;
        all = after(segments[parity][w], all);
      }
      carry = all;
      parity ^= 1;
    } else {
      carry = after(whole, carry);
    }
    return static_cast<Acc>(after(Segment<double>{behind, behind_gates, (cut_lanes >> lane >> 1) != 0}, entering));
  }

  __device__ __forceinline__ StagedTensor target_slot() const {
    return operands.given.values ? kStagedValues : kStagedRewards;
  }

  // The results, from the lane's carry, in the place of the operands.
  __device__ __forceinline__ void apply(Acc y, const Differences& differences) const {
    const Rates<Acc>& rates = operands.rates();
    __syncwarp();  // a neighbor has read this lane's first value
#pragma unroll
    for (int c = kChunks - 1; c >= 0; --c) {
      Acc own[kVec] = {}, advantages[kVec], targets[kVec];
      if (p.targets.data && operands.given.own_values) read(kStagedValues, c, own);
      Factors factors;
      read_factors(c, factors);
      Acc pg_advantages[kVec];
#pragma unroll
      for (int j = kVec - 1; j >= 0; --j) {
        const int i = c * kVec + j;
        const bool cut = cuts >> i & 1;
        const Acc rho = factors.rho[j], delta = clipped(rho, clip_rho) * differences[i];
        if (Given::kHasPg)
          pg_advantages[j] =
              clipped(rho, clip_pg) * (cut ? differences[i] : rates.gate.step(differences[i], factors.steps[j] * y));
        y = cut ? delta : rates.gate.step(delta, factors.steps[j] * clipped(rho, clip_c) * y);
        advantages[j] = y;
        targets[j] = y + own[j];
      }
      if constexpr (Given::kHasPg)
        if (p.pg_advantages.data)
          *reinterpret_cast<Word*>(here + params.pg_slot + chunk_offset<kLaneBytes>(lane * kChunks + c)) =
              pack<Acc, T, kVec>(pg_advantages);
      if (p.advantages.data) operands.template chunk<T>(here, kStagedRewards, c) = pack<Acc, T, kVec>(advantages);
      if (p.targets.data) operands.template chunk<T>(here, target_slot(), c) = pack<Acc, T, kVec>(targets);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store_output(const ReturnsOutput& output, int slot) const {
    if (!output.data) return;
    const int64_t offset = kPacked ? at.lot * params.pack_rows * p.length : operands.in_row(at.lot, output.strides);
    store_tile<T, kPer>(here + slot, static_cast<T*>(output.data) + offset + base, count, params.whole_words, lane);
  }
  __device__ __forceinline__ void store() const {
    store_output(p.advantages, params.staged[kStagedRewards].slot);
    store_output(p.targets, params.staged[target_slot()].slot);
    if constexpr (Given::kHasPg) store_output(p.pg_advantages, params.pg_slot);
    __syncwarp();
  }
};

template <typename T, int kForm, ReturnsRows kRows>
__global__ void __launch_bounds__(32 * returns_warps(kRows, kForm), returns_blocks(kRows, kForm, sizeof(T)))
    returns_rows_kernel(const __grid_constant__ ReturnsRowsCall<typename Types<T>::Acc> params) {
  using Tile = ReturnsRowsTile<T, kForm, kRows>;
  using Operands = typename Tile::Operands;
  using Acc = typename Operands::Acc;
  constexpr int kStages = Operands::kStages;
  extern __shared__ __align__(16) unsigned char returns_shared[];
  __shared__ typename Tile::Segments segments;
  Operands operands(params, returns_shared);
  double after_power = 1.0;
  if constexpr (!Operands::kGates) {
#pragma unroll
    for (int s = 0; s < 5; ++s)
      if (31 - operands.lane >> s & 1) after_power = power_mul(after_power, params.powers[s]);
  }

  ReturnsTileIndex now = operands.first_index(), ahead = now;
  const bool has_bootstrap = !Operands::kPacked && operands.has_bootstrap;
  T bootstrap = has_bootstrap && now.lot < params.lots ? operands.bootstrap_of(now.lot) : cast<T>(Acc(0));
  double carry = 0.0;
  int stage = 0, parity = 0,
      missing = kStages;  // stages that have no tile on its way yet: one loop, so that the fetch is compiled once
  asm volatile("" : "+r"(missing));
  while (missing > 0 || now.lot < params.lots) {
    if (missing > 0) {
      --missing;
    } else {
      ReturnsTileIndex following = now;
      operands.move_on(following);
      // Asked for before it is needed.
      T next_bootstrap = cast<T>(Acc(0));
      if (has_bootstrap && following.tile == operands.tiles - 1 && following.lot < params.lots)
        next_bootstrap = operands.bootstrap_of(following.lot);
      Tile tile(operands, now, stage, bootstrap);
      typename Tile::Bootstraps bootstraps;
      tile.load_bootstraps(bootstraps);
      if (operands.rates_by_row() && now.tile == operands.tiles - 1) operands.set_rates(now.lot);
      wait_for_copies<kStages - 1>();
      __syncwarp();
      tile.load_flags();
      double gates = 1.0;
      typename Tile::Differences differences;
      const Acc total = tile.scan_local(bootstraps, differences, gates);
      tile.apply(tile.exchange_carries(total, gates, after_power, segments, parity, carry), differences);
      tile.store();
      now = following;
      if (!Operands::kPacked && now.tile == operands.tiles - 1) bootstrap = next_bootstrap;
    }
    operands.fetch(ahead, stage);
    operands.move_on(ahead);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

}  // namespace dcs
