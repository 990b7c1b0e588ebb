// csrc/cuda/common/ptx/known_address.cuh on a CPU.
#pragma once

namespace dcs {

template <typename Byte>
Byte* known_address(Byte* at) {
  return at;
}

}  // namespace dcs
