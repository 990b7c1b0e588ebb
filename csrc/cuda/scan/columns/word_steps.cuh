// A warp's steps of neighboring columns along a strided time, a word of four bytes a lane: one column of float, two of
// half precision. Steps may begin in the midst of words (kApart): of such a step a lane reads the word before its two
// columns' and gets the second one from the next lane; results go the same way back.
#pragma once

#include "common/ptx/global_load.cuh"
#include "common/ptx/global_store.cuh"
#include "common/ptx/latency.cuh"
#include "common/vector.cuh"
#include "scan/columns/column_values.cuh"

namespace dcs {

template <typename T, bool kApart, int kSteps>
struct WordSteps {
  static constexpr int kColumns = 4 / sizeof(T);
  static_assert(!kApart || kColumns == 2);
  const int lane;
  const int columns;  // the warp's, maybe none
  const int count;    // of steps

  // Of every other step: whether it begins in the midst of a word.
  struct Odd {
    bool of[2];
    __device__ __forceinline__ Odd(const char* first, int64_t pitch) {
      const auto at = reinterpret_cast<uintptr_t>(first);
      of[0] = kApart && (at & 2) != 0;
      of[1] = kApart && ((at + static_cast<uintptr_t>(pitch)) & 2) != 0;
    }
  };
  // The address of the lane's word.
  __device__ __forceinline__ char* word_at(const char* step) const {
    const auto at = reinterpret_cast<uintptr_t>(step + 4 * lane);
    return reinterpret_cast<char*>(kApart ? at & ~uintptr_t{3} : at);
  }
  // Whether the warp has the columns of either half of the lane's word.
  __device__ __forceinline__ bool has_low(bool odd) const {
    return kColumns * lane >= odd && kColumns * lane - odd < columns;
  }
  __device__ __forceinline__ bool has_high(bool odd) const { return kColumns * lane + kColumns - 1 - odd < columns; }

  // `is_first`, `is_last`: the thread's first step, or last one, is the tensor's, whose words may reach beyond it.
  __device__ __forceinline__ void load(
      const char* first, int64_t pitch, bool is_first, bool is_last, uint32_t (&to)[kSteps]) const {
    const Odd odd(first, pitch);
    const int most = kApart && is_last ? count - 1 : count;
    int counts[2];  // of every other step
#pragma unroll
    for (int i = 0; i < 2; ++i) counts[i] = has_low(odd.of[i]) || has_high(odd.of[i]) ? most : 0;
    const char* step = first;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      to[k] = 0;
      const bool is_whole = k > 0 || !kApart || !is_first;
      load_words_where(is_whole && k < counts[k % 2], reinterpret_cast<const uint32_t*>(word_at(step)), &to[k]);
      step += pitch;
    }
    if constexpr (kApart) {
      if (is_first) to[0] = edge_word(first, odd.of[0]);
      if (!is_last || count == 0) return;
      const int last = count - 1;
      const uint32_t word = edge_word(first + last * pitch, odd.of[last % 2]);
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        if (k == last) to[k] = word;
    }
  }
  // What the warp has of a lane's word.
  __device__ __forceinline__ uint32_t edge_word(const char* step, bool odd) const {
    const auto* const halves = reinterpret_cast<const uint16_t*>(word_at(step));
    uint32_t low = 0, high = 0;
    load_words_where(has_low(odd), halves, &low);
    load_words_where(has_high(odd), halves + 1, &high);
    return low | high << 16;
  }
  // From words to the lane's own columns.
  __device__ __forceinline__ void align(const char* first, int64_t pitch, uint32_t (&words)[kSteps]) const {
    if constexpr (!kApart) return;
    const Odd odd(first, pitch);
    int from[2] = {odd.of[0] ? 0x5432 : 0x3210, odd.of[1] ? 0x5432 : 0x3210};
    keep(from[0]), keep(from[1]);
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      words[k] = __byte_perm(words[k], __shfl_down_sync(0xffffffffu, words[k], 1), static_cast<unsigned>(from[k % 2]));
  }
  static __device__ __forceinline__ void values_at(uint32_t word, float (&to)[kColumns]) {
    Vector<T, kColumns> cell;
    memcpy(&cell, &word, sizeof cell);
    values_of(cell, to);
  }

  // The results of one step after the other.
  struct Output {
    const WordSteps& steps;
    char* step;
    const int64_t pitch;
    // Of every other step: of how many the lane stores a word, or half of one; from its own word and the one before its
    // word in memory, and the half; where that is. The compiler must not know them, or it makes code for each case.
    int words[2], halves[2], from[2], half_from[2], half_at[2];

    __device__ __forceinline__ Output(const WordSteps& of, char* first, int64_t apart)
        : steps(of), step(first), pitch(apart) {
      const Odd odd(first, apart);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool low = of.has_low(odd.of[i]), high = of.has_high(odd.of[i]);
        words[i] = low && high ? of.count : 0;
        halves[i] = low != high ? of.count : 0;
        from[i] = odd.of[i] ? 0x5432 : 0x7654;
        half_from[i] = high ? 0x3232 : 0x1010;
        half_at[i] = high ? 2 : 0;
        if constexpr (kApart) keep(words[i]), keep(halves[i]), keep(from[i]), keep(half_from[i]), keep(half_at[i]);
      }
    }
    // Of step k, once each, in turn.
    __device__ __forceinline__ void store(int k, const float (&values)[kColumns]) {
      const Vector<T, kColumns> cell = packed<T>(values);
      uint32_t word;
      memcpy(&word, &cell, sizeof word);
      char* const at = steps.word_at(step);
      if constexpr (kApart) {
        word = __byte_perm(__shfl_up_sync(0xffffffffu, word, 1), word, static_cast<unsigned>(from[k % 2]));
        const uint32_t part = __byte_perm(word, 0, static_cast<unsigned>(half_from[k % 2]));
        store_words_where(k < halves[k % 2], reinterpret_cast<uint16_t*>(at + half_at[k % 2]), &part);
      }
      store_words_where(k < words[k % 2], reinterpret_cast<uint32_t*>(at), &word);
      step += pitch;
    }
  };
};

}  // namespace dcs
