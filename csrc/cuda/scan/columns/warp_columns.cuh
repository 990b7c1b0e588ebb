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

// A warp's columns: scalars alone, so that they stay in registers. kColumns of a lane, read as one word; kCount steps
// of a segment, kStages of them in shared memory.
template <typename T, bool kStep, bool kBackward, bool kReverse, int kColumns, int kCount, int kStages>
struct WarpColumns {
  using Word = Vector<T, kColumns>;
  static constexpr int kSize = sizeof(T), kRow = 32 * kColumns, kRowBytes = kRow * kSize, kChunks = kRowBytes / 16,
                       kEvery = 32 / kChunks;
  static constexpr int kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0),
                       kStageBytes = kTensors * kCount * kRowBytes;
  static constexpr int kGatesAt = kCount * kRowBytes, kSavedAt = (kTensors - 1) * kCount * kRowBytes;
  static_assert(kChunks <= 32 && kCount % kEvery == 0);
  // Half precision is carried in float, for as many steps as that is good for (plan/aligned.h). Floats take a segment
  // in float from a carry in double where a shared gamma serves all of it, and in double with a per-step gamma:
  // conversions take four times as long as the rest, which gammas to be read leave time for.
  static constexpr bool kInDouble = kSize == 4 && kStep, kAnchored = kSize == 4 && !kStep,
                        kShort = std::is_same_v<T, __nv_bfloat16>;
  using Carry = std::conditional_t<kSize == 2, float, double>;
  using RowGate = Gate<float, kShort>;

  const WarpColumnsParams& params;
  const ScanProblem& p = params.problem;
  const int lane = threadIdx.x;
  const int64_t outer = params.blocks == 1 ? blockIdx.x : blockIdx.x / static_cast<uint32_t>(params.blocks);
  const int64_t first_column = (blockIdx.x - outer * params.blocks) * kRow;
  const int columns = static_cast<int>(min(p.inner - first_column, static_cast<int64_t>(kRow)));
  const bool inside = lane * kColumns < columns;
  const int64_t length = p.length, segments = (length + kCount - 1) / kCount;
  // A lane's chunks of 16 bytes are kEvery rows apart.
  const int own_row = lane / kChunks, chunk = lane % kChunks;
  const bool exists = chunk * 16 < columns * kSize;
  const bool full = columns == kRow;
  const char* const inputs = source(p.input, p.input_strides);
  const char* const gates = kStep ? source(p.gamma, p.gamma_strides) : nullptr;
  const char* const saved = kBackward ? source(p.saved, p.saved_strides) : nullptr;
  const int shift = kStep && p.shifted ? 1 : 0;

  __device__ __forceinline__ explicit WarpColumns(const WarpColumnsParams& of) : params(of) {}

  static __device__ __forceinline__ int64_t step_of(const Strides& strides) {
    return kReverse ? -strides.time : strides.time;
  }
  // A tensor at the scan's first step of these columns.
  template <typename P>
  __device__ __forceinline__ P* at_start(P* pointer, const Strides& strides) const {
    return pointer + (strides.at(outer, kReverse ? length - 1 : 0, 0) + first_column);
  }
  __device__ __forceinline__ const char* source(const void* pointer, const Strides& strides) const {
    return reinterpret_cast<const char*>(
               at_start(static_cast<const T*>(pointer), strides) + own_row * step_of(strides)) +
        chunk * 16;
  }
  __device__ __forceinline__ int64_t column_offset(const Strides& strides, int c) const {
    return strides.at(outer, first_column + lane * kColumns + c);
  }

  __device__ __forceinline__ void load(
      unsigned char* to, const char* from, const Strides& strides, int64_t first) const {
    const int64_t step = step_of(strides) * kSize;
    from += first * step;
    to += own_row * kRowBytes + chunk * 16;
    const bool whole = full && first >= 0 && first + kCount <= length;
#pragma unroll
    for (int r = 0; r < kCount; r += kEvery) {
      copy_async<16>(to + r * kRowBytes, from,
          whole || (exists && first + r + own_row >= 0 && first + r + own_row < length) ? 16 : 0);
      from += kEvery * step;
    }
  }
  __device__ __forceinline__ void fetch(int64_t segment, unsigned char* to) const {
    if (segment < segments) {
      load(to, inputs, p.input_strides, segment * kCount);
      if constexpr (kStep) load(to + kGatesAt, gates, p.gamma_strides, segment * kCount - shift);
      if constexpr (kBackward) load(to + kSavedAt, saved, p.saved_strides, segment * kCount + 1);
    }
    commit_copies();
  }
  __device__ __forceinline__ void read(const unsigned char* from, Word (&to)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      to[i] = *reinterpret_cast<const Word*>(from + i * kRowBytes + lane * kColumns * kSize);
  }

  // The segment from nothing, and its carry.
  static __device__ __forceinline__ void fold_segment(const Word (&x)[kCount], const RowGate (&gate)[kColumns],
      const double (&power)[kColumns], bool is_first, Carry (&carry)[kColumns]) {
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
      carry[c] = is_first ? total[c] : fold(static_cast<double>(total[c]), power[c], carry[c]);
  }
  // A step's results. No carry enters the first one of all, whatever its gate.
  static __device__ __forceinline__ Word take(const Word& x, const Word& g, const RowGate (&gate)[kColumns],
      const double (&gamma)[kColumns], bool starts, float (&y)[kColumns], Carry (&carry)[kColumns]) {
    float values[kColumns], factors[kColumns];
    unpack(x, values);
    if constexpr (kStep) unpack(g, factors);
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
  }
  // grad_gamma[t] = output[t] * saved[next(t)], which is 0 beyond the end.
  static __device__ __forceinline__ void multiply_saved(
      const Word& result, const Word& after, T* grad_gamma, float (&sums)[kColumns]) {
    float rounded[kColumns], other[kColumns];
    unpack(result, rounded);
    unpack(after, other);
    if constexpr (kStep) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) rounded[c] *= other[c];
      *reinterpret_cast<Word*>(grad_gamma) = pack<float, T, kColumns>(rounded);
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] = fmaf(rounded[c], other[c], sums[c]);
    }
  }
  __device__ __forceinline__ void store_sums(const double (&sum)[kColumns]) const {
    if (!inside) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float* const to = static_cast<float*>(p.grad_gamma) + column_offset(p.grad_gamma_strides, c);
      to[0] = static_cast<float>(sum[c]);
      for (int64_t j = 1; j < p.partials; ++j) to[j] = 0.f;
    }
  }
};

template <typename T, bool kStep, bool kBackward, bool kReverse, int kColumns, int kCount, int kStages>
__global__ void __launch_bounds__(32) warp_columns_kernel(const __grid_constant__ WarpColumnsParams params) {
  using Columns = WarpColumns<T, kStep, kBackward, kReverse, kColumns, kCount, kStages>;
  using Word = typename Columns::Word;
  const ScanProblem& p = params.problem;
  overlap_launches();
  extern __shared__ __align__(16) unsigned char warp_columns_shared[];
  const Columns columns(params);
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) columns.fetch(s, warp_columns_shared + s * Columns::kStageBytes);

  double gamma[kColumns], sum[kColumns], power[kColumns];
  typename Columns::Carry carry[kColumns];
  typename Columns::RowGate gate[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    gamma[c] = p.gamma_value;
    if (!kStep && p.gamma_kind == GammaKind::kRow && columns.inside)
      gamma[c] = load_gamma<double>(p.gamma, p.gamma_dtype, columns.column_offset(p.gamma_strides, c), false);
    carry[c] = 0;
    sum[c] = 0.0;
    gate[c] = make_gate<float, Columns::kShort>(gamma[c]);
    power[c] = power_of<kCount>(gamma[c]);
  }
  T* output = columns.at_start(static_cast<T*>(p.output), p.output_strides) + columns.lane * kColumns;
  const int64_t output_step = columns.step_of(p.output_strides);
  T* grad_gamma = nullptr;
  if constexpr (kBackward && kStep)
    grad_gamma = columns.at_start(static_cast<T*>(p.grad_gamma), p.grad_gamma_strides) + columns.lane * kColumns;
  const int64_t grad_gamma_step = columns.step_of(p.grad_gamma_strides);

  int stage = 0;
  for (int64_t segment = 0; segment < columns.segments; ++segment) {
    unsigned char* const here = warp_columns_shared + stage * Columns::kStageBytes;
    wait_for_copies<kStages - 1>();
    __syncwarp();
    Word x[kCount], g[kStep ? kCount : 1], after[kBackward ? kCount : 1];
    columns.read(here, x);
    if constexpr (kStep) columns.read(here + Columns::kGatesAt, g);
    if constexpr (kBackward) columns.read(here + Columns::kSavedAt, after);
    __syncwarp();
    columns.fetch(segment + kStages, here);

    float y[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) y[c] = static_cast<float>(carry[c]);
    if constexpr (Columns::kAnchored) Columns::fold_segment(x, gate, power, segment == 0, carry);
    const int count =
        columns.inside ? static_cast<int>(min(columns.length - segment * kCount, static_cast<int64_t>(kCount))) : 0;
    float sums[kColumns] = {};
    const auto step = [&](int i) {
      const Word result = Columns::take(x[i], g[kStep ? i : 0], gate, gamma, i == 0 && segment == 0, y, carry);
      *reinterpret_cast<Word*>(output + i * output_step) = result;
      if constexpr (kBackward) Columns::multiply_saved(result, after[i], grad_gamma + i * grad_gamma_step, sums);
    };
    if (count == kCount) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) step(i);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i < count) step(i);
    }
    if constexpr (sizeof(T) == 2) {
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
  if constexpr (kBackward && !kStep) columns.store_sums(sum);
}

}  // namespace dcs
