// A warp's slice of a tile of rows: neighboring steps, the same of every operand, each one range of shared memory.
// What lies flat comes and goes by one copy an operand, each of which another lane asks for; all else in chunks
// (scan/rows/row_chunks.cuh).
#pragma once

#include "common/ptx/async_copy.cuh"
#include "common/ptx/bulk_copy.cuh"
#include "returns/flat_rows/params.cuh"
#include "scan/rows/row_chunks.cuh"

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
  // The blocks of a cluster are neighbors. Else all rows' last tiles come first, then those before them in time.
  template <typename T>
  __device__ __forceinline__ void find_rank(const FlatReturnsParams<T>& p) {
    const uint32_t block = blockIdx.x;
    if (p.is_linked) {
      number = static_cast<int>(p.links.rows.of(block));
      row = block - static_cast<uint32_t>(number) * p.links.rows.divisor;
      rank = p.links.row_tiles - 1 - number;
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
    bool in_parts = false;
#if DCS_HAS_BULK_COPIES
    if (lane < p.operand_count) {
      const FlatTensor& tensor = p.operands[lane];
      const int count = count_of(tensor), bytes = count * tensor.bytes;
      in_parts = !tensor.is_flat || bytes % 16 != 0;
      mbarrier_arrive_expect_tx(barrier, in_parts ? 0 : bytes);
      if (!in_parts && bytes > 0) bulk_load(here + tensor.slot, tensor.data + first() * tensor.bytes, bytes, barrier);
      in_parts = in_parts && count > 0;
    }
#else
    mbarrier_arrive(barrier);
    in_parts = lane < p.operand_count && count_of(p.operands[lane]) > 0;
#endif
    const uint32_t others = __ballot_sync(0xffffffffu, in_parts);
    if (others) load_parts(p, here, first(), count_of(p.operands[0]), others);
  }
  // Operands in chunks. Not inlined: most calls have none.
  static __device__ __noinline__ void load_parts(
      const FlatReturnsParams<T>& p, unsigned char* here, int64_t first, int count, uint32_t others) {
    using Acc = typename Types<T>::Acc;
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, T>;
    const auto load = [&](const FlatTensor& tensor, auto element) {
      using E = decltype(element);
      const int all = static_cast<int>(min(int64_t{count + tensor.extra}, p.count - first));
      load_rows<1>(tensor.is_packed ? p.line : p.of_rows, reinterpret_cast<E*>(here + tensor.slot),
          reinterpret_cast<const E*>(tensor.data), tensor.is_packed ? Strides{0, 1, 0} : tensor.strides, first, all);
    };
    for (; others; others &= others - 1) {
      const FlatTensor& tensor = p.operands[__ffs(static_cast<int>(others)) - 1];
      if (tensor.bytes == 1) load(tensor, uint8_t{});
      else if (sizeof(Acc) == sizeof(T) || tensor.bytes == sizeof(T)) load(tensor, Bits{});
      else load(tensor, Acc{});
    }
    commit_copies();
    wait_for_copies<0>();
  }

  // What the tile has of the slice, once its lanes have written it.
  __device__ __forceinline__ void store() const {
    show_to_bulk_stores();
    __syncwarp();
    const int own = warp * kSteps, begin = max(tile.offset - own, 0), end = min(tile.offset + tile.steps - own, kSteps);
    if (begin >= end) return;
    const int whole_begin = min((begin + kVec - 1) / kVec * kVec, end), whole_end = max(end / kVec * kVec, whole_begin);
    bool in_parts = begin % kVec != 0 || end % kVec != 0;
    if (lane < p.result_count) {
      const FlatTensor& tensor = p.results[lane];
      in_parts = in_parts || !tensor.is_flat;
#if DCS_HAS_BULK_COPIES
      if (tensor.is_flat && whole_end > whole_begin) {
        bulk_store(tensor.data + (first() + whole_begin) * sizeof(T), here + tensor.slot + whole_begin * sizeof(T),
            (whole_end - whole_begin) * static_cast<int>(sizeof(T)));
        commit_stores();
      }
#endif
    }
    if (__any_sync(0xffffffffu, !DCS_HAS_BULK_COPIES || in_parts)) store_parts(p, here, first(), begin, end);
    if (lane < p.result_count) wait_for_stores_to_read();
  }
  static __device__ __noinline__ void store_parts(
      const FlatReturnsParams<T>& p, const unsigned char* here, int64_t first, int begin, int end) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int whole_begin = min((begin + kVec - 1) / kVec * kVec, end), whole_end = max(end / kVec * kVec, whole_begin);
#pragma unroll 1
    for (int i = 0; i < p.result_count; ++i) {
      const FlatTensor& tensor = p.results[i];
      const T* const from = reinterpret_cast<const T*>(here + tensor.slot);
      T* const to = reinterpret_cast<T*>(tensor.data);
      if (!tensor.is_flat) {
        store_rows(tensor.is_packed ? p.line : p.of_rows, to, from + begin,
            tensor.is_packed ? Strides{0, 1, 0} : tensor.strides, first + begin, end - begin);
        continue;
      }
      if (begin + lane < whole_begin) to[first + begin + lane] = from[begin + lane];
      if (whole_end + lane < end) to[first + whole_end + lane] = from[whole_end + lane];
#if !DCS_HAS_BULK_COPIES
      for (int at = whole_begin + lane * kVec; at < whole_end; at += 32 * kVec)
        *reinterpret_cast<uint4*>(to + first + at) = *reinterpret_cast<const uint4*>(from + at);
#endif
    }
  }
};

}  // namespace dcs
