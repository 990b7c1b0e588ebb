// csrc/cuda/common/word.cuh on a CPU.
#pragma once

#include <cstdint>

namespace dcs {

struct alignas(16) Word {
  uint64_t value;
  uint64_t state;
};

struct CallTag {
  uint64_t tag;
  uint32_t* launches;
};
constexpr int kMostCountedBits = 20;
inline uint64_t tag_of_launch(const CallTag& call) {
  if (!call.launches) return call.tag;
  const uint32_t others = gridDim.x - 1u, own = blockIdx.x == others ? (1u << kMostCountedBits) - others : 1;
  return call.tag + 4 * uint64_t{__atomic_fetch_add(call.launches, own, __ATOMIC_RELAXED) >> kMostCountedBits};
}

inline void store_word(Word* to, uint64_t value, uint64_t state) {
  const unsigned __int128 word = static_cast<unsigned __int128>(state) << 64 | value;
  __atomic_store_n(reinterpret_cast<unsigned __int128*>(to), word, __ATOMIC_RELAXED);
  ++emulation::progress;
}
inline Word load_word(const Word* from) {
  emulation::wait_for("a word of another block");
  const unsigned __int128 word =
      __atomic_load_n(reinterpret_cast<unsigned __int128*>(const_cast<Word*>(from)), __ATOMIC_RELAXED);
  return {static_cast<uint64_t>(word), static_cast<uint64_t>(word >> 64)};
}
inline void load_word_if(bool wanted, const Word* from, Word& to) {
  if (wanted) to = load_word(from);
}

}  // namespace dcs
