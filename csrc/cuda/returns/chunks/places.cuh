// Where a block finds the steps of its walk, in memory and in its tile.
#pragma once

#include "returns/chunks/params.cuh"

namespace dcs {

// Lines count from a column's first one in memory; in the order of the scan the last one comes first. A tile's slots go
// through memory from its end: slot 0 is the last column of its first line in that order. A thread has those that are
// 256 apart.
template <typename Acc>
struct ReturnsPlaces {
  const ReturnsChunksParams<Acc>& params;
  const ReturnsProblem& p = params.problem;
  const ReturnsPlan& plan = params.plan;
  int walk, chunk, begin, end;  // of the chunk's lines, in the order of the scan
  int columns, first_column;    // of the walk
  int first_row = 0;            // of its lines
  const bool has_own_values = p.values.data && !p.values_are_next;
  // Of the tile.
  int first_line = 0;      // of slot 0
  int there = 0;           // slots that are, in whole lines
  bool is_even = false;    // the thread's slots are equally far apart in each tensor
  bool has_lasts = false;  // some slots are the last step of a row
  int row = 0;             // of an even tile's lines, where rows are padded
  int in_row = 0;          // of the thread's first slot: how far its row goes before it

  // A walk has so many chunks in this launch.
  __device__ __forceinline__ ReturnsPlaces(const ReturnsChunksParams<Acc>& given, uint32_t chunks) : params(given) {
    walk = static_cast<int>(blockIdx.x / chunks);
    chunk = static_cast<int>(blockIdx.x - static_cast<uint32_t>(walk) * chunks);
    const int spans = static_cast<int>(plan.spans);
    if (plan.rows_apart) first_row = walk / spans;
    first_column = (walk - first_row * spans) * plan.sequences;
    columns = min(plan.sequences, static_cast<int>(p.inner) - first_column);
    begin = chunk * static_cast<int>(plan.chunk_steps);
    end = static_cast<int>(min((chunk + 1) * plan.chunk_steps, plan.lines));
  }

  // From line `first` of the scan on.
  __device__ __forceinline__ void begin_tile(int first) {
    const int here = min(plan.tile_steps, end - first), length = static_cast<int>(p.length);
    first_line = static_cast<int>(plan.lines) - 1 - first;
    there = here * plan.sequences;
    row = row_of_line(first_line);
    const int step = first_line - row * length;
    has_lasts = step == length - 1 || here > step + 1;
    is_even = !params.padded || here <= step + 1;
    if (!has_lasts) return;
    in_row = (step + 1) * params.line_places - 1 -
        (plan.linear ? static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x) >> params.column_bits);
    in_row %= params.row_places;
    if (in_row < 0) in_row += params.row_places;
  }
  __device__ __forceinline__ int row_of_line(int line) const {
    return p.outer == 1 || plan.rows_apart ? 0 : static_cast<int>(params.length.of(static_cast<uint32_t>(line)));
  }
  __device__ __forceinline__ int column_of(int sequence) const { return plan.sequences - 1 - sequence; }
  // Of a slot: how many lines it is from the tile's first one, and its column in the walk.
  __device__ __forceinline__ int line_of_slot(int slot) const {
    if (!plan.linear) return slot >> params.column_bits;
    return plan.sequences == 1 ? slot : static_cast<int>(params.sequences.of(static_cast<uint32_t>(slot)));
  }
  __device__ __forceinline__ int column_of_slot(int slot) const {
    return column_of(slot - line_of_slot(slot) * plan.sequences);
  }
  // Where a row's own value is, with `strides` of no time.
  __device__ __forceinline__ int64_t at_row(int of_row, int column, const Strides& strides) const {
    return (first_row + of_row) * strides.outer + (p.inner == 1 ? 0 : (first_column + column) * strides.inner);
  }
};

}  // namespace dcs
