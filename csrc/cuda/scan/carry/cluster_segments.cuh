// The segments of a cluster's blocks: each is stored in the shared memory of the blocks behind it in the scan, whose
// transaction barriers count the bytes. A barrier of the cluster would take a fence over all memory, and a load.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/ptx/cluster.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

template <typename Wide, int kMost>
struct ClusterSegments {
  using Word = std::conditional_t<sizeof(Segment<Wide>) % 8 == 0, double, float>;
  static constexpr int kWords = sizeof(Segment<Wide>) / sizeof(Word);

  Segment<Wide> of_blocks[kMost];
  uint64_t arrivals;

  // At the kernel's start, by all threads; `before`: blocks of the cluster before this one in the scan.
  __device__ __forceinline__ void init(int before) {
    if (threadIdx.x == 0) init_transaction_barrier(&arrivals, before * static_cast<int>(sizeof(Segment<Wide>)));
    __syncthreads();
    arrive_in_cluster_relaxed();
  }
  // Of block `rank`, this one, for block `to`. Behind `wait_for_cluster`, as the other's barrier is to be ready.
  __device__ __forceinline__ void store(const Segment<Wide>& segment, int rank, int to) {
    Word words[kWords];
    memcpy(words, &segment, sizeof segment);
    const auto* const at = reinterpret_cast<const Word*>(&of_blocks[rank]);
#pragma unroll
    for (int i = 0; i < kWords; ++i) store_async_in_cluster(at + i, &arrivals, static_cast<uint32_t>(to), words[i]);
  }
  // Until those of all blocks before have come.
  __device__ __forceinline__ void wait() { mbarrier_wait(&arrivals, 0); }
};

}  // namespace dcs
