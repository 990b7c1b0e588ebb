// csrc/cuda/common/ptx/named_barrier.cuh on a CPU, where a block has a thread of its own.
#pragma once

namespace dcs {

constexpr int kNamedBarriers = 16;

inline thread_local int barrier_arrivals[kNamedBarriers], barrier_generations[kNamedBarriers];

inline void arrive_at(int barrier, int threads) {
  if (++barrier_arrivals[barrier] < threads) return;
  barrier_arrivals[barrier] = 0;
  ++barrier_generations[barrier];
  ++emulation::progress;
}
inline void wait_at(int barrier, int threads) {
  const int generation = barrier_generations[barrier];
  arrive_at(barrier, threads);
  while (barrier_generations[barrier] == generation) emulation::wait_for("a named barrier");
}

}  // namespace dcs
