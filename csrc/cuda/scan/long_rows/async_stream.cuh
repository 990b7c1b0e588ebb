// Rows of many whole tiles, one pass over memory, where the rows alone fill the GPU: a block takes whole rows, as many
// blocks as the GPU holds at once, and waits for no other. It has its next tiles on their way into shared memory while
// it scans one. A thread scans neighboring steps serially, twice: from nothing for the totals, and from its carry for
// the output. All between is in double. No sums of gamma's gradient: those rows are bulk_stream.cuh's.
#pragma once

#include "common/element_types.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/row_offset.cuh"
#include "common/vector.cuh"
#include "scan/carry/segment.cuh"
#include "scan/long_rows/params.cuh"
#include "dcs/scan/plan/kernel_plans.h"

namespace dcs {

constexpr int kStreamWarps = kStreamThreads / 32;

template <typename T, bool kStep, bool kBackward, bool kReverse, int kChunks>
__global__ void __launch_bounds__(kStreamThreads, 2) async_stream_kernel(const __grid_constant__ StreamParams params) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr int kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0), kGateTensor = 1, kSavedTensor = kTensors - 1;
  constexpr int kStages = stream_stages(kTensors, kChunks);  // tiles in shared memory
  constexpr int kVectors = kStreamThreads * kChunks, kTile = kVectors * kVec;
  static_assert(kStep || !kBackward);
  using Chunk = Vector<T, kVec>;
  const ScanProblem& p = params.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // Vectors lie in the order of the scan, those of a thread side by side, and rotated by their thread so that neither
  // the copies, which go by vector, nor the scans, which go by thread, meet in a bank. All offsets are in bytes.
  extern __shared__ __align__(128) unsigned char stream_shared[];
  constexpr int kTensorBytes = kVectors * 16, kChunkBytes = 16;
  const auto rotation = [](int thread) {
    return (kChunks == 8 ? thread & 7 : kChunks == 4 ? thread >> 1 & 3 : thread >> 2 & 1) * kChunkBytes;
  };
  const auto own_offset = [&](int thread) { return thread * kChunks * kChunkBytes + rotation(thread); };
  const int own = own_offset(threadIdx.x);
  const int copied = warp * 32 * kChunks + lane;  // a warp copies what it scans: vectors 32 apart
  const int copy_to = (own_offset(copied / kChunks) ^ copied % kChunks * kChunkBytes);
  const auto at_offset = [&](int stage, int tensor, int offset) -> Chunk& {
    return *reinterpret_cast<Chunk*>(stream_shared + (stage * kTensors + tensor) * kTensorBytes + offset);
  };
  const auto mine = [&](int stage, int tensor, int k) -> Chunk& {
    return at_offset(stage, tensor, own ^ k * kChunkBytes);
  };
  // The rotation of the k-th vector copied is that of the first but for every other one of eight.
  const auto copy = [&](int stage, int tensor, int k) -> Chunk& {
    return at_offset(
        stage, tensor, (kChunks == 8 && k % 2 ? copy_to ^ 4 * kChunkBytes : copy_to) + k * 32 * kChunkBytes);
  };
  const auto read = [&](int stage, int tensor, int k, float (&to)[kVec]) {
    unpack_in_order<kReverse>(mine(stage, tensor, k), to);
  };

  struct TileIndex {
    uint32_t row, tile;
  };
  const auto base_of = [&](const TileIndex& at) {
    const int64_t start = static_cast<int64_t>(at.tile) * kTile;
    return kReverse ? p.length - start - kTile : start;
  };
  const auto move_on = [&](TileIndex& at) {  // to this block's next tile
    if (++at.tile == params.tiles) {
      at.tile = 0;
      at.row += gridDim.x;
    }
  };
  const auto offset_of = [&](const Strides& strides, uint32_t row) { return row_offset(row, p.inner, strides); };
  const auto row_of = [&](auto* pointer, const Strides& strides, uint32_t row) {
    return pointer + offset_of(strides, row);
  };
  const auto address = [&](int vector) { return kReverse ? kTile - kVec - vector * kVec : vector * kVec; };
  constexpr int kApart = kReverse ? -32 * kVec : 32 * kVec;  // in memory, of the vectors that a thread copies
  const auto fetch = [&](const TileIndex& at, int stage) {
    if (at.row < params.rows) {
      const auto load = [&](int tensor, const T* row) {
        const T* const from = row + base_of(at) + address(copied);
#pragma unroll
        for (int k = 0; k < kChunks; ++k) copy_async(&copy(stage, tensor, k), from + k * kApart);
      };
      load(0, row_of(static_cast<const T*>(p.input), p.input_strides, at.row));
      if constexpr (kStep) load(kGateTensor, row_of(static_cast<const T*>(p.gamma), p.gamma_strides, at.row));
      if constexpr (kBackward) load(kSavedTensor, row_of(static_cast<const T*>(p.saved), p.saved_strides, at.row));
    }
    commit_copies();
  };
  // Out of shared memory again.
  const auto store = [&](const TileIndex& at, int stage, int tensor, T* row) {
    T* const to = row + base_of(at) + address(copied);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) *reinterpret_cast<Chunk*>(to + k * kApart) = copy(stage, tensor, k);
  };

  // The powers of one gamma: over 1, 2, 4, ... threads, and over a warp.
  constexpr bool kShort = sizeof(T) == 2;
  Gate<float, kShort> gate{};
  double lane_powers[5], lane_power = 1.0, warp_power = 1.0;
  int64_t gamma_row = -1;
  const auto gamma_of_row = [&](uint32_t row) {
    if (kStep || gamma_row == row || (gamma_row >= 0 && params.one_gamma)) return;
    gamma_row = row;
    double gamma = p.gamma_value;
    if (p.gamma_kind != GammaKind::kNumber)
      gamma = load_gamma<double>(p.gamma, p.gamma_dtype, offset_of(p.gamma_strides, row), false);
    gate = make_gate<float, kShort>(gamma);
    double power = whole_power(gamma, kVec * kChunks);
    lane_power = 1.0;
#pragma unroll
    for (int d = 0; d < 5; ++d) {
      lane_powers[d] = power;
      if (lane >> d & 1) lane_power = power_mul(lane_power, power);
      power = power_mul(power, power);
    }
    warp_power = power;
  };
  const auto advance = [&](float value, float factor, float y) {
    return kStep ? plain_step(value, factor, y) : gate.step(value, y);
  };
  // No carry enters a row's first step.
  const auto first_of = [&](const TileIndex& at) { return at.tile == 0 && threadIdx.x == 0 ? 0 : -1; };

  __shared__ double warp_totals[3][kStreamWarps],
      warp_gates[kStep ? 3 : 1][kStreamWarps];  // by tile, three in turn: a warp may be one tile ahead

  // The gates of a vector's steps; in a shifted scan, of the step before each.
  const auto read_gates = [&](int stage, int k, float& before, float (&to)[kVec]) {
    float gates[kVec];
    read(stage, kGateTensor, k, gates);
#pragma unroll
    for (int i = 0; i < kVec; ++i) to[i] = !p.shifted ? gates[i] : i == 0 ? before : gates[(i + kVec - 1) % kVec];
    before = gates[kVec - 1];
  };

  // What the first pass over a tile leaves a thread for the second.
  struct State {
    double entering, gates;  // the threads before it in its warp: their total, the product of their gates
    float gate_before;       // of the step before its own
    float saved_after;       // after its last step
  };

  // The first pass: the totals of a tile's warps.
  const auto prepare = [&](const TileIndex& at, int stage, int third, bool only_one) {
    State state{0.0, 1.0, 0.f, 0.f};
    const int64_t base = base_of(at);
    const int first = first_of(at);
    gamma_of_row(at.row);
    // A neighboring warp's part and the tile after this come from global memory.
    if constexpr (kStep) {
      if (p.shifted && lane == 0) {
        const int here = address(warp * 32 * kChunks);
        const int64_t before = base + (kReverse ? here + kVec : here - 1);
        if (before >= 0 && before < p.length)
          state.gate_before = cast<float>(row_of(static_cast<const T*>(p.gamma), p.gamma_strides, at.row)[before]);
      }
    }
    if constexpr (kBackward) {
      if (lane == 31) {
        const int here = address((warp + 1) * 32 * kChunks - 1);
        const int64_t after = base + (kReverse ? here - 1 : here + kVec);
        if (after >= 0 && after < p.length)
          state.saved_after = cast<float>(row_of(static_cast<const T*>(p.saved), p.saved_strides, at.row)[after]);
      }
    }
    if (only_one) wait_for_copies<kStages - 1>();
    else wait_for_copies<kStages - 2>();
    __syncwarp();  // lanes read what others copied
    if constexpr (kStep) {
      if (p.shifted && lane > 0) {
        float before[kVec];
        unpack_in_order<kReverse>(
            at_offset(stage, kGateTensor, own_offset(threadIdx.x - 1) ^ (kChunks - 1) * kChunkBytes), before);
        state.gate_before = before[kVec - 1];
      }
    }
    if constexpr (kBackward) {
      if (lane < 31) {
        float after[kVec];
        unpack_in_order<kReverse>(at_offset(stage, kSavedTensor, own_offset(threadIdx.x + 1)), after);
        state.saved_after = after[0];
      }
    }

    float y = 0.f, most = 0.f, before = state.gate_before;
    GateProduct<T> product;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      float values[kVec], factors[kVec];
      read(stage, 0, k, values);
      if constexpr (kStep) read_gates(stage, k, before, factors);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        y = k == 0 && (i == 0 || i == first) ? values[i] : advance(values[i], factors[i], y);
        if constexpr (kStep) {
          const float factor = (k == 0 && i == first) ? 1.f : factors[i];
          most = fmaxf(most, fabsf(factor));
          product.take(factor);
        }
      }
    }
    Segment<double> segment{y, 1.0, false};
    if constexpr (kStep) {
      segment.gates = product.whole();
      // In float only where no product on the way left its range.
      if (!(most <= 1.f && fabsf(product.rounded) >= 0x1p-100f)) {
        segment.gates = 1.0;
        before = state.gate_before;
        for (int k = 0; k < kChunks; ++k) {
          float factors[kVec];
          read_gates(stage, k, before, factors);
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            if (k > 0 || i != first) segment.gates = clamped_mul(segment.gates, static_cast<double>(factors[i]));
        }
      }
    }
    if constexpr (kStep) {
      fold_lanes<32>(segment.total, segment.gates, lane);
    } else {
#pragma unroll
      for (int d = 0; d < 5; ++d) {
        const double total = shuffle_up(segment.total, 1 << d);
        if (lane >= 1 << d) segment.total = fold(segment.total, lane_powers[d], total);
      }
    }
    const double entering = shuffle_up(segment.total, 1);
    state.entering = lane == 0 ? 0.0 : entering;
    if constexpr (kStep) {
      const double gates = shuffle_up(segment.gates, 1);
      state.gates = lane == 0 ? 1.0 : gates;
    }
    if (lane == 31) {
      warp_totals[third][warp] = segment.total;
      if constexpr (kStep) warp_gates[third][warp] = segment.gates;
    }
    __syncthreads();
    return state;
  };

  // The second: its output.
  double own_carry = 0.0;  // out of the block's tile before
  const auto finish = [&](const State& state, const TileIndex& at, int stage, int third) {
    const int first = first_of(at);
    gamma_of_row(at.row);
    double carry = at.tile > 0 ? own_carry : 0.0;
    double behind = carry;  // behind each warp
#pragma unroll
    for (int w = 0; w < kStreamWarps; ++w) {
      behind = fold(warp_totals[third][w], kStep ? warp_gates[third][w] : warp_power, behind);
      if (w + 1 == warp) carry = behind;
    }
    own_carry = behind;

    float y = static_cast<float>(fold(state.entering, kStep ? state.gates : lane_power, carry));
    float before = state.gate_before;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      float values[kVec], factors[kVec];
      read(stage, 0, k, values);
      if constexpr (kStep) read_gates(stage, k, before, factors);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        y = (k == 0 && i == first) ? values[i] : advance(values[i], factors[i], y);
        values[i] = y;
      }
      const Chunk result = pack_in_order<kReverse, T>(values);
      mine(stage, 0, k) = result;
      if constexpr (kBackward) {
        // grad_gamma[t] = output[t] * saved[next(t)], where nothing is saved after the scan's last step.
        float rounded[kVec], saved[kVec], terms[kVec];
        unpack_in_order<kReverse>(result, rounded);
        read(stage, kSavedTensor, k, saved);
        float beyond = state.saved_after;
        if (k + 1 < kChunks) {
          float next[kVec];
          read(stage, kSavedTensor, k + 1, next);
          beyond = next[0];
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) terms[i] = rounded[i] * (i + 1 < kVec ? saved[(i + 1) % kVec] : beyond);
        mine(stage, kGateTensor, k) = pack_in_order<kReverse, T>(terms);
      }
    }
    __syncwarp();
    store(at, stage, 0, row_of(static_cast<T*>(p.output), p.output_strides, at.row));
    if constexpr (kBackward)
      store(at, stage, kGateTensor, row_of(static_cast<T*>(p.grad_gamma), p.grad_gamma_strides, at.row));
    __syncwarp();
  };
  // One loop, so that the code is there once: a round prepares a tile and finishes the one before.
  TileIndex next{blockIdx.x, 0}, ahead = next;
#pragma unroll 1
  for (int i = 0; i < kStages; ++i, move_on(ahead)) fetch(ahead, i);
  TileIndex now{params.rows, 0};  // to finish
  State state{};
  int stage = kStages - 1, third = 2;  // of the tile to finish
  bool any = false;
#pragma unroll 1
  while (next.row < params.rows || any) {
    const int next_stage = stage + 1 == kStages ? 0 : stage + 1, next_third = third == 2 ? 0 : third + 1;
    State prepared{};
    const bool has_next = next.row < params.rows;
    if (has_next) prepared = prepare(next, next_stage, next_third, !any);
    if (any) {
      finish(state, now, stage, third);
      fetch(ahead, stage);
      move_on(ahead);
    }
    any = has_next;
    now = next;
    state = prepared;
    move_on(next);
    stage = next_stage;
    third = next_third;
  }
}

}  // namespace dcs
