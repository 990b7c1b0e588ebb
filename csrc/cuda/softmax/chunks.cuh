// Softmax of tiles of columns that no cluster holds: tiles are cut into chunks, a block each. One kernel finds the
// parts of each chunk's columns, where these are many a second one joins them, and the last one writes, from the end to
// the beginning, because what was read last is still in L2.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "softmax/columns.cuh"
#include "softmax/slabs.cuh"

namespace dcs {

constexpr int kJoinColumns = 8;

template <typename T, bool kBackward, template <typename> class Lines>
__global__ void __launch_bounds__(kTileThreads, 4)
    softmax_chunk_kernel(const __grid_constant__ SoftmaxTiles<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  launch_dependents();
  const int64_t tile = blockIdx.x / params.chunks;
  const Lines<T> lines(params, tile, blockIdx.x - tile * params.chunks);
  griddepcontrol_wait();
  Part<Acc> parts[kVec];
  add_lines<kBackward, kGroupVectors<T>>(params, lines, parts);
  const Part<Acc>* const joined = lines.template join<kBackward>(parts, reinterpret_cast<Part<Acc>*>(softmax_shared));
  for (int column = threadIdx.x; column < lines.columns; column += blockDim.x)
    params.parts[static_cast<int64_t>(blockIdx.x) * lines.columns + column] = joined[lines.slot(column)];
}

template <typename Acc>
struct SoftmaxParts {
  const Part<Acc>* parts;  // (tiles, chunks, columns)
  Part<Acc>* joined;       // (tiles, columns)
  int64_t chunks;
  int columns;
};

// The parts of kJoinColumns of a tile's columns, joined over its chunks.
template <typename Acc, bool kBackward>
__global__ void __launch_bounds__(kTileThreads)
    softmax_join_chunks_kernel(const __grid_constant__ SoftmaxParts<Acc> params) {
  __shared__ Part<Acc> shared[joined_parts(32 * kJoinColumns, kTileThreads)];
  griddepcontrol_wait();
  launch_dependents();
  const int columns = params.columns, groups = (columns + kJoinColumns - 1) / kJoinColumns;
  const int64_t tile = blockIdx.x / groups;
  const int begin = static_cast<int>(blockIdx.x - tile * groups) * kJoinColumns,
            count = min(kJoinColumns, columns - begin);
  const Part<Acc>* const from = params.parts + tile * params.chunks * columns + begin;
  Part<Acc>* const to = params.joined + tile * columns + begin;
  const int chunks = static_cast<int>(params.chunks);
  if (groups > 1) {
    join_rows<kBackward, Acc>(
        chunks, count, [&](int chunk, int column) { return from[static_cast<int64_t>(chunk) * columns + column]; },
        [&](int column, Part<Acc> part) { to[column] = part; });
  } else {
    const Part<Acc>* const result =
        join_all<kBackward, Acc>(chunks * columns, columns, [&](int p) { return from[p]; }, shared);
    if (static_cast<int>(threadIdx.x) < columns) to[threadIdx.x] = result[threadIdx.x];
  }
}

template <typename T, bool kBackward, template <typename> class Lines>
__global__ void __launch_bounds__(kTileThreads, Lines<T>::kView ? 3 : 4)
    softmax_finish_kernel(const __grid_constant__ SoftmaxTiles<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  const int64_t block = gridDim.x - 1 - blockIdx.x, tile = block / params.chunks;
  const Lines<T> lines(params, tile, block - tile * params.chunks);
  const int columns = lines.columns, chunks = params.joined ? 1 : static_cast<int>(params.chunks);
  const int64_t part_columns = params.part_columns;
  const Part<Acc>* const from = (params.joined ? params.joined : params.parts) + tile * chunks * part_columns;
  Part<Acc>* const shared = reinterpret_cast<Part<Acc>*>(softmax_shared);
  griddepcontrol_wait();
  join_rows<kBackward, Acc>(
      chunks, columns, [&](int chunk, int column) { return from[chunk * part_columns + lines.number_of_part(column)]; },
      [&](int column, Part<Acc> part) { shared[lines.slot(column)] = part; });
  __syncthreads();
  Part<Acc> parts[kVec];
  lines.take(shared, parts);
  invert_totals<kBackward>(parts);
  finish_lines<kBackward, kGroupVectors<T>>(params, lines, parts);
}

}  // namespace dcs
