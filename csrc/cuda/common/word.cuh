// What blocks publish to each other in global memory while they run: words of 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ptx/whole_access.cuh"

namespace dcs {

// A word in global memory that is written and read whole, with a state of its own: no fence orders several.
struct alignas(16) Word {
  uint64_t value;
  uint64_t state;
};

// What tells the words of one call from whatever memory held before: an even number, of which the two lowest bits say
// more, and where the replays of a graph are counted, which all have the same number (call_tag.h).
struct CallTag {
  uint64_t tag;
  uint32_t* launches;  // null: the tag says it all
};
constexpr int kMostCountedBits = 20;  // of a launch's number of blocks

// A launch's number, for which each of its blocks asks once. All of them together add the same number to the count, the
// last block what the others leave of it.
__device__ __forceinline__ uint32_t launch_of(const CallTag& call) {
  if (!call.launches) return 0;
  constexpr int kBits = kMostCountedBits;
  const uint32_t others = gridDim.x - 1;
  return atomicAdd(call.launches, blockIdx.x == others ? (1u << kBits) - others : 1) >> kBits;
}
// Its own tag.
__device__ __forceinline__ uint64_t tag_of(const CallTag& call, uint32_t launch) {
  return call.tag + 4 * uint64_t{launch};
}
__device__ __forceinline__ uint64_t tag_of_launch(const CallTag& call) { return tag_of(call, launch_of(call)); }

__device__ __forceinline__ void store_word(Word* to, uint64_t value, uint64_t state) { store_whole(to, value, state); }
__device__ __forceinline__ Word load_word(const Word* from) {
  Word word;
  load_whole(from, word.value, word.state);
  return word;
}
// The same where `wanted`, else what is there: without a branch, so that several loads are on their way at once.
__device__ __forceinline__ void load_word_if(bool wanted, const Word* from, Word& to) {
  load_whole_if(wanted, from, to.value, to.state);
}

}  // namespace dcs
