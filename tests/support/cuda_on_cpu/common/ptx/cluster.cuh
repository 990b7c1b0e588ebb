// csrc/cuda/common/ptx/cluster.cuh on a CPU, where blocks are in no clusters: their kernels can be compiled.
#pragma once

#include <cstdlib>

#include "common/ptx/mbarrier.cuh"

namespace dcs {

inline void init_transaction_barrier(uint64_t*, int) { std::abort(); }
inline void arrive_in_cluster_relaxed() { std::abort(); }
inline void wait_for_cluster() { std::abort(); }
template <typename Word>
void store_async_in_cluster(const Word*, const uint64_t*, uint32_t, Word) {
  std::abort();
}

}  // namespace dcs
