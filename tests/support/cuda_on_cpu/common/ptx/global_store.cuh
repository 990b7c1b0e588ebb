// csrc/cuda/common/ptx/global_store.cuh on a CPU.
#pragma once

#include <cstring>

namespace dcs {

template <typename E>
void store_words_where(bool wanted, E* to, const uint32_t* from) {
  if (wanted) memcpy(to, from, sizeof(E));
}

}  // namespace dcs
