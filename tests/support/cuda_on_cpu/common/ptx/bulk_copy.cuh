// csrc/cuda/common/ptx/bulk_copy.cuh on a CPU: copies happen late, and only what hardware can copy is copied; where the
// test has named tensors, only what is theirs is read.
#pragma once

#include <cstdlib>

#include "common/ptx/global_load.cuh"
#include "common/ptx/mbarrier.cuh"

#define DCS_HAS_BULK_COPIES 1

namespace dcs {

inline void check_bulk_copy(const void* to, const void* from, int bytes, bool may_be_read = true) {
  if (may_be_read && bytes > 0 && bytes % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0 &&
      reinterpret_cast<uintptr_t>(from) % 16 == 0)
    return;
  printf("a bulk copy of %d bytes from %p to %p\n", bytes, from, to);
  fflush(stdout);
  std::abort();
}
inline void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  check_bulk_copy(to, from, bytes, tensors.empty() || are_of_tensors(from, bytes));
  emulation::current().loads.push_back({to, from, bytes, barrier});
}
inline void bulk_load_once(void* to, const void* from, int bytes, uint64_t* barrier) {
  bulk_load(to, from, bytes, barrier);
}
inline void bulk_store(void* to, const void* from, int bytes) {
  check_bulk_copy(to, from, bytes);
  emulation::current().now->stores.push_back({to, from, bytes, nullptr});
}
inline void commit_stores() {}
inline void wait_for_stores_to_read() { emulation::run_stores(*emulation::current().now); }
inline void wait_for_stores() { wait_for_stores_to_read(); }
inline void show_to_bulk_stores() {}

}  // namespace dcs
