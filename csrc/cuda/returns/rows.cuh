// The temporal difference scan along contiguous time. A warp takes rows (of short rows, packs of several), a block takes a row where rows are few. A warp's
// tile is kPer steps a lane; it walks through the tiles of its rows from the last step back, and the next kStages - 1 tiles are on their way into shared memory
// meanwhile, across the ends of rows too. Within a tile a lane goes through its steps twice: from nothing for its total, and, once the lanes after it in time
// are known, from its carry. Between lanes everything is in double. Results take their operands' place in shared memory, so that global memory sees
// whole lines both ways.
#pragma once

#include "common/row_offset.cuh"
#include "returns/tile.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

template <typename T, int kForm, ReturnsRows kRows>
__global__ void __launch_bounds__(32 * returns_warps(kRows, kForm), returns_blocks(kRows, kForm, sizeof(T)))
    returns_rows_kernel(const __grid_constant__ ReturnsRowsCall<typename Types<T>::Acc> params) {
  using Acc = typename Types<T>::Acc;
  using Tile = ReturnsTile<T, kForm>;
  using Word = Vector<T, 16 / sizeof(T)>;
  using Given = ReturnsGiven<kForm>;
  constexpr bool kFull = Given::kFull, kGates = Given::kGates;
  constexpr bool kPacked = kRows == ReturnsRows::kPacked, kBlock = kRows == ReturnsRows::kBlock;
  constexpr int kPer = Tile::kPer, kSteps = Tile::kSteps, kStages = Tile::kStages;
  constexpr int kVec = 16 / sizeof(T), kChunks = kPer / kVec, kLaneBytes = kPer * sizeof(T);
  const ReturnsProblem& p = params.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  extern __shared__ __align__(16) unsigned char returns_shared[];
  unsigned char* const ring = returns_shared + warp * kStages * params.stage_bytes;

  const Given given(p);
  const bool has_values = given.values, has_next = given.next, has_rhos = given.rhos;
  // Read for every step: one a step, or packed rows' own.
  const auto is_each = [](const ReturnsDiscount& discount) {
    return kFull && (kPacked ? discount.kind != GammaKind::kNumber : discount.kind == GammaKind::kStep);
  };
  const bool each_gamma = is_each(p.gamma), each_trace = is_each(p.trace);

  struct Place {
    int64_t lot;
    int tile;
  };
  const int tiles = kPacked ? 1 : params.tiles;
  const int64_t stride = kBlock ? gridDim.x : static_cast<int64_t>(gridDim.x) * warps;
  const auto move_on = [&](Place& at) {
    if (at.tile > 0) {
      --at.tile;
    } else {
      at.tile = tiles - 1;
      at.lot += stride;
    }
  };
  // Steps of the lot, and the first one of this warp's tile.
  const auto length_of = [&](const Place& at) {
    return kPacked ? min(p.outer * p.inner - at.lot * params.pack_rows, static_cast<int64_t>(params.pack_rows)) * p.length : p.length;
  };
  const auto base_of = [&](const Place& at) {
    return kPacked ? int64_t{0} : (kBlock ? static_cast<int64_t>(at.tile) * warps + warp : static_cast<int64_t>(at.tile)) * kSteps;
  };
  const auto in_row = [&](int64_t row, const Strides& strides) { return row_offset(row, p.inner, strides); };

  const auto fetch = [&](const Place& at, int stage) {
    if (at.lot < params.lots) {
      unsigned char* const to = ring + stage * params.stage_bytes;
      const int64_t base = base_of(at), left = length_of(at) - base;
      const auto bring = [&](auto width, StagedTensor which) {
        constexpr int kElement = decltype(width)::value;
        const Staged& staged = params.staged[which];
        const int64_t offset = kPacked ? at.lot * params.pack_rows * p.length * kElement : row_offset(at.lot, p.inner, staged.outer, staged.inner);
        const char* const from = staged.data + offset + base * kElement;
        const int valid = static_cast<int>(max(int64_t{0}, min(left, int64_t{kSteps}))) * kElement;
        bring_tile<kPer * kElement, kElement>(to + staged.slot, from, valid, staged.grain, lane);
        if (which == kStagedValues && lane == 0) {
          // The step behind the tile.
          unsigned char* const behind = to + staged.slot + 32 * kLaneBytes;
          const char* const there = from + 32 * kLaneBytes;
          const int more = static_cast<int>(max(int64_t{0}, min(left - kSteps, int64_t{kVec}))) * kElement;
          if (staged.grain == 16) {
            copy_existing<16, kElement>(behind, there, more);
          } else if (staged.grain == 4) {
            copy_existing<4, std::min(kElement, 4)>(behind, there, more);
            if constexpr (kElement == 8) copy_existing<4, 4>(behind + 4, there + 4, more);
          } else if constexpr (kElement == 2) {
            *reinterpret_cast<uint16_t*>(behind) = more > 0 ? *reinterpret_cast<const uint16_t*>(there) : uint16_t(0);
          }
        }
      };
      constexpr std::integral_constant<int, sizeof(T)> wide;
      constexpr std::integral_constant<int, sizeof(Acc)> widest;
      constexpr std::integral_constant<int, 1> byte;
      const auto bring_flags = [&](const ReturnsInput& flags, bool is_bool, StagedTensor which) {
        if (!flags.data) return;
        if (!kFull || is_bool) bring(byte, which);
        else bring(wide, which);
      };
      bring(wide, kStagedRewards);
      if (has_values) bring(wide, kStagedValues);
      bring_flags(p.terminated, p.terminated_is_bool, kStagedTerminated);
      bring_flags(p.truncated, p.truncated_is_bool, kStagedTruncated);
      if (has_next) bring(wide, kStagedNext);
      if (has_rhos) bring(wide, kStagedRhos);
      if constexpr (kFull) {
        if (p.gamma.kind == GammaKind::kStep) bring(widest, kStagedGamma);
        if (p.trace.kind == GammaKind::kStep) bring(widest, kStagedTrace);
      }
    }
    commit_copies();
  };

  // The discounts of the row, and c over a lane's steps.
  Rates<Acc> own_rates;
  double lane_power = params.powers[0];
  const Rates<Acc>& rates = kFull ? own_rates : params.rates;
  const auto set_rates = [&](int64_t row) {
    if (kPacked) {
      ReturnsDiscount gamma = p.gamma, trace = p.trace;
      if (each_gamma) gamma.kind = GammaKind::kStep;
      if (each_trace) trace.kind = GammaKind::kStep;
      own_rates = rates_of<Acc>(gamma, trace, 0, 0);
    } else {
      own_rates = rates_of<Acc>(p.gamma, p.trace, in_row(row, p.gamma.tensor.strides), in_row(row, p.trace.tensor.strides));
    }
    lane_power = power_of<kPer>(own_rates.carried);
  };
  const bool rates_by_row = kFull && !kPacked && (p.gamma.kind == GammaKind::kRow || p.trace.kind == GammaKind::kRow);
  if (kFull) set_rates(0);
  double after_power = 1.0;  // over the lanes after this one
  if constexpr (!kGates) {
#pragma unroll
    for (int s = 0; s < 5; ++s)
      if (31 - lane >> s & 1) after_power = power_mul(after_power, params.powers[s]);
  }

  // Bit i: the lane's step i is the last of its row. The same in every pack.
  uint32_t pack_lasts = 0;
  int first_row = 0;  // of the lane's steps, in its pack
  if constexpr (kPacked) {
    const int length = static_cast<int>(p.length);
    first_row = lane * kPer / length;
    int at = lane * kPer - first_row * length;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (++at == length) {
        pack_lasts |= 1u << i;
        at = 0;
      }
    }
  }
  const auto bootstrap_of = [&](int64_t row) {
    return static_cast<const T*>(p.bootstrap_value.data)[in_row(row, p.bootstrap_value.strides)];
  };
  const T nothing = cast<T>(Acc(0));

  Place now{kBlock ? static_cast<int64_t>(blockIdx.x) : static_cast<int64_t>(blockIdx.x) * warps + warp, tiles - 1}, ahead = now;
  for (int stage = 0; stage < kStages; ++stage, move_on(ahead)) fetch(ahead, stage);
  const bool has_bootstrap = p.bootstrap_value.data != nullptr;
  T bootstrap = !kPacked && has_bootstrap && now.lot < params.lots ? bootstrap_of(now.lot) : nothing;
  double carry = 0.0;
  int stage = 0, parity = 0;
  __shared__ Piece<double> pieces[kBlock ? 2 : 1][kBlock ? returns_warps(kRows, kForm) : 1];  // two in turn: a warp may be one tile ahead

  while (now.lot < params.lots) {
    Place following = now;
    move_on(following);
    // Asked for before it is needed.
    T next_bootstrap = nothing;
    if (!kPacked && has_bootstrap && following.tile == tiles - 1 && following.lot < params.lots) next_bootstrap = bootstrap_of(following.lot);
    const int64_t base = base_of(now), left = length_of(now) - base;
    const int count = static_cast<int>(max(int64_t{0}, min(left, int64_t{kSteps})));
    T bootstraps[kPacked ? kPer : 1];
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        bootstraps[i] = nothing;
        if (has_bootstrap && pack_lasts >> i & 1 && lane * kPer + i < count)
          bootstraps[i] = bootstrap_of(now.lot * params.pack_rows + first_row + __popc(pack_lasts & ((1u << i) - 1)));
      }
    }
    if (rates_by_row && now.tile == tiles - 1) set_rates(now.lot);
    unsigned char* const here = ring + stage * params.stage_bytes;
    const auto chunk = [&](auto kind, StagedTensor which, int c) -> auto& {
      using U = decltype(kind);
      constexpr int kBytes = kPer * sizeof(U);
      return *reinterpret_cast<Vector<U, 16 / sizeof(U)>*>(here + params.staged[which].slot + chunk_place<kBytes>(lane * (kBytes / 16) + c));
    };
    const auto read = [&](StagedTensor which, int c, Acc(&to)[kVec]) { unpack(whole(chunk(T{}, which, c)), to); };

    wait_for_copies<kStages - 1>();
    __syncwarp();
    unsigned char* const values = here + params.staged[kStagedValues].slot;
    if constexpr (!kFull && !kPacked && !(kForm & kWithNext)) {
      // The step behind the row's last has no other use.
      if (has_bootstrap && left > 0 && left <= kSteps) {
        const int at = static_cast<int>(left);
        if (lane == 0) *reinterpret_cast<T*>(values + (at == kSteps ? 32 * kLaneBytes : chunk_place<kLaneBytes>(at / kVec)) + at % kVec * sizeof(T)) = bootstrap;
        __syncwarp();
      }
    }

    // Bit i: the lane's step i.
    const auto flags_of = [&](const ReturnsInput& flags, bool is_bool, StagedTensor which) {
      uint32_t bits = 0;
      if (!flags.data) return bits;
      if (!kFull || is_bool) {
        const uint32_t* const bytes = reinterpret_cast<const uint32_t*>(here + params.staged[which].slot + lane * kPer);
        const Vector<uint32_t, kPer / 4> words = *reinterpret_cast<const Vector<uint32_t, kPer / 4>*>(bytes);
#pragma unroll
        for (int w = 0; w < kPer / 4; ++w) bits |= flag_bits(words.get(w)) << 4 * w;
      } else {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          Acc set[kVec];
          read(which, c, set);
#pragma unroll
          for (int j = 0; j < kVec; ++j)
            if (set[j] != Acc(0)) bits |= 1u << (c * kVec + j);
        }
      }
      return bits;
    };
    const uint32_t terminates = flags_of(p.terminated, p.terminated_is_bool, kStagedTerminated);
    const uint32_t truncates = flags_of(p.truncated, p.truncated_is_bool, kStagedTruncated);
    uint32_t lasts = pack_lasts;
    if constexpr (!kPacked) {
      const int64_t last = left - 1 - lane * kPer;
      if (last >= 0 && last < kPer) lasts = 1u << last;
    }
    const uint32_t ends = terminates | truncates, cuts = ends | lasts;
    uint32_t drops = has_next ? terminates : ends;  // the next state's value
    if constexpr (!kFull) drops = left_out(has_values, rates, drops, cuts);

    // Discounts and ratios of a chunk's steps.
    const auto read_each = [&](bool each, const ReturnsDiscount& discount, StagedTensor which, int c, Acc otherwise, Acc(&to)[kVec]) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) to[j] = otherwise;
      if (!each) return;
      if (kPacked && discount.kind == GammaKind::kRow) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const int i = c * kVec + j;
          const int64_t row = now.lot * params.pack_rows + first_row + __popc(pack_lasts & ((1u << i) - 1));
          if (lane * kPer + i < count) to[j] = load_gamma<Acc>(discount.tensor.data, discount.dtype, in_row(row, discount.tensor.strides), false);
        }
      } else {
        // As wide as Acc: a chunk of halves has two of these.
        constexpr int kWide = 16 / sizeof(Acc);
#pragma unroll
        for (int w = 0; w < kVec / kWide; ++w) {
          const Vector<Acc, kWide> part = whole(chunk(Acc{}, which, c * (kVec / kWide) + w));
#pragma unroll
          for (int j = 0; j < kWide; ++j) to[w * kWide + j] = part.get(j);
        }
      }
    };
    struct Factors {
      Acc gamma[kVec], steps[kVec], trace[kVec], rho[kVec];  // steps: of gamma * trace, what is one a step
    };
    const auto read_factors = [&](int c, Factors& to) {
      read_each(each_gamma, p.gamma, kStagedGamma, c, rates.gamma, to.gamma);
      read_each(each_trace, p.trace, kStagedTrace, c, rates.trace, to.trace);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        to.steps[j] = (each_gamma ? to.gamma[j] : Acc(1)) * (each_trace ? to.trace[j] : Acc(1));
        to.rho[j] = 1;
      }
      if (has_rhos) read(kStagedRhos, c, to.rho);
    };
    const Acc clip_rho = has_rhos ? static_cast<Acc>(p.clip_rho) : Acc(1), clip_c = has_rhos ? static_cast<Acc>(p.clip_c) : Acc(1);
    const Acc clip_pg = has_rhos ? static_cast<Acc>(p.clip_pg) : Acc(1);

    // The lane's total, and the product of its factors where they differ.
    Acc differences[kPer], y = 0, after = 0, product = 1;
    if (has_values) after = cast<Acc>(*reinterpret_cast<const T*>(lane == 31 ? values + 32 * kLaneBytes : values + chunk_place<kLaneBytes>((lane + 1) * kChunks)));
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
        if (!has_values && !cut) weight = each_gamma || each_trace ? weight - weight * factors.trace[j] : rates.rest;
        const bool dropped = drops >> i & 1 || (kFull && !has_values && weight == Acc(0));
        differences[i] = (dropped ? rewards[j] : rewards[j] + weight * next[j]) - own[j];
        const Acc factor = factors.steps[j] * clipped(factors.rho[j], clip_c), delta = clipped(factors.rho[j], clip_rho) * differences[i];
        y = cut ? delta : rates.gate.step(delta, factor * y);
        if (kGates) product *= factor;
      }
    }
    double gates = 1.0;
    if constexpr (kGates) {
      gates = static_cast<double>(product);
      if (!in_range(product)) {
        gates = 1.0;
#pragma unroll 1
        for (int c = kChunks - 1; c >= 0; --c) {
          Factors factors;
          read_factors(c, factors);
#pragma unroll
          for (int j = kVec - 1; j >= 0; --j)
            gates = clamped_mul(gates, static_cast<double>(factors.steps[j] * clipped(factors.rho[j], clip_c)));
        }
      }
      gates = clamped_mul(gates, lane_power);
    }

    // Over the lanes, from the last one back. A cut in [lane, lane + d) keeps out what lies behind.
    const uint32_t cut_lanes = __ballot_sync(0xffffffffu, cuts != 0);
    double total = y;
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
    const Piece<double> whole{shuffle(total, 0), kGates ? shuffle(gates, 0) : params.powers[5], cut_lanes != 0};
    double entering = carry;
    if constexpr (kBlock) {
      if (lane == 0) pieces[parity][warp] = whole;
      __syncthreads();
      double all = carry;
      for (int w = warps - 1; w >= 0; --w) {
        if (w == warp) entering = all;
        all = dcs::after(pieces[parity][w], all);
      }
      carry = all;
      parity ^= 1;
    } else {
      carry = dcs::after(whole, carry);
    }
    y = static_cast<Acc>(dcs::after(Piece<double>{behind, behind_gates, (cut_lanes >> lane >> 1) != 0}, entering));

    const StagedTensor target_slot = has_values ? kStagedValues : kStagedRewards;
    __syncwarp();  // a neighbour has read this lane's first value
#pragma unroll
    for (int c = kChunks - 1; c >= 0; --c) {
      Acc own[kVec] = {}, advantages[kVec], targets[kVec];
      if (p.targets.data && has_values) read(kStagedValues, c, own);
      Factors factors;
      read_factors(c, factors);
      Acc pg_advantages[kVec];
#pragma unroll
      for (int j = kVec - 1; j >= 0; --j) {
        const int i = c * kVec + j;
        const bool cut = cuts >> i & 1;
        const Acc rho = factors.rho[j], delta = clipped(rho, clip_rho) * differences[i];
        if (Given::kHasPg) pg_advantages[j] = clipped(rho, clip_pg) * (cut ? differences[i] : rates.gate.step(differences[i], factors.steps[j] * y));
        y = cut ? delta : rates.gate.step(delta, factors.steps[j] * clipped(rho, clip_c) * y);
        advantages[j] = y;
        targets[j] = y + own[j];
      }
      if constexpr (Given::kHasPg)
        if (p.pg_advantages.data)
          *reinterpret_cast<Word*>(here + params.pg_slot + chunk_place<kLaneBytes>(lane * kChunks + c)) = pack<Acc, T, kVec>(pg_advantages);
      if (p.advantages.data) chunk(T{}, kStagedRewards, c) = pack<Acc, T, kVec>(advantages);
      if (p.targets.data) chunk(T{}, target_slot, c) = pack<Acc, T, kVec>(targets);
    }
    __syncwarp();
    const auto put = [&](const ReturnsOutput& output, int slot) {
      if (!output.data) return;
      const int64_t offset = kPacked ? now.lot * params.pack_rows * p.length : in_row(now.lot, output.strides);
      put_tile<T, kPer>(here + slot, static_cast<T*>(output.data) + offset + base, count, params.whole_words, lane);
    };
    put(p.advantages, params.staged[kStagedRewards].slot);
    put(p.targets, params.staged[target_slot].slot);
    if constexpr (Given::kHasPg) put(p.pg_advantages, params.pg_slot);
    __syncwarp();
    fetch(ahead, stage);
    move_on(ahead);

    now = following;
    if (!kPacked && now.tile == tiles - 1) bootstrap = next_bootstrap;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

}  // namespace dcs
