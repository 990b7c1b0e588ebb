// csrc/cuda/common/ptx/whole_access.cuh on a CPU.
#pragma once

#include <cstdint>

namespace dcs {

inline void store_whole(void* to, uint64_t low, uint64_t high) {
  const unsigned __int128 word = static_cast<unsigned __int128>(high) << 64 | low;
  __atomic_store_n(static_cast<unsigned __int128*>(to), word, __ATOMIC_RELAXED);
  ++emulation::progress;
}
inline void load_whole(const void* from, uint64_t& low, uint64_t& high) {
  emulation::wait_for("a word of another block");
  const unsigned __int128 word =
      __atomic_load_n(static_cast<unsigned __int128*>(const_cast<void*>(from)), __ATOMIC_RELAXED);
  low = static_cast<uint64_t>(word), high = static_cast<uint64_t>(word >> 64);
}
inline void load_whole_if(bool wanted, const void* from, uint64_t& low, uint64_t& high) {
  if (wanted) load_whole(from, low, high);
}

}  // namespace dcs
