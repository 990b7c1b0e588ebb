// Waiting for time to pass.
#pragma once

#include <cstdint>

namespace dcs {

// Waits about so many cycles; no longer on a multiprocessor whose clock is behind, where a block may be resumed.
__device__ __forceinline__ void wait_cycles(uint64_t cycles) {
#if defined(__CUDA_ARCH__)
  const uint64_t begin = clock64();
  while (clock64() - begin < cycles) __nanosleep(200);
#endif
}

}  // namespace dcs
