// Scans along a strided time with many contiguous columns beside it: a warp takes 32 lanes of neighboring columns and
// takes them through all of time, the next segments on their way into its shared memory. No carry is handed on and no
// block waits: 0.955 of a copy of 1024 steps of 65536 bfloat16 columns, where the blocks of block_columns.cuh reach
// 0.88.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/element_types.cuh"
#include "common/vector.cuh"

namespace dcs {

struct WarpColumnsParams {
  ScanProblem problem;
  int64_t blocks;  // of an outer index
};

// kColumns of a lane, read as one word; kCount steps of a segment, kStages of them in shared memory.
template <typename T, bool kStep, bool kBackward, bool kReverse, int kColumns, int kCount, int kStages>
__global__ void __launch_bounds__(32) warp_columns_kernel(const __grid_constant__ WarpColumnsParams params) {
  using Word = Vector<T, kColumns>;
  constexpr int kSize = sizeof(T), kRow = 32 * kColumns, kRowBytes = kRow * kSize, kPieces = kRowBytes / 16,
                kEvery = 32 / kPieces;
  constexpr int kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0), kStageBytes = kTensors * kCount * kRowBytes;
  constexpr int kGatesAt = kCount * kRowBytes, kSavedAt = (kTensors - 1) * kCount * kRowBytes;
  static_assert(kPieces <= 32 && kCount % kEvery == 0);
  // Half precision is carried in float, for as many steps as that is good for (plan/aligned.h). Floats take a segment
  // in float from a carry in double where one gamma serves all of it, and in double with a gamma a step: conversions
  // take four times as long as the rest, which gammas to be read leave time for.
  constexpr bool kInDouble = kSize == 4 && kStep, kAnchored = kSize == 4 && !kStep,
                 kShort = std::is_same_v<T, __nv_bfloat16>;
  const ScanProblem& p = params.problem;
  overlap_launches();
  extern __shared__ __align__(16) unsigned char warp_columns_shared[];
  const int lane = threadIdx.x;
  const int64_t outer = params.blocks == 1 ? blockIdx.x : blockIdx.x / static_cast<uint32_t>(params.blocks);
  const int64_t first_column = (blockIdx.x - outer * params.blocks) * kRow;
  const int columns = static_cast<int>(min(p.inner - first_column, static_cast<int64_t>(kRow)));
  const bool inside = lane * kColumns < columns;
  const int64_t length = p.length, segments = (length + kCount - 1) / kCount;
  const auto step_of = [&](const Strides& strides) { return kReverse ? -strides.time : strides.time; };
  // A tensor at the scan's first step of these columns.
  const auto at_start = [&](auto* pointer, const Strides& strides) {
    return pointer + (outer * strides.outer + first_column + (kReverse ? (length - 1) * strides.time : 0));
  };

  // A lane's pieces of 16 bytes are kEvery rows apart.
  const int own_row = lane / kPieces, piece = lane % kPieces;
  const bool exists = piece * 16 < columns * kSize;
  const bool full = columns == kRow;
  const auto source = [&](const void* pointer, const Strides& strides) {
    return reinterpret_cast<const char*>(
               at_start(static_cast<const T*>(pointer), strides) + own_row * step_of(strides)) +
        piece * 16;
  };
  const char* const inputs = source(p.input, p.input_strides);
  const char* const gates = kStep ? source(p.gamma, p.gamma_strides) : nullptr;
  const char* const saved = kBackward ? source(p.saved, p.saved_strides) : nullptr;
  const auto load = [&](unsigned char* to, const char* from, const Strides& strides, int64_t first) {
    const int64_t step = step_of(strides) * kSize;
    from += first * step;
    to += own_row * kRowBytes + piece * 16;
    const bool whole = full && first >= 0 && first + kCount <= length;
#pragma unroll
    for (int r = 0; r < kCount; r += kEvery) {
      copy_async<16>(to + r * kRowBytes, from,
          whole || (exists && first + r + own_row >= 0 && first + r + own_row < length) ? 16 : 0);
      from += kEvery * step;
    }
  };
  const int shift = kStep && p.shifted ? 1 : 0;
  const auto fetch = [&](int64_t segment, unsigned char* to) {
    if (segment < segments) {
      load(to, inputs, p.input_strides, segment * kCount);
      if constexpr (kStep) load(to + kGatesAt, gates, p.gamma_strides, segment * kCount - shift);
      if constexpr (kBackward) load(to + kSavedAt, saved, p.saved_strides, segment * kCount + 1);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) fetch(s, warp_columns_shared + s * kStageBytes);

  using Carry = std::conditional_t<kSize == 2, float, double>;
  double gamma[kColumns], sum[kColumns], power[kColumns];
  Carry carry[kColumns];
  Gate<float, kShort> gate[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    gamma[c] = p.gamma_value;
    if (!kStep && p.gamma_kind == GammaKind::kRow && inside)
      gamma[c] = load_gamma<double>(p.gamma, p.gamma_dtype,
          outer * p.gamma_strides.outer + (first_column + lane * kColumns + c) * p.gamma_strides.inner, false);
    carry[c] = 0;
    sum[c] = 0.0;
    gate[c] = make_gate<float, kShort>(gamma[c]);
    power[c] = power_of<kCount>(gamma[c]);
  }
  T* output = at_start(static_cast<T*>(p.output), p.output_strides) + lane * kColumns;
  const int64_t output_step = step_of(p.output_strides);
  T* grad_gamma = nullptr;
  if constexpr (kBackward && kStep)
    grad_gamma = at_start(static_cast<T*>(p.grad_gamma), p.grad_gamma_strides) + lane * kColumns;
  const int64_t grad_gamma_step = step_of(p.grad_gamma_strides);

  int stage = 0;
  for (int64_t segment = 0; segment < segments; ++segment) {
    unsigned char* const here = warp_columns_shared + stage * kStageBytes;
    wait_for_copies<kStages - 1>();
    __syncwarp();
    Word x[kCount], g[kStep ? kCount : 1], after[kBackward ? kCount : 1];
    const auto read = [&](int at, Word(&to)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        to[i] = *reinterpret_cast<const Word*>(here + at + i * kRowBytes + lane * kColumns * kSize);
    };
    read(0, x);
    if constexpr (kStep) read(kGatesAt, g);
    if constexpr (kBackward) read(kSavedAt, after);
    __syncwarp();
    fetch(segment + kStages, here);

    float y[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) y[c] = static_cast<float>(carry[c]);
    if constexpr (kAnchored) {
      // The segment from nothing, and its carry.
      float total[kColumns];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float values[kColumns];
        unpack(x[i], values);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) total[c] = i == 0 ? values[c] : gate[c].step(values[c], total[c]);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        carry[c] = segment == 0 ? total[c] : fold(static_cast<double>(total[c]), power[c], carry[c]);
    }
    const int count = inside ? static_cast<int>(min(length - segment * kCount, static_cast<int64_t>(kCount))) : 0;
    float sums[kColumns] = {};
    const auto take = [&](int i) {
      float values[kColumns], factors[kColumns];
      unpack(x[i], values);
      if constexpr (kStep) unpack(g[i], factors);
      // No carry enters the first step, whatever its gate.
      const bool starts = i == 0 && segment == 0;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if constexpr (kInDouble) {
          const double next =
              fma(kStep ? static_cast<double>(factors[c]) : gamma[c], carry[c], static_cast<double>(values[c]));
          carry[c] = starts ? static_cast<double>(values[c]) : next;
          values[c] = static_cast<float>(carry[c]);
        } else {
          const float next = kStep ? plain_step(values[c], factors[c], y[c]) : gate[c].step(values[c], y[c]);
          values[c] = y[c] = starts ? values[c] : next;
        }
      }
      return pack<float, T, kColumns>(values);
    };
    const auto store = [&](int i, Word result) {
      *reinterpret_cast<Word*>(output + i * output_step) = result;
      if constexpr (kBackward) {
        // grad_gamma[t] = output[t] * saved[next(t)], which is 0 beyond the end.
        float rounded[kColumns], other[kColumns];
        unpack(result, rounded);
        unpack(after[i], other);
        if constexpr (kStep) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) rounded[c] *= other[c];
          *reinterpret_cast<Word*>(grad_gamma + i * grad_gamma_step) = pack<float, T, kColumns>(rounded);
        } else {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) sums[c] = fmaf(rounded[c], other[c], sums[c]);
        }
      }
    };
    if (count == kCount) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) store(i, take(i));
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i < count) store(i, take(i));
    }
    if constexpr (kSize == 2) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) carry[c] = y[c];
    }
    if constexpr (kBackward && !kStep) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] += sums[c];
    }
    output += kCount * output_step;
    if constexpr (kBackward && kStep) grad_gamma += kCount * grad_gamma_step;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  if constexpr (kBackward && !kStep) {
    if (!inside) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float* const to = static_cast<float*>(p.grad_gamma) + outer * p.grad_gamma_strides.outer +
          (first_column + lane * kColumns + c) * p.grad_gamma_strides.inner;
      to[0] = static_cast<float>(sum[c]);
      for (int64_t j = 1; j < p.partials; ++j) to[j] = 0.f;
    }
  }
}

}  // namespace dcs
