// Where the threads of small scans are whose blocks take a span of neighboring lines through all of time: columns
// (columns/small_columns.cuh) or a row (rows/float_rows.cuh).
#pragma once

#include <cstring>

#include "common/divisor.cuh"
#include "common/element_types.cuh"
#include "common/word.cuh"

namespace dcs {

// An operand from the scan's first step on, with strides of elements in the scan's direction.
struct SmallColumnOperand {
  const void* data;  // null where there is none
  int outer, time, inner;
};

// What kernels of small scans are launched with, whose blocks share a span of lines.
struct SmallLinesParams {
  SmallColumnOperand input, output, initial;
  Divisor spans, cluster;  // of an outer row; blocks that share time
  int length, columns;     // steps, and columns of one of them
  int span;                // columns of a block
  int span_bits;           // 2^these lanes of a slot, at least the span
  int steps;               // of a thread
  bool flat, reverse;
  void* words;  // by which blocks share time that are no cluster (small_words.cuh, float_exchange.cuh)
  CallTag tag;
};

// A thread's place: lanes of a warp are neighboring columns of a span, then neighbors in time (slots).
template <typename Params>
struct SmallPlaceOf {
  const Params& p;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
            warps = static_cast<int>(blockDim.x) / 32;
  const int slots = 32 >> p.span_bits, slot = lane >> p.span_bits, span_column = lane & ((1 << p.span_bits) - 1);
  int rank = 0;                    // of the block among those that share time
  int outer, first_column, width;  // of the span, which has `width` columns
  int warp_step, first_step;       // the warp's; the thread's

  __device__ __forceinline__ explicit SmallPlaceOf(const Params& params) : p(params) {
    uint32_t group = blockIdx.x;
    if (p.cluster.divisor > 1) {
      group = p.cluster.of(blockIdx.x);
      rank = static_cast<int>(blockIdx.x - group * p.cluster.divisor);
    }
    outer = static_cast<int>(p.spans.of(group));
    first_column = static_cast<int>(group - static_cast<uint32_t>(outer) * p.spans.divisor) * p.span;
    width = min(p.span, p.columns - first_column);
    warp_step = (rank * warps + warp) * slots * p.steps;
    first_step = warp_step + slot * p.steps;
  }
};

// A column's words of all blocks that share its time, of which neighboring lanes read neighboring ones.
template <typename Words, typename Params>
__device__ __forceinline__ Words* words_of_column(const SmallPlaceOf<Params>& at, int column) {
  const uint32_t first = (blockIdx.x - static_cast<uint32_t>(at.rank)) * static_cast<uint32_t>(at.p.span);
  return static_cast<Words*>(at.p.words) + first + column * static_cast<int>(at.p.cluster.divisor);
}

// A word's value.
template <typename T, typename Acc>
__device__ __forceinline__ Acc value_of_word(uint32_t word) {
  T element;
  memcpy(&element, &word, sizeof element);
  return static_cast<Acc>(cast<float>(element));
}

}  // namespace dcs
