// The barriers that a block has by number: some warps wait there for others, which only arrive.
#pragma once

namespace dcs {

constexpr int kNamedBarriers = 16;  // that of __syncthreads, 0, included

// By whole warps, `threads` of both kinds together. What was done before the arrival is seen behind the wait. The
// number is in a register: the kernel reserves all 16, of which a multiprocessor of 9.0 has 64, enough for four blocks.
// (Constant numbers reserve as many as the largest; each with its predicate, few columns took 1 to 4 % longer.)
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void wait_at(int barrier, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace dcs
