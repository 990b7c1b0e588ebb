// small_rows.cuh in float (lines/float_lines.cuh), for rows of which a block has one or a part: a thread has 16 bytes
// of neighboring elements, and begins where a word of memory does if the row's input does not.
#pragma once

#include "common/ptx/global_load.cuh"
#include "common/vector.cuh"
#include "scan/lines/float_lines.cuh"

namespace dcs {

// What is ready before memory may be read.
template <typename T>
struct FloatRow : FloatPlace {
  static constexpr int kSteps = 16 / sizeof(T);
  using Word = Vector<T, kSteps>;
  const T* from;
  T* to;
  int position;          // of the thread's first element in the row: less than 0 before the row begins
  int in_word, to_word;  // all of its elements are in the row, and one word of the input, or of the output
  int turns;             // no thread's elements are one word of the output

  __device__ __forceinline__ explicit FloatRow(const FloatLinesParams& params) : FloatPlace(params) {
    const T* const first = static_cast<const T*>(p.input.data) + outer * p.input.outer;
    const int beyond = beyond_word(first);
    const int ahead = p.shifts ? (p.reverse ? kSteps - 1 - beyond : beyond) : 0;
    position = first_step - ahead;
    from = first + position * p.input.time;
    to = static_cast<T*>(const_cast<void*>(p.output.data)) + (outer * p.output.outer + position * p.output.time);
    const bool is_whole = position >= 0 && position + kSteps <= p.length;
    in_word = is_whole && beyond_word(lowest(from)) == 0;
    to_word = is_whole && beyond_word(lowest(to)) == 0;
    turns = p.flat && beyond_word(lowest(to)) != 0;
    keep(from);
    keep(to);
    hold(position);
    hold(in_word);
    hold(to_word);
    hold(turns);
  }

  __device__ __forceinline__ void load(float (&values)[kSteps], float& initial) const {
    uint32_t words[4] = {}, word = 0;
    load_words_where(in_word, reinterpret_cast<const Word*>(lowest(from)), words);
    if (p.initial.data) {
      const T* const of_row = static_cast<const T*>(p.initial.data) + outer * p.initial.outer;
      load_words_where(has(0), of_row, &word);
    }
    if (in_word || position >= p.length) {
      Word whole;
      memcpy(&whole, words, sizeof whole);
      unpack_in_order(whole, values, p.reverse);
    } else {
      uint32_t single[kSteps] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const bool is_there = position + k >= 0 && position + k < p.length;
        load_words_where(is_there, from + k * p.input.time, &single[k]);
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) values[k] = value_of_word<T, float>(single[k]);
    }
    initial = value_of_word<T, float>(word);
  }
  __device__ __forceinline__ bool is_first(int k) const { return position + k == 0; }

  // By way of `shared`, where words of the output are not those of the input.
  __device__ __forceinline__ void store(const float (&values)[kSteps], unsigned char* shared) const {
    const Word word = pack_in_order<T>(values, p.reverse);
    if (turns) {
      T* const range = reinterpret_cast<T*>(shared) + warp * (32 * kSteps);
      const int turned = p.reverse ? 31 - lane : lane, warp_position = position - lane * kSteps;
      reinterpret_cast<Word*>(range)[turned] = word;
      __syncwarp();
      // In the order of memory, from the warp's lowest element on.
      T* const low = to - lane * kSteps * p.output.time - (p.reverse ? 32 * kSteps - 1 : 0);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int i = 32 * k + lane, at = warp_position + (p.reverse ? 32 * kSteps - 1 - i : i);
        if (at >= 0 && at < p.length) low[i] = range[i];
      }
    } else if (to_word) {
      *reinterpret_cast<Word*>(lowest(to)) = word;
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        if (position + k >= 0 && position + k < p.length) to[k * p.output.time] = cast<T>(values[k]);
    }
  }

 private:
  // Elements since a word of memory began.
  static __device__ __forceinline__ int beyond_word(const T* at) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(at) / sizeof(T)) & (kSteps - 1);
  }
  template <typename Element>
  __device__ __forceinline__ Element* lowest(Element* at) const {
    return p.reverse ? at - (kSteps - 1) : at;
  }
  __device__ __forceinline__ bool has(int at) const { return position <= at && at < position + kSteps; }
};

template <typename T>
__global__ void __launch_bounds__(32 * kSmallBlockWarps, 1)
    float_rows_kernel(const __grid_constant__ FloatLinesParams p) {
  extern __shared__ __align__(16) unsigned char float_rows_shared[];
  scan_float_line<T, FloatRow<T>, FloatMessages>(p, float_rows_shared);
}

}  // namespace dcs
