// Tiles that are one piece of memory, in shared memory: whole vectors of 16 bytes come and go by copies that nobody
// waits for one by one. Between parts shared memory has room, so that the lanes of a warp read from different banks.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "scan/columns/columns_params.cuh"

namespace dcs {

struct TileMemory {
  const HeldColumnsParams& params;
  unsigned char* shared;
  __device__ __forceinline__ TileMemory(const HeldColumnsParams& given, unsigned char* memory)
      : params(given), shared(memory) {}

  // Of the input, which the output takes the place of, then of the gates.
  __device__ __forceinline__ char* tile_of(int which) const {
    return reinterpret_cast<char*>(shared) + which * params.plan.flat_bytes;
  }
};

struct TileCopy {
  const HeldColumnsParams& params;
  const TileMemory& memory;
  int64_t first;  // byte of the tile's memory
  int bytes;
  int missing;  // vectors before them in shared memory: a last tile's rows lie at its end where time runs backwards

  __device__ __forceinline__ TileCopy(
      const HeldColumnsParams& given, const TileMemory& tiles, int64_t tile, int64_t outer, int row_bytes)
      : params(given), memory(tiles) {
    const ScanProblem& p = given.problem;
    const int64_t rows = int64_t{given.plan.parts} * given.plan.part_steps, begin = tile * rows,
                  end = min(begin + rows, p.length);
    first = (outer * p.length + (p.reverse ? p.length - end : begin)) * row_bytes;
    bytes = static_cast<int>(end - begin) * row_bytes;
    missing = p.reverse ? static_cast<int>(rows - (end - begin)) * row_bytes / 16 : 0;
  }

  template <bool kStep>
  __device__ __forceinline__ void bring() const {
    const ScanProblem& p = params.problem;
    bring_one(0, static_cast<const char*>(p.input));
    if constexpr (kStep) {
      if (!p.shifted) bring_one(1, static_cast<const char*>(p.gamma));
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
  }
  __device__ __forceinline__ void put() const {
    __syncthreads();
    char *const tile = memory.tile_of(0), *const to = static_cast<char*>(params.problem.output) + first;
    each_vector([&](int vector, int place) {
      *reinterpret_cast<uint4*>(to + 16 * vector) = *reinterpret_cast<const uint4*>(tile + place);
    });
    rest([&](int byte, int place) {
      *reinterpret_cast<uint16_t*>(to + byte) = *reinterpret_cast<const uint16_t*>(tile + place);
    });
  }

 private:
  __device__ __forceinline__ void bring_one(int which, const char* pointer) const {
    char* const tile = memory.tile_of(which);
    const char* const from = pointer + first;
    each_vector([&](int vector, int place) { copy_async(tile + place, from + 16 * vector); });
    rest([&](int byte, int place) {
      *reinterpret_cast<uint16_t*>(tile + place) = *reinterpret_cast<const uint16_t*>(from + byte);
    });
  }
  // Where a vector of the tile lies in shared memory, in bytes.
  __device__ __forceinline__ int place_of(int vector) const {
    const HeldColumnsPlan& t = params.plan;
    const auto part = static_cast<int>(uint64_t{static_cast<uint32_t>(vector)} * t.vectors_inverse >> 32);
    return 16 * (vector + part * (t.part_pitch - t.part_vectors));
  }
  template <typename Visit>
  __device__ __forceinline__ void each_vector(const Visit& visit) const {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < bytes / 16; i += kColumnThreads) visit(i, place_of(i + missing));
  }
  // What is no whole vector, by twos of bytes, of which every element has some.
  template <typename Visit>
  __device__ __forceinline__ void rest(const Visit& visit) const {
    const int byte = bytes / 16 * 16 + 2 * static_cast<int>(threadIdx.x);
    if (byte < bytes) visit(byte, place_of(bytes / 16 + missing) + byte % 16);
  }
};

}  // namespace dcs
