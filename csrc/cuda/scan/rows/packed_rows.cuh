// Short rows one behind the other, of whole vectors, up to a warp's 32: a warp takes as many neighboring rows as its
// lanes hold, a vector a lane, four times over. A row needs nothing but shuffles among its own lanes, and their
// direction is the scan's, so that memory is read and written in its order either way. Instructions are what limits
// half precision here: 65536 rows of 256 have 1000 a warp at the speed of a copy.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/problem.h"
#include "common/element_types.cuh"
#include "common/row_offset.cuh"
#include "common/vector.cuh"

namespace dcs {

constexpr int kPackedThreads = 64;
constexpr int kPackedChunks = 4;  // vectors of a lane

struct PackedRowsParams {
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
  // Half precision stays packed between the two readings: as floats they would take twice the registers.
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

// What a lane takes: a vector of each of kPackedChunks rows. kEach: a gamma for each row.
template <typename T, bool kEach, bool kBackward, bool kReverse>
struct PackedLane {
  static constexpr int kVec = 16 / sizeof(T), kChunks = kPackedChunks, kGates = kEach ? kChunks : 1;
  static constexpr bool kShort = sizeof(T) == 2;
  static constexpr unsigned kAll = 0xffffffffu;
  using Word = Vector<T, kVec>;

  const PackedRowsParams& params;
  const ScanProblem& p = params.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int span = params.span;
  const int own_row = lane / span, sub = lane - own_row * span;
  const int order = kReverse ? span - 1 - sub : sub;  // vectors of the row that the scan meets before this one
  const bool active = own_row < params.together;
  const int64_t first_row =
      (static_cast<int64_t>(blockIdx.x) * (kPackedThreads / 32) + warp) * kChunks * params.together + own_row;
  const int64_t first = first_row * span + sub;
  const int apart = params.together * span;
  using Gates = Gate<float, kShort>[kGates];

  __device__ __forceinline__ explicit PackedLane(const PackedRowsParams& of) : params(of) {}

  __device__ __forceinline__ int64_t row_of(int k) const { return first_row + k * params.together; }
  static __device__ __forceinline__ Gate<float, kShort> gate_at(const Gates& gates, int k) {
    return gates[kEach ? k : 0];
  }
  template <typename V>
  static __device__ __forceinline__ V from_before(V value, int distance) {
    return kReverse ? __shfl_down_sync(kAll, value, distance) : __shfl_up_sync(kAll, value, distance);
  }

  __device__ __forceinline__ void load(const void* from, const bool (&inside)[kChunks], Word (&to)[kChunks]) const {
    const Word* const words = static_cast<const Word*>(from) + first;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      to[k] = Word{};
      if (inside[k]) to[k] = words[k * apart];
    }
  }
  template <typename G>
  __device__ __forceinline__ void load_gates(const G* gammas, Gates& gates) const {
#pragma unroll
    for (int k = 0; k < kGates; ++k) {
      const int64_t row = kEach ? min(row_of(k), params.rows - 1) : 0;
      gates[k] = gate_of<kShort>(gammas[row_offset(row, p.inner, p.gamma_strides)]);
    }
  }
  __device__ __forceinline__ void load_gates(Gates& gates) const {
    if (!kEach && p.gamma_kind == GammaKind::kNumber) {
      gates[0] = make_gate<float, kShort>(p.gamma_value);
    } else {
      switch (p.gamma_dtype) {
        case ElementType::Half: load_gates(static_cast<const __half*>(p.gamma), gates); break;
        case ElementType::BFloat16: load_gates(static_cast<const __nv_bfloat16*>(p.gamma), gates); break;
        case ElementType::Float: load_gates(static_cast<const float*>(p.gamma), gates); break;
        default: load_gates(static_cast<const double*>(p.gamma), gates);
      }
    }
  }
  // Whether float holds the powers of the warp's gammas.
  __device__ __forceinline__ bool is_narrow(const Gates& gates) const {
    bool narrow = true;
#pragma unroll
    for (int k = 0; k < kGates; ++k)
      narrow = narrow && fabsf(gates[k].value) <= 1.f && fabsf(gates[k].value) >= params.least;
    if constexpr (kEach) narrow = __all_sync(kAll, narrow);
    return narrow;
  }

  // Each vector from nothing.
  __device__ __forceinline__ void scan(const Gates& gates, const Word (&x)[kChunks], float (&total)[kChunks]) const {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      float values[kVec];
      unpack_in_order<kReverse>(x[k], values);
      float y = values[0];
#pragma unroll
      for (int i = 1; i < kVec; ++i) y = gate_at(gates, k).step(values[i], y);
      total[k] = y;
    }
  }
  // Makes of the vectors' totals those of the row's vectors before each, in float.
  __device__ __forceinline__ void fold_narrow(const Gates& gates, float (&total)[kChunks]) const {
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
  }
  // The same in double.
  __device__ __forceinline__ void fold_wide(const Gates& gates, float (&total)[kChunks]) const {
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

  // Gamma's gradient: the parts of a row's lanes in a fixed tree, sums of as many neighbors as there are, up to the
  // next power of two.
  __device__ __forceinline__ void store_sum(int k, bool inside, float sum) const {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      if (d >= span) break;
      const float other = __shfl_down_sync(kAll, sum, d);
      if (sub + d < span) sum += other;
    }
    if (inside && sub == 0) {
      float* const to = static_cast<float*>(p.grad_gamma) + row_offset(row_of(k), p.inner, p.grad_gamma_strides);
      to[0] = sum;
      for (int64_t j = 1; j < p.partials; ++j) to[j] = 0.f;
    }
  }
};

template <typename T, bool kEach, bool kBackward, bool kReverse>
__global__ void __launch_bounds__(kPackedThreads, kBackward ? 12 : 16)
    packed_rows_kernel(const __grid_constant__ PackedRowsParams params) {
  using Lane = PackedLane<T, kEach, kBackward, kReverse>;
  using Word = typename Lane::Word;
  constexpr int kChunks = kPackedChunks;
  overlap_launches();
  const Lane lane(params);
  bool inside[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) inside[k] = lane.active && lane.row_of(k) < params.rows;
  Word x[kChunks], saved[kBackward ? kChunks : 1];
  lane.load(params.problem.input, inside, x);
  if constexpr (kBackward) lane.load(params.problem.saved, inside, saved);
  typename Lane::Gates gates;
  lane.load_gates(gates);
  const bool narrow = lane.is_narrow(gates);
  float total[kChunks];
  lane.scan(gates, x, total);
  if (narrow) lane.fold_narrow(gates, total);
  else lane.fold_wide(gates, total);

  // The recurrence from each vector's carry.
  T* const output = static_cast<T*>(params.problem.output);
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const Word result = scan_vector<kReverse>(x[k], Lane::gate_at(gates, k), total[k], lane.order == 0);
    if (inside[k]) reinterpret_cast<Word*>(output)[lane.first + k * lane.apart] = result;
    if constexpr (kBackward) {
      // Nothing is saved after the last step.
      const float sum = gamma_terms<kReverse>(result, saved[k], lane.order == lane.span - 1, 0.f);
      lane.store_sum(k, inside[k], sum);
    }
  }
}

}  // namespace dcs
