// csrc/cuda/common/ptx/cluster.cuh on a CPU.
#pragma once

#include "common/ptx/mbarrier.cuh"

namespace dcs {

inline uint32_t cluster_blocks() { return static_cast<uint32_t>(emulation::current().cluster->anchors.size()); }
inline uint32_t cluster_rank() { return emulation::current().index % cluster_blocks(); }
inline uint32_t cluster_index() { return emulation::current().index / cluster_blocks(); }

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
inline void arrive_in_cluster_unaligned() { arrive_in_cluster(); }
inline void wait_for_cluster_unaligned() { wait_for_cluster(); }
// Static shared variables lie as far from each other in all threads; dynamic shared memory is of each block's own.
template <typename T>
T* address_in_cluster(T* local, uint32_t rank) {
  const emulation::Block& block = emulation::current();
  auto* const byte = reinterpret_cast<unsigned char*>(local);
  if (byte >= block.shared && byte < block.shared + block.shared_bytes)
    return reinterpret_cast<T*>(block.cluster->dynamics[rank] + (byte - block.shared));
  const auto apart = reinterpret_cast<const char*>(local) - &emulation::anchor;
  return reinterpret_cast<T*>(block.cluster->anchors[rank] + apart);
}
template <typename T>
const T& in_cluster(const T& local, uint32_t rank) {
  return *address_in_cluster(const_cast<T*>(&local), rank);
}
template <typename Word>
void store_in_cluster(Word* local, uint32_t rank, Word value) {
  *address_in_cluster(local, rank) = value;
}
template <typename Word>
Word load_in_cluster(const Word* local, uint32_t rank) {
  return in_cluster(*local, rank);
}

inline void init_transaction_barrier(uint64_t* barrier, int bytes) {
  mbarrier_init(barrier, 1);
  mbarrier_arrive_expect_tx(barrier, bytes);
}
template <typename Word>
void store_async_in_cluster(const Word* local, const uint64_t* barrier, uint32_t rank, Word value) {
  emulation::RemoteStore store{address_in_cluster(const_cast<Word*>(local), rank), 0, static_cast<int>(sizeof(Word)),
      address_in_cluster(const_cast<uint64_t*>(barrier), rank)};
  memcpy(&store.bits, &value, sizeof(Word));
  emulation::RemoteStores& to_rank = emulation::current().cluster->remote_stores[rank];
  const std::lock_guard<std::mutex> guard(to_rank.mutex);
  to_rank.stores.push_back(store);
}

}  // namespace dcs
