// Addresses that the compiler takes as they are.
#pragma once

namespace dcs {

// An address in global memory as one value: else the compiler adds the parts it was made of to every offset from it.
template <typename Byte>
__device__ __forceinline__ Byte* known_address(Byte* at) {
  asm volatile("" : "+l"(at));
  __builtin_assume(__isGlobal(at));
  return at;
}

}  // namespace dcs
