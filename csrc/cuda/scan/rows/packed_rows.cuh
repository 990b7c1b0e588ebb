// Short rows one behind the other, of whole vectors, up to a warp's 32: a warp takes as many neighbouring rows as its
// lanes hold, a vector a lane, four times over. A row needs nothing but shuffles among its own lanes, and their
// direction is the scan's, so that memory is read and written in its order either way. Instructions are what limits
// halves here: 65536 rows of 256 have 1000 a warp at the speed of a copy.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "dcs/scan/plan/pieces.h"
#include "common/element_types.cuh"
#include "common/vector.cuh"

namespace dcs {

constexpr int kShortThreads = 64;
constexpr int kShortChunks = 4;  // vectors of a lane

struct ShortRowsParams {
  ScanProblem problem;
  int64_t rows;
  int span;      // vectors of a row
  int together;  // rows of a warp's 32 vectors
  float least;   // gammas from here to 1 have powers over a row that float holds in full precision
};

// A power of gamma as the sum of two floats: squared five times over it keeps the digits that a float alone would lose.
struct FloatPair {
  float high, low;
};
__device__ __forceinline__ FloatPair squared(FloatPair a) {
  const float square = a.high * a.high, rest = fmaf(2.f * a.high, a.low, fmaf(a.high, a.high, -square));
  const float high = square + rest;  // nearest to the whole
  return {high, rest - (high - square)};
}
__device__ __forceinline__ FloatPair pair_of(Gate<float, true> gate) { return {gate.value, 0.f}; }
__device__ __forceinline__ FloatPair pair_of(Gate<float, false> gate) { return {gate.value, gate.rest}; }

// The gate of a gamma that is stored as a float or less, or as a double.
template <bool kShort, typename G>
__device__ __forceinline__ Gate<float, kShort> gate_of(G gamma) {
  if constexpr (std::is_same_v<G, double>) {
    return make_gate<float, kShort>(gamma);
  } else {
    const float value = cast<float>(gamma);
    if constexpr (kShort) return {value};
    else return {value, value * 0x1p-60f};
  }
}

// The recurrence over a vector from the carry into it or, where a row `starts`, from its first value.
template <bool kReverse, typename T, int kVec, typename G>
__device__ __forceinline__ Vector<T, kVec> scan_vector(Vector<T, kVec>& x, const G& gate, float carry, bool starts) {
  // Halves stay packed between the two readings: as floats they would take twice the registers.
  if constexpr (sizeof(T) == 2)
    asm volatile("" : "+r"(x.words[0]), "+r"(x.words[1]), "+r"(x.words[2]), "+r"(x.words[3]));
  float values[kVec];
  unpack_in_order<kReverse>(x, values);
  float y = starts ? values[0] : gate.step(values[0], carry);
  values[0] = y;
#pragma unroll
  for (int i = 1; i < kVec; ++i) values[i] = y = gate.step(values[i], y);
  return pack_in_order<kReverse, T>(values);
}

// A vector's part of gamma's gradient: grad_gamma[t] = output[t] * saved[next(t)]. What follows the vector is the next
// lane's, but for the `last`: `beyond`.
template <bool kReverse, typename T, int kVec>
__device__ __forceinline__ float gamma_terms(
    const Vector<T, kVec>& output, const Vector<T, kVec>& saved, bool last, float beyond) {
  float rounded[kVec], after[kVec];
  unpack_in_order<kReverse>(output, rounded);
  unpack_in_order<kReverse>(saved, after);
  const float next = kReverse ? __shfl_up_sync(0xffffffffu, after[0], 1) : __shfl_down_sync(0xffffffffu, after[0], 1);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i + 1 < kVec; ++i) sum = fmaf(after[i + 1], rounded[i], sum);
  return fmaf(last ? beyond : next, rounded[kVec - 1], sum);
}

// kEach: a gamma for each row.
template <typename T, bool kEach, bool kBackward, bool kReverse>
__global__ void __launch_bounds__(kShortThreads, kBackward ? 12 : 16)
    short_rows_kernel(const __grid_constant__ ShortRowsParams params) {
  constexpr int kVec = 16 / sizeof(T), kChunks = kShortChunks, kGates = kEach ? kChunks : 1;
  constexpr bool kShort = sizeof(T) == 2;
  constexpr unsigned kAll = 0xffffffffu;
  using Word = Vector<T, kVec>;
  const ScanProblem& p = params.problem;
  overlap_launches();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int span = params.span;
  const int own_row = lane / span, sub = lane - own_row * span;
  const int order = kReverse ? span - 1 - sub : sub;  // vectors of the row that the scan meets before this one
  const bool active = own_row < params.together;
  const int64_t first_row =
      (static_cast<int64_t>(blockIdx.x) * (kShortThreads / 32) + warp) * kChunks * params.together + own_row;
  const auto row_of = [&](int k) { return first_row + k * params.together; };
  const int64_t first = first_row * span + sub;
  const int apart = params.together * span;
  bool inside[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) inside[k] = active && row_of(k) < params.rows;
  const auto fetch = [&](const void* from, Word(&to)[kChunks]) {
    const Word* const words = static_cast<const Word*>(from) + first;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      to[k] = Word{};
      if (inside[k]) to[k] = words[k * apart];
    }
  };
  Word x[kChunks], saved[kBackward ? kChunks : 1];
  fetch(p.input, x);
  if constexpr (kBackward) fetch(p.saved, saved);

  const auto row_offset = [&](int64_t row, const Strides& strides) {
    return p.inner == 1 ? row * strides.outer : (row / p.inner) * strides.outer + (row % p.inner) * strides.inner;
  };
  Gate<float, kShort> gates[kGates];
  const auto load_gates = [&](const auto* gammas) {
#pragma unroll
    for (int k = 0; k < kGates; ++k) {
      const int64_t row = kEach ? min(row_of(k), params.rows - 1) : 0;
      gates[k] = gate_of<kShort>(gammas[row_offset(row, p.gamma_strides)]);
    }
  };
  if (!kEach && p.gamma_kind == GammaKind::kNumber) {
    gates[0] = make_gate<float, kShort>(p.gamma_value);
  } else {
    switch (p.gamma_dtype) {
      case ElementType::Half: load_gates(static_cast<const __half*>(p.gamma)); break;
      case ElementType::BFloat16: load_gates(static_cast<const __nv_bfloat16*>(p.gamma)); break;
      case ElementType::Float: load_gates(static_cast<const float*>(p.gamma)); break;
      default: load_gates(static_cast<const double*>(p.gamma));
    }
  }
  bool narrow = true;
#pragma unroll
  for (int k = 0; k < kGates; ++k)
    narrow = narrow && fabsf(gates[k].value) <= 1.f && fabsf(gates[k].value) >= params.least;
  if constexpr (kEach) narrow = __all_sync(kAll, narrow);

  // Each vector from nothing, then the totals of a row's vectors before each.
  const auto gate_at = [&](int k) { return gates[kEach ? k : 0]; };
  float total[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    float values[kVec];
    unpack_in_order<kReverse>(x[k], values);
    float y = values[0];
#pragma unroll
    for (int i = 1; i < kVec; ++i) y = gate_at(k).step(values[i], y);
    total[k] = y;
  }
  const auto from_before = [&](auto value, int distance) {
    return kReverse ? __shfl_down_sync(kAll, value, distance) : __shfl_up_sync(kAll, value, distance);
  };
  if (narrow) {
    FloatPair power[kGates];
#pragma unroll
    for (int k = 0; k < kGates; ++k) {
      power[k] = pair_of(gates[k]);
#pragma unroll
      for (int e = 1; e < kVec; e *= 2) power[k] = squared(power[k]);
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      if (d >= span) break;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const float other = from_before(total[k], d);
        if (order >= d) total[k] = fmaf(power[kEach ? k : 0].high, other, total[k]);
      }
#pragma unroll
      for (int k = 0; k < kGates; ++k) power[k] = squared(power[k]);
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) total[k] = from_before(total[k], 1);
  } else {
#pragma unroll 1
    for (int k = 0; k < kChunks; ++k) {
      // Chunk after chunk, for the registers: which of them is picked without an index.
      Gate<float, kShort> gate = gates[0];
      float mine = total[0];
#pragma unroll
      for (int j = 1; j < kChunks; ++j) {
        if (j == k) {
          mine = total[j];
          if constexpr (kEach) gate = gates[j];
        }
      }
      double power = power_of<kVec>(!kEach && p.gamma_kind == GammaKind::kNumber ? p.gamma_value : whole_gamma(gate)),
             sum = mine;
      for (int d = 1; d < span; d *= 2) {
        const double other = from_before(sum, d);
        if (order >= d) sum = fold(sum, power, other);
        power = power_mul(power, power);
      }
      mine = static_cast<float>(from_before(sum, 1));
#pragma unroll
      for (int j = 0; j < kChunks; ++j)
        if (j == k) total[j] = mine;
    }
  }

  // The recurrence from each vector's carry.
  T* const output = static_cast<T*>(p.output);
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const Word result = scan_vector<kReverse>(x[k], gate_at(k), total[k], order == 0);
    if (inside[k]) reinterpret_cast<Word*>(output)[first + k * apart] = result;
    if constexpr (kBackward) {
      float sum =
          gamma_terms<kReverse>(result, saved[k], order == span - 1, 0.f);  // nothing is saved after the last step
      // Those of a row's lanes in a fixed tree: sums of as many neighbours as there are, up to the next power of two.
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        if (d >= span) break;
        const float other = __shfl_down_sync(kAll, sum, d);
        if (sub + d < span) sum += other;
      }
      if (inside[k] && sub == 0) {
        float* const to = static_cast<float*>(p.grad_gamma) + row_offset(row_of(k), p.grad_gamma_strides);
        to[0] = sum;
        for (int64_t j = 1; j < p.partials; ++j) to[j] = 0.f;
      }
    }
  }
}

}  // namespace dcs
