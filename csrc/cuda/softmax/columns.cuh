// Tiles of columns that many lie side by side of: a window of `across` vectors, of which neighboring threads take one
// each, and steps in turn.
//
// Where a step's columns are no whole vectors, steps begin at different offsets in a vector, but those of a thread at
// the same. A window is a vector narrower than its threads, so that these cover it from any offset.
#pragma once

#include <algorithm>

#include "softmax/tiles.cuh"

namespace dcs {

// The threads of a warp have `across` vectors, or 32 of them, and steps that begin at the same offset in a vector: the
// elements of lanes `across` apart are of the same columns.
template <typename T>
struct ColumnWindow : ThreadVectors<T> {
  using ThreadVectors<T>::kVec;
  Range mine;    // elements that are the window's
  int x, shift;  // a vector's first element is column x * kVec - shift of the window, shift < kVec
  int across, columns;
  int group_bits;  // threads that leave one part of each column, as a power of two

  __device__ __forceinline__ ColumnWindow(const SoftmaxTiles<T>& params, int64_t tile, int64_t chunk) {
    across = 1 << params.across_bits;
    columns = across * kVec;
    group_bits = max(params.across_bits, 5);
    x = threadIdx.x & (across - 1), shift = 0;
    const int group = threadIdx.x >> group_bits, row = (threadIdx.x & 31) >> min(params.across_bits, 5);
    const int step_in_turn =
        (group & (params.unit - 1)) + row * params.unit + max(32 >> params.across_bits, 1) * (group & -params.unit);
    const int64_t begin = chunk * params.chunk, end = min(begin + params.chunk, params.length),
                  step = begin + step_in_turn, size = params.length * params.inner;
    int64_t at;  // of step 0
    if (params.windows == 0) {
      const int64_t vectors = params.inner / kVec, number = tile * across + x,
                    outer = params.outer == 1 ? (number < vectors ? 0 : 1) : number / vectors;
      mine = {0, outer < params.outer ? kVec : 0};
      at = outer * size + (number - outer * vectors) * kVec;
    } else {
      const int64_t outer = params.outer == 1 ? 0 : tile / params.windows, width = (across - 1) * kVec,
                    first_column = (tile - outer * params.windows) * width;
      at = outer * size + first_column;
      shift = static_cast<int>((at + step * params.inner) % kVec);
      const int position = x * kVec - shift;
      at += position;
      mine = {-position, static_cast<int>(min(width, params.inner - first_column)) - position};
    }
    if (mine.template has_any<kVec>(0) && step < end)
      this->count = static_cast<int>(params.by_down.of(static_cast<uint32_t>(end - step + params.down - 1)));
    this->first = at + step * params.inner;
    this->apart = params.down * params.inner;
    this->left = params.elements - this->first;
    this->is_whole = mine.template has_all<kVec>(0);
    this->settle();
  }
  __device__ __forceinline__ Range range(int) const { return mine; }

  // Where a column's part is in shared memory: no two lanes' are in one bank.
  __device__ __forceinline__ static int slot(int column) {
    return column + static_cast<int>(static_cast<unsigned>(column) / kVec);
  }
  __device__ __forceinline__ static int number_of_part(int column) { return column; }
  // Of `columns` numbers each, which one an index is of.
  __device__ __forceinline__ int part_of(int index) const { return index >> (31 - __clz(columns)); }
  // The parts of all columns, joined over the block, in shared memory at `shared`, which has column_parts of them.
  template <bool kBackward, typename Acc>
  __device__ __forceinline__ Part<Acc>* join(Part<Acc> (&parts)[kVec], Part<Acc>* shared) const {
    join_apart<kBackward>(parts, across);
    const int slots = slot(columns), groups = blockDim.x >> group_bits, group = threadIdx.x >> group_bits;
    Part<Acc>* const joined = shared + groups * slots;
    if ((static_cast<int>(threadIdx.x) & ((1 << group_bits) - 1)) < across)
      each_part([&](int i, int to) { shared[group * slots + to] = parts[i]; });
    __syncthreads();
    join_rows<kBackward, Acc>(
        groups, columns, [&](int group, int column) { return shared[group * slots + slot(column)]; },
        [&](int column, Part<Acc> part) { joined[slot(column)] = part; });
    __syncthreads();
    return joined;
  }
  template <typename Acc>
  __device__ __forceinline__ void take(const Part<Acc>* joined, Part<Acc> (&parts)[kVec]) const {
    each_part([&](int i, int from) { parts[i] = joined[from]; });
  }

 private:
  template <typename Body>
  __device__ __forceinline__ void each_part(const Body& body) const {
    const int from = x * (kVec + 1) - shift;
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (mine.has(i)) body(i, from + i - (i < shift ? 1 : 0));  // slot
  }
};

// The same of a view: an input whose elements lie in runs, at any alignment.
template <typename T>
struct ViewWindow : ColumnWindow<T> {
  using ColumnWindow<T>::ColumnWindow;
  static constexpr bool kView = true;
  // Vector k in the input, by the first of its elements that is the window's.
  __device__ __forceinline__ const T* source(const SoftmaxTiles<T>& params, int k) const {
    const int64_t at = this->place(k);
    return params.input + at + params.runs.beyond(at + max(this->mine.low, 0));
  }
};

template <typename T>
int64_t column_parts(int64_t across, int64_t threads) {
  return (threads / std::max<int64_t>(across, 32) + 1) * across * (16 / static_cast<int64_t>(sizeof(T)) + 1);
}

}  // namespace dcs
