// Softmax of tiles that no cluster holds, but the multiprocessors together: as cluster_tiles.cuh, by groups of blocks
// that run at the same time and tell each other their parts in global memory. A group takes one tile after the other.
//
// Forward progress: a block waits for the others of its group alone, and the launch, a cooperative one, runs all blocks
// at once or fails.
#pragma once

#include "common/call_tag.h"
#include "softmax/cluster_tiles.cuh"

namespace dcs {

// Parts of a group's blocks, at most, which each of its blocks reads. Of more, a block joins some of the columns, and
// all read the joined ones: two exchanges, but few words.
constexpr int64_t kMostGroupParts = 1024;
__host__ __device__ constexpr bool joins_at_once(int64_t blocks, int64_t columns) {
  return columns == 1 || blocks * columns <= kMostGroupParts;
}
// Words of a tile: (blocks, columns) at once, else (columns, blocks) and the joined ones.
__host__ __device__ constexpr int64_t group_words(int64_t blocks, int64_t columns) {
  return blocks * columns + (joins_at_once(blocks, columns) ? 0 : columns);
}

// A part in global memory, and beside each word of it which launch wrote it.
template <typename Acc>
struct PartWords {
  static constexpr int kWords = sizeof(Part<Acc>) / 8;
  Word words[kWords];

  __device__ __forceinline__ void publish(const Part<Acc>& part, uint64_t tag) {
    uint64_t bits[kWords];
    memcpy(bits, &part, sizeof part);
#pragma unroll
    for (int i = 0; i < kWords; ++i) store_word(&words[i], bits[i], tag);
  }
  // Loads what `from` holds where `wanted`, without a branch.
  __device__ __forceinline__ void load_if(bool wanted, const PartWords& from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) load_word_if(wanted, &from.words[i], words[i]);
  }
  __device__ __forceinline__ bool is_of(uint64_t tag) const {
    bool is_there = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) is_there = is_there && words[i].state == tag;
    return is_there;
  }
  __device__ __forceinline__ Part<Acc> get() const {
    uint64_t bits[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) bits[i] = words[i].value;
    Part<Acc> part;
    memcpy(&part, bits, sizeof part);
    return part;
  }
};

// The parts that are published at `words`, of which `take(index, part)` gets each once, all threads of the block
// together.
template <typename Acc, typename Take>
__device__ __forceinline__ void await_parts(const PartWords<Acc>* words, int count, uint64_t tag, const Take& take) {
  constexpr int kAtOnce = 4;
  for (int begin = threadIdx.x; begin < count; begin += kAtOnce * blockDim.x) {
    PartWords<Acc> loaded[kAtOnce] = {};
    bool is_there;
    do {
      is_there = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int index = begin + i * static_cast<int>(blockDim.x);
        loaded[i].load_if(index < count && !loaded[i].is_of(tag), words[min(index, count - 1)]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        is_there = is_there && (begin + i * static_cast<int>(blockDim.x) >= count || loaded[i].is_of(tag));
    } while (!is_there);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = begin + i * static_cast<int>(blockDim.x);
      if (index < count) take(index, loaded[i].get());
    }
  }
}

// The parts of a tile's columns, joined over the blocks of its group, in shared memory after the block's own.
template <bool kBackward, typename Acc, typename Lines>
__device__ __forceinline__ const Part<Acc>* join_blocks(
    const Lines& lines, Part<Acc>* of_block, int rank, int blocks, PartWords<Acc>* words, uint64_t tag) {
  const int columns = lines.columns;
  const bool at_once = joins_at_once(blocks, columns);
  for (int column = threadIdx.x; column < columns; column += blockDim.x)
    words[at_once ? rank * columns + column : column * blocks + rank].publish(of_block[lines.slot(column)], tag);
  Part<Acc>* const joined = of_block + lines.slot(columns);
  if (columns == 1) {
    Part<Acc> part;
    await_parts(words, blocks, tag, [&](int, Part<Acc> other) { part = join_two<kBackward>(part, other); });
    part = join_warps<kBackward>(join_lanes<kBackward>(part));
    if (threadIdx.x == 0) joined[0] = part;
    __syncthreads();
    return joined;
  }
  Part<Acc>* const exchange = joined + lines.slot(columns);
  const auto take = [&](int index, Part<Acc> part) { exchange[index] = part; };
  if (at_once) {
    await_parts(words, blocks * columns, tag, take);
    __syncthreads();
    join_rows<kBackward, Acc>(
        blocks, columns, [&](int block, int column) { return exchange[block * columns + column]; },
        [&](int column, Part<Acc> part) { joined[lines.slot(column)] = part; });
  } else {
    const int each = (columns + blocks - 1) / blocks, first = min(rank * each, columns),
              mine = min(each, columns - first);
    PartWords<Acc>* const of_group = words + columns * blocks;
    await_parts(words + first * blocks, mine * blocks, tag, take);
    __syncthreads();
    join_rows<kBackward, Acc>(
        blocks, mine, [&](int block, int column) { return exchange[column * blocks + block]; },
        [&](int column, Part<Acc> part) { of_group[first + column].publish(part, tag); });
    await_parts(of_group, columns, tag, [&](int column, Part<Acc> part) { joined[lines.slot(column)] = part; });
  }
  __syncthreads();
  return joined;
}
// Parts of the block's lines, `parts`, become those of all of the group's. `shared`: behind the elements that it holds.
// `tag` may be known at the barrier in `join` only.
template <bool kBackward, typename T, typename Acc, typename Lines, int kVec>
__device__ __forceinline__ void exchange_parts(const SoftmaxTiles<T>& params, const Lines& lines, int64_t tile,
    int rank, const uint64_t& tag, Part<Acc> (&parts)[kVec], Part<Acc>* shared) {
  const int blocks = static_cast<int>(params.chunks);
  Part<Acc>* const of_block = lines.template join<kBackward>(parts, shared);
  PartWords<Acc>* const words = static_cast<PartWords<Acc>*>(params.words) + tile * group_words(blocks, lines.columns);
  lines.take(join_blocks<kBackward>(lines, of_block, rank, blocks, words, tag), parts);
  invert_totals<kBackward>(parts);
}

// Parts of an exchange.
inline int64_t group_exchange_parts(int64_t columns, int64_t blocks) {
  if (columns == 1) return 0;
  return joins_at_once(blocks, columns) ? blocks * columns : blocks + columns;
}

template <typename T, bool kBackward, template <typename> class Lines>
__global__ void __launch_bounds__(kTileThreads, 3)
    softmax_resident_kernel(const __grid_constant__ SoftmaxTiles<T> params) {
  using Acc = typename Types<T>::Acc;
  using Vectors = HeldVectors<T, kBackward, Lines<T>>;
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  __shared__ uint64_t tag;
  const int blocks = static_cast<int>(params.chunks), groups = gridDim.x / blocks, group = blockIdx.x / blocks,
            rank = blockIdx.x - group * blocks;
  for (int64_t tile = group; tile < params.tiles; tile += groups) {
    const Lines<T> lines(params, tile, rank);
    const Vectors vectors(params, lines, softmax_shared);
    vectors.load();
    // After the loads, which would wait for it.
    if (tile == group && threadIdx.x == 0) tag = tag_of_launch(params.tag);
    Part<Acc> parts[Vectors::kVec];
    vectors.add(parts);
    exchange_parts<kBackward>(params, lines, tile, rank, tag, parts, Vectors::parts_after(params, softmax_shared));
    vectors.store(parts);
  }
}

}  // namespace dcs
