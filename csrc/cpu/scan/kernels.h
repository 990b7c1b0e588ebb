// What the driver (ops.cpp) asks of the kernels, which are compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "dcs/scan/problem.h"

namespace dcs::cpu {

// Rows are numbered outer * problem.inner + inner. Steps and chunks are counted in scan order.

constexpr int64_t kChunk = 4096;      // steps; of no number of threads, so that bits do not depend on it
constexpr int64_t kAbreast = 8;       // rows, or chunks of a row, of a line
constexpr int64_t kWidestVector = 8;  // doubles, of all instruction sets
constexpr int64_t kColumns = 512;     // columns of a block: their carries and gates stay in the first-level cache
constexpr int64_t kMostColumns = kColumns + kWidestVector - 1;  // that one call takes

// Blocks of `width` columns. What is left beside whole ones is the last one's if it would be no vector.
inline int64_t column_blocks(int64_t columns, int64_t width) {
  const int64_t whole = columns / width;
  return whole == 0 || columns - whole * width >= kWidestVector ? whole + 1 : whole;
}

// Room for one number of any kind.
struct Value {
  double re, im;
};

// A chunk seen as y_out = sum + product * y_in, and then its carry-in and its share of gamma's gradient.
struct Chunk {
  Value sum;
  Value product;
  Value carry;
  Value partial;
  bool cut;  // a reset, or the beginning of the row: y_out = sum
};

struct Kernels {
  const char* name;

  // Whether `columns` takes the problem; else, whether those that take chunks do; else `rows` does.
  bool (*by_columns)(const ScanProblem&);
  bool (*by_chunks)(const ScanProblem&);

  // Whole columns [inner, inner + count) of one outer index: a vector at least, kMostColumns at most.
  void (*columns)(const ScanProblem&, int64_t outer, int64_t inner, int64_t count);
  // Whole rows: of `sets` of them, those in [begin, end).
  int64_t (*sets)(const ScanProblem&);
  void (*rows)(const ScanProblem&, int64_t begin, int64_t end);

  // How long chunks are, how many of a row are scanned together, and how many neighboring rows.
  int64_t (*chunk_steps)(const ScanProblem&);
  int64_t (*abreast)(const ScanProblem&);
  int64_t (*together)(const ScanProblem&);

  // The rows that stay together with `row` in chunks [begin, end), chunks[c - begin] describing chunk c, the next row's
  // `stride` further: sums and products; then, row by row and over all in order, carries (`carry`: the row's value
  // before the first of them, updated to the one after the last); then outputs and partials.
  void (*aggregate)(const ScanProblem&, int64_t row, int64_t begin, int64_t end, Chunk* chunks, int64_t stride);
  void (*carry)(const ScanProblem&, int64_t row, int64_t begin, int64_t end, Chunk* chunks, Value* carry);
  void (*scan_chunks)(const ScanProblem&, int64_t row, int64_t begin, int64_t end, Chunk* chunks, int64_t stride);
  // Both at once, for one chunk with its carry and the same bits: the rows' chunks lie next to each other. Where
  // `takes_one_pass`.
  bool (*takes_one_pass)(const ScanProblem&);
  void (*scan_and_aggregate)(const ScanProblem&, int64_t row, int64_t chunk, Chunk* chunks);
  // Adds a row's partials to `sum`, and writes the sum as gamma's gradient.
  void (*add_partials)(const ScanProblem&, int64_t begin, int64_t end, const Chunk* chunks, Value* sum);
  void (*store_partial)(const ScanProblem&, int64_t row, const Value* sum);

  // One row's outputs of the windows' blocks [begin, end); scratch: problem.window values.
  void (*window)(const ScanProblem&, int64_t row, int64_t begin, int64_t end, Value* scratch);
};

extern const Kernels kKernelsDefault;
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;

}  // namespace dcs::cpu
