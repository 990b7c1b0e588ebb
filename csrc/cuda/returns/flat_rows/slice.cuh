// A warp's slice of a tile of rows: neighboring steps, the same of every operand, each one range of shared memory.
// What lies flat comes and goes by one copy an operand, each of which another lane asks for, and less than 16 bytes at
// its ends. All else by calls (apart.cuh).
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/ptx/bulk_copy.cuh"
#include "returns/flat_rows/apart.cuh"

namespace dcs {

// Of a block's tile.
struct FlatTileRows {
  int64_t row;   // the first one
  int64_t base;  // the last multiple of the grain up to its first step
  int rows;
  int offset, steps;  // of its first step from there; of all
  int left;           // elements of the tensors from there on, or more than a tile has

  int before = 0;  // of its first row, in other tiles
  int rank = 0;    // of the block in its row, in order of time
  int number = 0;  // in the order of the scan

  template <typename T>
  __device__ __forceinline__ explicit FlatTileRows(const FlatReturnsParams<T>& p) {
    const int length = static_cast<int>(p.length.divisor);
    if (p.cluster == 1 && !p.is_linked) {
      row = static_cast<int64_t>(blockIdx.x) * p.tile_rows;
      const int64_t low = static_cast<int64_t>(blockIdx.x) * p.tile_steps;
      rows = blockIdx.x + 1 == gridDim.x ? p.last_rows : p.tile_rows;
      steps = rows * length;
      offset = static_cast<int>(static_cast<uint32_t>(low) % kFlatReturnsGrain);
      base = low - offset;
    } else {
      find_rank(p);
      rows = 1;
      const int64_t start = row * length, first = start / kFlatReturnsGrain * kFlatReturnsGrain;
      base = first + static_cast<int64_t>(rank) * p.tile_steps;
      offset = static_cast<int>(max(start - base, int64_t{0}));
      before = static_cast<int>(base + offset - start);
      steps = max(min(p.tile_steps - offset, length - before), 0);
    }
    left = static_cast<int>(min(p.count - base, int64_t{1} << 30));
  }
  // The blocks of a cluster are neighbors. Else all rows' last tiles come first, then those before them in time; of
  // gradients their first ones.
  template <typename T>
  __device__ __forceinline__ void find_rank(const FlatReturnsParams<T>& p) {
    const uint32_t block = blockIdx.x;
    if (p.is_linked) {
      number = static_cast<int>(p.links.rows.of(block));
      row = block - static_cast<uint32_t>(number) * p.links.rows.divisor;
      rank = p.is_gradient ? number : p.links.row_tiles - 1 - number;
    } else {
      const uint32_t blocks = static_cast<uint32_t>(p.cluster);
      row = block / blocks;
      rank = static_cast<int>(block - static_cast<uint32_t>(row) * blocks);
    }
  }
};

template <typename T, int kVectors>
struct FlatSlice {
  static constexpr int kVec = flat_vector(sizeof(T)), kOwn = kVectors * kVec, kSteps = 32 * kOwn;

  const FlatReturnsParams<T>& p;
  const FlatTileRows& tile;
  unsigned char* const here;
  const int warp, lane;

  __device__ __forceinline__ int64_t first() const { return tile.base + warp * kSteps; }

  // A step of the slice, counted from the first one of the tile's first row, or of `lift` rows before it.
  __device__ __forceinline__ uint32_t up_of(int step) const {
    const int length = static_cast<int>(p.length.divisor);
    return static_cast<uint32_t>(step + warp * kSteps - tile.offset + tile.before + p.lift * length);
  }

  // Elements of an operand that there are.
  __device__ __forceinline__ int count_of(const FlatTensor& tensor) const {
    const int end = tile.offset + tile.steps,
              whole = (end + kFlatReturnsGrain - 1) / kFlatReturnsGrain * kFlatReturnsGrain;
    const int before = warp * kSteps, own = min(whole - before, kSteps);
    return own <= 0 ? 0 : min(own + tensor.extra, tile.left - before);
  }
  static __device__ __forceinline__ int arrivals(const FlatReturnsParams<T>& p) {
    return DCS_HAS_BULK_COPIES ? p.operand_count : 32;
  }
  __device__ __forceinline__ void load(uint64_t* barrier) const {
    bool is_apart = false, has_tail = false;
#if DCS_HAS_BULK_COPIES
    if (lane < p.operand_count) {
      const FlatTensor& tensor = p.operands[lane];
      const int bytes = max(count_of(tensor), 0) * tensor.bytes, whole = tensor.is_flat ? bytes / 16 * 16 : 0;
      mbarrier_arrive_expect_tx(barrier, whole);
      if (whole > 0) bulk_load(here + tensor.slot, tensor.data + first() * tensor.bytes, whole, barrier);
      is_apart = !tensor.is_flat && bytes > 0;
      has_tail = tensor.is_flat && whole < bytes;
    }
#else
    mbarrier_arrive(barrier);
    is_apart = lane < p.operand_count && count_of(p.operands[lane]) > 0;
#endif
    const uint32_t others = __ballot_sync(0xffffffffu, is_apart);
    if (others)
      load_apart<T, kVectors>(
          p, here, tile.row - p.lift, up_of(0), count_of(p.operands[0]), tile.left - warp * kSteps, others);
    if (__any_sync(0xffffffffu, has_tail)) load_tails();
  }
  // What is behind the last whole 16 bytes of the tensors, at once: four lanes for an operand, four bytes each.
  __device__ __forceinline__ void load_tails() const {
    static_assert(4 * kMostFlatOperands <= 32);
    const int operand = lane / 4;
    if (operand >= p.operand_count || !p.operands[operand].is_flat) return;
    const FlatTensor& tensor = p.operands[operand];
    const int bytes = max(count_of(tensor), 0) * tensor.bytes, begin = bytes / 16 * 16 + lane % 4 * 4;
    const unsigned char* const from = reinterpret_cast<const unsigned char*>(tensor.data) + first() * tensor.bytes;
    unsigned char* const to = here + tensor.slot;
    if (begin + 4 <= bytes) {
      *reinterpret_cast<uint32_t*>(to + begin) = *reinterpret_cast<const uint32_t*>(from + begin);
    } else {
#pragma unroll
      for (int i = 0; i < 3; ++i)
        if (begin + i < bytes) to[begin + i] = from[begin + i];
    }
  }

  // What the tile has of the slice, once its lanes have written it.
  __device__ __forceinline__ void store() const {
    show_to_bulk_stores();
    __syncwarp();
    const int own = warp * kSteps, begin = max(tile.offset - own, 0), end = min(tile.offset + tile.steps - own, kSteps);
    if (begin >= end) return;
    const int whole_begin = min((begin + kVec - 1) / kVec * kVec, end), whole_end = max(end / kVec * kVec, whole_begin);
    bool is_apart = false;
    if (lane < p.result_count) {
      const FlatTensor& tensor = p.results[lane];
      is_apart = !tensor.is_flat;
#if DCS_HAS_BULK_COPIES
      if (tensor.is_flat && whole_end > whole_begin) {
        bulk_store(tensor.data + (first() + whole_begin) * sizeof(T), here + tensor.slot + whole_begin * sizeof(T),
            (whole_end - whole_begin) * static_cast<int>(sizeof(T)));
        commit_stores();
      }
#endif
    }
    if (begin % kVec != 0 || end % kVec != 0) {
      // Less than a vector at either end, of all results at once: some lanes for each.
      static_assert(kVec * kMostFlatResults <= 32);
      const int result = lane / kVec, at = lane % kVec;
      if (result < p.result_count && p.results[result].is_flat) {
        const FlatTensor& tensor = p.results[result];
        const T* const from = reinterpret_cast<const T*>(here + tensor.slot);
        T* const to = reinterpret_cast<T*>(tensor.data) + first();
        if (begin + at < whole_begin) to[begin + at] = from[begin + at];
        if (whole_end + at < end) to[whole_end + at] = from[whole_end + at];
      }
    }
    if (__any_sync(0xffffffffu, !DCS_HAS_BULK_COPIES || is_apart))
      store_apart<T, kVectors>(p, here, tile.row - p.lift, up_of(0), begin, end);
    if (lane < p.result_count) wait_for_stores_to_read();
  }
};

}  // namespace dcs
