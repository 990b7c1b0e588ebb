// Where steps of a block's outer rows are in memory and in shared memory, a slab of each outer row in the order of
// memory (columns/staged_columns.cuh, columns/staged_parts.cuh).
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/vector.cuh"
#include "scan/columns/columns_params.cuh"

namespace dcs {

// How many bytes an address lies behind a whole word of kWord bytes.
template <int kWord, typename E>
__device__ __forceinline__ uint32_t behind_word(const E* at) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at)) % kWord;
}

// Where some steps of an outer row lie in the order of memory. In shared memory they are as far behind a whole word as
// in global memory, so that words of it are words there.
template <int kWord, typename E>
__device__ __forceinline__ E* staged_in(const E* at, char* slot) {
  return reinterpret_cast<E*>(slot + (sizeof(E) < kWord ? behind_word<kWord>(at) : 0));
}

// Of so many elements, those before the first whole word of kWord bytes, such words, and the elements behind them.
struct WholeWords {
  int before, words, behind;
};
template <int kWord, typename E>
__device__ __forceinline__ WholeWords whole_words(const E* at, int count) {
  constexpr uint32_t kSize = sizeof(E), kOfWord = kWord > kSize ? kWord / kSize : 1;
  const uint32_t all = static_cast<uint32_t>(count),
                 before = kOfWord == 1 ? 0 : min((kOfWord - behind_word<kWord>(at) / kSize) % kOfWord, all),
                 words = (all - before) / kOfWord;
  return {static_cast<int>(before), static_cast<int>(words), static_cast<int>(all - before - words * kOfWord)};
}

// Elements [first, end), shared among lanes: visit(how many as a constant, the first of them) of whole words of kWord
// bytes, and of what lies before and behind these. kEdge: fewer words than lanes.
template <int kWord, bool kEdge = false, typename E, typename Visit>
__device__ __forceinline__ void each_word(const E* at, int first, int end, int lane, int lanes, const Visit& visit) {
  constexpr int kOfWord = kWord > static_cast<int>(sizeof(E)) ? kWord / static_cast<int>(sizeof(E)) : 1;
  const WholeWords whole = whole_words<kWord>(at + first, end - first);
  const auto visit_word = [&](int i) {
    visit(std::integral_constant<int, kOfWord>(), first + whole.before + i * kOfWord);
  };
  if constexpr (kEdge) {
    if (lane < whole.words) visit_word(lane);
  } else {
#pragma unroll 4
    for (int i = lane; i < whole.words; i += lanes) visit_word(i);
  }
  if constexpr (kOfWord > 1) {
    each_word<sizeof(E), true>(at, first, first + whole.before, lane, lanes, visit);
    each_word<sizeof(E), true>(at, end - whole.behind, end, lanes - 1 - lane, lanes, visit);
  }
}

// Copies so many elements, in words where both sides have them.
template <int kWord, typename T>
__device__ __forceinline__ void copy_words(T* to, const T* from, int count, int lane, int lanes) {
  each_word<kWord>(to, 0, count, lane, lanes, [&](auto of_word, int i) {
    using Word = Vector<T, of_word()>;
    *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(from + i);
  });
}
// The same asynchronously, but for what is smaller than a word.
template <typename E>
__device__ __forceinline__ void copy_words_async(E* to, const E* from, int first, int end, int lane, int lanes) {
  each_word<4>(from, first, end, lane, lanes, [&](auto of_word, int i) {
    constexpr int kBytes = of_word() * sizeof(E);
    if constexpr (kBytes >= 4) copy_async<kBytes>(to + i, from + i, kBytes);
    else to[i] = from[i];
  });
}
// Whether words of so many bytes of two ranges are words of both.
__device__ __forceinline__ bool words_agree(const void* a, const void* b, uint32_t word) {
  return (static_cast<uint32_t>(reinterpret_cast<uintptr_t>(a)) -
             static_cast<uint32_t>(reinterpret_cast<uintptr_t>(b))) %
      word ==
      0;
}

// kWord: bytes that are copied at once where both sides lie so. kMayLieFlat: slabs may be one contiguous range.
template <typename T, int kWord, bool kMayLieFlat>
struct StagedSlabs {
  const ScanProblem& p;
  const StagedColumnsPlan& t;
  char* const shared;
  const int inner = static_cast<int>(p.inner), shift = p.shifted ? 1 : 0;
  int64_t first_outer;
  int slabs;  // outer rows of the block

  __device__ __forceinline__ StagedSlabs(const StagedColumnsParams& params, unsigned char* memory)
      : p(params.problem), t(params.plan), shared(reinterpret_cast<char*>(memory)) {
    first_outer = static_cast<int64_t>(blockIdx.x) * t.slabs;
    slabs = static_cast<int>(min(int64_t{t.slabs}, p.outer - first_outer));
  }

  // The first in the order of memory of `count` steps from `begin` on in that of the scan; it may be outside the row.
  template <typename E>
  __device__ __forceinline__ E* lowest(E* data, const Strides& strides, int of_slab, int64_t begin, int count) const {
    return data + strides.at(first_outer + of_slab, p.reverse ? p.length - begin - count : begin, 0);
  }
  __device__ __forceinline__ const T* input(int of_slab, int64_t begin, int count) const {
    return lowest(static_cast<const T*>(p.input), p.input_strides, of_slab, begin, count);
  }
  __device__ __forceinline__ T* output(int of_slab, int64_t begin, int count) const {
    return lowest(static_cast<T*>(p.output), p.output_strides, of_slab, begin, count);
  }
  // Where gates are those of the step before, so are flags.
  __device__ __forceinline__ const uint8_t* flags(int of_slab, int64_t begin, int count) const {
    return lowest(reinterpret_cast<const uint8_t*>(p.reset), p.reset_strides, of_slab, begin - shift, count);
  }
  __device__ __forceinline__ char* slot(int buffer, int of_slab) const {
    return shared + (buffer * t.slabs + of_slab) * t.slab_bytes;
  }
  __device__ __forceinline__ bool flat() const { return kMayLieFlat && t.flat; }
  // Which slab's place one of them is found by, and how many elements behind it.
  __device__ __forceinline__ int holder_of(int of_slab) const { return flat() ? 0 : of_slab; }
  __device__ __forceinline__ int behind_holder(int of_slab, int count) const {
    return flat() ? of_slab * count * inner : 0;
  }
  // The same in shared memory.
  __device__ __forceinline__ T* staged(int buffer, int of_slab, int64_t begin, int count) const {
    const int holder = holder_of(of_slab);
    return staged_in<kWord>(input(holder, begin, count), slot(buffer, holder)) + behind_holder(of_slab, count);
  }
  __device__ __forceinline__ uint8_t* staged_flags(int buffer, int of_slab, int64_t begin, int count) const {
    const int holder = holder_of(of_slab);
    return staged_in<kWord>(flags(holder, begin, count), slot(buffer, holder) + t.operand_bytes) +
        behind_holder(of_slab, count);
  }
  __device__ __forceinline__ int count_of(int64_t begin) const {
    return static_cast<int>(min(int64_t{t.steps}, p.length - begin));
  }
  // visit(first, end): of so many elements of a slab's flags those that there are. The first step of all has none where
  // they are those of the step before.
  template <typename Visit>
  __device__ __forceinline__ void known_flags(int64_t begin, int elements, const Visit& visit) const {
    const int missing = begin < shift ? inner : 0;
    visit(p.reverse ? 0 : missing, elements - (p.reverse ? missing : 0));
  }
};

}  // namespace dcs
