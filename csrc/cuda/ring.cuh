// Rows of many tiles, one pass over memory, for devices with bulk copies. Blocks walk over the tiles of all rows in turn as in stream.cuh, whose terms
// this file uses; what differs is who waits for what. Most warps scan, each its slice of the tile: serially from 0 for its total, and again from its carry
// for the output, which leaves by a bulk copy. None waits for the others. One more warp brings the tiles in, a second publishes the block's totals, a third
// collects those of the other blocks and leaves each warp its carry, while the others finish the tile before.
// A thread's vectors lie side by side, an odd number of them, so that the lanes' reads meet in no bank.
#pragma once

#include "bulk.cuh"
#include "lookback.cuh"
#include "stream.cuh"
#include "types.cuh"
#include "vector.cuh"

namespace dcs {

template <int kTensors_, int kWarps_, int kVectors_, int kStages_, int kAhead_>
struct RingShape {
  static constexpr int kTensors = kTensors_;  // read: input, gates, saved output
  static constexpr int kWarps = kWarps_;      // that scan, of a block
  static constexpr int kVectors = kVectors_;  // of a thread
  static constexpr int kStages = kStages_;    // tiles in shared memory
  static constexpr int kAhead = kAhead_;      // tiles whose totals are known before one is finished
  static constexpr int kThreads = kWarps * 32 + 96;
  static constexpr int kWindow = 5;  // tiles of the window that a lane reads: up to 160 multiprocessors
  static constexpr int kSlice = kVectors * 32;  // vectors of a warp
  static constexpr int kTile = kSlice * kWarps;
  static constexpr int kStageVectors = kTile * kTensors + kTensors - 1;  // gates and saved: one more, the neighbour's
  static constexpr int kSharedBytes = kStages * kStageVectors * 16;
};

// Where a tile in shared memory lies: its vectors in the order of memory, from offsets of the output and of the gates' gradient on. Its elements
// low .. high - 1 are the row's.
struct TileInfo {
  int64_t output, grad;
  int low, high;
  uint32_t row;  // kNoRow: no tile follows
  uint32_t flags;
  static constexpr uint32_t kWhole = 1, kStarts = 2, kEnds = 4, kNoRow = 0xffffffffu;
};

template <typename T, bool kStep, bool kBackward, bool kReverse, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) ring_kernel(const __grid_constant__ StreamParams params) {
#if DCS_HAS_BULK_COPIES
  constexpr int kVec = 16 / sizeof(T), kWarps = Shape::kWarps, kVectors = Shape::kVectors, kStages = Shape::kStages, kSlice = Shape::kSlice;
  static_assert((kWarps & (kWarps - 1)) == 0 && kWarps <= 16 && kVectors % 2 == 1 && Shape::kTensors == 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0));
  constexpr int kTileVectors = Shape::kTile, kStageVectors = Shape::kStageVectors;
  constexpr int kAhead = Shape::kAhead, kTurns = kAhead + 1;  // of what passes between the warps: so many tiles are under way
  static_assert(kStages >= kAhead + 2);
  constexpr int kWords = kStep ? 2 : 1, kWindow = Shape::kWindow;
  constexpr bool kShort = sizeof(T) == 2;
  using Chunk = Vector<T, kVec>;
  const ScanProblem& p = params.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t blocks = gridDim.x;
  const bool alone = params.alone;

  __shared__ uint64_t full[kStages], empty[kStages];  // a tile has arrived; has left
  __shared__ TileInfo infos[kStages];
  __shared__ uint64_t totals_ready[kTurns], carries_ready[kTurns];  // of a tile
  __shared__ double warp_totals[kTurns][kWarps], warp_gates[kStep ? kTurns : 1][kWarps], warp_carries[kTurns][kWarps];
  __shared__ float warp_sums[kTurns][kWarps];  // of gamma's gradient
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTurns; ++i) {
      init_barrier(&totals_ready[i], kWarps);
      init_barrier(&carries_ready[i], alone ? 1 : 2);
    }
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&empty[i], kWarps);
    }
    publish_barriers();
  }
  __syncthreads();

  struct Place {
    uint32_t row, tile;
  };
  const uint32_t rows_on = alone ? 0 : blocks / params.tiles, tiles_on = alone ? 1 : blocks - rows_on * params.tiles;
  const uint32_t next_row = alone ? blocks : 1;  // behind a row's last tile
  const auto move_on = [&](Place& at) {  // to this block's next tile
    at.row += rows_on;
    at.tile += tiles_on;
    if (at.tile >= params.tiles) {
      at.tile -= params.tiles;
      at.row += next_row;
    }
  };
  const auto offset_of = [&](const Strides& strides, uint32_t row) {
    if (p.inner == 1) return row * strides.outer;
    const uint32_t inner = static_cast<uint32_t>(p.inner), outer = row / inner;
    return outer * strides.outer + (row - outer * inner) * strides.inner;
  };
  const auto row_of = [&](auto* pointer, const Strides& strides, uint32_t row) { return pointer + offset_of(strides, row); };
  Place now{alone ? blockIdx.x : blockIdx.x / params.tiles, alone ? 0 : blockIdx.x % params.tiles};
  const auto gamma_of = [&](uint32_t row) {
    if (p.gamma_kind == GammaKind::kNumber) return p.gamma_value;
    return load_gamma<double>(p.gamma, p.gamma_dtype, offset_of(p.gamma_strides, row), false);
  };

  Word* const words = static_cast<Word*>(params.statuses);
  if (warp == kWarps || warp == kWarps + 1) {
    // Powers of one gamma over a warp's steps 1, 2, 4, ... times, `lane` times, and over a tile.
    double warp_powers[5], warp_power = 1.0, tile_power = 1.0;
    const auto set_powers = [&](uint32_t row) {
      double power = whole_power(gamma_of(row), kVec * kSlice);
      warp_power = 1.0;
#pragma unroll
      for (int d = 0; d < 5; ++d) {
        warp_powers[d] = power;
        if (1 << d < kWarps && (lane >> d & 1)) warp_power = clamped_mul(warp_power, power);
        if (1 << d == kWarps) tile_power = power;
        power = clamped_mul(power, power);
      }
    };
    int64_t gamma_row = -1;
    const auto is_new_gamma = [&](uint32_t row) {
      if (kStep || gamma_row == row || (gamma_row >= 0 && params.one_gamma)) return false;
      gamma_row = row;
      return true;
    };
    // Lane w: the fold of the totals of the warps up to w.
    double total = 0.0, gates = 1.0;
    const auto fold_warps = [&](int parity) {
      const int of = min(lane, kWarps - 1);
      total = warp_totals[parity][of];
      bool bounded = false;
      if constexpr (kStep) {
        gates = warp_gates[parity][of];
        bounded = __all_sync(0xffffffffu, fabs(gates) <= 1.0);
      }
#pragma unroll
      for (int d = 0; 1 << d < kWarps; ++d) {
        const double other = shuffle_up(total, 1 << d);
        if constexpr (kStep) {
          const double other_gates = shuffle_up(gates, 1 << d);
          if (lane >= 1 << d) {
            total = fold(total, gates, other);
            gates = bounded ? gates * other_gates : clamped_mul(gates, other_gates);
          }
        } else {
          if (lane >= 1 << d) total = fold(total, warp_powers[d], other);
        }
      }
    };
    uint32_t index = blockIdx.x, phase = 0;
    int turn = 0;
    const auto next_turn = [&] {
      if (++turn == kTurns) turn = 0, phase ^= 1;
      index += blocks;
      move_on(now);
    };
    if (warp == kWarps) {
      // Publishes the tiles' totals.
      if (!alone) {
        for (; now.row < params.rows; next_turn()) {
          if (is_new_gamma(now.row)) set_powers(now.row);
          wait(&totals_ready[turn], phase);
          fold_warps(turn);
          if (lane == kWarps - 1 && now.tile + 1 < params.tiles) {
            if constexpr (kStep) store_word(words + kWords * static_cast<int64_t>(index) + 1, __double_as_longlong(gates), 1);
            store_word(words + kWords * static_cast<int64_t>(index), __double_as_longlong(total), 1);
          }
          __syncwarp();
          if (lane == 0) arrive(&carries_ready[turn]);  // the totals have been read
        }
      }
      if constexpr (kBackward && !kStep) __syncthreads();
      return;
    }
    // Collects the totals of the tiles before, for the warps' carries.
    double carry_in = 0.0;  // into this block's tile before; `alone`: out of it
    double lane_weight = 1.0, far_power = 1.0, base_weight = 1.0;
    Place behind = now;  // of which gamma's gradient is stored next
    uint32_t rounds = 0;
    const auto store_sum = [&](int turn) {
      float* const partials = row_of(static_cast<float*>(p.grad_gamma), p.grad_gamma_strides, behind.row);
      if (lane == 0) {
        float all = warp_sums[turn][0];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) all += warp_sums[turn][w];
        partials[behind.tile] = all;
      }
      if (behind.tile == 0)
        for (int64_t j = params.tiles + lane; j < p.partials; j += 32) partials[j] = 0.f;
      move_on(behind);
    };
    for (; now.row < params.rows; next_turn()) {
      if (is_new_gamma(now.row)) {
        set_powers(now.row);
        lane_weight = whole_power(tile_power, lane);
        far_power = power_of<32>(tile_power);
        if (params.tiles > blocks) base_weight = whole_power(tile_power, blocks);
      }
      const uint32_t window = alone ? 0 : min(now.tile, blocks);
      double carry = 0.0;
      if (window > 0) {
        // Lane l reads the tiles l, l + 32, ... before the nearest; with a gamma a step, the kWindow tiles from l * kWindow on.
        Word read[kWindow * kWords];
        const auto distance = [&](int j) { return kStep ? static_cast<uint32_t>(lane * kWindow + j) : static_cast<uint32_t>(lane + 32 * j); };
        uint32_t missing = 0;
#pragma unroll
        for (int j = 0; j < kWindow * kWords; ++j) {
          read[j] = {0, 0};
          if (distance(j / kWords) < window) missing |= 1u << j;
        }
        const Word* const nearest = words + kWords * (static_cast<int64_t>(index) - 1);
        while (__any_sync(0xffffffffu, missing != 0)) {  // all that is missing in one trip
#pragma unroll
          for (int j = 0; j < kWindow * kWords; ++j)
            if (missing >> j & 1) read[j] = load_word(nearest - kWords * static_cast<int64_t>(distance(j / kWords)) + j % kWords);
#pragma unroll
          for (int j = 0; j < kWindow * kWords; ++j)
            if (read[j].state != 0) missing &= ~(1u << j);
        }
        double sum = 0.0, product = 1.0;
#pragma unroll
        for (int j = kWindow - 1; j >= 0; --j) {
          if (distance(j) < window) {
            const double here = __longlong_as_double(read[j * kWords].value);
            if constexpr (kStep) {
              const double here_gates = __longlong_as_double(read[j * kWords + kWords - 1].value);
              sum = fold(here, here_gates, sum);
              product = clamped_mul(product, here_gates);
            } else {
              sum = fold(here, far_power, sum);
            }
          }
        }
        if constexpr (kStep) {
          const bool bounded = __all_sync(0xffffffffu, fabs(product) <= 1.0);
#pragma unroll
          for (int d = 1; d < 32; d *= 2) {
            const double farther = __shfl_down_sync(0xffffffffu, sum, d), farther_gates = __shfl_down_sync(0xffffffffu, product, d);
            if (lane + d < 32) {
              sum = fold(sum, product, farther);
              product = bounded ? product * farther_gates : clamped_mul(product, farther_gates);
            }
          }
          sum = shuffle(sum, 0);
          product = shuffle(product, 0);
        } else {
          sum *= lane_weight;
#pragma unroll
          for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
          product = base_weight;
        }
        carry = now.tile > blocks ? fold(sum, product, carry_in) : sum;
      } else if (alone && now.tile > 0) {
        carry = carry_in;
      }
      carry_in = carry;
      wait(&totals_ready[turn], phase);
      fold_warps(turn);
      if constexpr (kBackward && !kStep) {
        if (++rounds > kTurns) store_sum(turn);
      }
      if (alone) carry_in = shuffle(fold(total, kStep ? gates : tile_power, carry), kWarps - 1);
      const double earlier = shuffle_up(total, 1), earlier_gates = kStep ? shuffle_up(gates, 1) : warp_power;
      if (lane < kWarps) warp_carries[turn][lane] = lane == 0 ? carry : fold(earlier, earlier_gates, carry);
      __syncwarp();
      if (lane == 0) arrive(&carries_ready[turn]);
    }
    if constexpr (kBackward && !kStep) {
      __syncthreads();
      if (rounds < kTurns) turn = 0;
      for (uint32_t i = 0; i < min(rounds, static_cast<uint32_t>(kTurns)); ++i) {
        store_sum(turn);
        if (++turn == kTurns) turn = 0;
      }
    }
    return;
  }

  // A tile in vectors of the row's memory is [first, first + kTileVectors), of which [0, whole_vectors) exist as a whole, and perhaps one more in part. In
  // shared memory: input, then gates and the vector before them in the order of the scan, saved and the one after it.
  extern __shared__ __align__(128) unsigned char ring_shared[];
  Chunk* const ring = reinterpret_cast<Chunk*>(ring_shared);
  constexpr bool kGatesFront = !kReverse, kSavedFront = kReverse;
  constexpr int kGatesAt = kTileVectors + (kGatesFront ? 1 : 0);
  constexpr int kSavedAt = kTileVectors * (kStep ? 2 : 1) + (kStep ? 1 : 0) + (kSavedFront ? 1 : 0);
  const int64_t whole_vectors = p.length / kVec;
  const int rest = static_cast<int>(p.length - whole_vectors * kVec);
  if (warp == kWarps + 2) {
    // Brings tiles in.
    int stage = 0;
    uint32_t phase = 1;  // the first wait for an empty stage is over at once
    if (lane == 0) {
      while (true) {
        wait(&empty[stage], phase);
        TileInfo& info = infos[stage];
        if (now.row >= params.rows) {
          info.row = TileInfo::kNoRow;
          arrive(&full[stage]);
          break;
        }
        const int64_t start = static_cast<int64_t>(now.tile) * kTileVectors;
        const int64_t first = kReverse ? params.padded / kVec - start - kTileVectors : start;
        info.row = now.row;
        info.output = offset_of(p.output_strides, now.row) + first * kVec;
        if constexpr (kBackward && kStep) info.grad = offset_of(p.grad_gamma_strides, now.row) + first * kVec;
        info.low = static_cast<int>(max(int64_t{0}, -first)) * kVec;
        info.high = static_cast<int>(min(int64_t{kTileVectors * kVec}, p.length - first * kVec));
        const bool whole = info.low == 0 && info.high == kTileVectors * kVec;
        info.flags = (whole ? TileInfo::kWhole : 0u) | (now.tile == 0 ? TileInfo::kStarts : 0u) | (now.tile + 1 == params.tiles ? TileInfo::kEnds : 0u);
        Chunk* const to = ring + stage * kStageVectors;
        int bytes = 0;
        const auto each = [&](const auto& bring) {
          bring(static_cast<const T*>(p.input), p.input_strides, 0, 0, 0);
          if constexpr (kStep) bring(static_cast<const T*>(p.gamma), p.gamma_strides, kGatesAt, kGatesFront, !kGatesFront);
          if constexpr (kBackward) bring(static_cast<const T*>(p.saved), p.saved_strides, kSavedAt, kSavedFront, !kSavedFront);
        };
        each([&](const T* pointer, const Strides& strides, int at, int front, int back) {
          const int64_t begin = max(first - front, int64_t{0}), end = min(first + kTileVectors + back, whole_vectors);
          if (end > begin) bytes += static_cast<int>(end - begin) * 16;
          // A part of a vector must be there before the arrival.
          if (rest && whole_vectors >= first - front && whole_vectors < first + kTileVectors + back)
            to[at + static_cast<int>(whole_vectors - first)] = load_vector<T, kVec>(row_of(pointer, strides, now.row) + whole_vectors * kVec, 0, 0, rest);
        });
        arrive_expecting(&full[stage], bytes);
        each([&](const T* pointer, const Strides& strides, int at, int front, int back) {
          const int64_t begin = max(first - front, int64_t{0}), end = min(first + kTileVectors + back, whole_vectors);
          if (end > begin)
            bulk_load(to + at + static_cast<int>(begin - first), row_of(pointer, strides, now.row) + begin * kVec, static_cast<int>(end - begin) * 16, &full[stage]);
        });
        move_on(now);
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
    }
    __syncwarp();
    if constexpr (kBackward && !kStep) __syncthreads();
    return;
  }

  // Scans. A lane's vectors in the order of the scan.
  const int slice = kReverse ? kTileVectors - (warp + 1) * kSlice : warp * kSlice;
  const int own = slice + (kReverse ? kSlice - 1 - lane * kVectors : lane * kVectors);
  const auto at_k = [&](int k) { return kReverse ? own - k : own + k; };
  const bool shifted = kBackward || p.shifted;

  Gate<float, kShort> gate{};
  double lane_powers[5], lane_power = 1.0;
  uint32_t gamma_row = TileInfo::kNoRow;
  const auto gamma_of_row = [&](uint32_t row) {
    if (kStep || gamma_row == row || (gamma_row != TileInfo::kNoRow && params.one_gamma)) return;
    gamma_row = row;
    const double gamma = gamma_of(row);
    gate = make_gate<float, kShort>(gamma);
    double power = whole_power(gamma, kVec * kVectors);
    lane_power = 1.0;
#pragma unroll
    for (int d = 0; d < 5; ++d) {
      lane_powers[d] = power;
      if (lane >> d & 1) lane_power = clamped_mul(lane_power, power);
      power = clamped_mul(power, power);
    }
  };
  const auto advance = [&](float value, float factor, float y) { return kStep ? plain_step(value, factor, y) : gate.step(value, y); };
  // Where a row's first step is in this thread's first vector: no carry enters it.
  const int pad = kReverse && rest ? kVec - rest : 0;
  const auto first_step = [&](const TileInfo& info) { return threadIdx.x == 0 && info.flags & TileInfo::kStarts ? pad : -1; };

  // The gates of a vector's steps; in a shifted scan, of the step before each.
  const auto read_gates = [&](const Chunk* here, int k, float& before, float(&to)[kVec]) {
    float gates[kVec];
    unpack_in_order<kReverse>(here[kGatesAt + at_k(k)], gates);
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = !shifted ? gates[i] : i == 0 ? before : gates[(i + kVec - 1) % kVec];
    before = gates[kVec - 1];
  };
  const auto gate_before_own = [&](const Chunk* here) {
    float before[kVec];
    unpack_in_order<kReverse>(here[kGatesAt + at_k(-1)], before);
    return before[kVec - 1];
  };

  struct State {
    double entering, gates;  // the lanes before: their total, the product of their gates
    float gate_before;       // of the step before: once finished, the neighbour's gates are gone
  };
  const auto prepare = [&](const TileInfo& info, const Chunk* here, int turn) {
    const int first = first_step(info);
    gamma_of_row(info.row);
    const float gate_before = kStep ? gate_before_own(here) : 0.f;
    float y = 0.f, product = 1.f, most = 0.f, before = gate_before;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float values[kVec], factors[kVec];
      unpack_in_order<kReverse>(here[at_k(k)], values);
      if constexpr (kStep) read_gates(here, k, before, factors);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        y = k == 0 && (i == 0 || i == first) ? values[i] : advance(values[i], factors[i], y);
        if constexpr (kStep) {
          const float factor = (k == 0 && i <= first) ? 1.f : factors[i];
          most = fmaxf(most, fabsf(factor));
          product *= factor;
        }
      }
    }
    double total = y, gates = 1.0;
    if constexpr (kStep) {
      gates = product;
      // In float only where no product on the way left its range.
      if (!(most <= 1.f && fabsf(product) >= 0x1p-100f)) {
        gates = 1.0;
        before = gate_before;
        for (int k = 0; k < kVectors; ++k) {
          float factors[kVec];
          read_gates(here, k, before, factors);
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            if (k > 0 || i > first) gates = clamped_mul(gates, static_cast<double>(factors[i]));
        }
      }
    }
    const auto scan_lanes = [&](const auto& times) {
#pragma unroll
      for (int d = 0; d < 5; ++d) {
        const double other = shuffle_up(total, 1 << d);
        if constexpr (kStep) {
          const double other_gates = shuffle_up(gates, 1 << d);
          if (lane >= 1 << d) {
            total = fold(total, gates, other);
            gates = times(gates, other_gates);
          }
        } else {
          if (lane >= 1 << d) total = fold(total, lane_powers[d], other);
        }
      }
    };
    if (!kStep || __all_sync(0xffffffffu, fabs(gates) <= 1.0)) scan_lanes([](double a, double b) { return a * b; });
    else scan_lanes([](double a, double b) { return clamped_mul(a, b); });
    if (lane == 31) {
      warp_totals[turn][warp] = total;
      if constexpr (kStep) warp_gates[turn][warp] = gates;
      arrive(&totals_ready[turn]);
    }
    State state{shuffle_up(total, 1), kStep ? shuffle_up(gates, 1) : 1.0, gate_before};
    if (lane == 0) state.entering = 0.0, state.gates = 1.0;
    return state;
  };

  const auto finish = [&](const State& state, const TileInfo& info, Chunk* here, int turn, uint32_t phase) {
    const int first = first_step(info);
    gamma_of_row(info.row);
    float before = state.gate_before;
    float saved_after = 0.f;
    if constexpr (kBackward) {
      float after[kVec];
      unpack_in_order<kReverse>(here[kSavedAt + at_k(kVectors)], after);
      saved_after = after[0];
    }
    const bool whole = info.flags & TileInfo::kWhole, masked = !whole || info.flags & TileInfo::kEnds;
    const int last = info.flags & TileInfo::kEnds ? kReverse ? info.low : info.high - 1 : -1;  // the row's last step
    wait(&carries_ready[turn], phase);
    float y = static_cast<float>(fold(state.entering, kStep ? state.gates : lane_power, warp_carries[turn][warp]));
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float values[kVec], factors[kVec];
      unpack_in_order<kReverse>(here[at_k(k)], values);
      if constexpr (kStep) read_gates(here, k, before, factors);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        y = (k == 0 && i == first) ? values[i] : advance(values[i], factors[i], y);
        values[i] = y;
      }
      const Chunk result = pack_in_order<kReverse, T>(values);
      here[at_k(k)] = result;
      if constexpr (kBackward) {
        // grad_gamma[t] = output[t] * saved[next(t)], where nothing is saved after the scan's last step.
        float rounded[kVec], saved[kVec], terms[kVec];
        unpack_in_order<kReverse>(result, rounded);
        unpack_in_order<kReverse>(here[kSavedAt + at_k(k)], saved);
        float beyond = saved_after;
        if (k + 1 < kVectors) {
          float next[kVec];
          unpack_in_order<kReverse>(here[kSavedAt + at_k(k + 1)], next);
          beyond = next[0];
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          float other = i + 1 < kVec ? saved[(i + 1) % kVec] : beyond;
          bool inside = true;
          if (masked) {
            const int place = at_k(k) * kVec + (kReverse ? kVec - 1 - i : i);
            inside = place >= info.low && place < info.high;
            if (place == last) other = 0.f;
          }
          terms[i] = inside ? rounded[i] * other : 0.f;
          sum += terms[i];
        }
        if constexpr (kStep) here[kGatesAt + at_k(k)] = pack_in_order<kReverse, T>(terms);
      }
    }
    show_to_bulk_stores();
    __syncwarp();
    if (lane == 0) {
      const auto put = [&](T* to, int offset) {  // `to`: of the tile's first vector
        if (whole) {
          bulk_store(to + slice * kVec, here + offset + slice, kSlice * 16);
          return;
        }
        const int begin = max(info.low / kVec, slice), end = min(info.high / kVec, slice + kSlice), part = info.high / kVec;
        if (end > begin) bulk_store(to + begin * kVec, here + offset + begin, (end - begin) * 16);
        if (info.high % kVec && part >= slice && part < slice + kSlice) store_vector<T, kVec>(to + part * kVec, 0, 0, info.high % kVec, here[offset + part]);
      };
      put(static_cast<T*>(p.output) + info.output, 0);
      if constexpr (kBackward && kStep) put(static_cast<T*>(p.grad_gamma) + info.grad, kGatesAt);
      commit_stores();
    }
    if constexpr (kBackward && !kStep) {
#pragma unroll
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      if (lane == 0) warp_sums[turn][warp] = sum;
    }
    __syncwarp();
  };

  const auto stage_at = [&](int stage) { return ring + stage * kStageVectors; };
  State states[kAhead + 1];  // the first is of the tile to finish next
  int ready_stage = 0, ready_turn = 0, known = 0;  // known: prepared and not finished
  uint32_t ready_phase = 0;
  bool more = true;
  const auto prepare_next = [&](State& state) {
    if (!more) return;
    wait(&full[ready_stage], ready_phase);
    const TileInfo info = infos[ready_stage];
    more = info.row != TileInfo::kNoRow;
    if (!more) return;
    state = prepare(info, stage_at(ready_stage), ready_turn);
    ++known;
    if (++ready_stage == kStages) ready_stage = 0, ready_phase ^= 1;
    if (++ready_turn == kTurns) ready_turn = 0;
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) prepare_next(states[i]);
  int stage = 0, turn = 0, left = -1;
  uint32_t phase = 0;
  while (known > 0) {
    prepare_next(states[kAhead]);
    if (left >= 0 && lane == 0) {
      wait_for_stores_to_read();
      arrive(&empty[left]);  // by this warp
    }
    finish(states[0], infos[stage], stage_at(stage), turn, phase);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) states[i] = states[i + 1];
    --known;
    left = stage;
    if (++stage == kStages) stage = 0;
    if (++turn == kTurns) turn = 0, phase ^= 1;
  }
  if (lane == 0) wait_for_stores();
  if constexpr (kBackward && !kStep) __syncthreads();
#endif
}

}  // namespace dcs
