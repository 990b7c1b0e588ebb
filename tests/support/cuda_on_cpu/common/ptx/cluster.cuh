// csrc/cuda/common/ptx/cluster.cuh on a CPU. Stores that a barrier counts are not there: their kernels can be compiled.
#pragma once

#include <cstdlib>

#include "common/ptx/mbarrier.cuh"

namespace dcs {

inline void arrive_in_cluster() {
  emulation::Block& block = emulation::current();
  emulation::Cluster& cluster = *block.cluster;
  block.now->cluster_generation = cluster.generation;
  const auto threads = static_cast<unsigned>(cluster.anchors.size()) * block.threads;
  if (++cluster.arrived == threads) {
    cluster.arrived = 0;
    ++cluster.generation;
    ++emulation::progress;
  }
}
inline void arrive_in_cluster_relaxed() { arrive_in_cluster(); }
inline void wait_for_cluster() {
  const emulation::Block& block = emulation::current();
  while (block.cluster->generation == block.now->cluster_generation) emulation::wait_for("the cluster");
}
// Variables of threads lie as far from each other in all of them.
template <typename T>
const T& in_cluster(const T& local, uint32_t rank) {
  const auto apart = reinterpret_cast<const char*>(&local) - &emulation::anchor;
  return *reinterpret_cast<const T*>(emulation::current().cluster->anchors[rank] + apart);
}

inline void init_transaction_barrier(uint64_t*, int) { std::abort(); }
template <typename Word>
void store_async_in_cluster(const Word*, const uint64_t*, uint32_t, Word) {
  std::abort();
}

}  // namespace dcs
