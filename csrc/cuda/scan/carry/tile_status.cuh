// A segment in global memory: written by one block, read by others while they run.
#pragma once

#include "scan/carry/segment.cuh"
#include "scan/carry/word.cuh"

namespace dcs {

enum : uint32_t { kEmpty = 0, kTotal = 1, kPrefix = 2, kClosedBit = 4 };

template <typename Wide>
struct Status {
  static constexpr int kValues = sizeof(Wide) / 8;  // 8-byte parts of a wide value
  static constexpr int kWords = 2 * kValues;        // total, gates
  Word words[kWords];

  __device__ __forceinline__ void publish(const Piece<Wide>& piece, uint32_t state) {
    const uint64_t tag = state | (piece.closed ? kClosedBit : 0);
    const uint64_t* total = reinterpret_cast<const uint64_t*>(&piece.total);
    const uint64_t* gates = reinterpret_cast<const uint64_t*>(&piece.gates);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      store_word(&words[i], total[i], tag);
      store_word(&words[kValues + i], gates[i], tag);
    }
  }
  // One reading; the state is kEmpty while the words are not all of one state.
  __device__ __forceinline__ uint32_t read(Piece<Wide>& piece) const {
    uint64_t* total = reinterpret_cast<uint64_t*>(&piece.total);
    uint64_t* gates = reinterpret_cast<uint64_t*>(&piece.gates);
    uint64_t tag = 0;
    bool same = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const Word word = load_word(&words[i]);
      (i < kValues ? total[i] : gates[i - kValues]) = word.value;
      if (i == 0) tag = word.state;
      same = same && word.state == tag;
    }
    piece.closed = tag & kClosedBit;
    return same ? static_cast<uint32_t>(tag) & ~kClosedBit : kEmpty;
  }
};

}  // namespace dcs
