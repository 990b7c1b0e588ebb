// Tiles that are one piece of memory, in shared memory: whole vectors of 16 bytes come and go by copies that nobody
// waits for one by one.
#pragma once

#include "common/ptx/async_copy.cuh"
#include "scan/columns/columns_params.cuh"

namespace dcs {

struct TileCopy {
  const HeldColumnsParams& params;
  unsigned char* shared;
  int64_t first;    // element of the tile's memory
  int64_t count;    // elements
  int64_t missing;  // before them in shared memory: a last tile's rows lie at its end where time runs backwards

  __device__ __forceinline__ TileCopy(
      const HeldColumnsParams& given, unsigned char* memory, int64_t tile, int64_t outer)
      : params(given), shared(memory) {
    const ScanProblem& p = given.problem;
    const int64_t rows = int64_t{given.plan.parts} * given.plan.part_steps, begin = tile * rows,
                  end = min(begin + rows, p.length);
    first = (outer * p.length + (p.reverse ? p.length - end : begin)) * p.inner;
    count = (end - begin) * p.inner;
    missing = p.reverse ? (rows - (end - begin)) * p.inner : 0;
  }

  // Tile of the input, then of the gates.
  __device__ __forceinline__ char* tile_of(int which) const {
    return reinterpret_cast<char*>(shared) + which * params.plan.flat_bytes;
  }
  template <typename T, bool kStep>
  __device__ __forceinline__ void bring() const {
    const ScanProblem& p = params.problem;
    bring_one<T>(0, static_cast<const T*>(p.input));
    if constexpr (kStep) {
      if (!p.shifted) bring_one<T>(1, static_cast<const T*>(p.gamma));
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
  }
  template <typename T>
  __device__ __forceinline__ void bring_one(int which, const T* pointer) const {
    constexpr int kVec = 16 / sizeof(T);
    T* const to = reinterpret_cast<T*>(tile_of(which)) + missing;
    const T* const from = pointer + first;
    const int64_t whole = count / kVec * kVec;
    for (int64_t i = threadIdx.x * kVec; i < whole; i += kColumnThreads * kVec) copy_async<16>(to + i, from + i, 16);
    if (whole + threadIdx.x < count) to[whole + threadIdx.x] = from[whole + threadIdx.x];
  }
  template <typename T>
  __device__ __forceinline__ void put() const {
    constexpr int kVec = 16 / sizeof(T);
    __syncthreads();
    const T* const from = reinterpret_cast<const T*>(tile_of(0)) + missing;
    T* const to = static_cast<T*>(params.problem.output) + first;
    const int64_t whole = count / kVec * kVec;
    for (int64_t i = threadIdx.x * kVec; i < whole; i += kColumnThreads * kVec)
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    if (whole + threadIdx.x < count) to[whole + threadIdx.x] = from[whole + threadIdx.x];
  }
};

}  // namespace dcs
