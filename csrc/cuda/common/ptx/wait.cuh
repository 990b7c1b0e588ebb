// Waiting for time to pass.
#pragma once

#include <cstdint>

namespace dcs {

// About so many cycles of the multiprocessor.
__device__ __forceinline__ void wait_cycles(int64_t cycles) {
#if defined(__CUDA_ARCH__)
  const int64_t begin = clock64();
  while (clock64() - begin < cycles) __nanosleep(200);
#endif
}

}  // namespace dcs
