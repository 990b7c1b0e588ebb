// csrc/cuda/scan/carry/word.cuh on a CPU.
#pragma once

#include <cstdint>

namespace dcs {

struct alignas(16) Word {
  uint64_t value;
  uint64_t state;
};

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
