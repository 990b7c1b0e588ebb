// Rows of many tiles, one pass over memory, for devices with bulk copies. As many blocks as the GPU holds at once take
// the tiles of all rows in turn: block b takes the tiles b, b + blocks, b + 2 * blocks, ... A tile's carry comes
// from the totals of the tiles of its row that the other blocks took since this block's last one, folded in a fixed
// order onto the carry that this block had there: whichever block is first, the bits are the same, and no carry is
// handed from block to block. Blocks wait for each other's totals, so they are launched cooperatively: all of them run,
// or none. Where the rows alone fill the GPU, each block takes whole rows instead.
//
// Most warps scan, each its slice of the tile: serially from 0 for its total, and again from its carry for the output,
// which leaves by a bulk copy. None waits for the others. One more warp loads the tiles, a second publishes the
// block's totals, a third collects those of the other blocks and leaves each warp its carry, while the others finish
// the tile before. A thread's vectors lie side by side, an odd number of them, so that the lanes' reads meet in no
// bank.
#pragma once

#include "scan/long_rows/bulk_stream_carries.cuh"
#include "scan/long_rows/bulk_stream_load.cuh"
#include "scan/long_rows/bulk_stream_shared.cuh"
#include "common/vector.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

__device__ __forceinline__ float power_of_40(float base) {
  const float power_of_2 = base * base, power_of_4 = power_of_2 * power_of_2, power_of_8 = power_of_4 * power_of_4;
  return power_of_8 * power_of_8 * (power_of_8 * power_of_8) * power_of_8;
}

// `kShifted`: a step's gate is that of the step before, as in every backward; nothing to a gamma that is not one a
// step.
template <typename T, bool kStep, bool kBackward, bool kReverse, bool kShifted, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) bulk_stream_kernel(const __grid_constant__ StreamParams params) {
#if DCS_HAS_BULK_COPIES
  using Layout = BulkStreamLayout<kStep, kBackward, kReverse, kShifted, Shape>;
  static_assert(Layout::kStageVectors <= Shape::kStageVectors);
  constexpr int kVec = 16 / sizeof(T), kWarps = Shape::kWarps, kVectors = Shape::kVectors, kStages = Shape::kStages,
                kSlice = Shape::kSlice;
  constexpr int kTileVectors = Shape::kTile, kAhead = Shape::kAhead, kTurns = kAhead + 1;
  static_assert((kStep || (kWarps & (kWarps - 1)) == 0) && kWarps <= 16 && kVectors % 2 == 1 && kStages >= kAhead + 2);
  static_assert(Shape::kTensors == 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0));
  constexpr bool kShort = sizeof(T) == 2;
  using Chunk = Vector<T, kVec>;
  const ScanProblem& p = params.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  extern __shared__ __align__(128) unsigned char bulk_stream_bytes[];
  Chunk* const stages = reinterpret_cast<Chunk*>(bulk_stream_bytes);
  using Shared = BulkStreamShared<kStep, Shape>;
  __shared__ Shared shared;
  static_assert(sizeof(shared) <= kBulkStreamStaticBytes);
  if (threadIdx.x == 0) shared.init(params.row_per_block);
  __syncthreads();
  if (warp == kWarps + 1) {
    collect_carries<T, kStep, kBackward>(params, shared);
    return;
  }
  if (warp > kWarps - 1) {
    if (warp == kWarps && !params.row_per_block) publish_totals<kStep, kVec>(params, shared);
    if (warp == kWarps + 2) load_tiles<T, kStep, kBackward, kReverse, kShifted>(params, shared, stages);
    return;
  }

  // Scans. A lane's vectors in the order of the scan.
  const int slice = kReverse ? kTileVectors - (warp + 1) * kSlice : warp * kSlice;
  const int own = slice + (kReverse ? kSlice - 1 - lane * kVectors : lane * kVectors);
  const auto at_k = [&](int k) { return kReverse ? own - k : own + k; };

  using RowGate = Gate<float, kShort>;
  RowGate gate{};  // of the tile prepared last
  double lane_powers[5], lane_power = 1.0;
  uint32_t gamma_row = TileCursor(params).row;
  const auto set_gamma = [&](double gamma) {
    gate = make_gate<float, kShort>(gamma);
    double power = whole_power(gamma, kVec * kVectors);
    lane_power = 1.0;
#pragma unroll
    for (int d = 0; d < 5; ++d) {
      lane_powers[d] = power;
      if (lane >> d & 1) lane_power = power_mul(lane_power, power);
      power = power_mul(power, power);
    }
  };
  if constexpr (!kStep) set_gamma(gamma_of_row(p, gamma_row));
  const auto advance = [](const RowGate& of_row, float value, float factor, float y) {
    return kStep ? plain_step(value, factor, y) : of_row.step(value, y);
  };
  // Where a row's first step is in this thread's first vector: no carry enters it.
  const int pad = kReverse ? static_cast<int>(params.padded - p.length) : 0;
  const auto first_step = [&](const TileInfo& info) {
    return threadIdx.x == 0 && info.flags & TileInfo::kStarts ? pad : -1;
  };

  // The gates of a vector's steps; in a shifted scan, of the step before each.
  const auto read_gates = [&](const Chunk* here, int k, float& before, float (&to)[kVec]) {
    float gates[kVec];
    unpack_in_order<kReverse>(here[Layout::kGatesAt + at_k(k)], gates);
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = !kShifted ? gates[i] : i == 0 ? before : gates[(i + kVec - 1) % kVec];
    before = gates[kVec - 1];
  };
  const auto gate_before_own = [&](const Chunk* here) {
    float before[kVec];
    unpack_in_order<kReverse>(here[Layout::kGatesAt + at_k(-1)], before);
    return before[kVec - 1];
  };

  // The product of a lane's gates in double; `vanished`: that in float is 0, for which a gate of 0 is looked for first,
  // as that is sooner done.
  const auto multiply_gates = [&](const Chunk* here, float before, int first, bool vanished) {
    double product = 1.0;
    bool has_zero = false;
    const auto go_through = [&](const auto& visit) {
      float last = before;
#pragma unroll 1
      for (int k = 0; k < kVectors; ++k) {
        float factors[kVec];
        read_gates(here, k, last, factors);
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          if (k > 0 || i > first) visit(factors[i]);
      }
    };
    if (vanished) go_through([&](float factor) { has_zero = has_zero || factor == 0.f; });
    if (has_zero) return 0.0;
    go_through([&](float factor) { product = clamped_mul(product, static_cast<double>(factor)); });
    return product;
  };

  struct State {
    double entering, gates;  // the lanes before: their total, the product of their gates
    float gate_before;       // of the step before: once finished, the neighbor's gates are gone
    RowGate gate;
  };
  const auto prepare = [&](const TileInfo& info, const Chunk* here, int turn) {
    const int first = first_step(info);
    if (!kStep && !params.one_gamma && info.row != gamma_row) {
      gamma_row = info.row;
      set_gamma(info.gamma);
    }
    const float gate_before = kStep && kShifted ? gate_before_own(here) : 0.f;
    float y = 0.f, before = gate_before;
    constexpr int kGroup = kVec * kVectors <= 40 ? kVectors : (kVectors + 1) / 2;  // vectors of a product in float
    static_assert(!kStep || kVec * kGroup <= 40);
    GateProduct<T> products[2];
    Largest<T, kVec> largest;  // of the gates, this lane's last among them even where that belongs to the next
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float values[kVec], factors[kVec];
      unpack_in_order<kReverse>(here[at_k(k)], values);
      if constexpr (kStep) {
        read_gates(here, k, before, factors);
        largest.take(here[Layout::kGatesAt + at_k(k)]);
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        y = k == 0 && (i == 0 || i == first) ? values[i] : advance(gate, values[i], factors[i], y);
        if constexpr (kStep) products[k >= kGroup].take((k == 0 && i <= first) ? 1.f : factors[i]);
      }
    }
    double total = y, gates = 1.0;
    if constexpr (kStep) {
      gates = products[0].whole();
      if constexpr (kGroup < kVectors) gates *= products[1].whole();
      // In float only where no product on the way left its range: what 40 gates can lift at most, they may have lifted.
      const float most = kShifted ? fmaxf(largest.magnitude(), fabsf(gate_before)) : largest.magnitude();
      const float least = 0x1p-126f * power_of_40(fmaxf(most, 1.f));
      if (__builtin_expect(!(fabsf(products[0].rounded) > least && fabsf(products[1].rounded) > least), 0)) {
        // Nobody asks what lies behind a row's last step.
        const bool outside = kReverse ? (own + 1) * kVec <= info.low : own * kVec >= info.high;
        if (!outside) gates = multiply_gates(here, gate_before, first, gates == 0.0);
      }
    }
    if constexpr (kStep) {
      fold_lanes<32>(total, gates, lane);
    } else {
#pragma unroll
      for (int d = 0; d < 5; ++d) {
        const double other = shuffle_up(total, 1 << d);
        if (lane >= 1 << d) total = fold(total, lane_powers[d], other);
      }
    }
    if (lane == 31) {
      shared.totals[turn][warp] = total;
      if constexpr (kStep) shared.gates[turn][warp] = gates;
    }
    // Finishing writes the gradient over gates: by then all have read their neighbors', the first lanes those of
    // another warp.
    if (kStep && kBackward && lane == 0) mbarrier_arrive(&shared.carries_ready[turn]);
    if (!params.row_per_block) arrive_at(Shared::kToPublish + turn, Shared::kArrivals);
    arrive_at(Shared::kToCollect + turn, Shared::kArrivals);
    State state{shuffle_up(total, 1), kStep ? shuffle_up(gates, 1) : lane_power, gate_before, gate};
    if (lane == 0) state.entering = 0.0, state.gates = 1.0;
    return state;
  };

  const auto finish = [&](const State& state, const TileInfo& info, Chunk* here, int turn, uint32_t phase) {
    const int first = first_step(info);
    float before = state.gate_before;
    float saved_after = 0.f;
    if constexpr (kBackward) {
      float after[kVec];
      unpack_in_order<kReverse>(here[Layout::kSavedAt + at_k(kVectors)], after);
      saved_after = after[0];
    }
    const bool whole = info.flags & TileInfo::kWhole, masked = !whole || info.flags & TileInfo::kEnds;
    const int last = info.flags & TileInfo::kEnds ? kReverse ? info.low : info.high - 1 : -1;  // the row's last step
    mbarrier_wait(&shared.carries_ready[turn], phase);
    float y = static_cast<float>(fold(state.entering, state.gates, shared.carries[turn][warp]));
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float values[kVec], factors[kVec];
      unpack_in_order<kReverse>(here[at_k(k)], values);
      if constexpr (kStep) read_gates(here, k, before, factors);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        y = (k == 0 && i == first) ? values[i] : advance(state.gate, values[i], factors[i], y);
        values[i] = y;
      }
      const Chunk result = pack_in_order<kReverse, T>(values);
      here[at_k(k)] = result;
      if constexpr (kBackward) {
        // grad_gamma[t] = output[t] * saved[next(t)], where nothing is saved after the scan's last step.
        float rounded[kVec], saved[kVec], terms[kVec];
        unpack_in_order<kReverse>(result, rounded);
        unpack_in_order<kReverse>(here[Layout::kSavedAt + at_k(k)], saved);
        float beyond = saved_after;
        if (k + 1 < kVectors) {
          float next[kVec];
          unpack_in_order<kReverse>(here[Layout::kSavedAt + at_k(k + 1)], next);
          beyond = next[0];
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          float other = i + 1 < kVec ? saved[(i + 1) % kVec] : beyond;
          bool inside = true;
          if (masked) {
            const int index = at_k(k) * kVec + (kReverse ? kVec - 1 - i : i);
            inside = index >= info.low && index < info.high;
            if (index == last) other = 0.f;
          }
          terms[i] = inside ? rounded[i] * other : 0.f;
          sum += terms[i];
        }
        if constexpr (kStep) here[Layout::kGatesAt + at_k(k)] = pack_in_order<kReverse, T>(terms);
      }
    }
    show_to_bulk_stores();
    __syncwarp();
    if (lane == 0) {
      const auto store = [&](T* to, int offset) {  // `to`: of the tile's first vector
        if (whole) {
          bulk_store(to + slice * kVec, here + offset + slice, kSlice * 16);
          return;
        }
        const int begin = max(info.low / kVec, slice), end = min(info.high / kVec, slice + kSlice),
                  part = info.high / kVec;
        if (end > begin) bulk_store(to + begin * kVec, here + offset + begin, (end - begin) * 16);
        if (info.high % kVec && part >= slice && part < slice + kSlice)
          store_vector<T, kVec>(to + part * kVec, 0, 0, info.high % kVec, here[offset + part]);
      };
      store(static_cast<T*>(p.output) + info.output, 0);
      if constexpr (kBackward && kStep) store(static_cast<T*>(p.grad_gamma) + info.grad, Layout::kGatesAt);
      commit_stores();
    }
    if constexpr (kBackward && !kStep) {
      sum = warp_sum(sum);
      if (lane == 0) shared.sums[turn][warp] = sum;
    }
    __syncwarp();
  };

  const auto stage_at = [&](int stage) { return stages + stage * Layout::kStageVectors; };
  // One loop, so that the code is there once: a round prepares a tile and finishes that of kAhead rounds before.
  State states[kAhead + 1];  // the last is of the tile prepared last
  int ready_stage = 0, ready_turn = 0, stage = 0, turn = 0, left = -1;
  int known = 0;  // prepared and not finished
  uint32_t ready_phase = 0, phase = 0;
  bool more = true;
#pragma unroll 1
  for (int round = 0; more || known > 0; ++round) {
    if (more) {
      mbarrier_wait(&shared.full[ready_stage], ready_phase);
      const TileInfo info = shared.infos[ready_stage];
      more = info.row != TileInfo::kNoRow;
      if (more) {
        states[kAhead] = prepare(info, stage_at(ready_stage), ready_turn);
        ++known;
        if (++ready_stage == kStages) ready_stage = 0, ready_phase ^= 1;
        if (++ready_turn == kTurns) ready_turn = 0;
      }
    }
    if (round >= kAhead && known > 0) {
      if (left >= 0) {
        if (lane == 0) wait_for_stores_to_read();
        arrive_at(Shared::kLeft + left, Shared::kArrivals);
      }
      finish(states[0], shared.infos[stage], stage_at(stage), turn, phase);
      --known;
      left = stage;
      if (++stage == kStages) stage = 0;
      if (++turn == kTurns) turn = 0, phase ^= 1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) states[i] = states[i + 1];
  }
  if (lane == 0) wait_for_stores();
  if constexpr (kBackward && !kStep) arrive_at(Shared::kLastSums, Shared::kArrivals);
#endif
}

}  // namespace dcs
