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
  constexpr int kVec = 16 / sizeof(T), kGroup = kGroupVectors<T>;
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  launch_dependents();
  const int64_t tile = blockIdx.x / params.chunks;
  const Lines<T> lines(params, tile, blockIdx.x - tile * params.chunks);
  griddepcontrol_wait();
  Part<Acc> parts[kVec];
  const auto add = [&](int first, auto all) {
    constexpr bool kAll = decltype(all)::value;
    Vector<T, kVec> raw[kGroup], saved[kBackward ? kGroup : 1];
    load_vectors<kBackward, kAll>(lines, params.input, first, raw);
    if constexpr (kBackward) load_vectors<true, kAll>(lines, params.saved, first, saved);
    mask_vectors<kBackward>(lines, first, raw);
    if constexpr (kBackward) mask_vectors<true>(lines, first, saved);
    add_vectors<kBackward>(parts, raw, saved);
  };
  int first = 0;
  for (; first + kGroup <= lines.count; first += kGroup) add(first, std::true_type());
  if (first < lines.count) add(first, std::false_type());

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
  constexpr int kVec = 16 / sizeof(T), kGroup = kGroupVectors<T>;
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
  const auto finish = [&](int first, auto all) {
    constexpr bool kAll = decltype(all)::value;
    Vector<T, kVec> raw[kGroup], saved[kBackward ? kGroup : 1];
    load_vectors<kBackward, kAll>(lines, params.input, first, raw);
    if constexpr (kBackward) load_vectors<true, kAll>(lines, params.saved, first, saved);
#pragma unroll
    for (int k = 0; k < kGroup; ++k)
      if (kAll || first + k < lines.count)
        store_finished<kBackward>(lines, params.output, first + k, raw[k], saved[kBackward ? k : 0], parts);
  };
  int first = lines.count / kGroup * kGroup;
  if (first < lines.count) finish(first, std::false_type());
  while (first > 0) finish(first -= kGroup, std::true_type());
}

}  // namespace dcs
