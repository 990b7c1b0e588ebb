// small_columns.cuh in float (float_lines.cuh): a thread has a few neighboring steps of a column of its block's span.
#pragma once

#include "common/ptx/global_load.cuh"
#include "scan/lines/float_lines.cuh"

namespace dcs {

// What is ready before memory may be read.
template <typename T, int kCount>
struct FloatColumn : FloatPlace {
  static constexpr int kSteps = kCount;
  const T* from;
  T* to;
  int count;  // of the thread's steps that are of a column

  __device__ __forceinline__ explicit FloatColumn(const FloatLinesParams& params) : FloatPlace(params) {
    const int own = first_column + min(span_column, width - 1);
    const auto first_of = [&](const SmallColumnOperand& of) {
      return static_cast<T*>(const_cast<void*>(of.data)) + (outer * of.outer + first_step * of.time + own * of.inner);
    };
    from = first_of(p.input);
    to = first_of(p.output);
    count = span_column < width ? min(max(p.length - first_step, 0), kSteps) : 0;
    keep(from);
    keep(to);
    hold(count);
  }
  // `initial`: of the column's first step.
  __device__ __forceinline__ void load(float (&values)[kSteps], float& initial) const {
    uint32_t words[kSteps] = {}, word = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) load_words_where(k < count, from + k * p.input.time, &words[k]);
    if (p.initial.data) {
      const int own = outer * p.initial.outer + (first_column + min(span_column, width - 1)) * p.initial.inner;
      load_words_where(first_step == 0, static_cast<const T*>(p.initial.data) + own, &word);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) values[k] = value_of_word<T, float>(words[k]);
    initial = value_of_word<T, float>(word);
  }
  __device__ __forceinline__ bool is_first(int k) const { return k == 0 && first_step == 0; }
  // Where what a warp has is one range of memory, by way of `shared`.
  __device__ __forceinline__ void store(const float (&values)[kSteps], unsigned char* shared) const {
    if (!p.flat) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        if (k < count) to[k * p.output.time] = cast<T>(values[k]);
      return;
    }
    T* const range = reinterpret_cast<T*>(shared) + warp * (32 * kSteps);
    const int last = width - 1, elements = min(slots * kSteps, p.length - warp_step) * width;
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      if (k < count)
        range[(slot * kSteps + k) * width + (p.reverse ? last - span_column : span_column)] = cast<T>(values[k]);
    __syncwarp();
    T* const first =
        static_cast<T*>(const_cast<void*>(p.output.data)) + outer * p.output.outer + warp_step * p.output.time;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int i = 32 * k + lane;
      if (i < elements) first[p.reverse ? last - i : i] = range[i];
    }
  }
};

// kShares: blocks along time are no cluster, but leave each other words.
template <typename T, int kSteps, bool kShares>
__global__ void __launch_bounds__(32 * kSmallBlockWarps, 1)
    float_columns_kernel(const __grid_constant__ FloatLinesParams p) {
  extern __shared__ __align__(16) unsigned char float_columns_shared[];
  scan_float_line<T, FloatColumn<T, kSteps>, std::conditional_t<kShares, FloatWords, FloatMessages>>(
      p, float_columns_shared);
}

}  // namespace dcs
