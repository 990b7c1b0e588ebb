// Softmax of columns of few steps in registers, one read and one write: a thread takes all steps of a word of
// neighboring columns, or of several words, and meets no other. A word is as wide as all steps of all tensors allow,
// down to one element, so that views and steps of any length are read in place. Neighboring threads take neighboring
// words.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "softmax/lines.cuh"

namespace dcs {

constexpr int kFewStepsThreads = 128;  // of a block

// Words of a step to a thread, a warp's words apart, whose loads of all steps have at least kBytesOnTheWay together. An
// instance of kSteps has columns of more than half as many steps.
constexpr int kBytesOnTheWay = 32;
constexpr int few_steps_words(int word_bytes, int steps, bool backward) {
  const int least_steps = steps == 2 ? 2 : steps / 2 + 1, bytes = least_steps * word_bytes * (backward ? 2 : 1);
  int words = 1;
  while (words * bytes < kBytesOnTheWay) words *= 2;
  return words;
}

template <typename T>
struct SoftmaxColumns {
  const T* input;
  const T* saved;
  T* output;
  int64_t length, inner;
  // Strips are neighboring columns, all of an outer or, of a view whose runs are parts of a step, a run's. Words of a
  // strip's step; strips of an outer, and of all; from a step of the input to the next one, in elements; warps of a
  // strip, where threads have several words.
  int64_t strip_words, outer_strips, strips, input_step;
  Divisor by_warps;
  RunIndex runs;
};

// Of as few roundings one behind the other as there can be.
template <int kFirst, int kCount, typename Acc, int kSteps>
__device__ __forceinline__ Acc sum_in_pairs(const Acc (&x)[kSteps]) {
  if constexpr (kCount == 1) return x[kFirst];
  else return sum_in_pairs<kFirst, kCount / 2>(x) + sum_in_pairs<kFirst + kCount / 2, kCount - kCount / 2>(x);
}

// All steps of some columns.
template <bool kBackward, typename Acc, int kColumns, int kSteps>
__device__ __forceinline__ void finish_columns(Acc (&x)[kColumns][kSteps], const Acc (&saved)[kColumns][kSteps]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if constexpr (kBackward) {
      Acc total = 0;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) total += x[c][s] * saved[c][s];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) x[c][s] = (x[c][s] - total) * saved[c][s];
    } else {
      Acc largest = kLowest<Acc>;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) largest = larger(largest, x[c][s]);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) x[c][s] = shifted_power(x[c][s], largest);
      const Acc scale = inverse(sum_in_pairs<0, kSteps>(x[c]));
#pragma unroll
      for (int s = 0; s < kSteps; ++s) x[c][s] *= scale;
    }
  }
}

// All steps of a word of columns, in place.
template <bool kBackward, typename T, int kVec, int kSteps, int kSaved>
__device__ __forceinline__ void finish_words(
    WordRegisters<T, kVec> (&raw)[kSteps], const WordRegisters<T, kVec> (&saved)[kSaved]) {
  using Acc = typename Types<T>::Acc;
  constexpr int kColumns = kVec == 1 ? 1 : 2;  // at once
  Vector<T, kVec> words[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) words[s] = raw[s].get();
#pragma unroll
  for (int i = 0; i < kVec; i += kColumns) {
    Acc x[kColumns][kSteps], y[kColumns][kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        x[c][s] = cast<Acc>(words[s].get(i + c));
        if constexpr (kBackward) y[c][s] = cast<Acc>(saved[s].get().get(i + c));
      }
    }
    finish_columns<kBackward>(x, y);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) words[s].set(i + c, cast<T>(x[c][s]));
    }
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) raw[s].set(words[s]);
}

// A thread's words in the first step of their columns, which are a warp's words apart.
template <int kVec, int kWords>
struct StepWords {
  int64_t at, in_input;  // the first, in elements: of contiguous tensors, and of the input, which may be a view
  int left;              // words of the strip from the first one on, as far as they matter

  template <typename T>
  __device__ __forceinline__ explicit StepWords(const SoftmaxColumns<T>& params) {
    int64_t strip, word;  // which one of all, and which one of the strip's
    if constexpr (kWords == 1) {
      const int64_t thread = static_cast<int64_t>(blockIdx.x) * kFewStepsThreads + threadIdx.x;
      strip = divided(thread, params.strip_words);
      word = thread - strip * params.strip_words;
    } else {
      const uint32_t warp = blockIdx.x * (kFewStepsThreads / 32) + threadIdx.x / 32, number = params.by_warps.of(warp);
      strip = number;
      word = static_cast<int64_t>(warp - number * params.by_warps.divisor) * (32 * kWords) + threadIdx.x % 32;
    }
    const int64_t outer = params.outer_strips == 1 ? strip : divided(strip, params.outer_strips),
                  column = ((strip - outer * params.outer_strips) * params.strip_words + word) * kVec;
    at = outer * params.length * params.inner + column;
    in_input = at + (params.runs.span > 0 ? params.runs.beyond(at) : 0);
    left = static_cast<int>(
        strip < params.strips ? min(params.strip_words - word, static_cast<int64_t>(32 * kWords)) : int64_t{0});
  }
  __device__ __forceinline__ bool has(int number) const { return 32 * number < left; }
  // What `has` says is found again behind this: predicates of all loads, kept for the stores, are more than there are,
  // and the last loads would wait for the first.
  __device__ __forceinline__ void forget() { asm volatile("" : "+r"(left)); }
};

template <typename T, int kVec, int kSteps, bool kBackward>
__global__ void __launch_bounds__(kFewStepsThreads)
    softmax_few_steps_kernel(const __grid_constant__ SoftmaxColumns<T> params) {
  constexpr int kWords = few_steps_words(kVec * sizeof(T), kSteps, kBackward), kApart = 32 * kVec;
  using Registers = WordRegisters<T, kVec>;
  overlap_launches();
  StepWords<kVec, kWords> mine(params);
  if (!mine.has(0)) return;
  const int length = static_cast<int>(params.length);
  const T* const input = params.input + mine.in_input;
  const T* const outputs = kBackward ? params.saved + mine.at : nullptr;
  T* const output = params.output + mine.at;
  Registers raw[kWords][kSteps], saved[kWords][kBackward ? kSteps : 1];
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const bool is_there = s < length && mine.has(k);
      raw[k][s].set(neutral<T, kVec, kBackward>());
      raw[k][s].load_where(is_there, input + s * params.input_step + k * kApart);
      if constexpr (kBackward) saved[k][s].load_where(is_there, outputs + s * params.inner + k * kApart);
    }
  }
  mine.forget();
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    finish_words<kBackward>(raw[k], saved[k]);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      if (s < length && mine.has(k))
        *reinterpret_cast<Vector<T, kVec>*>(output + s * params.inner + k * kApart) = raw[k][s].get();
  }
}

}  // namespace dcs
