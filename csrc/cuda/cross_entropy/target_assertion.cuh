// The device assertion of a class index that is out of range, as F.cross_entropy has it: release builds keep it.
#pragma once

// <cassert> declares it only without NDEBUG.
extern "C" __host__ __device__ void __assert_fail(
    const char* assertion, const char* file, unsigned int line, const char* function) noexcept;

namespace dcs {

__device__ __forceinline__ void fail_target(const char* file, unsigned int line) {
  __assert_fail("target >= 0 && target < classes, or target == ignore_index", file, line, "cross_entropy_rows");
}

}  // namespace dcs
