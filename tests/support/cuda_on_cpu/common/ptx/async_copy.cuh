// csrc/cuda/common/ptx/async_copy.cuh on a CPU: a copy happens when it is waited for, or some time before.
#pragma once

#include <cstdlib>
#include <cstring>

#include "common/ptx/mbarrier.cuh"

namespace dcs {

template <int kBytes, bool kWholeLines = false>
void copy_async(void* to, const void* from, int valid) {
  const auto misplaced = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kBytes != 0; };
  if (misplaced(to) || misplaced(from) || valid < 0 || valid > kBytes) {
    printf("an asynchronous copy of %d of %d bytes from %p to %p\n", valid, kBytes, from, to);
    std::abort();
  }
  auto& groups = emulation::current().now->groups;
  if (groups.empty()) groups.emplace_back();
  // What is not read becomes 0.
  groups.back().push_back({to, from, valid, nullptr});
  groups.back().push_back({static_cast<char*>(to) + valid, nullptr, kBytes - valid, nullptr});
}
inline void copy_async(void* to, const void* from) { copy_async<16>(to, from, 16); }
// A part of kSize bytes is not copied asynchronously.
template <int kSize, int kElement>
void copy_existing(void* to, const void* from, int bytes) {
  if (bytes >= kSize || bytes <= 0) return copy_async<kSize>(to, from, bytes > 0 ? kSize : 0);
  memcpy(to, from, static_cast<size_t>(bytes / kElement * kElement));
  memset(static_cast<char*>(to) + bytes, 0, static_cast<size_t>(kSize - bytes));
}
inline void commit_copies() { emulation::current().now->groups.emplace_back(); }
template <int kPending>
void wait_for_copies() {
  auto& groups = emulation::current().now->groups;
  if (groups.empty()) groups.emplace_back();
  const size_t left = emulation::current().random() % 4 ? kPending : 0;
  while (groups.size() - 1 > left) {
    for (const emulation::Copy& copy : groups.front()) {
      if (copy.from) memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
      else memset(copy.to, 0, static_cast<size_t>(copy.bytes));
    }
    groups.pop_front();
  }
}
// The copies happen later, as those that the barrier waits for.
inline void mbarrier_arrive_after_copies(uint64_t* barrier) {
  auto& groups = emulation::current().now->groups;
  for (const std::vector<emulation::Copy>& group : groups)
    for (const emulation::Copy& copy : group) {
      if (!copy.from || copy.bytes == 0) continue;
      emulation::barrier_at(barrier).bytes_and_phase += 2 * copy.bytes;
      emulation::current().loads.push_back({copy.to, copy.from, copy.bytes, barrier});
    }
  groups.clear();
  mbarrier_arrive(barrier);
}

}  // namespace dcs
