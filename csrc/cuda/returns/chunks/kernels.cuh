// The kernels of the temporal difference scan of any shape.
#pragma once

#include "returns/chunks/chunk.cuh"

namespace dcs {

constexpr int chunk_blocks(bool gates) { return gates ? 3 : 4; }

// The pieces of all chunks but each walk's last one.
template <typename T, bool kGates>
__global__ void __launch_bounds__(kChunkThreads, chunk_blocks(kGates))
    returns_pieces_kernel(const __grid_constant__ ReturnsChunksParams<typename Types<T>::Acc> params) {
  using Chunk = ReturnsChunk<T, kGates, true>;
  extern __shared__ __align__(16) unsigned char chunks_shared[];
  auto& memory = *reinterpret_cast<typename Chunk::Memory*>(chunks_shared);
  Chunk chunk(params, memory, static_cast<uint32_t>(params.plan.chunks - 1));
  const bool has_piece = static_cast<int>(threadIdx.x) < params.plan.sequences;
  if (has_piece) memory.carried[threadIdx.x] = identity<double>();
  // From the last tile on: what lies before an episode's end does not count.
  for (int first = chunk.walk.end - params.plan.tile_steps; first >= chunk.walk.begin;
      first -= params.plan.tile_steps) {
    chunk.fill(first);
    __syncthreads();
    chunk.add_up();
    __syncthreads();
    chunk.exchange(false);
    if (__syncthreads_and(!has_piece || memory.carried[threadIdx.x].closed)) break;
  }
  if (has_piece) chunk.pieces()[chunk.walk.chunk * params.plan.sequences + threadIdx.x] = memory.carried[threadIdx.x];
}

template <typename T, bool kGates>
__global__ void __launch_bounds__(kChunkThreads, chunk_blocks(kGates))
    returns_chunks_kernel(const __grid_constant__ ReturnsChunksParams<typename Types<T>::Acc> params) {
  using Chunk = ReturnsChunk<T, kGates, false>;
  extern __shared__ __align__(16) unsigned char chunks_shared[];
  auto& memory = *reinterpret_cast<typename Chunk::Memory*>(chunks_shared);
  Chunk chunk(params, memory, static_cast<uint32_t>(params.plan.chunks));
  const int steps = params.plan.tile_steps;
  for (int first = chunk.walk.begin - (chunk.enter() ? 0 : steps); first < chunk.walk.end; first += steps) {
    const bool enters = first < chunk.walk.begin;
    if (enters) {
      chunk.gather();
    } else {
      chunk.fill(first);
      __syncthreads();
      chunk.add_up();
    }
    __syncthreads();
    chunk.exchange(enters);
    if (enters) continue;
    chunk.apply();
    __syncthreads();
    chunk.finish();
    // Policy-gradient advantages read their neighbors' slots.
    if constexpr (kGates) __syncthreads();
  }
}

}  // namespace dcs
