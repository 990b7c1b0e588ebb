// Rows of many tiles, one pass over memory. As many blocks as the GPU holds at once walk over the tiles of all rows in
// turn: block b takes the tiles b, b + blocks, b + 2 * blocks, ... Each has its next tiles on their way into shared
// memory while it scans one, and publishes a tile's total one tile before it needs the others': memory waits for no
// carry. A tile's carry comes from the totals of the tiles of its row that the other blocks took since this block's
// last one, folded in a fixed order onto the carry that this block had there: whichever block is first, the bits are
// the same, and no carry is handed from block to block. Blocks wait for each other's totals, so they are launched
// cooperatively: all of them run, or none. Where the rows alone fill the GPU, each block takes whole rows instead
// (`kAlone`). Where the device has bulk copies, bulk_stream.cuh takes the rows that blocks share, and in a backward
// with one gamma also whole ones. A thread scans neighbouring steps serially, twice: from nothing for the totals, and
// from its carry for the output. All between is in double.
#pragma once

#include "common/element_types.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/row_offset.cuh"
#include "common/vector.cuh"
#include "scan/carry/segment.cuh"
#include "scan/carry/word.cuh"
#include "scan/long_rows/params.cuh"
#include "dcs/scan/plan/pieces.h"

namespace dcs {

constexpr int kStreamWarps = kStreamThreads / 32;

// `kAlone`: a block takes whole rows, one tile after the other, and waits for nobody.
template <typename T, bool kStep, bool kBackward, bool kReverse, bool kAlone, int kChunks>
__global__ void __launch_bounds__(kStreamThreads, 2) stream_kernel(const __grid_constant__ StreamParams params) {
  constexpr int kVec = 16 / sizeof(T);
  constexpr int kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0), kGateTensor = 1, kSavedTensor = kTensors - 1;
  constexpr int kStages = stream_stages(kTensors, kChunks);  // tiles in shared memory
  constexpr int kVectors = kStreamThreads * kChunks, kTile = kVectors * kVec;
  constexpr int kWords = kStep ? 2 : 1;  // a tile's total, and the product of its gates where it is not known
  using Chunk = Vector<T, kVec>;
  const ScanProblem& p = params.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t blocks = gridDim.x;
  const int pad = kReverse ? static_cast<int>(params.padded - p.length) : 0;
  Word* const words = static_cast<Word*>(params.statuses);

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

  // A tile's place. Positions are relative to `base`; those of the row are low .. high - 1.
  struct Place {
    uint32_t row, tile;
  };
  struct Bounds {
    int64_t base;
    int low, high;
    bool whole;
  };
  const auto bounds_of = [&](const Place& at) {
    Bounds bounds;
    const int64_t start = static_cast<int64_t>(at.tile) * kTile;
    bounds.base = kReverse ? params.padded - start - kTile : start;
    bounds.whole = bounds.base >= 0 && bounds.base + kTile <= p.length;
    bounds.low = static_cast<int>(max(int64_t{0}, -bounds.base));
    bounds.high = static_cast<int>(min(static_cast<int64_t>(kTile), p.length - bounds.base));
    return bounds;
  };
  const uint32_t rows_on = kAlone ? 0 : blocks / params.tiles, tiles_on = kAlone ? 1 : blocks - rows_on * params.tiles;
  const uint32_t next_row = kAlone ? blocks : 1;  // behind a row's last tile
  const auto move_on = [&](Place& at) {           // to this block's next tile
    at.row += rows_on;
    at.tile += tiles_on;
    if (at.tile >= params.tiles) {
      at.tile -= params.tiles;
      at.row += next_row;
    }
  };
  const auto offset_of = [&](const Strides& strides, uint32_t row) { return row_offset(row, p.inner, strides); };
  const auto row_of = [&](auto* pointer, const Strides& strides, uint32_t row) {
    return pointer + offset_of(strides, row);
  };
  const auto address = [&](int vector) { return kReverse ? kTile - kVec - vector * kVec : vector * kVec; };
  constexpr int kApart = kReverse ? -32 * kVec : 32 * kVec;  // in memory, of the vectors that a thread copies
  const auto fetch = [&](const Place& at, int stage) {
    if (at.row < params.rows) {
      const Bounds bounds = bounds_of(at);
      const auto bring = [&](int tensor, const T* row) {
        const T* from = row + bounds.base;
        if (bounds.whole) {
          from += address(copied);
#pragma unroll
          for (int k = 0; k < kChunks; ++k) copy_async(&copy(stage, tensor, k), from + k * kApart);
        } else {
#pragma unroll 1
          for (int k = 0; k < kChunks; ++k)
            copy(stage, tensor, k) = load_vector<T, kVec>(from, address(copied + k * 32), bounds.low, bounds.high);
        }
      };
      bring(0, row_of(static_cast<const T*>(p.input), p.input_strides, at.row));
      if constexpr (kStep) bring(kGateTensor, row_of(static_cast<const T*>(p.gamma), p.gamma_strides, at.row));
      if constexpr (kBackward) bring(kSavedTensor, row_of(static_cast<const T*>(p.saved), p.saved_strides, at.row));
    }
    commit_copies();
  };
  // Out of shared memory again.
  const auto put = [&](const Bounds& bounds, int stage, int tensor, T* row) {
    T* to = row + bounds.base;
    if (bounds.whole) {
      to += address(copied);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) *reinterpret_cast<Chunk*>(to + k * kApart) = copy(stage, tensor, k);
    } else {
#pragma unroll 1
      for (int k = 0; k < kChunks; ++k)
        store_vector<T, kVec>(to, address(copied + k * 32), bounds.low, bounds.high, copy(stage, tensor, k));
    }
  };

  // The powers of one gamma: over 1, 2, 4, ... threads, a warp, the tiles between a thread's part of the window and the
  // tile, and the whole window.
  constexpr bool kShort = sizeof(T) == 2;
  Gate<float, kShort> gate{};
  double lane_powers[5], lane_power = 1.0, warp_power = 1.0, window_weight = 1.0, base_weight = 1.0;
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
    const double tile_power = power_of<kStreamWarps>(warp_power);
    window_weight = whole_power(tile_power, threadIdx.x);
    if (params.tiles > blocks) base_weight = whole_power(tile_power, blocks);
  };
  const auto advance = [&](float value, float factor, float y) {
    return kStep ? plain_step(value, factor, y) : gate.step(value, y);
  };
  // Where a row's first step is in this thread's first vector: no carry enters it.
  const auto first_of = [&](const Place& at) { return at.tile == 0 && threadIdx.x == 0 ? pad : -1; };

  __shared__ double warp_totals[3][kStreamWarps],
      warp_gates[kStep ? 3 : 1][kStreamWarps];  // by tile, three in turn: a warp may be one tile ahead
  __shared__ double window_totals[2][kStreamWarps],
      window_gates[2][kStreamWarps];       // two in turn: after the last tile but one, no barrier comes before
  __shared__ float sums[2][kStreamWarps];  // of gamma's gradient

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

  // The first pass: a tile's total, for the other blocks.
  const auto prepare = [&](const Place& at, uint32_t index, int stage, int third, bool only_one) {
    State state{0.0, 1.0, 0.f, 0.f};
    const int64_t base = bounds_of(at).base;
    const int first = first_of(at);
    gamma_of_row(at.row);
    // A neighbouring warp's part and the tile after this come from global memory.
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
    Piece<double> piece{y, 1.0, false};
    if constexpr (kStep) {
      piece.gates = product.whole();
      // In float only where no product on the way left its range.
      if (!(most <= 1.f && fabsf(product.rounded) >= 0x1p-100f)) {
        piece.gates = 1.0;
        before = state.gate_before;
        for (int k = 0; k < kChunks; ++k) {
          float factors[kVec];
          read_gates(stage, k, before, factors);
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            if (k > 0 || i != first) piece.gates = clamped_mul(piece.gates, static_cast<double>(factors[i]));
        }
      }
    }
    if constexpr (kStep) {
      fold_lanes<32>(piece.total, piece.gates, lane);
    } else {
#pragma unroll
      for (int d = 0; d < 5; ++d) {
        const double total = shuffle_up(piece.total, 1 << d);
        if (lane >= 1 << d) piece.total = fold(piece.total, lane_powers[d], total);
      }
    }
    const double entering = shuffle_up(piece.total, 1);
    state.entering = lane == 0 ? 0.0 : entering;
    if constexpr (kStep) {
      const double gates = shuffle_up(piece.gates, 1);
      state.gates = lane == 0 ? 1.0 : gates;
    }
    if (lane == 31) {
      warp_totals[third][warp] = piece.total;
      if constexpr (kStep) warp_gates[third][warp] = piece.gates;
    }
    __syncthreads();
    if (threadIdx.x == 0 && !kAlone && at.tile + 1 < params.tiles) {
      double total = warp_totals[third][0], gates = kStep ? warp_gates[third][0] : 1.0;
#pragma unroll
      for (int w = 1; w < kStreamWarps; ++w) {
        total = fold(warp_totals[third][w], kStep ? warp_gates[third][w] : warp_power, total);
        if constexpr (kStep) gates = clamped_mul(gates, warp_gates[third][w]);
      }
      if constexpr (kStep) store_word(words + kWords * static_cast<int64_t>(index) + 1, __double_as_longlong(gates), 1);
      store_word(words + kWords * static_cast<int64_t>(index), __double_as_longlong(total), 1);
    }
    return state;
  };

  // The second: its output. A thread brings its part of the window, the tile `threadIdx.x + 1` before this one, as read
  // some time ago.
  double own_carry = 0.0;  // into this block's tile before; `kAlone`: out of it
  const auto finish = [&](const State& state, const Place& at, uint32_t index, int stage, int third, int parity,
                          Word total_word, Word gates_word) {
    const Bounds bounds = bounds_of(at);
    const int first = first_of(at);
    gamma_of_row(at.row);
    const uint32_t window = kAlone ? 0 : min(at.tile, blocks);
    const int window_warps = (static_cast<int>(window) + 31) / 32;
    double carry = 0.0;
    if (warp < window_warps) {
      Piece<double> piece = identity<double>();
      if (threadIdx.x < window) {
        const Word* from = words + kWords * (static_cast<int64_t>(index) - 1 - threadIdx.x);
        while (total_word.state == 0) total_word = load_word(from);
        piece.total = __longlong_as_double(total_word.value);
        if constexpr (kStep) {
          while (gates_word.state == 0) gates_word = load_word(from + 1);
          piece.gates = __longlong_as_double(gates_word.value);
        }
      }
      __syncwarp();
      if constexpr (kStep) {
        const bool bounded = __all_sync(0xffffffffu, fabs(piece.gates) <= 1.0);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const double total = __shfl_down_sync(0xffffffffu, piece.total, d),
                       gates = __shfl_down_sync(0xffffffffu, piece.gates, d);
          if (lane + d < 32) {
            piece.total = fold(piece.total, piece.gates, total);
            piece.gates = bounded ? piece.gates * gates : clamped_mul(piece.gates, gates);
          }
        }
      } else {
        piece.total = warp_sum(piece.total * window_weight);
      }
      if (lane == 0) {
        window_totals[parity][warp] = piece.total;
        if constexpr (kStep) window_gates[parity][warp] = piece.gates;
      }
    }
    if (kAlone) {
      // `own_carry` is the carry out of the tile before, which was this row's.
      if (at.tile > 0) carry = own_carry;
    } else {
      __syncthreads();
      for (int w = window_warps - 1; w >= 0; --w)
        carry =
            kStep ? fold(window_totals[parity][w], window_gates[parity][w], carry) : carry + window_totals[parity][w];
      if (at.tile > blocks) {
        double gates = base_weight;
        if constexpr (kStep) {
          gates = 1.0;
          for (int w = 0; w < window_warps; ++w) gates = clamped_mul(gates, window_gates[parity][w]);
        }
        carry = fold(carry, gates, own_carry);
      }
      own_carry = carry;
    }
    double behind = carry;  // behind each warp
#pragma unroll
    for (int w = 0; w < kStreamWarps; ++w) {
      behind = fold(warp_totals[third][w], kStep ? warp_gates[third][w] : warp_power, behind);
      if (w + 1 == warp) carry = behind;
    }
    if (kAlone) own_carry = behind;

    float y = static_cast<float>(fold(state.entering, kStep ? state.gates : lane_power, carry));
    float sum = 0.f, before = state.gate_before;
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
        for (int i = 0; i < kVec; ++i) {
          terms[i] = rounded[i] * (i + 1 < kVec ? saved[(i + 1) % kVec] : beyond);
          if (!bounds.whole) {
            const int s = (static_cast<int>(threadIdx.x) * kChunks + k) * kVec + i;
            const int memory = kReverse ? kTile - 1 - s : s;
            if (memory < bounds.low || memory >= bounds.high) terms[i] = 0.f;
          }
          sum += terms[i];
        }
        if constexpr (kStep) mine(stage, kGateTensor, k) = pack_in_order<kReverse, T>(terms);
      }
    }
    __syncwarp();
    put(bounds, stage, 0, row_of(static_cast<T*>(p.output), p.output_strides, at.row));
    if constexpr (kBackward && kStep)
      put(bounds, stage, kGateTensor, row_of(static_cast<T*>(p.grad_gamma), p.grad_gamma_strides, at.row));
    if constexpr (kBackward && !kStep) {
      sum = warp_sum(sum);
      if (lane == 0) sums[parity][warp] = sum;
    }
    __syncwarp();
  };
  // The tile's part of gamma's gradient, once all warps have left their sums.
  const auto store_sum = [&](const Place& at, int parity) {
    float* const partials = row_of(static_cast<float*>(p.grad_gamma), p.grad_gamma_strides, at.row);
    if (threadIdx.x == 0) {
      float all = sums[parity][0];
#pragma unroll
      for (int w = 1; w < kStreamWarps; ++w) all += sums[parity][w];
      partials[at.tile] = all;
    }
    if (at.tile == 0)
      for (int64_t j = params.tiles + threadIdx.x; j < p.partials; j += kStreamThreads) partials[j] = 0.f;
  };

  // One loop, so that the code is there once: a round prepares a tile and finishes the one before.
  uint32_t index = blockIdx.x;  // of the tile to prepare
  Place next{index / params.tiles, index % params.tiles}, ahead;
  if (kAlone) next = {index, 0};
  ahead = next;
#pragma unroll 1
  for (int i = 0; i < kStages; ++i, move_on(ahead)) fetch(ahead, i);
  Place now{params.rows, 0};  // to finish
  State state{};
  int stage = kStages - 1, third = 2, parity = 1;  // of the tile to finish
  bool any = false;
#pragma unroll 1
  while (next.row < params.rows || any) {
    // The window's words start on their way before the next tile is prepared: then they are mostly there.
    Word total_word{}, gates_word{};
    if (any && !kAlone && threadIdx.x < min(now.tile, blocks)) {
      const Word* from = words + kWords * (static_cast<int64_t>(index - blocks) - 1 - threadIdx.x);
      total_word = load_word(from);
      if constexpr (kStep) gates_word = load_word(from + 1);
    }
    const int next_stage = stage + 1 == kStages ? 0 : stage + 1, next_third = third == 2 ? 0 : third + 1;
    State prepared{};
    const bool has_next = next.row < params.rows;
    if (has_next) prepared = prepare(next, index, next_stage, next_third, !any);
    if (any) {
      finish(state, now, index - blocks, stage, third, parity, total_word, gates_word);
      fetch(ahead, stage);
      move_on(ahead);
      if constexpr (kBackward && !kStep) {
        __syncthreads();
        store_sum(now, parity);
      }
    }
    any = has_next;
    now = next;
    state = prepared;
    move_on(next);
    index += blocks;
    stage = next_stage;
    third = next_third;
    parity ^= 1;
  }
}

}  // namespace dcs
