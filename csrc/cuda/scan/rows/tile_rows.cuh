// Scans along contiguous time. A block takes a tile: a row, or its segment for a block of a cluster. A lane holds
// kChunks vectors of 16 bytes, 32 vectors apart, so that loads and stores are whole lines; a vector is scanned
// serially, vectors across the warp by shuffles (lane_scan.cuh), warps through shared memory, the tiles of a row
// through that of a cluster (warp_carries.cuh). The last step runs the plain recurrence again from each vector's carry.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "scan/rows/lane_scan.cuh"
#include "scan/rows/tile.cuh"
#include "scan/rows/warp_carries.cuh"

namespace dcs {

// A block's tile, from its loads to its stores. Arrays are no members: those stay in registers.
template <typename T, bool kStep, bool kBackward, bool kReverse>
struct TileRowsScan {
  using Kind = RowsKind<T, kStep, kReverse>;
  static constexpr int kVec = Kind::kVec, kChunks = Kind::kChunks;
  static constexpr int kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0);
  static constexpr int kGateTensor = kStep ? 1 : 0, kSavedTensor = kTensors - 1;
  using Word = Vector<T, kVec>;
  using Words = Word[kTensors * kChunks];
  // The last lane's: the scan position after its vector.
  using SavedNext = T[kBackward ? kChunks : 1];

  const RowsParams& params;
  const ScanProblem& p;
  const RowsTile<Kind>& at;

  __device__ __forceinline__ void fetch(Words& words, int tensor, const T* from) const {
    const int apart = at.apart();
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      words[tensor * kChunks + k] = at.whole ? *reinterpret_cast<const Word*>(from + at.address(0) + k * apart)
                                             : load_vector<T, kVec>(from, at.address(k), at.low, at.high);
    }
  }
  // Loads everything first.
  __device__ __forceinline__ void load(const T* input, const T* gates, Words& words, SavedNext& saved_next) const {
    fetch(words, 0, input);
    if constexpr (kStep) fetch(words, kGateTensor, gates);
    if constexpr (kBackward) {
      const T* saved = at.tile_of(static_cast<const T*>(p.saved), p.saved_strides);
      fetch(words, kSavedTensor, saved);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int64_t next = at.base + (kReverse ? at.address(k) - 1 : at.address(k) + kVec);
        saved_next[k] = at.lane == 31 && next >= 0 && next < p.length ? saved[next - at.base] : cast<T>(0.f);
      }
    }
  }
  // A vector's values in scan order.
  static __device__ __forceinline__ void read(const Words& words, int tensor, int k, float (&to)[kVec]) {
    unpack_in_order<kReverse>(words[tensor * kChunks + k], to);
  }
  static __device__ __forceinline__ void step_gates(const Words& words, int k, float (&to)[kVec]) {
    if constexpr (kStep) read(words, kGateTensor, k, to);
  }
  static __device__ __forceinline__ float advance(
      const RowsGammas<Kind>& gammas, float value, float step_gate, float y) {
    if constexpr (kStep) return plain_step(value, step_gate, y);
    else return gammas.gate.step(value, y);
  }

  // The gates of a shifted scan's steps: those of the step before.
  __device__ __forceinline__ void shift_gates(const T* gates, Words& words) const {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      Word g = words[kGateTensor * kChunks + k];
      turn(g, kReverse);
      const int first = at.address(k);
      const int64_t before = at.base + (kReverse ? first + kVec : first - 1);
      T previous = before >= 0 && before < p.length ? gates[before - at.base] : cast<T>(0.f);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const T mine = g.get(i);
        g.set(i, previous);
        previous = mine;
      }
      turn(g, kReverse);
      words[kGateTensor * kChunks + k] = g;
    }
  }

  // Scans each vector from a zero carry.
  __device__ __forceinline__ void scan_vectors(
      const Words& words, const RowsGammas<Kind>& gammas, LaneScan<Kind>& lanes) const {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      float values[kVec], factors[kVec];
      read(words, 0, k, values);
      step_gates(words, k, factors);
      float y = 0.f;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const float
            value = values[i],
            factor = factors[i];  // here: beside the comparison of i they would be indexed by what it is compared with
        if (at.starts(k, i)) y = value;
        else y = i == 0 ? value : advance(gammas, value, factor, y);
      }
      lanes.vector_total[k] = y;
    }
  }
  // A vector's gates as factors of the carry's products. No carry enters a row's first step, so its gate, which may be
  // a NaN, has no part in them.
  __device__ __forceinline__ void carry_gates(const Words& words, int k, float (&to)[kVec]) const {
    step_gates(words, k, to);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float factor = to[i];
      to[i] = at.starts(k, i) ? 1.f : factor;
    }
  }

  // The recurrence from the carry into a vector, which becomes the one behind it.
  __device__ __forceinline__ Word scan_vector(
      Words& words, const RowsGammas<Kind>& gammas, const LaneScan<Kind>& lanes, int k, double& carry) const {
    // Half precision stays packed between the two readings: as floats they would take twice the registers.
    if constexpr (sizeof(T) == 2) {
      Word& here = words[k];
      asm volatile("" : "+r"(here.words[0]), "+r"(here.words[1]), "+r"(here.words[2]), "+r"(here.words[3]));
    }
    float y = cast<float>(fold(lanes.carry_into(k), lanes.lane_gates[kStep ? k : 0], carry));
    carry = fold(lanes.total_of(k), lanes.gates_of(k), carry);
    float values[kVec], factors[kVec];
    read(words, 0, k, values);
    step_gates(words, k, factors);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float value = values[i], factor = factors[i];
      if (at.starts(k, i)) y = value;
      else y = advance(gammas, value, factor, y);
      values[i] = y;
    }
    return pack_in_order<kReverse, T>(values);
  }
  __device__ __forceinline__ void store_sum(float* grad_gamma, float sum, float* sums) const {
    sum = block_sum(sum, sums, at.lane, at.warp, at.warps);
    float* partials = grad_gamma + p.grad_gamma_strides.at(at.outer, at.inner);
    if (threadIdx.x == 0) partials[at.tile] = sum;
    if (at.tile == 0)
      for (int64_t j = params.tiles + threadIdx.x; j < p.partials; j += blockDim.x) partials[j] = 0.f;
  }
};

template <typename T, bool kStep, bool kBackward, bool kReverse>
__global__ void __launch_bounds__(32 * (kStep || kBackward ? kTileWarps : kMaxWarps), kStep == kBackward ? 2 : 3)
    tile_rows_kernel(const __grid_constant__ RowsParams params) {
  using Scan = TileRowsScan<T, kStep, kBackward, kReverse>;
  using Kind = typename Scan::Kind;
  constexpr int kVec = Scan::kVec, kChunks = Scan::kChunks;
  using Word = typename Scan::Word;
  const ScanProblem& p = params.problem;
  __shared__ TileSegments cluster;
  launch_dependents();
  const RowsTile<Kind> at(params);
  if (params.tiles > 1) cluster.init(static_cast<int>(at.tile));
  griddepcontrol_wait();
  const Scan scan{params, p, at};
  const T* input = at.tile_of(static_cast<const T*>(p.input), p.input_strides);
  const T* gates = nullptr;
  if constexpr (kStep) gates = at.tile_of(static_cast<const T*>(p.gamma), p.gamma_strides);

  typename Scan::Words words;
  typename Scan::SavedNext saved_next;
  scan.load(input, gates, words, saved_next);
  const RowsGammas<Kind> gammas(at);
  if constexpr (kStep) {
    if (p.shifted) scan.shift_gates(gates, words);
  }

  LaneScan<Kind> lanes;
  scan.scan_vectors(words, gammas, lanes);
  double wide_carries[2 * kChunks];
  lanes.wide_carries = wide_carries;
  asm volatile("" : "+l"(lanes.wide_carries));  // keeps the array out of registers
  lanes.run(at, gammas, [&](int k, float (&to)[kVec]) { scan.carry_gates(words, k, to); });

  double carry = 0.0;
  if (at.warps > 1) carry = carry_across_warps(at, lanes, cluster);

  T* output = at.tile_of(static_cast<T*>(p.output), p.output_strides);
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int first = at.address(k);
    const Word result = scan.scan_vector(words, gammas, lanes, k, carry);
    if (at.whole) *reinterpret_cast<Word*>(output + at.address(0) + k * at.apart()) = result;
    else store_vector<T, kVec>(output, first, at.low, at.high, result);
    if constexpr (kBackward) {
      // grad_gamma[t] = output[t] * saved[next(t)].
      float terms[kVec];
      float rounded[kVec], after_each[kVec];
      unpack_in_order<kReverse>(result, rounded);
      scan.read(words, Scan::kSavedTensor, k, after_each);
      const float following = shuffle_down(after_each[0], 1);
      const float beyond = at.lane == 31 ? cast<float>(saved_next[k]) : following;
      float vector_sum = 0.f;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const int s = at.position(k) + i;
        float other = i + 1 < kVec ? after_each[(i + 1) % kVec] : beyond;
        // The adjoint's last step of a row is the forward's first, which had no carry.
        if (at.start + s - at.pad == p.length - 1) other = cast<float>(0.0);
        float term = 0.f;
        if (at.inside(s)) term = plain_step(term, other, rounded[i]);
        terms[i] = term;
        vector_sum = vector_sum + term;
      }
      if constexpr (kStep) {
        store_vector<T, kVec>(at.tile_of(static_cast<T*>(p.grad_gamma), p.grad_gamma_strides), first, at.low, at.high,
            pack_in_order<kReverse, T>(terms));
      } else {
        sum = sum + vector_sum;
      }
    }
  }
  if constexpr (kBackward && !kStep) {
    __shared__ float sums[kMaxWarps];
    scan.store_sum(static_cast<float*>(p.grad_gamma), sum, sums);
  }
}

}  // namespace dcs
