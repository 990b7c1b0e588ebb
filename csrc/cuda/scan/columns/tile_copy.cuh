// Tiles that are one contiguous range of memory, in shared memory: whole vectors of 16 bytes come and go by copies that
// nobody waits for one by one. Between parts shared memory has room, so that the lanes of a warp read from different
// banks.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "scan/columns/columns_params.cuh"

namespace dcs {

// Visits the block's share of whole vectors, by their numbers.
template <typename Visit>
__device__ __forceinline__ void each_tile_vector(int first, int end, const Visit& visit) {
#pragma unroll 4
  for (int i = first + static_cast<int>(threadIdx.x); i < end; i += kColumnThreads) visit(i);
}

// A contiguous range of memory and its address in shared memory, as far behind a whole vector of 16 bytes there: whole
// vectors of it are whole vectors of memory, at any address.
struct CopiedRange {
  char *at, *shared;  // of the vectors in which the range begins
  int begin, end;     // bytes of the range, from there

  __device__ __forceinline__ CopiedRange(char* pointer, int bytes, char* slot)
      : begin(static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % 16)) {
    at = pointer - begin;
    shared = slot;
    end = begin + bytes;
  }
  // What is around a range's ends is read along, where it is in its tensor. Edges that it is not are bytes of one warp.
  __device__ __forceinline__ void fetch(const char* tensor, const char* tensor_end, int warp) const {
    if (begin == end) return;
    const int first = at < tensor ? 1 : 0, whole = (end + 15) / 16,
              last = at + 16 * whole > tensor_end ? whole - 1 : whole;
    each_tile_vector(first, last, [&](int i) { copy_async(shared + 16 * i, at + 16 * i); });
    each_edge(first, last, warp, [&](int byte) { shared[byte] = at[byte]; });
  }
  __device__ __forceinline__ void copy_back(int warp) const {
    const int first = (begin + 15) / 16, last = end / 16;
    each_tile_vector(first, last,
        [&](int i) { *reinterpret_cast<uint4*>(at + 16 * i) = *reinterpret_cast<const uint4*>(shared + 16 * i); });
    each_edge(first, last, warp, [&](int byte) { at[byte] = shared[byte]; });
  }

 private:
  // The bytes of the first and of the last vector, where it is not among [first, last).
  template <typename Visit>
  __device__ __forceinline__ void each_edge(int first, int last, int warp, const Visit& visit) const {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    if (thread / 32 != warp) return;
    const int byte = lane < 16 ? lane : (end - 1) / 16 * 16 + lane - 16, vector = byte / 16;
    if (byte >= begin && byte < end && (vector < first || vector >= last)) visit(byte);
  }
};

struct TileMemory {
  const ResidentColumnsParams& params;
  unsigned char* shared;
  __device__ __forceinline__ TileMemory(const ResidentColumnsParams& given, unsigned char* memory)
      : params(given), shared(memory) {}

  // Of the input, which the output takes the place of, then of the gates.
  __device__ __forceinline__ char* tile_of(int which) const {
    return reinterpret_cast<char*>(shared) + which * params.plan.flat_bytes;
  }
};

// Steps that tiles have before a row's first one, so that they begin, or end where time runs backwards, at an aligned
// address.
__device__ __forceinline__ int lead_of(const ScanProblem& p, const ResidentColumnsPlan& t, int outer) {
  const uint32_t rows = static_cast<uint32_t>(outer + (p.reverse ? 1 : 0)) * static_cast<uint32_t>(p.length);
  return static_cast<int>((p.reverse ? 0u - rows : rows) & t.lead_mask);
}

struct TileCopy {
  const ResidentColumnsParams& params;
  const TileMemory& memory;
  int64_t first;   // byte of memory where the tile begins, of which what is before a row's first or after its last one
                   // does not exist
  int begin, end;  // bytes that do, from there

  __device__ __forceinline__ TileCopy(
      const ResidentColumnsParams& given, const TileMemory& tiles, int64_t tile, int outer, int row_bytes)
      : params(given), memory(tiles) {
    const ScanProblem& p = given.problem;
    const int rows = given.plan.parts * given.plan.part_steps;
    const int64_t step = tile * rows - lead_of(p, given.plan, outer), row = p.reverse ? p.length - step - rows : step;
    first = (outer * p.length + row) * row_bytes;
    begin = static_cast<int>(max(int64_t{0}, min(-row, int64_t{rows}))) * row_bytes;
    end = static_cast<int>(max(int64_t{0}, min(p.length - row, int64_t{rows}))) * row_bytes;
  }

  template <bool kStep>
  __device__ __forceinline__ void fetch() const {
    const ScanProblem& p = params.problem;
    fetch_one(0, static_cast<const char*>(p.input));
    if constexpr (kStep) {
      if (!p.shifted) fetch_one(1, static_cast<const char*>(p.gamma));
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
  }
  __device__ __forceinline__ void copy_back() const {
    __syncthreads();
    char *const tile = memory.tile_of(0), *const to = static_cast<char*>(params.problem.output) + first;
    each_vector([&](int vector, int offset) {
      *reinterpret_cast<uint4*>(to + 16 * vector) = *reinterpret_cast<const uint4*>(tile + offset);
    });
    rest([&](int byte, int offset) {
      *reinterpret_cast<uint16_t*>(to + byte) = *reinterpret_cast<const uint16_t*>(tile + offset);
    });
  }

 private:
  __device__ __forceinline__ void fetch_one(int which, const char* pointer) const {
    char* const tile = memory.tile_of(which);
    const char* const from = pointer + first;
    each_vector([&](int vector, int offset) { copy_async(tile + offset, from + 16 * vector); });
    rest([&](int byte, int offset) {
      *reinterpret_cast<uint16_t*>(tile + offset) = *reinterpret_cast<const uint16_t*>(from + byte);
    });
  }
  // Where a vector of the tile lies in shared memory, in bytes.
  __device__ __forceinline__ int offset_of(int vector) const {
    const ResidentColumnsPlan& t = params.plan;
    const auto part = static_cast<int>(uint64_t{static_cast<uint32_t>(vector)} * t.vectors_inverse >> 32);
    return 16 * (vector + part * (t.part_pitch - t.part_vectors));
  }
  template <typename Visit>
  __device__ __forceinline__ void each_vector(const Visit& visit) const {
    each_tile_vector((begin + 15) / 16, end / 16, [&](int i) { visit(i, offset_of(i)); });
  }
  // What is no whole vector, at both ends, by twos of bytes, of which every element has some.
  template <typename Visit>
  __device__ __forceinline__ void rest(const Visit& visit) const {
    const int thread = static_cast<int>(threadIdx.x), vector = (thread < 8 ? begin : end) / 16,
              byte = vector * 16 + thread % 8 * 2;
    const bool is_edge = thread < 8 ? begin % 16 != 0 : thread < 16;
    if (is_edge && byte >= begin && byte < end) visit(byte, offset_of(vector) + byte % 16);
  }
};

}  // namespace dcs
