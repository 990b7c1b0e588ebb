// Rows of contiguous time as one flat sequence: position after position in the order of the scan, row after row, with a
// recurrence that starts anew at every multiple of a row's length. No alignment, number or length of rows is a case of
// its own: where a tile begins in its row is arithmetic.
//
// Positions count from 0 at the scan's first element; a reverse scan's lie in memory from the end on. An index is a
// position plus `phase`, which makes every multiple of kFlatGrain an aligned address in either direction.
#pragma once

#include "common/element_types.cuh"
#include "common/word.cuh"
#include "dcs/scan/problem.h"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

struct FlatParams {
  ScanProblem problem;
  int64_t rows, count;  // elements of all rows: rows * length
  int64_t phase;
  int64_t tile;  // elements from tile to tile
  int64_t tiles;
  uint64_t inverse;  // 2^64 / length
  uint64_t inner_inverse;
  uint64_t starts;          // bits at the multiples of length
  int64_t lift;             // rows before the first one: of kFlatGrain elements at least
  int vectors;              // of a lane; odd, so that the lanes' lie in different banks
  double lane_powers[6];    // of a number gamma over 1, 2, 4, ... lanes
  double lane_weights[32];  // over the lanes before each
  bool one_gamma;           // of all rows
  // Of each operand whether all rows lie one behind the other from an aligned address on.
  struct Flat {
    bool input, gates, saved, reset, output, gradient;
  } flat;
  bool all_flat;  // of those that there are
  int cluster;    // of flat_rows_kernel: blocks of a row, or 1
  // Of long_rows_kernel: tiles in shared memory; what the blocks leave each other.
  int stages;
  void* segments;
  CallTag tag;
};

// A row, and how many of its elements come before.
struct FlatPosition {
  int64_t row, done;
};
// So many whole rows and elements.
__device__ __forceinline__ FlatPosition whole_rows(const FlatParams& p, int64_t elements) {
  const int64_t length = p.problem.length;
  FlatPosition at;
  at.row = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(elements), p.inverse));
  at.done = elements - at.row * length;
  if (at.done >= length) at.done -= length, ++at.row;
  return at;
}
__device__ __forceinline__ FlatPosition locate(const FlatParams& p, int64_t index) {
  FlatPosition at = whole_rows(p, index - p.phase + p.lift * p.problem.length);
  at.row -= p.lift;
  return at;
}
// So many rows and fewer than a row's elements on, or as many elements back.
__device__ __forceinline__ FlatPosition moved(
    const FlatParams& p, FlatPosition at, int64_t elements, int64_t rows = 0) {
  at.row += rows;
  at.done += elements;
  if (at.done < 0) at.done += p.problem.length, --at.row;
  else if (at.done >= p.problem.length) at.done -= p.problem.length, ++at.row;
  return at;
}

// A kernel's direction: one that it is compiled for, or the problem's, which is a value there.
enum class Direction { kForward, kReverse, kEither };
template <Direction kDirection>
struct InDirection {
  static constexpr bool reverse = kDirection == Direction::kReverse;
  __device__ __forceinline__ explicit InDirection(const FlatParams&) {}
};
template <>
struct InDirection<Direction::kEither> {
  const bool reverse;
  __device__ __forceinline__ explicit InDirection(const FlatParams& p) : reverse(p.problem.reverse) {}
};

// The number in memory of a row in the order of the scan; of rows that there are not, one that there is.
template <Direction kDirection>
__device__ __forceinline__ int64_t memory_row(const FlatParams& p, int64_t row) {
  const bool reverse = kDirection == Direction::kEither ? p.problem.reverse : kDirection == Direction::kReverse;
  return max(int64_t{0}, min(p.rows - 1, reverse ? p.rows - 1 - row : row));
}

// Where one begins: a 64-bit division is a call of 100 instructions.
struct RowIndex {
  int64_t outer, inner;
  __device__ __forceinline__ RowIndex(const FlatParams& p, int64_t row) : outer(row), inner(0) {
    const int64_t size = p.problem.inner;
    if (size == 1) return;
    outer = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(row), p.inner_inverse));
    inner = row - outer * size;
    if (inner >= size) inner -= size, ++outer;
  }
  __device__ __forceinline__ int64_t offset(const Strides& strides) const { return strides.at(outer, inner); }
};

template <Direction kDirection, typename Wide>
__device__ __forceinline__ Wide gamma_of(const FlatParams& p, int64_t row) {
  const ScanProblem& problem = p.problem;
  if (problem.gamma_kind == GammaKind::kNumber) return cast<Wide>(problem.gamma_value);
  return load_gamma<Wide>(problem.gamma, problem.gamma_dtype,
      RowIndex(p, memory_row<kDirection>(p, row)).offset(problem.gamma_strides), problem.conjugate_gamma);
}

}  // namespace dcs
