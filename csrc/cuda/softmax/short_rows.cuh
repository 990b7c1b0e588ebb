// Softmax of short contiguous rows that are no whole vectors: a block takes some of them, which are one range of whole
// vectors together. Bulk copies bring and take it; a power of two of lanes takes a row in shared memory, element by
// element, in place: of a vector at a row's ends no lane has to ask which elements are its own.
#pragma once

#include "common/ptx/bulk_copy.cuh"
#include "softmax/packed_lines.cuh"

namespace dcs {

constexpr int kShortRowThreads = 128;
// Elements of a row to a lane, at most, and more than half as many at least; so many of them are not all lanes'.
constexpr int kShortRowElements = 16, kShortRowParts = 4;
static_assert(kShortRowElements == 4 * kShortRowParts);  // of up to 12 all lanes have 8, of more 12

template <typename T>
struct SoftmaxShortRows {
  const T* input;
  const T* saved;
  T* output;
  int64_t rows;
  int length, tile;  // elements of a row; rows of a block, whole vectors together
  int lane_bits;     // lanes of a row, a power of two
};

// kElements: of a row to a lane; the last kShortRowParts are not all lanes'.
template <typename T, int kElements, bool kBackward>
__global__ void __launch_bounds__(kShortRowThreads)
    softmax_short_rows_kernel(const __grid_constant__ SoftmaxShortRows<T> params) {
  constexpr int kVec = 16 / sizeof(T);
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  __shared__ uint64_t full;
  T* const tile = reinterpret_cast<T*>(softmax_shared);
  T* const saved = tile + params.tile * params.length;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * params.tile, begin = first * params.length;
  const int rows = static_cast<int>(min(params.rows - first, int64_t{params.tile})), count = rows * params.length,
            whole = count / kVec * kVec, bytes = whole * static_cast<int>(sizeof(T));
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_fence_init();
  }
  overlap_launches();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&full, kBackward ? 2 * bytes : bytes);
    if (bytes > 0) {
      bulk_load_once(tile, params.input + begin, bytes, &full);
      if constexpr (kBackward) bulk_load_once(saved, params.saved + begin, bytes, &full);
    }
  }
  // Behind the tensor's last whole vector.
  const int tail = whole + static_cast<int>(threadIdx.x);
  if (tail < count) {
    tile[tail] = params.input[begin + tail];
    if constexpr (kBackward) saved[tail] = params.saved[begin + tail];
  }
  __syncthreads();
  mbarrier_wait(&full, 0);

  const int lanes = 1 << params.lane_bits, lane = threadIdx.x & (lanes - 1), own = threadIdx.x >> params.lane_bits,
            at_once = kShortRowThreads >> params.lane_bits, rounds = (rows + at_once - 1) / at_once;
  const int elements = (params.length - lane + lanes - 1) >> params.lane_bits;
  int at = own * params.length + lane;
  for (int round = 0; round < rounds; ++round, at += at_once * params.length) {
    const bool exists = round * at_once + own < rows;
    packed_softmax<kElements, kBackward, kElements - kShortRowParts>(
        tile, saved, tile, exists ? elements : 0, lanes, [&](int i) { return at + i * lanes; });
  }
  show_to_bulk_stores();
  __syncthreads();
  if (tail < count) params.output[begin + tail] = tile[tail];
  if (threadIdx.x == 0 && bytes > 0) {
    bulk_store(params.output + begin, tile, bytes);
    commit_stores();
    wait_for_stores_to_read();
  }
}

}  // namespace dcs
