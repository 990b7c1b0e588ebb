// Softmax of slabs that the multiprocessors do not hold, not even together: as resident.cuh, but each thread holds its
// last vectors alone. It reads the others twice, the second time from the last one to the first one, because what was
// read last is still in L2, where the blocks of the same multiprocessors have asked for it.
//
// Forward progress: resident.cuh's.
#pragma once

#include "softmax/resident.cuh"
#include "softmax/strips.cuh"

namespace dcs {

constexpr int kStreamedThreads = 1024;  // of a block, at most; and of a multiprocessor
// Of a thread at once: doubles' powers leave memory idle if there are two.
constexpr int kStreamedVectors = 4;

template <typename T, bool kBackward, template <typename> class Lines>
__global__ void __launch_bounds__(kStreamedThreads)
    softmax_streamed_kernel(const __grid_constant__ SoftmaxTiles<T> params) {
  using Acc = typename Types<T>::Acc;
  using Vectors = HeldVectors<T, kBackward, Lines<T>>;
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  __shared__ uint64_t tag;
  const int blocks = static_cast<int>(params.chunks), groups = gridDim.x / blocks, group = blockIdx.x / blocks,
            rank = blockIdx.x - group * blocks;
  for (int64_t tile = group; tile < params.tiles; tile += groups) {
    const Lines<T> lines(params, tile, rank);
    const int streamed = max(0, lines.count - params.each);
    const Lines<T> head = lines.head(streamed), tail = lines.tail(streamed);
    const Vectors resident(params, tail, softmax_shared);
    resident.load();
    if (tile == group && threadIdx.x == 0) tag = tag_of_launch(params.tag);
    Part<Acc> parts[Vectors::kVec];
    add_lines<kBackward, kStreamedVectors>(params, head, parts);
    resident.add(parts);
    exchange_parts<kBackward>(params, lines, tile, rank, tag, parts, Vectors::parts_after(params, softmax_shared));
    finish_lines<kBackward, kStreamedVectors>(params, head, parts);
    resident.store(parts);
  }
}

}  // namespace dcs
