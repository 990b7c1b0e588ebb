// Scans along a strided time, one column a lane: a warp reads the same step of 32 columns at once, so that contiguous
// columns make whole lines. A thread holds some steps of its column, the block's warps hold consecutive segments of
// time, and the block takes time serially with the carry. It asks nothing of addresses and pitches.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/element_types.cuh"
#include "common/vector.cuh"
#include "dcs/scan/plan/tuning.h"
#include "dcs/scan/problem.h"
#include "scan/carry/segment.cuh"

namespace dcs {

// Steps of a thread: what registers have room for. Step gammas are a second tensor in them.
template <bool kStep>
constexpr int kSteps = kStep ? 8 : 16;

// Segments of a block at most (plan/aligned.h, plan_block_columns): what shared memory has room for; of pairs, what
// makes enough blocks.
template <int kColumns, int kLanes, bool kFew>
constexpr int kMaxSegments = kLanes < 32 || kColumns == 1 ? 32 : (kFew ? kPairWarps : 2 * kPairWarps);

// kColumns neighboring columns a lane, read as one word; kLanes lanes a segment of time, a whole warp or half of one;
// kCount steps a thread.
template <typename T, bool kStep, bool kBackward, int kColumns, int kLanes, int kCount>
__global__ void __launch_bounds__(kLanes* kMaxSegments<kColumns, kLanes, !kBackward>,
    kColumns == 1 || kLanes < 32 ? 1
        : kBackward              ? 3
        : kCount > kSteps<kStep> ? 4
                                 : 8) block_columns_kernel(const __grid_constant__ ScanProblem p) {
  using Word = Vector<T, kColumns>;
  constexpr int kWarps = kMaxSegments<kColumns, kLanes, !kBackward>;
  // What follows calls the lanes of a segment a warp.
  overlap_launches();
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int warps = blockDim.x / kLanes;
  const int64_t time = p.length;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kLanes + lane) * kColumns;
  const bool inside = column < p.outer * p.inner;
  const int64_t outer = !inside || p.inner == 1 ? (inside ? column : 0) : p.outer == 1 ? 0 : column / p.inner;
  const int64_t inner = inside ? column - outer * p.inner : 0;
  // A tensor at the scan's first step of this column, and from there one step on.
  const auto at_start = [&](auto* pointer, const Strides& strides) {
    return pointer + (strides.at(outer, inner) + (p.reverse ? (time - 1) * strides.time : 0));
  };
  const auto step_of = [&](const Strides& strides) { return p.reverse ? -strides.time : strides.time; };
  const T* input = at_start(static_cast<const T*>(p.input), p.input_strides);
  const int64_t input_step = step_of(p.input_strides);
  T* output = at_start(static_cast<T*>(p.output), p.output_strides);
  const int64_t output_step = step_of(p.output_strides);
  const T* gates = nullptr;
  if constexpr (kStep) gates = at_start(static_cast<const T*>(p.gamma), p.gamma_strides);
  const int64_t gates_step = step_of(p.gamma_strides);
  const int shift = p.shifted ? 1 : 0;
  const bool whole_block = (static_cast<int64_t>(blockIdx.x) + 1) * kLanes * kColumns <= p.outer * p.inner;
  const T* saved = nullptr;
  T* grad_gamma = nullptr;
  if constexpr (kBackward) saved = at_start(static_cast<const T*>(p.saved), p.saved_strides);
  if constexpr (kBackward && kStep) grad_gamma = at_start(static_cast<T*>(p.grad_gamma), p.grad_gamma_strides);
  const int64_t saved_step = step_of(p.saved_strides), grad_gamma_step = step_of(p.grad_gamma_strides);

  bool bounded = !kStep;  // no product of gates can overflow
  constexpr bool kShort =
      std::is_same_v<T, __nv_bfloat16>;  // one warp may carry a column over all its steps: too far for float16
  Gate<float, kShort> gate[kColumns];
  double segment_gates[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    double gamma = p.gamma_value;
    if (!kStep && p.gamma_kind == GammaKind::kRow)
      gamma = load_gamma<double>(p.gamma, p.gamma_dtype, p.gamma_strides.at(outer, inner + c), false);
    gate[c] = make_gate<float, kShort>(gamma);
    if constexpr (!kStep) {
      // Up to 1024 steps of a block: within a double.
      bounded = bounded && fabs(gamma) < 1.9;
      segment_gates[c] = gamma;
#pragma unroll
      for (int e = 1; e < kCount; e *= 2)
        segment_gates[c] =
            bounded ? segment_gates[c] * segment_gates[c] : clamped_mul(segment_gates[c], segment_gates[c]);
    }
  }

  // One entry a warp and column, padded by a column against bank conflicts.
  __shared__ double totals[kColumns][kWarps][kLanes + 1];
  __shared__ double products[kStep ? kColumns : 1][kStep ? kWarps : 1][kLanes + 1];
  __shared__ bool closed[kStep ? kColumns : 1][kStep ? kWarps : 1][kLanes + 1];
  __shared__ double powers[kStep ? 1 : kColumns][kLanes];  // a column's gamma over one segment
  __shared__ double carries[kColumns][kLanes];             // into the block's next segments
  double carry[kColumns];                                  // the same where the block is one warp
  float sum[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    carry[c] = 0.0;
    sum[c] = 0.f;
    if (warp == 0) {
      carries[c][lane] = 0.0;
      if constexpr (!kStep) powers[c][lane] = segment_gates[c];
    }
  }
  for (int64_t begin = 0; begin < time; begin += warps * kCount) {
    const int64_t first = begin + warp * kCount;
    const int count = inside ? static_cast<int>(max(int64_t{0}, min(time - first, static_cast<int64_t>(kCount)))) : 0;
    Word x[kCount];
    Word g[kStep ? kCount : 1];
    const bool starts = first == 0;
    // A segment without a test for each step: the same for all lanes of a warp.
    const bool even = whole_block && first + kCount <= time && !(starts && kStep && p.shifted);
    const T* from = input + first * input_step;
    if (even) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = *reinterpret_cast<const Word*>(from + i * input_step);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i < count) x[i] = *reinterpret_cast<const Word*>(from + i * input_step);
    }
    // The shifted scan takes the gate of the step before; the first step needs none.
    if constexpr (kStep) {
      const T* from_gate = gates + (first - shift) * gates_step;
      if (even) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) g[i] = *reinterpret_cast<const Word*>(from_gate + i * gates_step);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) g[i].set(c, cast<T>(1.f));
          if (i < count && first + i >= shift) g[i] = *reinterpret_cast<const Word*>(from_gate + i * gates_step);
        }
      }
    }
    Word following[kBackward ? kCount
                             : 1];  // the saved output after each step, read before the stores that could alias it
    if constexpr (kBackward) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i < count && first + i + 1 < time)
          following[i] = *reinterpret_cast<const Word*>(saved + (first + i + 1) * saved_step);
    }
    const auto advance = [&](float value, int i, int c, float y) {
      if constexpr (kStep) return plain_step(value, cast<float>(g[i].get(c)), y);
      else return gate[c].step(value, y);
    };
    // y after a step. No carry enters the first one of a row.
    const auto next = [&](int i, int c, float y) {
      const float value = cast<float>(x[i].get(c));
      return i == 0 && starts ? value : advance(value, i, c, y);
    };

    double mine[kColumns];
    if (warps > 1) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float y = 0.f;
        if (even) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) y = next(i, c, y);
        } else {
#pragma unroll
          for (int i = 0; i < kCount; ++i)
            if (i < count) y = next(i, c, y);
        }
        if constexpr (kStep) {
          // In float only where no product on the way leaves its range.
          float most = 0.f;
          GateProduct<T> in_float;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const float factor = cast<float>(g[i].get(c));
            in_float.take(factor);
            most = fmaxf(most, fabsf(factor));
          }
          const bool narrow = most <= 1.f && fabsf(in_float.rounded) >= 0x1p-100f;
          double product = in_float.whole();
          if (!narrow) {
            product = 1.0;
#pragma unroll
            for (int i = 0; i < kCount; ++i) product = clamped_mul(product, cast<double>(g[i].get(c)));
          }
          products[c][warp][lane] = product;
        }
        totals[c][warp][lane] = y;
        if constexpr (kStep) closed[c][warp][lane] = first == 0;
      }
      const bool all_bounded = __syncthreads_and(bounded);
      const auto times = [&](double a, double b) { return all_bounded ? a * b : clamped_mul(a, b); };
      // The warps' totals across time: `warps` lanes take a column and scan it, and each leaves its warp's carry where
      // the total was.
      const int whole_lane = threadIdx.x % 32;
      const int segment = whole_lane % warps,
                of_column = static_cast<int>(threadIdx.x) / 32 * (32 / warps) + whole_lane / warps;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        Segment<double> folded = identity<double>();
        folded.total = totals[c][segment][of_column];
        if constexpr (kStep) {
          folded.gates = products[c][segment][of_column];
          folded.closed = closed[c][segment][of_column];
        } else {
          folded.gates = powers[c][of_column];
        }
        double lane_power = 1.0;
        for (int d = 1; d < warps; d *= 2) {
          const double total = shuffle_up(folded.total, d, warps);
          if (segment >= d && !folded.closed) folded.total = fold(folded.total, folded.gates, total);
          if constexpr (kStep) {
            const double gates = shuffle_up(folded.gates, d, warps);
            if (segment >= d) folded.gates = clamped_mul(folded.gates, gates);
            const bool stops = __shfl_up_sync(0xffffffffu, folded.closed, d, warps);
            if (segment >= d) folded.closed = folded.closed || stops;
          } else {
            if (segment & d) lane_power = times(lane_power, folded.gates);
            folded.gates = times(folded.gates, folded.gates);
          }
        }
        const double entering = carries[c][of_column];
        Segment<double> before{shuffle_up(folded.total, 1, warps), lane_power, false};
        if constexpr (kStep) {
          before.gates = shuffle_up(folded.gates, 1, warps);
          before.closed = __shfl_up_sync(0xffffffffu, folded.closed, 1, warps);
        }
        totals[c][segment][of_column] = segment == 0 ? entering : after(before, entering);
        __syncwarp();
        if (segment == warps - 1) carries[c][of_column] = after(folded, entering);
      }
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns; ++c) mine[c] = totals[c][warp][lane];
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) mine[c] = carry[c];
    }

    if constexpr (kColumns == 2 && sizeof(T) == 2) {
      // Half precision stays packed between the two readings: as floats they would take twice the registers.
#pragma unroll
      for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i].words[0]));
    }
    // A float's steps keep what rounding takes from them: 32 would lose 9e-4 of 10000 ones at gamma = 0.999, so 1e-4.
    // With a per-step gamma they are fewer, and it would cost a twentieth of the time; backward a fortieth.
    constexpr bool kCareful = std::is_same_v<T, float> && !kStep && !kBackward;
    float y[kColumns];
    float lost[kCareful ? kColumns : 1] = {};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      y[c] = static_cast<float>(mine[c]);
      if constexpr (kCareful) lost[c] = lost_in(mine[c], y[c]);
    }
    T* to = output + first * output_step;
    const auto emit = [&](int i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if constexpr (kCareful) {
          if (i == 0 && starts) {
            y[c] = next(i, c, y[c]);
            lost[c] = 0.f;
          } else {
            y[c] = careful_step(fmaf(gate[c].rest, y[c], x[i].get(c)), gate[c].value, y[c], lost[c]);
          }
        } else {
          y[c] = next(i, c, y[c]);
        }
      }
      const Word rounded = pack<float, T, kColumns>(y);
      *reinterpret_cast<Word*>(to + i * output_step) = rounded;
      if constexpr (kBackward) {
        // grad_gamma[t] = output[t] * saved[next(t)].
        const int64_t q = first + i;
        const bool last = q + 1 == time;
        float terms[kColumns], stored[kColumns];
        unpack(rounded, stored);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float before = last ? 0.f : cast<float>(following[i].get(c));
          const float term = plain_step(0.f, before, stored[c]);
          terms[c] = term;
          sum[c] = sum[c] + term;
        }
        if constexpr (kStep)
          *reinterpret_cast<Word*>(grad_gamma + q * grad_gamma_step) = pack<float, T, kColumns>(terms);
      }
    };
    if (even) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) emit(i);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i < count) emit(i);
    }
    if (warps == 1)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) carry[c] = y[c];
  }
  if constexpr (kBackward && !kStep) {
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) totals[c][warp][lane] = sum[c];
    __syncthreads();
    if (warp == 0 && inside) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        double all = totals[c][0][lane];
        for (int w = 1; w < warps; ++w) all = all + totals[c][w][lane];
        float* partials = static_cast<float*>(p.grad_gamma) + p.grad_gamma_strides.at(outer, inner + c);
        partials[0] = static_cast<float>(all);
        for (int64_t j = 1; j < p.partials; ++j) partials[j] = 0.f;
      }
    }
  }
}

}  // namespace dcs
