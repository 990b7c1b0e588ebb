// What the softmax kernels share beside values.cuh: vectors of which a part is a line's, and parts of
// lines joined by all threads of a block.
#pragma once

#include "common/any_vector.cuh"
#include "common/ptx/global_store.cuh"
#include "common/range.cuh"
#include "softmax/values.cuh"

namespace dcs {

// A word in registers of 32 bits until its elements are used: two elements of half precision that share a register
// would wait for each other's loads.
template <typename T, int kVec>
struct WordRegisters {
  using Word = Vector<T, kVec>;
  uint32_t words[(sizeof(Word) + 3) / 4] = {};

  __device__ __forceinline__ void set(const Word& word) { memcpy(words, &word, sizeof word); }
  __device__ __forceinline__ Word get() const {
    Word word;
    memcpy(&word, words, sizeof word);
    return word;
  }
  __device__ __forceinline__ void load_where(bool wanted, const T* from) {
    load_words_where(wanted, reinterpret_cast<const Word*>(from), words);
  }
  __device__ __forceinline__ void store_where(bool wanted, T* to) const {
    store_words_where(wanted, reinterpret_cast<Word*>(to), words);
  }
};

// A vector of elements, where `wanted`; the tensor ends `left` elements after its first one.
template <typename T, int kVec>
__device__ __forceinline__ void load_where(bool wanted, const T* from, int64_t left, Vector<T, kVec>& raw) {
  load_where(wanted && left >= kVec, reinterpret_cast<const Vector<T, kVec>*>(from), raw);
  if (wanted && left < kVec) {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (i < left) raw.set(i, from[i]);
  }
}

// Of a vector of a view, whose elements are the `span` from `tensor` on, those that there are.
template <typename T, int kVec>
__device__ __forceinline__ void load_existing(const T* from, const T* tensor, int64_t span, Vector<T, kVec>& raw) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const int64_t number = from + i - tensor;
    if (number >= 0 && number < span) raw.set(i, from[i]);
  }
}

template <bool kBackward, typename T, int kVec>
__device__ __forceinline__ void mask(Vector<T, kVec>& raw, int first, Range range) {
  if (range.has_all<kVec>(first)) return;
  const T nothing = neutral<T, kVec, kBackward>().get(0);
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (!range.has(first + i)) raw.set(i, nothing);
}
// The largest of each element of the vectors, where larger than `most`; NaNs are dropped.
template <typename T, typename Acc, int kVec, int kCount>
__device__ __forceinline__ void take_larger(const Vector<T, kVec> (&raw)[kCount], Acc (&most)[kVec]) {
  Acc values[kVec];
  if constexpr (sizeof(T) == 2) {
    using Pair = HalfPair<T>;
    Vector<T, kVec> largest = raw[0];
#pragma unroll
    for (int w = 0; w < kVec / 2; ++w) {
      Pair pair = *reinterpret_cast<const Pair*>(&raw[0].words[w]);
#pragma unroll
      for (int k = 1; k < kCount; ++k) pair = __hmax2(pair, *reinterpret_cast<const Pair*>(&raw[k].words[w]));
      largest.words[w] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    unpack(largest, values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) most[i] = larger(most[i], values[i]);
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      unpack(raw[k], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) most[i] = larger(most[i], values[i]);
    }
  }
}

// The vectors' elements join their columns' parts.
template <bool kBackward, typename T, typename Acc, int kVec, int kCount, int kSaved>
__device__ __forceinline__ void add_vectors(
    Part<Acc> (&parts)[kVec], const Vector<T, kVec> (&raw)[kCount], const Vector<T, kVec> (&saved)[kSaved]) {
  if constexpr (!kBackward) {
    Acc largest[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) largest[i] = parts[i].largest;
    take_larger(raw, largest);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      parts[i].total *= shifted_power(parts[i].largest, largest[i]);
      parts[i].largest = largest[i];
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    Acc x[kVec], y[kVec];
    unpack(raw[k], x);
    if constexpr (kBackward) unpack(saved[k], y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) parts[i].total += kBackward ? x[i] * y[i] : shifted_power(x[i], parts[i].largest);
  }
}

// The parts of lanes that are a multiple of `apart`, a power of two, from each other, joined; all lanes get them.
template <bool kBackward, typename Acc, int kCount>
__device__ __forceinline__ void join_apart(Part<Acc> (&parts)[kCount], int apart) {
  if (apart >= 32) return;
  if constexpr (!kBackward) {
    Acc largest[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest[i] = parts[i].largest;
    for (int d = apart; d < 32; d *= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) largest[i] = larger(largest[i], __shfl_xor_sync(kAllLanes, largest[i], d));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      parts[i].total *= shifted_power(parts[i].largest, largest[i]);
      parts[i].largest = largest[i];
    }
  }
  for (int d = apart; d < 32; d *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) parts[i].total += __shfl_xor_sync(kAllLanes, parts[i].total, d);
  }
}

// The parts begin, begin + step ... below `end`, joined, kAtOnce at a time, whose powers do not wait for each other;
// nor do their loads, as none has a branch around it.
template <bool kBackward, int kAtOnce, typename Acc, typename Load>
__device__ __forceinline__ Part<Acc> join_every(int begin, int end, int step, const Load& load) {
  Part<Acc> part;
  for (int p = begin; p < end; p += kAtOnce * step) {
    Part<Acc> parts[1 + kAtOnce] = {part};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      parts[i + 1] = load(min(p + i * step, end - 1));
      if (p + i * step >= end) parts[i + 1] = {};
    }
    part = join_all_of<kBackward>(parts);
  }
  return part;
}

// The same of doubles, whose powers take 22 instructions: the largest comes first, so that a part takes one of them,
// which waits for no other's.
template <typename Acc, typename Load>
__device__ __forceinline__ Part<Acc> join_by_largest(int begin, int end, int step, const Load& load) {
  Part<Acc> joined;
  for (int p = begin; p < end; p += step) joined.largest = larger(joined.largest, load(p).largest);
#pragma unroll 2
  for (int p = begin; p < end; p += step) {
    const Part<Acc> part = load(p);
    joined.total += part.total * shifted_power(part.largest, joined.largest);
  }
  return joined;
}

// Joins the rows of a matrix of parts, (rows, columns), by all threads of the block: `load(row, column)`,
// `store(column, part)`.
template <bool kBackward, typename Acc, typename Load, typename Store>
__device__ __forceinline__ void join_rows(int rows, int columns, const Load& load, const Store& store) {
  const int threads = blockDim.x;
  int lane_bits = 0;  // of a column's lanes
  while (lane_bits < 5 && 1 << lane_bits < rows && 2 * columns << lane_bits <= threads) ++lane_bits;
  const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1), at_once = threads >> lane_bits;
  for (int begin = 0; begin < columns; begin += at_once) {
    const int column = begin + (static_cast<int>(threadIdx.x) >> lane_bits);
    Part<Acc> part;
    if (rows <= lanes) {
      if (column < columns && lane < rows) part = load(lane, column);
    } else if (column < columns) {
      const auto load_row = [&](int row) { return load(row, column); };
      if constexpr (sizeof(Acc) == 8 && !kBackward) part = join_by_largest<Acc>(lane, rows, lanes, load_row);
      else part = join_every<kBackward, sizeof(Acc) == 8 ? 1 : 4, Acc>(lane, rows, lanes, load_row);
    }
    part = join_group<kBackward>(part, lanes);
    if (column < columns && lane == 0) store(column, part);
  }
}

}  // namespace dcs
