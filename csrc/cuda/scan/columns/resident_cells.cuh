// The resident cells of a thread's part in columns/resident_columns.cuh: the first ones in shared memory, if the part
// is long, the others in registers.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/ptx/known_address.cuh"
#include "common/vector.cuh"
#include "scan/columns/column_values.cuh"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

// In registers: two cells of two bytes share one.
template <typename Cell, int kCount, bool kPacked = sizeof(Cell) == 2 && kCount % 2 == 0>
struct ResidentCells {
  Cell cells[kCount];
  __device__ __forceinline__ Cell get(int i) const { return cells[i]; }
  __device__ __forceinline__ void set(int i, const Cell& cell) { cells[i] = cell; }
};
template <typename Cell, int kCount>
struct ResidentCells<Cell, kCount, true> {
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

// An operand at a thread's next step, in memory or in a tile of shared memory.
template <typename Byte>
struct CellSteps {
  Byte* at;
  int apart;  // bytes from a step to the next in the order of the scan
  __device__ __forceinline__ void next() { at += apart; }
  __device__ __forceinline__ CellSteps after(int steps) const { return {at + int64_t{apart} * steps, apart}; }
};

// In shared memory, of one operand: in a contiguous tile, or in slots of the thread's own, which no other one
// touches. One step's slots of all threads are neighbors: the lanes of a warp have different banks.
template <typename Cell, bool kFlat>
struct EarlyCells {
  static constexpr int kStride = kColumnThreads * static_cast<int>(sizeof(Cell));
  char* at;
  int apart;
  __device__ __forceinline__ int step_bytes() const { return kFlat ? apart : kStride; }
  __device__ __forceinline__ Cell get(int i) const { return *reinterpret_cast<const Cell*>(at + i * step_bytes()); }
  __device__ __forceinline__ void move(int steps) { at += steps * step_bytes(); }

  // Of `steps` steps, those from `least` to `most`, and zeros: cells of two bytes through registers, others by
  // asynchronous copies that the thread waits for later.
  __device__ __forceinline__ void load(CellSteps<const char> from, int steps, int least, int most) const {
    constexpr int kAtOnce = sizeof(Cell) == 2 ? 4 * kEarlyBatch : kEarlyBatch;
    char* to = at;
#pragma unroll 1
    for (int k = 0; k < steps; k += kAtOnce, to += kAtOnce * kStride) {
      Cell loaded[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i % kEarlyBatch == 0 && k + i >= steps) break;
        const bool exists = k + i >= least && k + i < most;
        if constexpr (sizeof(Cell) == 2) loaded[i] = exists ? *reinterpret_cast<const Cell*>(from.at) : Cell{};
        else copy_async<sizeof(Cell)>(to + i * kStride, from.at, exists ? static_cast<int>(sizeof(Cell)) : 0);
        from.next();
      }
      if constexpr (sizeof(Cell) == 2) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (i % kEarlyBatch == 0 && k + i >= steps) break;
          *reinterpret_cast<Cell*>(to + i * kStride) = loaded[i];
        }
      }
    }
  }
};

// Flags of a column's next kCount steps, a bit each: those from `least`, 0 or 1, to `most`. All are in flight before
// one is used.
template <int kCount>
__device__ __forceinline__ uint32_t flags_of(CellSteps<const char> from, int least, int most) {
  constexpr int kSum = 16;
  static_assert(kCount <= 2 * kSum);
  uint8_t flags[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool exists = i < most && (i > 0 || least == 0);
    flags[i] = exists && *reinterpret_cast<const uint8_t*>(from.at) != 0;
    from.next();
  }
  // Sums take one instruction a flag.
  uint32_t sums[2] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i / kSum] += uint32_t{flags[i]} << i % kSum;
  return sums[0] | sums[1] << kSum;
}

}  // namespace dcs
