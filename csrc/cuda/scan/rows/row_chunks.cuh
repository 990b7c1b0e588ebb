// Rows that are not one flat sequence, between global and shared memory. A part of one row, of long rows of floats any
// part, comes in words that are whole in shared memory. Parts of several come, and all go, in chunks of 16 bytes that
// are aligned in global memory, whatever the rows' pitch and alignment. That their elements lie elsewhere in shared
// memory is left to narrow copies, reads and writes there. What a chunk has of no row, or of another one, is neither
// kept nor written.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/ptx/async_copy.cuh"
#include "common/ptx/global_load.cuh"
#include "scan/rows/flat.cuh"

namespace dcs {

// 16 aligned bytes.
template <typename E>
struct RowChunk {
  static constexpr int kVec = 16 / sizeof(E);
  E* memory;       // their first element, which need not be the row's
  int at;          // the same in the range
  int first, end;  // those that are the row's and in the range
  __device__ __forceinline__ bool has(int element) const { return element >= first && element < end; }
  __device__ __forceinline__ bool is_whole() const { return first == 0 && end == kVec; }
};

// The chunks of elements [begin, begin + count) in memory; a lane takes every 32nd one. Rows are counted from that of
// `begin`, and each has as many chunks as it can have at any alignment, some of them empty.
template <typename E>
class RowChunks {
 public:
  static constexpr int kVec = RowChunk<E>::kVec;

  __device__ __forceinline__ RowChunks(
      const FlatParams& p, E* pointer, const Strides& strides, int64_t begin, int count)
      : count_(count) {
    const FlatPosition position = whole_rows(p, begin);
    const int64_t inner = p.problem.inner;
    length_ = shortened(p.problem.length);
    until_ = shortened(p.problem.length - position.done);
    const RowIndex index(p, position.row);
    row_ = pointer + index.offset(strides);
    done_ = position.done;
    row_step_ = inner == 1 ? strides.outer : strides.inner;
    turn_step_ = strides.outer - inner * strides.inner;
    inner_ = static_cast<unsigned>(shortened(inner));
    until_turn_ = inner == 1 ? kMany : shortened(inner - index.inner);
    chunks_ = chunks_of(min(length_, count));
    skipped_ = chunks_ - chunks_of(min(until_, count));
    const unsigned of_row = static_cast<unsigned>(chunks_), first = skipped_ + threadIdx.x % 32;
    rows_apart_ = static_cast<int>(32 / of_row);
    chunks_apart_ = static_cast<int>(32 % of_row);
    row_number_ = static_cast<int>(first / of_row);
    chunk_ = static_cast<int>(first % of_row);
    enter_row();
  }

  // Whether one may come, the lane's or a later one of its. Behind the last one they are empty.
  __device__ __forceinline__ bool more() const { return at_ < count_ + kVec; }
  __device__ __forceinline__ void next() {
    chunk_ += chunks_apart_;
    if (rows_apart_ == 0 && chunk_ < chunks_) {
      memory_ += 32 * kVec;
      at_ += 32 * kVec;
      return;
    }
    row_number_ += rows_apart_;
    if (chunk_ >= chunks_) chunk_ -= chunks_, ++row_number_;
    enter_row();
  }
  __device__ __forceinline__ RowChunk<E> get() const {
    return {memory_, at_, max(row_begin_ - at_, 0), min(row_end_ - at_, kVec)};
  }

 private:
  static constexpr int kMany = 1 << 20;  // more than a slice has
  static __device__ __forceinline__ int shortened(int64_t count) {
    return static_cast<int>(min(count, int64_t{kMany}));
  }
  // At least one, also of no elements: they are divided by.
  static __device__ __forceinline__ int chunks_of(int elements) {
    if constexpr (kVec == 1) return max(elements, 1);
    return static_cast<int>(static_cast<unsigned>(elements + 2 * kVec - 2) / kVec);
  }
  // To the chunk at hand from its numbers.
  __device__ __forceinline__ void enter_row() {
    const bool is_first = row_number_ == 0;
    row_begin_ = is_first ? 0 : until_ + (row_number_ - 1) * length_;
    row_end_ = min(is_first ? until_ : row_begin_ + length_, count_);
    int64_t offset = is_first ? done_ : static_cast<unsigned>(row_number_) * row_step_;
    if (row_number_ >= until_turn_)
      offset += (1 + static_cast<unsigned>(row_number_ - until_turn_) / inner_) * turn_step_;
    E* const memory = row_ + offset;
    const int early = static_cast<int>(reinterpret_cast<uintptr_t>(memory) % 16 / sizeof(E)),
              from = (is_first ? chunk_ - skipped_ : chunk_) * kVec - early;
    memory_ = memory + from;
    at_ = row_begin_ + from;
  }

  int count_, length_, until_;  // elements: of the range, of a row, of the first one
  E* row_;                      // the first one
  int64_t done_;                // of its elements, before the range
  int64_t row_step_, turn_step_;
  int until_turn_;  // rows before the outer index goes on
  unsigned inner_;
  int chunks_, skipped_;  // of a row, those before the first one's
  int rows_apart_, chunks_apart_;
  int row_number_, chunk_;   // at hand
  int row_begin_, row_end_;  // its row's elements in the range
  E* memory_;
  int at_;
};

// Of an operand, the chunks that are not between its first and last element, where all memory can be read: at most two.
class Edges {
 public:
  template <typename E>
  __device__ __forceinline__ Edges(const ScanProblem& p, const E* pointer, const Strides& strides) {
    const auto low = reinterpret_cast<uintptr_t>(pointer),
               high = reinterpret_cast<uintptr_t>(pointer + strides.at(p.outer - 1, p.length - 1, p.inner - 1) + 1);
    low_ = low % 16 ? word(low) : 1;
    high_ = high % 16 ? word(high) : 1;
  }
  __device__ __forceinline__ bool have(const void* chunk) const {
    const uint32_t at = word(reinterpret_cast<uintptr_t>(chunk));
    return at == low_ || at == high_;
  }

 private:
  // A half is enough to know them by.
  static __device__ __forceinline__ uint32_t word(uintptr_t address) {
    return static_cast<uint32_t>(address / 16 * 16);
  }
  uint32_t low_, high_;
};

// A whole chunk to its offset in a range that begins at a multiple of 16 bytes, asynchronously; false where that needs
// better alignment.
template <typename E>
__device__ __forceinline__ bool copy_chunk(E* to, const RowChunk<const E>& chunk) {
  E* const here = to + chunk.at;
  if (chunk.at % chunk.kVec == 0) {
    copy_async<16>(here, chunk.memory, 16);
  } else if (chunk.at % (chunk.kVec / 4) == 0) {
#pragma unroll
    for (int e = 0; e < chunk.kVec; e += chunk.kVec / 4) copy_async<4>(here + e, chunk.memory + e, 4);
  } else {
    return false;
  }
  return true;
}

// Elements of less than four bytes.
template <typename E>
__device__ __forceinline__ void write_chunk(E* to, const RowChunk<const E>& chunk, const uint4& words) {
  if constexpr (sizeof(E) == 2) {
    if (chunk.is_whole()) {  // at an odd address
      uint16_t* const halves = reinterpret_cast<uint16_t*>(to);
      uint32_t* const pairs = reinterpret_cast<uint32_t*>(halves + 1);
      halves[0] = static_cast<uint16_t>(words.x);
      pairs[0] = __funnelshift_r(words.x, words.y, 16);
      pairs[1] = __funnelshift_r(words.y, words.z, 16);
      pairs[2] = __funnelshift_r(words.z, words.w, 16);
      halves[7] = static_cast<uint16_t>(words.w >> 16);
      return;
    }
  }
  E values[chunk.kVec];
  memcpy(values, &words, 16);
#pragma unroll
  for (int e = 0; e < chunk.kVec; ++e)
    if (chunk.has(e)) to[e] = values[e];
}

// What the hardware does not copy asynchronously is waited for, some chunks at a time.
template <int kTogether, typename E>
__device__ __forceinline__ void load_narrow_chunks(E* to, RowChunks<const E> chunks, const Edges& edges) {
  while (chunks.more()) {
    RowChunk<const E> taken[kTogether];
    uint4 words[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j, chunks.next()) {
      RowChunk<const E>& chunk = taken[j] = chunks.get();
      words[j] = {};
      if (chunk.is_whole() && copy_chunk(to, chunk)) chunk.end = 0;
      bool at_once = chunk.first < chunk.end;
      if (at_once && edges.have(chunk.memory)) {
        at_once = false;
        E values[chunk.kVec] = {};
#pragma unroll
        for (int e = 0; e < chunk.kVec; ++e)
          if (chunk.has(e)) values[e] = chunk.memory[e];
        memcpy(&words[j], values, 16);
      }
      load_where(at_once, reinterpret_cast<const uint4*>(chunk.memory), words[j]);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) write_chunk(to + taken[j].at, taken[j], words[j]);
  }
}
template <typename E>
__device__ __forceinline__ void load_chunks(E* to, RowChunks<const E> chunks) {
  for (; chunks.more(); chunks.next()) {
    const RowChunk<const E> chunk = chunks.get();
    E* const here = to + chunk.at;
    if (chunk.is_whole() && chunk.at % chunk.kVec == 0) {
      copy_async<16>(here, chunk.memory, 16);
      continue;
    }
#pragma unroll
    for (int e = 0; e < chunk.kVec; ++e)
      if (chunk.has(e)) copy_async<sizeof(E)>(here + e, chunk.memory + e, sizeof(E));
  }
}

// Rows whose elements are no neighbors: the lane's elements, every 32nd, and where an operand has them.
struct ElementCursor {
  const FlatParams& p;
  const Strides& strides;
  int at = threadIdx.x % 32;
  FlatPosition position, rows_apart;
  int64_t row_begin;
  __device__ __forceinline__ ElementCursor(const FlatParams& of, const Strides& by, int64_t begin)
      : p(of),
        strides(by),
        position(whole_rows(p, begin + at)),
        rows_apart(whole_rows(p, 32)),
        row_begin(RowIndex(p, position.row).offset(strides)) {}
  __device__ __forceinline__ int64_t offset() const { return row_begin + position.done * strides.time; }
  __device__ __forceinline__ void next() {
    at += 32;
    const int64_t row = position.row;
    position = moved(p, position, rows_apart.done, rows_apart.row);
    if (position.row != row) row_begin = RowIndex(p, position.row).offset(strides);
  }
};
template <typename E>
__device__ __forceinline__ void load_elements(E* to, const E* from, ElementCursor cursor, int count) {
  constexpr int kTogether = 4;
  while (cursor.at < count) {
    const int at = cursor.at;
    E values[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j, cursor.next())
      if (cursor.at < count) values[j] = from[cursor.offset()];
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      if (at + 32 * j < count) to[at + 32 * j] = values[j];
  }
}

// Elements of four bytes that one row has, in words of kBytes. Neighboring lanes take neighboring words, and a lane
// some with one address: in a loop over single ones most instructions are for addresses.
template <int kBytes, typename E>
__device__ __forceinline__ void copy_words_of_row(E* to, const E* from, int count) {
  static_assert(sizeof(E) == 4);
  constexpr int kTogether = 4, kOf = kBytes / 4, kApart = 32 * kOf;
  int at = static_cast<int>(threadIdx.x % 32) * kOf;
#pragma unroll 1
  for (; at + (kTogether - 1) * kApart + kOf <= count; at += kTogether * kApart) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) copy_async<kBytes>(to + at + j * kApart, from + at + j * kApart, kBytes);
  }
#pragma unroll 1
  for (; at < count; at += kApart) copy_async<kBytes>(to + at, from + at, kBytes);
}
template <typename E>
__device__ __forceinline__ void copy_part_of_row(E* to, const E* from, int count) {
  const bool is_aligned = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 == 0;
  const int whole = is_aligned ? count / 4 * 4 : 0;
  if (is_aligned) copy_words_of_row<16>(to, from, whole);
  copy_words_of_row<4>(to + whole, from + whole, count - whole);
}

// Elements that one row has, in words that are whole in shared memory: neighboring lanes take neighboring ones. Those
// of memory are as well aligned, or each is made of two, of which the first may begin up to three bytes before the
// elements: not before memory that is there, as it begins at whole words.
template <typename E>
__device__ __forceinline__ void load_part_of_row(E* to, const E* from, int count) {
  constexpr int kWord = sizeof(E) > 4 ? 8 : 4, kSize = static_cast<int>(sizeof(E));
  const int lane = threadIdx.x % 32, bytes = count * kSize;
  const auto address = reinterpret_cast<uintptr_t>(from);
  const char* const source = reinterpret_cast<const char*>(from);
  char* const words = reinterpret_cast<char*>(to);
  int done;  // bytes
  if (address % 16 == 0) {
    done = bytes / 16 * 16;
    for (int at = 16 * lane; at < done; at += 16 * 32) copy_async<16>(words + at, source + at, 16);
  } else if (kSize >= 4 || address % 4 == 0) {
    done = bytes / kWord * kWord;
    for (int at = kWord * lane; at < done; at += kWord * 32) copy_async<kWord>(words + at, source + at, kWord);
  } else {
    constexpr int kTogether = 4;
    const int early = static_cast<int>(address % 4);
    const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(source - early);
    const int count_of_words = max((bytes + early) / 4 - 1, 0);
    done = 4 * count_of_words;
#pragma unroll 1
    for (int first = lane; first < count_of_words; first += 32 * kTogether) {
      uint32_t low[kTogether], high[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int word = first + 32 * j;
        if (word < count_of_words) low[j] = pairs[word], high[j] = pairs[word + 1];
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int word = first + 32 * j;
        if (word < count_of_words) reinterpret_cast<uint32_t*>(to)[word] = __funnelshift_r(low[j], high[j], 8 * early);
      }
    }
  }
  for (int element = done / kSize + lane; element < count; element += 32) to[element] = from[element];
}

// Elements [begin, begin + count) of memory, by a warp, to a multiple of 16 bytes in shared memory. `kTogether`:
// half-precision chunks that are waited for at a time. A call, as storing is: inlined, such copies lie in the midst of
// the code of rows that are flat, which then takes longer to come from memory.
template <int kTogether, typename E>
__device__ __noinline__ void load_rows(
    const FlatParams& p, E* to, const E* from, const Strides& strides, int64_t begin, int count) {
  if (strides.time != 1) return load_elements(to, from, ElementCursor(p, strides, begin), count);
  FlatPosition position = whole_rows(p, begin);
  if constexpr (sizeof(E) == 4) {
    if (p.problem.length >= kLeastPartedSteps) {
      for (int done = 0; done < count; ++position.row, position.done = 0) {
        const int64_t left = p.problem.length - position.done;
        const int part = static_cast<int>(min(left, static_cast<int64_t>(count - done)));
        copy_part_of_row(to + done, from + (RowIndex(p, position.row).offset(strides) + position.done), part);
        done += part;
      }
      return;
    }
  }
  if (position.done + count <= p.problem.length) {
    load_part_of_row(to, from + (RowIndex(p, position.row).offset(strides) + position.done), count);
    return;
  }
  const RowChunks<const E> chunks(p, from, strides, begin, count);
  if constexpr (sizeof(E) < 4)
    load_narrow_chunks<sizeof(E) == 1 ? 1 : kTogether>(to, chunks, Edges(p.problem, from, strides));
  else load_chunks(to, chunks);
}

// Sixteen bytes of shared memory from an element's address on.
template <typename E>
__device__ __forceinline__ uint4 read_chunk(const E* from) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (address % 16 == 0) return *reinterpret_cast<const uint4*>(from);
  if constexpr (sizeof(E) == 2) {
    const int odd = static_cast<int>(address / 2 % 2);
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(from - odd);
    const uint32_t a = words[0], b = words[1], c = words[2], d = words[3], e = words[3 + odd];
    return {__funnelshift_r(a, b, 16 * odd), __funnelshift_r(b, c, 16 * odd), __funnelshift_r(c, d, 16 * odd),
        __funnelshift_r(d, e, 16 * odd)};
  } else {
    E values[16 / sizeof(E)];
#pragma unroll
    for (int e = 0; e < static_cast<int>(16 / sizeof(E)); ++e) values[e] = from[e];
    uint4 words;
    memcpy(&words, values, 16);
    return words;
  }
}

// Those from shared memory.
template <typename E>
__device__ __noinline__ void store_rows(
    const FlatParams& p, E* to, const E* from, const Strides& strides, int64_t begin, int count) {
  if (strides.time != 1) {
    for (ElementCursor cursor(p, strides, begin); cursor.at < count; cursor.next())
      to[cursor.offset()] = from[cursor.at];
    return;
  }
  for (RowChunks<E> chunks(p, to, strides, begin, count); chunks.more(); chunks.next()) {
    const RowChunk<E> chunk = chunks.get();
    const E* const here = from + chunk.at;
    if (chunk.is_whole()) {
      *reinterpret_cast<uint4*>(chunk.memory) = read_chunk(here);
      continue;
    }
#pragma unroll
    for (int e = 0; e < chunk.kVec; ++e)
      if (chunk.has(e)) chunk.memory[e] = here[e];
  }
}

}  // namespace dcs
