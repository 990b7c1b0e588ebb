// csrc/cuda/common/ptx/global_load.cuh on a CPU, which stops where an address is not aligned, or not all of the bytes
// are of a tensor that the test has named; words of less than 16 bytes may be anywhere unless it says otherwise.
#pragma once

#include <cstdlib>
#include <cstring>

namespace dcs {

struct Bytes {
  const void* begin;
  int64_t count;
};
inline std::vector<Bytes> tensors;
inline bool words_are_of_tensors = false;

// Whether all bytes are of one of them.
inline bool are_of_tensors(const void* from, int bytes) {
  const char* const at = static_cast<const char*>(from);
  for (const Bytes& tensor : tensors) {
    const char* const begin = static_cast<const char*>(tensor.begin);
    if (at >= begin && at + bytes <= begin + tensor.count) return true;
  }
  return false;
}
inline void check_load(const void* from, int bytes = 16) {
  const bool is_known = (bytes < 16 && !words_are_of_tensors) || are_of_tensors(from, bytes);
  if (is_known && reinterpret_cast<uintptr_t>(from) % bytes == 0) return;
  printf("a load of %d bytes from %p\n", bytes, from);
  fflush(stdout);
  std::abort();
}
template <typename Word>
Word load_now(const Word* from) {
  check_load(from);
  return *from;
}
template <typename Word>
void load_where(bool wanted, const Word* from, Word& to) {
  if (wanted) to = load_now(from);
}
template <typename E>
void load_words_where(bool wanted, const E* from, uint32_t* to) {
  if (!wanted) return;
  check_load(from, sizeof(E));
  to[0] = 0;
  memcpy(to, from, sizeof(E));
}

}  // namespace dcs
