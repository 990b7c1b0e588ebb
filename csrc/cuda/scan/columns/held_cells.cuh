// Where a thread of columns/held_columns.cuh has the cells of its part: the first ones in shared memory, if the part is
// long, the others in registers.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/vector.cuh"
#include "scan/columns/column_values.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

// In registers: those of two bytes in twos.
template <typename Cell, int kCount, bool kPacked = sizeof(Cell) == 2>
struct HeldCells {
  Cell cells[kCount];
  __device__ __forceinline__ Cell get(int i) const { return cells[i]; }
  __device__ __forceinline__ void set(int i, const Cell& cell) { cells[i] = cell; }
};
template <typename Cell, int kCount>
struct HeldCells<Cell, kCount, true> {
  uint32_t words[kCount / 2];
  __device__ __forceinline__ Cell get(int i) const {
    const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
    return *reinterpret_cast<const Cell*>(&bits);
  }
  __device__ __forceinline__ void set(int i, const Cell& cell) {
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(&cell);
    words[i / 2] = i % 2 ? words[i / 2] | bits << 16 : bits;
  }
};
struct NoCells {};

// In shared memory, of one operand: in a tile that is one piece of memory, or slots of the thread's own, which no other
// touches. One step's slots of all threads are neighbors: the lanes of a warp have different banks.
template <typename Cell, bool kFlat>
struct EarlyCells {
  static constexpr int kApart = kColumnThreads * static_cast<int>(sizeof(Cell));
  char* at;
  int apart;
  __device__ __forceinline__ int step_bytes() const { return kFlat ? apart : kApart; }
  __device__ __forceinline__ Cell get(int i) const { return *reinterpret_cast<const Cell*>(at + i * step_bytes()); }
  __device__ __forceinline__ void move(int steps) { at += steps * step_bytes(); }

  // Of `steps` steps, those from `least` to `most`, and zeros: cells of two bytes through registers, others by copies
  // that the thread waits for later. kFull: all of them.
  template <bool kFull>
  __device__ __forceinline__ void bring(Steps<const char> from, int steps, int least, int most) const {
    constexpr int kAtOnce = sizeof(Cell) == 2 ? 4 * kEarlyBatch : kEarlyBatch;
    char* to = at;
#pragma unroll 1
    for (int k = 0; k < steps; k += kAtOnce, to += kAtOnce * kApart) {
      Cell loaded[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i % kEarlyBatch == 0 && k + i >= steps) break;
        const bool exists = kFull || (k + i >= least && k + i < most);
        if constexpr (sizeof(Cell) == 2) loaded[i] = exists ? *reinterpret_cast<const Cell*>(from.at) : Cell{};
        else copy_async<sizeof(Cell)>(to + i * kApart, from.at, exists ? static_cast<int>(sizeof(Cell)) : 0);
        from.at += from.apart;
      }
      if constexpr (sizeof(Cell) == 2) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (i % kEarlyBatch == 0 && k + i >= steps) break;
          *reinterpret_cast<Cell*>(to + i * kApart) = loaded[i];
        }
      }
    }
  }
};

// Flags of a column's neighboring steps from `at` on, a bit each: those from `least` to `most`. kAtOnce of them
// are on their way before one is used.
template <int kCount, int kAtOnce, typename Bits>
__device__ __forceinline__ Bits flags_of(const bool* at, int64_t apart, int least, int most) {
  Bits bits = 0;
#pragma unroll
  for (int k = 0; k < kCount; k += kAtOnce) {
    if (k >= most) break;
    uint8_t flags[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce && k + i < kCount; ++i) {
      flags[i] = k + i >= least && k + i < most ? *reinterpret_cast<const uint8_t*>(at) : 0;
      at += apart;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce && k + i < kCount; ++i) bits |= Bits{flags[i]} << (k + i);
  }
  return bits;
}

}  // namespace dcs
