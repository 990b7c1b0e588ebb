// Where the elements of small rows are, and how a thread gets them: a vector, or element by element (small_rows.cuh).
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/divisor.cuh"
#include "common/ptx/global_load.cuh"
#include "common/vector.cuh"
#include "dcs/scan/problem.h"

namespace dcs {

// An operand from the scan's first element on, with strides in the scan's direction. Rows of those with an element for
// every step lie equally far apart.
struct SmallOperand {
  const void* data;
  int pitch, time;
  // Of each kVec elements of a thread, that they are neighbors in memory which begin at a multiple of their size.
  bool in_words;
};
struct SmallRowOperand {
  const void* data;
  int outer, inner;
};

struct SmallRowsParams {
  SmallOperand input, gates, reset, output;  // null where there are none
  SmallRowOperand gamma, initial;
  Divisor length, inner, cluster;  // elements of a row, inner rows, blocks of a cluster
  int rows, group_rows;            // of all, of a block or cluster
  int levels;                      // of shuffles: 2^levels lanes are farther than a row reaches
  int back;                        // 1 where gates and resets are those of the step before
  bool reverse, by_step;
  ElementType gamma_dtype;
  double number, powers[6];      // gamma; over 1, 2, 4, ... lanes
  SmallOperand saved, gradient;  // backward
  SmallRowOperand sums;
  int64_t partials;  // of a sum
};

// Of so many neighboring elements, those that come and go as one word.
template <typename E, int kVec>
constexpr int kWordElements = std::min(kVec, 16 / static_cast<int>(sizeof(E)));

// What a thread has asked for: a vector in the order of memory, or elements in the order of the scan, in registers of
// their own.
template <typename E, int kVec>
struct Asked {
  static constexpr int kWords = sizeof(E) == 8 ? 2 : 1;
  uint32_t words[kVec * kWords] = {};

  __device__ __forceinline__ void load_vector(bool wanted, const E* from) {
    constexpr int kOf = kWordElements<E, kVec>;
#pragma unroll
    for (int i = 0; i < kVec; i += kOf)
      load_words_where(wanted, reinterpret_cast<const Vector<E, kOf>*>(from + i), words + i * sizeof(E) / 4);
  }
  __device__ __forceinline__ void load(bool wanted, const E* from, int i) {
    load_words_where(wanted, from, words + i * kWords);
  }
  __device__ __forceinline__ Vector<E, kVec> vector() const { return as<Vector<E, kVec>>(words); }
  __device__ __forceinline__ E operator[](int i) const { return as<E>(words + i * kWords); }

 private:
  template <typename To>
  __device__ __forceinline__ static To as(const uint32_t* from) {
    To to;
    memcpy(&to, from, sizeof to);
    return to;
  }
};

// A thread's elements. Params have what SmallOperands::place fills (small_params.cuh), and `reverse`.
template <int kVec, typename Params = SmallRowsParams>
struct SmallElements {
  const Params& p;
  const int length = static_cast<int>(p.length.divisor);
  int rank = 0;             // of the block in its cluster
  int first_row, elements;  // of the block's rows, or the cluster's
  int at;                   // elements of these before the thread's first one
  int row, done;            // of the first one, elements of its row before it; negative before the first row
  int low, high;            // those that are of these rows
  bool is_whole;            // all of its own are
  bool is_word;             // its words are in the tensor

  __device__ __forceinline__ explicit SmallElements(const Params& params) : p(params) {
    uint32_t group = blockIdx.x;
    if (p.cluster.divisor > 1) {
      group = p.cluster.of(blockIdx.x);
      rank = static_cast<int>(blockIdx.x - group * p.cluster.divisor);
    }
    first_row = static_cast<int>(group) * p.group_rows;
    elements = min(p.rows - first_row, p.group_rows) * length;
    // Threads begin where words do, if rows lie one behind the other.
    const int from_word = (first_row - (p.reverse ? p.rows : 0)) * length & (kVec - 1);
    at = (rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVec - from_word;
    const int rows_before = whole_rows(max(at, 0));
    row = first_row + rows_before;
    done = at - rows_before * length;
    low = max(0, -at);
    high = max(0, min(kVec, elements - at));
    // Not high == kVec, for which nvcc 13.0 takes a predicate that is true behind the last element of doubles, too.
    is_whole = at >= 0 && at + kVec <= elements;
    const int index = first_row * length + at;
    is_word = high > 0 && index >= 0 && index + kVec <= p.rows * length;
  }
  // Of the block in its cluster that has the last element.
  __device__ __forceinline__ int last_rank() const {
    const int threads = static_cast<int>(blockDim.x), end = elements - 1 - at;  // from the thread's first element on
    return rank + (end + static_cast<int>(threadIdx.x) * kVec) / (threads * kVec);
  }
  __device__ __forceinline__ bool has(int i) const { return i >= low && i < high; }
  __device__ __forceinline__ int whole_rows(int count) const {
    return static_cast<int>(p.length.of(static_cast<uint32_t>(count)));
  }

  __device__ __forceinline__ int offset(const SmallRowOperand& of, int at_row) const {
    const int outer = static_cast<int>(p.inner.of(static_cast<uint32_t>(at_row)));
    return outer * of.outer + (at_row - outer * static_cast<int>(p.inner.divisor)) * of.inner;
  }
  // Calls `visit` with each element's number, row, and elements of the row before it.
  template <typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
    int at_row = row, at_done = done;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (at_done == length) at_done = 0, ++at_row;
      visit(i, at_row, at_done);
      ++at_done;
    }
  }

  // The same, and how far from the thread's first element each lies.
  template <typename Visit>
  __device__ __forceinline__ void each_of(const SmallOperand& of, const Visit& visit) const {
    const int to_next_row = of.pitch - (length - 1) * of.time;
    int ahead = 0, row_before = row;
    each([&](int i, int at_row, int at_done) {
      if (i > 0) ahead += at_row != row_before ? to_next_row : of.time;
      row_before = at_row;
      visit(i, at_row, at_done, ahead);
    });
  }

  // Where the thread's first element lies.
  template <typename E>
  __device__ __forceinline__ const E* first_of(const SmallOperand& of, int back = 0) const {
    return static_cast<const E*>(of.data) + (row * of.pitch + (done - back) * of.time);
  }
  // `back`: of the step before, where the row has one.
  template <typename E>
  __device__ __forceinline__ void ask(
      const SmallOperand& of, const E* first, Asked<E, kVec>& asked, int back = 0) const {
    if (of.in_words) {
      asked.load_vector(is_word, p.reverse ? first - (kVec - 1) : first);
      if (is_word || high == 0) return;
#pragma unroll
      for (int i = 0; i < kVec; ++i) asked.load(has(i), p.reverse ? first - i : first + i, i);
    } else {
      each_of(of, [&](int i, int, int at_done, int ahead) { asked.load(has(i) && at_done >= back, first + ahead, i); });
    }
  }
  // Element by element what is behind each: of a row's last one its `ends`, if there are.
  template <typename E>
  __device__ __forceinline__ void ask_behind(
      const SmallOperand& of, const SmallRowOperand& ends, Asked<E, kVec>& asked) const {
    const E* const first = first_of<E>(of, -1);
    each_of(of, [&](int i, int at_row, int at_done, int ahead) {
      const E* from = first + ahead;
      const bool is_last = at_done == length - 1;
      if (ends.data && is_last) from = static_cast<const E*>(ends.data) + offset(ends, at_row);
      asked.load(has(i) && (!is_last || ends.data), from, i);
    });
  }
  // In the order of the scan.
  template <typename Acc, typename E>
  __device__ __forceinline__ void get(const SmallOperand& of, const Asked<E, kVec>& asked, Acc (&to)[kVec]) const {
    if (of.in_words && is_word) {
      Acc values[kVec];
      unpack(asked.vector(), values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) to[i] = p.reverse ? values[kVec - 1 - i] : values[i];
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) to[i] = cast<Acc>(asked[i]);
    }
  }

  template <typename Acc>
  __device__ __forceinline__ void get_row_gammas(Acc (&to)[kVec]) const {
    const auto load = [&](const auto* gammas) {
      Asked<std::decay_t<decltype(*gammas)>, kVec> asked;
      each([&](int i, int at_row, int) { asked.load(has(i), gammas + offset(p.gamma, at_row), i); });
#pragma unroll
      for (int i = 0; i < kVec; ++i) to[i] = cast<Acc>(asked[i]);
    };
    switch (p.gamma_dtype) {
      case ElementType::Half: return load(static_cast<const __half*>(p.gamma.data));
      case ElementType::BFloat16: return load(static_cast<const __nv_bfloat16*>(p.gamma.data));
      case ElementType::Float: return load(static_cast<const float*>(p.gamma.data));
      default: return load(static_cast<const double*>(p.gamma.data));
    }
  }

  // `shared` has a vector a thread, by way of which the warp's lanes take single elements in turn.
  template <typename T, typename Acc>
  __device__ __forceinline__ void store(
      const SmallOperand& operand, const Acc (&values)[kVec], unsigned char* shared) const {
    T* const to = static_cast<T*>(const_cast<void*>(operand.data));
    if (operand.in_words) {
      T* const first = const_cast<T*>(first_of<T>(operand));
      if (is_whole) {
        Acc turned[kVec];
#pragma unroll
        for (int i = 0; i < kVec; ++i) turned[i] = p.reverse ? values[kVec - 1 - i] : values[i];
        store_words(p.reverse ? first - (kVec - 1) : first, pack<Acc, T, kVec>(turned));
        return;
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (has(i)) *(p.reverse ? first - i : first + i) = cast<T>(values[i]);
      return;
    }
    const int lane = static_cast<int>(threadIdx.x) % 32;
    T* const warp = reinterpret_cast<T*>(shared) + (static_cast<int>(threadIdx.x) - lane) * kVec;
    reinterpret_cast<Vector<T, kVec>*>(warp)[lane] = pack<Acc, T, kVec>(values);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int own = 32 * i + lane, index = at - lane * kVec + own, rows_before = whole_rows(max(index, 0));
      if (index >= 0 && index < elements)
        to[(first_row + rows_before) * operand.pitch + (index - rows_before * length) * operand.time] = warp[own];
    }
  }

 private:
  template <typename T>
  static __device__ __forceinline__ void store_words(T* to, const Vector<T, kVec>& values) {
    using Word = Vector<T, kWordElements<T, kVec>>;
    Word words[sizeof values / sizeof(Word)];
    memcpy(words, &values, sizeof values);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof values / sizeof(Word)); ++i) reinterpret_cast<Word*>(to)[i] = words[i];
  }
};

}  // namespace dcs
