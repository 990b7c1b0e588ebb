// Tiles of rows in shared memory: what the row kernel of the temporal difference scan stages of its operands, and how
// tiles come and go.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/ptx/async_copy.cuh"
#include "returns/step.cuh"
#include "common/vector.cuh"

namespace dcs {

enum class ReturnsRows { kWarp, kPacked, kBlock };

// Ratios make tiles so large that two of them a warp are enough in flight; more warps then hide what a warp waits for.
constexpr bool returns_crowd(int form) { return form != kAnyForm && (form & kWithRhos); }

// Warps of a block, at most: one whose warps take rows of their own, and one that takes a row; and how many such blocks
// have registers on a multiprocessor.
constexpr int returns_warps(ReturnsRows rows, int form) {
  return rows == ReturnsRows::kBlock ? 8 : returns_crowd(form) ? 2 : 4;
}
constexpr int returns_blocks(ReturnsRows rows, int form, int size) {
  const bool crowded =
      form == kAnyForm && size != 4;  // a chunk of half precision is eight steps, a double two registers
  if (rows == ReturnsRows::kBlock) return crowded ? 1 : 2;
  return ((rows == ReturnsRows::kPacked ? 3 : 4) - (crowded ? 1 : 0)) * (returns_crowd(form) ? 2 : 1);
}

// A warp's tile, and how many of them it has in shared memory.
template <typename T, int kForm>
struct ReturnsTile {
  static constexpr int kPer = sizeof(T) == 8 ? 8 : 16, kSteps = 32 * kPer,
                       kStages = sizeof(T) == 2 ? 4
      : returns_crowd(kForm)                    ? 2
                                                : 3;
};

enum StagedTensor {
  kStagedRewards,
  kStagedValues,
  kStagedNext,
  kStagedRhos,
  kStagedTerminated,
  kStagedTruncated,
  kStagedGamma,
  kStagedTrace,
  kStagedTensors
};

struct Staged {
  const char* data = nullptr;
  int64_t outer = 0, inner = 0;  // strides in bytes
  int slot = 0;                  // where in a stage
  int grain = 0;                 // bytes that are copied at a time, 16 or 4; 0: an element
};

struct ReturnsRowsParams {
  ReturnsProblem problem;
  Staged staged[kStagedTensors];
  int64_t lots;   // rows, or packs of short rows
  int pack_rows;  // rows of a pack, one behind the other in memory; else 0
  int tiles;      // of a row
  int stage_bytes;
  int pg_slot;
  bool whole_words;  // every output takes words of 16 bytes
};

// With what the kernels of known forms need of their one gamma and trace: c over the steps of 1, 2, 4, ... 32 lanes.
template <typename Acc>
struct ReturnsRowsCall : ReturnsRowsParams {
  Rates<Acc> rates;
  double powers[6];
};

// Where chunk q of a tile with kLaneBytes bytes a lane lies: rotated so that neither the copies, which go by chunk, nor
// the lanes, which read neighboring chunks, meet in a bank.
template <int kLaneBytes>
__device__ __forceinline__ int chunk_offset(int q) {
  constexpr int kChunks = kLaneBytes / 16;
  if constexpr (kChunks <= 1) return q * 16;
  else return (q ^ (kChunks == 4 ? q >> 3 & 3 : q >> 3 & 1)) * 16;
}

// A vector of shared memory, read by one instruction: element by element, lanes 64 bytes apart would meet in a bank.
template <typename T, int kVec>
__device__ __forceinline__ Vector<T, kVec> whole(const Vector<T, kVec>& at) {
  static_assert(sizeof(at) == 16);
  const uint4 bits = *reinterpret_cast<const uint4*>(&at);
  return *reinterpret_cast<const Vector<T, kVec>*>(&bits);
}

// A warp copies a tile of which `valid` bytes exist, by words of 4 bytes (grain 4) or by elements.
template <int kLaneBytes, int kElement>
__device__ __noinline__ void fetch_unaligned_tile(unsigned char* slot, const char* from, int valid, int grain) {
  constexpr int kBytes = 32 * kLaneBytes;
  const int lane = threadIdx.x % 32;
  if (grain == 4) {
#pragma unroll 4
    for (int word = lane; word < kBytes / 4; word += 32)
      copy_existing<4, std::min(kElement, 4)>(
          slot + chunk_offset<kLaneBytes>(word / 4) + word % 4 * 4, from + word * 4, valid - word * 4);
  } else if constexpr (kElement < 4) {
    using Bits = std::conditional_t<kElement == 2, uint16_t, uint8_t>;
#pragma unroll 8
    for (int e = lane; e < kBytes / kElement; e += 32) {
      const int at = e * kElement;
      *reinterpret_cast<Bits*>(slot + chunk_offset<kLaneBytes>(at / 16) + at % 16) =
          at < valid ? *reinterpret_cast<const Bits*>(from + at) : Bits(0);
    }
  }
}
template <int kLaneBytes, int kElement>
__device__ __forceinline__ void fetch_tile(unsigned char* slot, const char* from, int valid, int grain, int lane) {
  constexpr int kBytes = 32 * kLaneBytes;
  if (grain == 16) {
#pragma unroll
    for (int k = 0; k < (kBytes + 511) / 512; ++k) {
      const int q = k * 32 + lane;
      if (kBytes >= 512 || q < kBytes / 16)
        copy_existing<16, kElement>(slot + chunk_offset<kLaneBytes>(q), from + q * 16, valid - q * 16);
    }
  } else {
    fetch_unaligned_tile<kLaneBytes, kElement>(slot, from, valid, grain);
  }
}

// And back: `count` elements exist.
template <typename T, int kPer>
__device__ __forceinline__ void store_tile(const unsigned char* slot, T* to, int count, bool whole_words, int lane) {
  constexpr int kVec = 16 / sizeof(T), kLaneBytes = kPer * sizeof(T);
  if (whole_words) {
#pragma unroll
    for (int k = 0; k < kPer / kVec; ++k) {
      const int q = k * 32 + lane;
      store_vector<T, kVec>(
          to, q * kVec, 0, count, *reinterpret_cast<const Vector<T, kVec>*>(slot + chunk_offset<kLaneBytes>(q)));
    }
  } else {
#pragma unroll 4
    for (int e = lane; e < min(count, 32 * kPer); e += 32)
      to[e] = *reinterpret_cast<const T*>(
          slot + chunk_offset<kLaneBytes>(e / kVec) + e % kVec * static_cast<int>(sizeof(T)));
  }
}

}  // namespace dcs
