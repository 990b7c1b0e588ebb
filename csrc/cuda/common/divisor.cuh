// Divisions of numbers that are not negative.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dcs {

// A 64-bit division is a call of 100 instructions.
__device__ __forceinline__ int64_t divided(int64_t a, int64_t b) {
  return (a | b) >> 32 ? a / b : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

// Of 31-bit numbers, by one that is known before the launch: a multiplication and a shift (Granlund and Montgomery,
// "Division by invariant integers using multiplication", PLDI 1994).
struct Divisor {
  uint32_t divisor = 1, factor = 1;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t by) : divisor(by) {
    while (uint64_t{1} << shift < by) ++shift;
    factor = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - by) / by + 1);
  }
  __device__ __forceinline__ uint32_t of(uint32_t number) const { return (__umulhi(factor, number) + number) >> shift; }
};

}  // namespace dcs
