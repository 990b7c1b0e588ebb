// Vectors of 16 bytes that begin at any of their elements, and where elements lie that are in runs.
#pragma once

#include "common/divisor.cuh"
#include "common/ptx/global_load.cuh"
#include "common/runs.h"
#include "common/vector.cuh"

namespace dcs {

// Where the elements of `Runs` lie, numbered as in the result.
struct RunIndex {
  int64_t run = 1, gap = 0;
  int64_t span = 0;       // elements of memory from the first one to the last one
  bool is_small = false;  // 31 bits number the elements
  Divisor by_run;

  RunIndex() = default;
  RunIndex(int64_t elements, int64_t of_run, int64_t of_gap)
      : run(of_run),
        gap(of_gap),
        span(elements + (elements - 1) / of_run * of_gap),
        is_small(elements < int64_t{1} << 31) {
    if (is_small) by_run = Divisor(static_cast<uint32_t>(run));
  }
  __device__ __forceinline__ int64_t run_of(int64_t element) const {
    return is_small ? static_cast<int64_t>(by_run.of(static_cast<uint32_t>(element))) : divided(element, run);
  }
  // How far an element's place is beyond its number.
  __device__ __forceinline__ int64_t beyond(int64_t element) const { return run_of(element) * gap; }
};

// A vector in words of four bytes, or eight, each of them read into registers of its own, so that nothing waits before
// the first is used. Elements of two bytes may begin in the middle of a word: that one and the last one are read whole.
template <typename E>
struct AnyVector {
  static constexpr int kVec = 16 / sizeof(E), kMargin = sizeof(E) == 2 ? 1 : 0;  // elements beside it that may be read
  static constexpr int kWords = sizeof(E) == 2 ? 5 : 4;
  using Vec = Vector<E, kVec>;
  uint32_t words[kWords] = {};

  __device__ __forceinline__ static bool is_odd(const E* from) {
    return sizeof(E) == 2 && reinterpret_cast<uintptr_t>(from) % 4 != 0;
  }
  __device__ __forceinline__ void ask(bool wanted, const E* from) {
    if constexpr (sizeof(E) == 2) {
      const auto* const pairs = reinterpret_cast<const uint32_t*>(from - (is_odd(from) ? 1 : 0));
#pragma unroll
      for (int i = 0; i < kWords - 1; ++i) load_words_where(wanted, pairs + i, words + i);
      load_words_where(wanted && is_odd(from), pairs + kWords - 1, words + kWords - 1);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) load_words_where(wanted, from + i, words + i * (kWords / kVec));
    }
  }
  __device__ __forceinline__ Vec get(const E* from) const {
    Vec raw;
    if constexpr (sizeof(E) == 2) {
#pragma unroll
      for (int i = 0; i < kWords - 1; ++i)
        raw.words[i] = is_odd(from) ? __funnelshift_r(words[i], words[i + 1], 16) : words[i];
    } else {
      memcpy(&raw, words, sizeof raw);
    }
    return raw;
  }
};

// Whether a vector, with what may be read beside it, is among the `span` elements from `tensor` on.
template <typename E>
__device__ __forceinline__ bool is_within(const E* from, const E* tensor, int64_t span) {
  constexpr int kMargin = AnyVector<E>::kMargin;
  const int64_t first = from - tensor;
  return first >= kMargin && first + AnyVector<E>::kVec + kMargin <= span;
}

}  // namespace dcs
