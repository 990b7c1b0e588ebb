// Tiles of columns that few, or none, lie side by side of: a slab, (length, columns), is contiguous, and is read so, in
// vectors: the block's `width` threads take vectors side by side, and theirs are `width` vectors apart, a multiple of
// the columns. So each element of a thread's vectors has one column, which is numbered from the aligned vector that the
// slab begins in.
#pragma once

#include "softmax/tiles.cuh"

namespace dcs {

// Joins `count` parts, of which number p is of column p % columns, by all threads. Shared memory: joined_parts. The
// result is the parts of the columns.
template <bool kBackward, typename Acc, typename Load>
__device__ __forceinline__ Part<Acc>* join_all(int count, int columns, const Load& load, Part<Acc>* shared) {
  int copies = 1;  // of a column, where there are few of them
  while (copies < 32 && 64 * copies * columns <= static_cast<int>(blockDim.x)) copies *= 2;
  const int all = copies * columns;
  join_rows<kBackward, Acc>((count + all - 1) / all, all,
      [&](int row, int column) { return row * all + column < count ? load(row * all + column) : Part<Acc>{}; },
      [&](int column, Part<Acc> part) { shared[column] = part; });
  __syncthreads();
  if (copies == 1) return shared;
  join_rows<kBackward, Acc>(
      copies, columns, [&](int row, int column) { return shared[row * columns + column]; },
      [&](int column, Part<Acc> part) { shared[all + column] = part; });
  __syncthreads();
  return shared + all;
}
__host__ __device__ constexpr int64_t joined_parts(int64_t columns, int64_t threads) {
  return 2 * columns + threads / 32;
}

// The parts of a slab that is one column.
template <bool kBackward, typename Acc, int kCount>
__device__ __forceinline__ Part<Acc>* join_one_column(const Part<Acc> (&parts)[kCount], Part<Acc>* shared) {
  const Part<Acc> part = join_warps<kBackward>(join_lanes<kBackward>(join_all_of<kBackward>(parts)));
  if (threadIdx.x == 0) shared[0] = part;
  __syncthreads();
  return shared;
}

// A thread's vectors of a slab: some, `apart` from each other, of those from `begin` to `end`, counted from the one
// that the slab begins in.
template <typename T>
struct SlabVectors : ThreadVectors<T> {
  using ThreadVectors<T>::kVec;
  Range mine;  // the slab's elements before `end`, relative to the first vector
  int columns, width;

  __device__ __forceinline__ SlabVectors(
      const SoftmaxTiles<T>& params, int64_t slab, int64_t begin, int64_t end, int apart, bool has_any)
      : columns(static_cast<int>(params.inner)), width(params.width) {
    constexpr int64_t kFar = 1 << 30;
    const int64_t size = params.length * params.inner;
    const int shift = static_cast<int>(slab * size % kVec);
    begin *= kVec, end *= kVec, apart *= kVec;
    this->first = slab * size - shift + begin;
    this->apart = apart;
    mine.low = static_cast<int>(max(shift - begin, -kFar));
    mine.high = static_cast<int>(min(min(shift + size, end) - begin, kFar));
    if (has_any) this->count = max(0, mine.high + apart - 1) / apart;
    this->left = params.elements - this->first;
    this->is_whole = mine.low <= 0 && mine.high - (this->count - 1) * apart >= kVec;
    this->settle();
  }
  __device__ __forceinline__ Range range(int k) const {
    const int before = k * static_cast<int>(this->apart);
    return {mine.low - before, mine.high - before};
  }
  __device__ __forceinline__ static int slot(int column) { return column; }

  // The parts of all columns, joined over the block, in shared memory at `shared`, which has slab_parts of them. The
  // block's first element is of column `start`; what it has nothing of adds nothing.
  template <bool kBackward, typename Acc>
  __device__ __forceinline__ Part<Acc>* join_from(int start, const Part<Acc> (&parts)[kVec], Part<Acc>* shared) const {
    if (columns == 1) return join_one_column<kBackward>(parts, shared);
    const int pitch = width + 1, thread = threadIdx.x;
    if (thread < width) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) shared[i * pitch + thread] = parts[i];
    }
    __syncthreads();
    return join_all<kBackward, Acc>(
        start + width * kVec, columns,
        [&](int p) { return p < start ? Part<Acc>{} : shared[(p - start) % kVec * pitch + (p - start) / kVec]; },
        shared + kVec * pitch);
  }
  template <typename Acc>
  __device__ __forceinline__ void take_from(int start, const Part<Acc>* joined, Part<Acc> (&parts)[kVec]) const {
    int column = (start + static_cast<int>(threadIdx.x) * kVec) % columns;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      parts[i] = joined[column];
      column = column + 1 == columns ? 0 : column + 1;
    }
  }
};

template <typename T>
struct Slab : SlabVectors<T> {
  using SlabVectors<T>::kVec;

  __device__ __forceinline__ Slab(const SoftmaxTiles<T>& params, int64_t slab, int64_t chunk)
      : SlabVectors<T>(params, slab, chunk * params.chunk + threadIdx.x, (chunk + 1) * params.chunk, params.width,
            static_cast<int>(threadIdx.x) < params.width) {}

  // Which of a tile's parts in global memory is a column's.
  __device__ __forceinline__ static int number_of_part(int column) { return column; }
  __device__ __forceinline__ int part_of(int index) const { return index / this->columns; }
  template <bool kBackward, typename Acc>
  __device__ __forceinline__ Part<Acc>* join(const Part<Acc> (&parts)[kVec], Part<Acc>* shared) const {
    return this->template join_from<kBackward>(0, parts, shared);
  }
  template <typename Acc>
  __device__ __forceinline__ void take(const Part<Acc>* joined, Part<Acc> (&parts)[kVec]) const {
    this->take_from(0, joined, parts);
  }
};

// The same of a view, each of whose steps is a run: neighboring vectors of a thread are at one distance there, too, and
// have their steps' ends at the same elements.
template <typename T>
struct ViewSlab : Slab<T> {
  using Slab<T>::kVec;
  static constexpr bool kView = true;
  using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  static constexpr int kElements = sizeof(Word) / sizeof(T), kWords = kVec / kElements;  // of a word; of a vector
  int64_t in_input, input_apart;
  int places[kWords];  // of a vector's words, from its first one
  int before, part_shift, pitch;
  bool in_vectors;

  __device__ __forceinline__ ViewSlab(const SoftmaxTiles<T>& params, int64_t slab, int64_t chunk)
      : Slab<T>(params, slab, chunk), in_vectors(params.in_vectors) {
    const int64_t step = divided(this->first, params.inner), gap = params.runs.gap;
    in_input = this->first + step * gap;
    input_apart = this->apart + static_cast<int>(this->apart) / this->columns * gap;
    pitch = this->columns + static_cast<int>(gap);
    const int64_t number = slab * params.length;
    before = this->columns - static_cast<int>(number * this->columns % kVec % this->columns);
    part_shift = static_cast<int>(number * pitch % kVec);
    int column = static_cast<int>(this->first - step * params.inner), beyond = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      places[w] = w * kElements + beyond;
      column += kElements;
      if (column == this->columns) column = 0, beyond += static_cast<int>(gap);
    }
  }
  // Of the parts of the input's slab with its gaps, which are numbered from the vector that it begins in there.
  __device__ __forceinline__ int number_of_part(int column) const {
    return ((column + before) % this->columns + part_shift) % pitch;
  }
};

template <bool kBackward, bool kAll, typename T, int kCount>
__device__ __forceinline__ void load_vectors(
    const ViewSlab<T>& lines, const T* tensor, int k, Vector<T, 16 / sizeof(T)> (&raw)[kCount]) {
  using Word = typename ViewSlab<T>::Word;
  constexpr int kWords = ViewSlab<T>::kWords, kElements = ViewSlab<T>::kElements;
  const T* const from = tensor + lines.in_input + k * lines.input_apart;
  uint32_t words[kCount][4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t left = k + i < lines.count ? lines.left - (k + i) * lines.apart : 0;
    if (lines.in_vectors) {
      load_words_where(
          left > 0, reinterpret_cast<const Vector<T, 16 / sizeof(T)>*>(from + i * lines.input_apart), words[i]);
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        load_words_where(left > w * kElements,
            reinterpret_cast<const Word*>(from + i * lines.input_apart + lines.places[w]), words[i] + w * (4 / kWords));
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) memcpy(&raw[i], words[i], sizeof raw[i]);
}

template <typename T>
int64_t slab_parts(int64_t columns, int64_t width, int64_t threads) {
  if (columns == 1) return 1;
  return 16 / static_cast<int64_t>(sizeof(T)) * (width + 1) + joined_parts(columns, threads);
}

}  // namespace dcs
