// Segments of a scan that blocks publish to each other in global memory while they run.
#pragma once

#include "scan/carry/segment.cuh"
#include "common/word.cuh"

namespace dcs {

// A segment as 16-byte words, which are written and read whole: a part of a value, and beside it which call wrote it. A
// call's tag is an even number that memory is unlikely to hold (`new_tag`), so nothing is cleared before a launch; its
// lowest bit says whether the segment is closed. With `kGates` the product of the gates goes along: where the reader
// knows it, as a power of a shared gamma, it does not.
template <typename Wide, bool kGates>
struct SegmentWords {
  static constexpr int kValues = sizeof(Wide) / 8, kWords = kValues * (kGates ? 2 : 1);
  Word words[kWords];

  __device__ __forceinline__ void publish(const Segment<Wide>& segment, uint64_t tag) {
    const uint64_t state = tag | (segment.closed ? 1 : 0);
    const uint64_t* const total = reinterpret_cast<const uint64_t*>(&segment.total);
    const uint64_t* const gates = reinterpret_cast<const uint64_t*>(&segment.gates);
#pragma unroll
    for (int i = 0; i < kWords; ++i) store_word(&words[i], i < kValues ? total[i] : gates[i - kValues], state);
  }
  // Loads what `from` holds where `wanted`, without a branch.
  __device__ __forceinline__ void load_if(bool wanted, const SegmentWords& from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) load_word_if(wanted, &from.words[i], words[i]);
  }
  // Whether the segment is in these words, which have been loaded; of `segment.gates` nothing is touched without
  // `kGates`.
  __device__ __forceinline__ bool get(Segment<Wide>& segment, uint64_t tag) const {
    uint64_t* const total = reinterpret_cast<uint64_t*>(&segment.total);
    uint64_t* const gates = reinterpret_cast<uint64_t*>(&segment.gates);
    bool there = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      (i < kValues ? total[i] : gates[i - kValues]) = words[i].value;
      there = there && (words[i].state & ~uint64_t{1}) == tag;
      segment.closed = words[i].state & 1;
    }
    return there;
  }
  // Whether the segment is there, in memory.
  __device__ __forceinline__ bool read(Segment<Wide>& segment, uint64_t tag) const {
    SegmentWords loaded;
#pragma unroll
    for (int i = 0; i < kWords; ++i) loaded.words[i] = load_word(&words[i]);
    return loaded.get(segment, tag);
  }
};

// The segments of the wanted ones of kCount words, `apart` from each other, when all of them are there.
template <typename Words, int kCount, typename Wide>
__device__ __forceinline__ void read_segments(
    const Words* words, int apart, uint32_t wanted, uint64_t tag, Segment<Wide> (&read)[kCount]) {
  Words asked[kCount]{};
  while (wanted) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asked[i].load_if(wanted >> i & 1, words[i * apart]);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (asked[i].get(read[i], tag)) wanted &= ~(1u << i);
  }
}

}  // namespace dcs
