// The barriers that a block has by number: some warps wait there for others, which only arrive.
#pragma once

#include <type_traits>

namespace dcs {

constexpr int kNamedBarriers = 16;  // that of __syncthreads, 0, included

// By whole warps, `threads` of both kinds together. What was done before the arrival is seen behind the wait.
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void wait_at(int barrier, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A constant number, by a warp that is together as it is. Such a kernel reserves the barriers up to its largest, others all 16, of which a multiprocessor of
// 9.0 has 64: enough for four blocks.
template <int kBarrier>
__device__ __forceinline__ void arrive_at(std::integral_constant<int, kBarrier>, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}
template <int kBarrier>
__device__ __forceinline__ void wait_at(std::integral_constant<int, kBarrier>, int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}

}  // namespace dcs
