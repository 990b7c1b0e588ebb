// Scans along contiguous time. A block takes a tile: a piece of one row, or several whole short rows. A lane holds
// kChunks vectors of 16 bytes, 32 vectors apart, so that loads and stores are whole lines; a vector is scanned
// serially, vectors across the warp by shuffles (lane_scan.cuh), warps through shared memory, tiles of a long row by
// look-back (warp_carries.cuh). The last step runs the plain recurrence again from each vector's carry.
#pragma once

#include "scan/rows/lane_scan.cuh"
#include "scan/rows/tile.cuh"
#include "scan/rows/warp_carries.cuh"

namespace dcs {

template <typename T, bool kStep, bool kBackward, Cuts kCuts, int kVec, Direction kDirection>
__global__ void __launch_bounds__(32 * (kCuts == Cuts::kPlain && !kStep && !kBackward ? kMaxWarps : kTileWarps),
    sizeof(T) > 4 || kCuts == Cuts::kGeneral || (kStep && kBackward) ? 2
        : kStep || kBackward || kCuts == Cuts::kPackedEach           ? 3
        : kCuts == Cuts::kPlain                                      ? 2
                                : 4) rows_kernel(const __grid_constant__ RowsParams params) {
  using Kind = RowsKind<T, kStep, kCuts, kVec, kDirection>;
  using Acc = typename Kind::Acc;
  using Wide = typename Kind::Wide;
  using Word = Vector<T, kVec>;
  constexpr int kChunks = Kind::kChunks;
  constexpr bool kGeneral = Kind::kGeneral, kPackedEach = Kind::kPackedEach, kByChunk = Kind::kByChunk;
  const ScanProblem& p = params.problem;
  if (kCuts == Cuts::kPlain && params.tiles > 1) arrive_in_cluster();
  const RowsTile<Kind> at(params);
  const int lane = at.lane;
  const bool reverse = at.is_reverse(), packed = at.is_packed(), whole = at.whole;
  const bool has_initial = kGeneral && p.initial;
  const T* input = at.tile_of(static_cast<const T*>(p.input), p.input_strides);
  const T* gates = nullptr;
  if constexpr (kStep) gates = at.tile_of(static_cast<const T*>(p.gamma), p.gamma_strides);
  const bool* reset = kGeneral && p.reset ? at.tile_of(p.reset, p.reset_strides) : nullptr;

  // Load everything first.
  constexpr int kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0);
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  Word held[kTensors * kChunks];
  const auto fetch = [&](int tensor, const T* from) {
    const int apart = at.apart();
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      held[tensor * kChunks + k] = whole ? *reinterpret_cast<const Word*>(from + at.address(0) + k * apart)
                                         : load_vector<T, kVec>(from, at.address(k), at.low, at.high);
    }
  };
  const auto word = [&](int tensor, int k) -> Word& { return held[tensor * kChunks + k]; };
  constexpr int kGateTensor = kStep ? 1 : 0, kSavedTensor = kTensors - 1;
  fetch(0, input);
  if constexpr (kStep) fetch(kGateTensor, gates);
  T saved_next[kBackward ? kChunks : 1];  // the last lane's: the scan position after its vector
  if constexpr (kBackward) {
    const T* saved = at.tile_of(static_cast<const T*>(p.saved), p.saved_strides);
    fetch(kSavedTensor, saved);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int64_t next = at.base + (reverse ? at.address(k) - 1 : at.address(k) + kVec);
      saved_next[k] = lane == 31 && next >= 0 && next < at.length ? saved[next - at.base] : cast<T>(cast<Acc>(0.0));
    }
  }
  // A vector in scan order.
  const auto in_order = [&](int tensor, int k) {
    Word values = word(tensor, k);
    turn(values, reverse);
    return values;
  };
  // Its values.
  const auto read = [&](int tensor, int k, Acc(&to)[kVec]) {
    if constexpr (kDirection == Direction::kEither) unpack(in_order(tensor, k), to);
    else unpack_in_order<kDirection == Direction::kRight>(word(tensor, k), to);
  };
  const auto in_memory_order = [&](const Acc(&values)[kVec]) {
    if constexpr (kDirection == Direction::kEither) {
      Word turned = pack<Acc, T, kVec>(values);
      turn(turned, reverse);
      return turned;
    } else {
      return pack_in_order<kDirection == Direction::kRight, T>(values);
    }
  };

  RowsGammas<Kind> gammas(at);
  gammas.load_each(at);
  const auto initial_at = [&](int s) {
    return cast<Acc>(static_cast<const T*>(p.initial)[at.row_offset(at.row_of(s), p.initial_strides)]);
  };
  const auto advance = [&](Acc value, Acc step_gate, Acc y) {
    if constexpr (kStep) return plain_step(value, step_gate, y);
    else return gammas.gate.step(value, y);
  };
  const auto step_gates = [&](int k, Acc(&to)[kVec]) {
    if constexpr (kStep) read(kGateTensor, k, to);
  };
  RowsCuts<Kind> cuts;
  cuts.find(at, reset);
  // The value that a row's first step starts from.
  const auto started = [&](Acc value, int k, int i, Acc step_gate) {
    if constexpr (kGeneral && !kBackward) {
      const int s = at.position(k) + i;
      if (!has_initial || !(cuts.starts[k] >> i & 1) || !at.inside(s)) return value;
      if (reset && reset[reverse ? at.extent - 1 - s : s]) return value;
      return advance(value, step_gate, initial_at(s));
    }
    return value;
  };

  // The gates of this scan's steps: conjugated, and of the step before in a shifted one.
  if constexpr (kStep) {
    constexpr bool kComplex = !std::is_floating_point_v<Acc>;
    if (p.shifted || kComplex) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        Word g = in_order(kGateTensor, k);
#pragma unroll
        for (int i = 0; i < kVec; ++i) g.set(i, conj_if(p.conjugate_gamma, g.get(i)));
        if (p.shifted) {
          const int first = at.address(k);
          const int64_t before = at.base + (reverse ? first + kVec : first - 1);
          T previous = before >= 0 && before < at.length ? conj_if(p.conjugate_gamma, gates[before - at.base])
                                                         : cast<T>(cast<Acc>(0.0));
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const T mine = g.get(i);
            g.set(i, previous);
            previous = mine;
          }
        }
        turn(g, reverse);
        word(kGateTensor, k) = g;
      }
    }
  }

  // Scan each vector from a zero carry, then the vectors of each chunk across the warp.
  LaneScan<Kind> lanes;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if constexpr (kGeneral && !kStep) {
      if (!gammas.one_gamma) gammas.set(at, at.position(k));
      gammas.own_gamma[k] = gammas.gamma;
    }
    if constexpr (kPackedEach) gammas.gate = gammas.own_gate[k];
    Acc values[kVec], factors[kVec];
    read(0, k, values);
    step_gates(k, factors);
    Acc y = cast<Acc>(0.0);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Acc value = values[i],
                factor =
                    factors[i];  // here: beside the comparison of i they would be indexed by what it is compared with
      if (cuts.is_cut(at, k, i)) y = started(value, k, i, factor);
      else y = i == 0 ? value : advance(value, factor, y);
    }
    lanes.vector_total[k] = y;
  }
  // A vector's gates as factors of the carry's products. No carry enters a row's first step, so its gate, which may be
  // a NaN, has no part in them.
  const auto carry_gates = [&](int k, Acc(&to)[kVec]) {
    step_gates(k, to);
    if constexpr (kCuts == Cuts::kPlain) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc factor = to[i];
        to[i] = cuts.is_cut(at, k, i) ? cast<Acc>(1.0) : factor;
      }
    }
  };
  Wide wide_carries[LaneScan<Kind>::kTwoScans ? 2 * kChunks : 1];
  lanes.wide_carries = wide_carries;
  asm volatile("" : "+l"(lanes.wide_carries));  // keeps the array out of registers
  lanes.run(at, cuts, gammas, carry_gates);

  const bool alone = at.alone_in_chunks();
  Wide carry = cast<Wide>(0.0);
  if (at.warps > 1 && !alone) carry = carry_across_warps(at, cuts, lanes);

  // The recurrence from each vector's carry.
  Acc* vector_sums = reinterpret_cast<Acc*>(dynamic_shared);  // packed backward: one a vector of the tile
  T* output = at.tile_of(static_cast<T*>(p.output), p.output_strides);
  Acc sum = cast<Acc>(0.0);
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int first = at.address(k);
    if constexpr (kGeneral && !kStep) gammas.gate = make_gate<Acc, Kind::kShort>(gammas.own_gamma[k]);
    if constexpr (kPackedEach) gammas.gate = gammas.own_gate[k];
    // Halves stay packed between the two readings: as floats they would take twice the registers.
    if constexpr (sizeof(T) == 2 && kVec == 8) {
      Word& here = word(0, k);
      asm volatile("" : "+r"(here.words[0]), "+r"(here.words[1]), "+r"(here.words[2]), "+r"(here.words[3]));
    }
    const bool entered = cuts.open >> k & 1;
    Acc y = entered ? cast<Acc>(fold(lanes.carry_into(k), lanes.lane_gates[kByChunk ? k : 0], carry))
                    : cast<Acc>(lanes.carry_into(k));
    if (!alone) carry = after(lanes.chunk_piece(k, cuts.closed), carry);
    Acc values[kVec], factors[kVec];
    read(0, k, values);
    step_gates(k, factors);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Acc value = values[i], factor = factors[i];
      if (cuts.is_cut(at, k, i)) y = started(value, k, i, factor);
      else y = advance(value, factor, y);
      values[i] = y;
    }
    const Word turned = in_memory_order(values);
    if (whole) *reinterpret_cast<Word*>(output + at.address(0) + k * at.apart()) = turned;
    else store_vector<T, kVec>(output, first, at.low, at.high, turned);

    if constexpr (kBackward) {
      // grad_gamma[t] = output[t] * conj(saved[next(t)]).
      Acc rounded[kVec], after_each[kVec], terms[kVec];
      if constexpr (kDirection == Direction::kEither) {
        Word result = turned;
        turn(result, reverse);
        unpack(result, rounded);
      } else {
        unpack_in_order<kDirection == Direction::kRight>(turned, rounded);
      }
      read(kSavedTensor, k, after_each);
      const Acc following = shuffle_down(after_each[0], 1);
      const Acc beyond = lane == 31 ? cast<Acc>(saved_next[k]) : following;
      uint32_t resets = 0;
      if (reset) resets = load_flags<kVec>(reset, first, at.low, at.high, reverse);
      Acc vector_sum = cast<Acc>(0.0);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int s = at.position(k) + i;
        Acc other = i + 1 < kVec ? after_each[(i + 1) % kVec] : beyond;
        bool last = false;  // the adjoint's last step of a row is the forward's first: its carry was `initial`
        if (packed)
          last = s >= at.pad && (kVec == 1 || kGeneral || i + 1 == kVec) && (s - at.pad) % at.time == at.time - 1;
        else last = at.start + s - at.pad == at.length - 1;
        if (last) other = has_initial ? initial_at(s) : cast<Acc>(0.0);
        Acc term = cast<Acc>(0.0);
        if (at.inside(s) && !(resets >> i & 1)) term = plain_step(term, conj_if(true, other), rounded[i]);
        terms[i] = term;
        vector_sum = vector_sum + term;
      }
      if constexpr (kStep) {
        store_vector<T, kVec>(at.tile_of(static_cast<T*>(p.grad_gamma), p.grad_gamma_strides), first, at.low, at.high,
            in_memory_order(terms));
      } else if (packed) {
        vector_sums[at.first_vector + k * 32] = vector_sum;
      } else {
        sum = sum + vector_sum;
      }
    }
  }
  if constexpr (kBackward && !kStep) {
    Acc* grad_gamma = static_cast<Acc*>(p.grad_gamma);
    if (packed) {
      // Eight lanes a row add its vectors' sums (a vector lies in one row, and no row is padded).
      __syncthreads();
      const int per_row = at.time / kVec;
      for (int r = threadIdx.x / 8; r < (at.rows_here + 3) / 4 * 4; r += blockDim.x / 8) {
        Acc part = cast<Acc>(0.0);
        if (r < at.rows_here)
          for (int v = threadIdx.x % 8; v < per_row; v += 8) part = part + vector_sums[r * per_row + v];
#pragma unroll
        for (int d = 4; d > 0; d /= 2) part = part + shuffle(part, lane / 8 * 8 + (lane + d) % 8);
        if (threadIdx.x % 8 == 0 && r < at.rows_here) {
          Acc* to = grad_gamma + at.row_offset(at.packed_row(r), p.grad_gamma_strides);
          for (int64_t j = 0; j < p.partials; ++j) to[j] = j ? cast<Acc>(0.0) : part;
        }
      }
    } else {
      __shared__ Acc sums[kMaxWarps];
      sum = block_sum(sum, sums, lane, at.warp, at.warps);
      Acc* partials = grad_gamma + at.outer * p.grad_gamma_strides.outer + at.inner * p.grad_gamma_strides.inner;
      if (threadIdx.x == 0) partials[at.tile] = sum;
      if (at.tile == 0)
        for (int64_t j = params.tiles + threadIdx.x; j < p.partials; j += blockDim.x) partials[j] = cast<Acc>(0.0);
    }
  }
}

}  // namespace dcs
