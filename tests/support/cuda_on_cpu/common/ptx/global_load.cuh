// csrc/cuda/common/ptx/global_load.cuh on a CPU, which stops where an address is not aligned, or not all of the 16
// bytes are of a tensor that the test has named.
#pragma once

#include <cstdlib>
#include <cstring>

namespace dcs {

struct Bytes {
  const void* begin;
  int64_t count;
};
inline std::vector<Bytes> tensors;

inline void check_load(const void* from) {
  const char* const at = static_cast<const char*>(from);
  bool is_known = false;
  for (const Bytes& tensor : tensors) {
    const char* const begin = static_cast<const char*>(tensor.begin);
    is_known |= at >= begin && at + 16 <= begin + tensor.count;
  }
  if (is_known && reinterpret_cast<uintptr_t>(from) % 16 == 0) return;
  printf("a load from %p\n", from);
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
  if (sizeof(E) == 16) check_load(from);
  to[0] = 0;
  memcpy(to, from, sizeof(E));
}

}  // namespace dcs
