// Steps of a block's outer rows in shared memory (columns/staged_columns.cuh, columns/staged_parts.cuh): they come and
// go in the order of memory, a slab of each outer row, and ask nothing of alignment.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/ptx/dependent_launch.cuh"
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

// Elements [first, end), shared among lanes: visit(how many as a constant, the first of them) of whole words of kWord
// bytes, and of what lies before and behind these, as words of 4 bytes and elements. kEdge: fewer words than lanes.
template <int kWord, bool kEdge = false, typename E, typename Visit>
__device__ __forceinline__ void each_word(const E* at, int first, int end, int lane, int lanes, const Visit& visit) {
  constexpr uint32_t kSize = sizeof(E), kOfWord = kWord > kSize ? kWord / kSize : 1;
  const uint32_t count = static_cast<uint32_t>(end - first), before = behind_word<kWord>(at + first) / kSize,
                 edge = kOfWord == 1 ? 0 : min((kOfWord - before) % kOfWord, count), words = (count - edge) / kOfWord,
                 rest = count - edge - words * kOfWord;
  const int first_word = first + static_cast<int>(edge);
  const auto visit_word = [&](int i) {
    visit(std::integral_constant<int, kOfWord>(), first_word + i * static_cast<int>(kOfWord));
  };
  if constexpr (kEdge) {
    if (lane < static_cast<int>(words)) visit_word(lane);
  } else {
#pragma unroll 4
    for (int i = lane; i < static_cast<int>(words); i += lanes) visit_word(i);
  }
  if constexpr (kOfWord > 1) {
    if (edge + rest == 0) return;
    constexpr int kShorter = kWord > 4 ? 4 : kSize;
    each_word<kShorter, true>(at, first, first_word, lane, lanes, visit);
    each_word<kShorter, true>(at, end - static_cast<int>(rest), end, lanes - 1 - lane, lanes, visit);
  }
}

// kWord: bytes that are copied at once where both sides lie so. Groups of neighboring threads, `lanes` each, take slabs
// in turn. kMayLieFlat: slabs may be one contiguous range, which all threads take (`t.flat`).
template <typename T, int kWord, bool kMayLieFlat>
struct StagedSlabs {
  const ScanProblem& p;
  const StagedColumnsPlan& t;
  char* const shared;
  const int group, groups, lane, lanes;
  const int inner = static_cast<int>(p.inner), shift = p.shifted ? 1 : 0;
  int64_t first_outer;
  int slabs;  // outer rows of the block

  __device__ __forceinline__ StagedSlabs(
      const StagedColumnsParams& params, unsigned char* memory, int lanes_of_group, int groups_of_block)
      : p(params.problem),
        t(params.plan),
        shared(reinterpret_cast<char*>(memory)),
        group(static_cast<int>(threadIdx.x) / lanes_of_group),
        groups(groups_of_block),
        lane(static_cast<int>(threadIdx.x) - group * lanes_of_group),
        lanes(lanes_of_group) {
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
  __device__ __forceinline__ const uint8_t* flags(int of_slab, int64_t begin, int count) const {
    return lowest(reinterpret_cast<const uint8_t*>(p.reset), p.reset_strides, of_slab, begin, count);
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
  // Where gates are those of the step before, so are flags.
  __device__ __forceinline__ uint8_t* staged_flags(int buffer, int of_slab, int64_t begin, int count) const {
    const int holder = holder_of(of_slab);
    return staged_in<kWord>(flags(holder, begin - shift, count), slot(buffer, holder) + t.operand_bytes) +
        behind_holder(of_slab, count);
  }
  __device__ __forceinline__ int count_of(int64_t begin) const {
    return static_cast<int>(min(int64_t{t.steps}, p.length - begin));
  }
  // Visits the slabs of the group, and how many elements of `count` steps are to be copied as one range.
  template <typename Visit>
  __device__ __forceinline__ void each_range(int count, const Visit& visit) const {
    const int ranges = flat() ? 1 : slabs, elements = count * inner * (flat() ? slabs : 1);
#pragma unroll 1
    for (int s = group; s < ranges; s += groups) visit(s, elements);
  }

  template <typename E>
  __device__ __forceinline__ void fetch_range(E* to, const E* from, int first, int end) const {
    each_word<kWord>(from, first, end, lane, lanes, [&](auto count, int i) {
      constexpr int kBytes = count() * sizeof(E);
      if constexpr (kBytes >= 4) copy_async<kBytes>(to + i, from + i, kBytes);
      else to[i] = from[i];
    });
  }
  __device__ __forceinline__ void fetch(int buffer, int64_t begin) const {
    const int count = count_of(begin);
    each_range(count, [&](int s, int elements) {
      fetch_range(staged(buffer, s, begin, count), input(s, begin, count), 0, elements);
      if (!p.reset) return;
      // The first step of all has no flags of a step before.
      const int missing = begin < shift ? inner : 0;
      fetch_range(staged_flags(buffer, s, begin, count), flags(s, begin - shift, count), p.reverse ? 0 : missing,
          elements - (p.reverse ? missing : 0));
    });
  }
  template <int kBytes>
  __device__ __forceinline__ void store_words(T* to, const T* values, int count) const {
    each_word<kBytes>(to, 0, count, lane, lanes, [&](auto of_word, int i) {
      using Word = Vector<T, of_word()>;
      *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(values + i);
    });
  }
  __device__ __forceinline__ void store(int buffer, int64_t begin) const {
    const int count = count_of(begin);
    each_range(count, [&](int s, int elements) {
      const T* const from = input(s, begin, count);
      const T* const values = staged(buffer, s, begin, count);
      T* const to = lowest(static_cast<T*>(p.output), p.output_strides, s, begin, count);
      const auto differs = [&](int word) {
        return (reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from)) % word != 0;
      };
      if (sizeof(T) >= kWord || !differs(kWord)) store_words<kWord>(to, values, elements);
      else if (kWord > 4 && (sizeof(T) >= 4 || !differs(4))) store_words<4>(to, values, elements);
      else store_words<sizeof(T)>(to, values, elements);
    });
  }
};

}  // namespace dcs
