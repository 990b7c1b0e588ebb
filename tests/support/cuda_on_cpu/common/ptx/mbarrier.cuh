// csrc/cuda/common/ptx/mbarrier.cuh on a CPU.
#pragma once

#include <cstdint>

namespace dcs {

inline void mbarrier_init(uint64_t* barrier, int arrivals) {
  const auto count = static_cast<uint16_t>(arrivals);
  emulation::barrier_at(barrier) = {count, count, 0};
}
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes) {
  emulation::Barrier& at = emulation::barrier_at(barrier);
  at.bytes_and_phase += 2 * bytes;
  --at.pending;
  emulation::settle(at);
}
inline void mbarrier_arrive(uint64_t* barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  const emulation::Barrier& at = emulation::barrier_at(barrier);
  while ((static_cast<uint32_t>(at.bytes_and_phase) & 1) == (parity & 1))
    emulation::wait_for("a barrier of " + std::to_string(at.expected) + " arrivals");
}

}  // namespace dcs
