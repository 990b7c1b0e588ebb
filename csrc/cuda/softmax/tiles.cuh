// Softmax of columns, (outer, length, inner), cut into tiles of neighboring columns: windows (columns.cuh) where many
// lie side by side, slabs (slabs.cuh) where few do, or one. A tile's steps go to one or more blocks. Each thread takes
// vectors at one distance from each other, whose elements of the same number have the same column.
#pragma once

#include "common/word.cuh"
#include "softmax/lines.cuh"

namespace dcs {

constexpr int kTileThreads = 256;  // of a block, at most
template <typename T>
constexpr int kGroupVectors = sizeof(T) == 8 ? 2 : 4;  // of a thread at once

template <typename T>
struct SoftmaxTiles {
  const T* input;
  const T* saved;
  T* output;
  int64_t outer, length, inner;
  int64_t chunk;   // of a block: steps of a window, a multiple of `down`, or vectors of a slab, a multiple of `width`
  int64_t chunks;  // of a tile
  int each;        // vectors of a thread, at most
  // Windows: vectors side by side, a power of two; steps at a time, in a block, a multiple of those after which they
  // begin at the same offset in a vector; windows of an outer, or 0 where the columns are whole vectors.
  int across_bits, down, unit;
  int64_t windows;
  Divisor by_down;
  int width;                             // slabs: threads that take vectors
  int strips, stride;                    // strips.cuh
  Part<typename Types<T>::Acc>* parts;   // (tiles, chunks, columns)
  Part<typename Types<T>::Acc>* joined;  // (tiles, columns), or null
  int part_columns;                      // of both, at least those of a tile
  // Of blocks that run together: how many tiles there are, the words of their parts (group_words), and what tells this
  // launch's.
  int64_t tiles;
  void* words;
  CallTag tag;
  RunIndex runs;     // of an input that is a view
  bool in_vectors;   // and whose steps begin and end at multiples of 16 bytes
  int64_t elements;  // of memory that is read
};

// A thread's vectors: number k is `apart` elements after the one before, and `range(k)` tells which of its elements are
// the tile's.
template <typename T>
struct ThreadVectors {
  static constexpr int kVec = 16 / sizeof(T);
  static constexpr bool kView = false;
  static constexpr bool kReadTwice = false;
  int count = 0;
  int64_t first, apart;  // in elements
  int64_t left;          // elements from the first vector to the tensor's end
  bool is_inside;        // whether all are inside of the tensor
  bool is_whole;         // and their elements the tile's

  __device__ __forceinline__ int64_t place(int k) const { return first + k * apart; }
  __device__ __forceinline__ void settle() { is_inside = (count - 1) * apart + kVec <= left; }
};

// Vectors `k`, k + 1 ... of a thread; kAll: it has all of them.
template <bool kBackward, bool kAll, typename T, typename Lines, int kCount>
__device__ __forceinline__ void load_vectors(
    const Lines& lines, const T* tensor, int k, Vector<T, 16 / sizeof(T)> (&raw)[kCount]) {
  using Vec = Vector<T, 16 / sizeof(T)>;
  const T* const from = tensor + lines.place(k);
  if (kAll && lines.is_inside) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) raw[i] = load_now(reinterpret_cast<const Vec*>(from + i * lines.apart));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) raw[i] = neutral<T, 16 / sizeof(T), kBackward>();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      load_where(k + i < lines.count, from + i * lines.apart, lines.left - (k + i) * lines.apart, raw[i]);
  }
}
// ... of the input.
template <bool kBackward, bool kAll, typename T, typename Lines, int kCount>
__device__ __forceinline__ void load_vectors(
    const SoftmaxTiles<T>& params, const Lines& lines, int k, Vector<T, 16 / sizeof(T)> (&raw)[kCount]) {
  load_vectors<kBackward, kAll>(lines, params.input, k, raw);
}
template <bool kBackward, typename T, int kVec, typename Lines, int kCount>
__device__ __forceinline__ void mask_vectors(const Lines& lines, int k, Vector<T, kVec> (&raw)[kCount]) {
  if (lines.is_whole) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) mask<kBackward>(raw[i], 0, lines.range(k + i));
}

// The result of an element, once its column's part is known: total is 1 / sum forward.
template <bool kBackward, typename Acc>
__device__ __forceinline__ Acc finished(Acc x, Acc saved, const Part<Acc>& part) {
  if constexpr (kBackward) return (x - part.total) * saved;
  else return shifted_power(x, part.largest) * part.total;
}
// `kReadTwice`: results leave room in L2 for what is to be read again.
template <bool kBackward, bool kReadTwice = false, typename T, typename Acc, int kVec, typename Lines>
__device__ __forceinline__ void store_finished(const Lines& lines, T* output, int k, const Vector<T, kVec>& raw,
    const Vector<T, kVec>& saved, const Part<Acc> (&parts)[kVec]) {
  Acc x[kVec], y[kVec];
  unpack(raw, x);
  if constexpr (kBackward) unpack(saved, y);
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = finished<kBackward>(x[i], kBackward ? y[i] : Acc(0), parts[i]);
  const Vector<T, kVec> result = pack<Acc, T, kVec>(x);
  T* const to = output + lines.place(k);
  if (lines.is_whole && kReadTwice) {
    uint4 words;
    memcpy(&words, &result, sizeof words);
    __stcs(reinterpret_cast<uint4*>(to), words);
  } else if (lines.is_whole) *reinterpret_cast<Vector<T, kVec>*>(to) = result;
  else store_in(to, 0, lines.range(k), result);
}
// A thread's vectors, read in groups, join their columns' parts.
template <bool kBackward, int kGroup, typename T, typename Lines, typename Acc, int kVec>
__device__ __forceinline__ void add_lines(const SoftmaxTiles<T>& params, const Lines& lines, Part<Acc> (&parts)[kVec]) {
  const auto add = [&](int first, auto all) {
    constexpr bool kAll = decltype(all)::value;
    Vector<T, kVec> raw[kGroup], saved[kBackward ? kGroup : 1];
    load_vectors<kBackward, kAll>(params, lines, first, raw);
    if constexpr (kBackward) load_vectors<true, kAll>(lines, params.saved, first, saved);
    mask_vectors<kBackward>(lines, first, raw);
    if constexpr (kBackward) mask_vectors<true>(lines, first, saved);
    add_vectors<kBackward>(parts, raw, saved);
  };
  int first = 0;
  for (; first + kGroup <= lines.count; first += kGroup) add(first, std::true_type());
  if (first < lines.count) add(first, std::false_type());
}
// They are read again, from the last one to the first one, and written.
template <bool kBackward, int kGroup, typename T, typename Lines, typename Acc, int kVec>
__device__ __forceinline__ void finish_lines(
    const SoftmaxTiles<T>& params, const Lines& lines, const Part<Acc> (&parts)[kVec]) {
  const auto finish = [&](int first, auto all) {
    constexpr bool kAll = decltype(all)::value;
    Vector<T, kVec> raw[kGroup], saved[kBackward ? kGroup : 1];
    load_vectors<kBackward, kAll>(params, lines, first, raw);
    if constexpr (kBackward) load_vectors<true, kAll>(lines, params.saved, first, saved);
#pragma unroll
    for (int k = 0; k < kGroup; ++k)
      if (kAll || first + k < lines.count)
        store_finished<kBackward, true>(lines, params.output, first + k, raw[k], saved[kBackward ? k : 0], parts);
  };
  int first = lines.count / kGroup * kGroup;
  if (first < lines.count) finish(first, std::false_type());
  while (first > 0) finish(first -= kGroup, std::true_type());
}
template <bool kBackward, typename Acc, int kVec>
__device__ __forceinline__ void invert_totals(Part<Acc> (&parts)[kVec]) {
  if constexpr (!kBackward) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) parts[i].total = inverse(parts[i].total);
  }
}

}  // namespace dcs
