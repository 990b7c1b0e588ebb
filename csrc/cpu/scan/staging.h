// Tiles of few columns as doubles, in scan order and without gaps, whatever the operand's layout.
#pragma once

#include "scan/row_view.h"
#include "scan/runs.h"
#include "common/simd.h"

namespace dcs::cpu {
namespace {

constexpr int64_t kTile = 512;  // elements: the operands of a tile stay in the first-level cache

// The columns of an outer index lie side by side in memory: steps first and columns within a step, an element's
// predecessor in time lies `lag` elements back.
struct Groups {
  int64_t lag;
  int64_t size;  // elements of one

  explicit Groups(const ScanProblem& problem) : lag(problem.inner), size(problem.length * problem.inner) {}
};

// Steps [time, time + steps), counted in memory's order, of adjacent groups.
struct Tile {
  int64_t group, groups;
  int64_t time, steps;
};

// run(offset, index, count, stride, apart) for the runs of an operand: elements from `offset` on, `stride` apart in
// memory, belong `apart` from each other into the tile, from `index` on.
template <typename Run>
DCS_INLINE void for_each_run(
    const ScanProblem& problem, const Groups& groups, const Strides& strides, const Tile& tile, const Run& run) {
  const int64_t lag = groups.lag, of_group = tile.steps * lag;
  const bool is_dense = (strides.time == lag || problem.length == 1) && strides.inner == 1;
  const bool is_packed = strides.outer == groups.size;
  const int64_t together = is_dense && (tile.groups == 1 || is_packed) ? tile.groups : 1;
  for (int64_t k = 0; k < tile.groups; k += together) {
    const int64_t from = (tile.group + k) * strides.outer + tile.time * strides.time;
    if (is_dense) {
      run(from, k * of_group, together * of_group, 1, 1);
      continue;
    }
    for (int64_t c = 0; c < lag; ++c) run(from + c * strides.inner, k * of_group + c, tile.steps, strides.time, lag);
  }
}

// Runs of `size` elements, `apart` from each other, one behind the other.
template <typename T>
DCS_SHARED void copy_elements(T* to, const T* from, int64_t runs, int64_t apart, int64_t size) {
  constexpr int64_t kBytes = sizeof(T);
  copy_runs(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), runs, apart * kBytes, size * kBytes);
}

// The tile's elements of an operand side by side, in memory's order: in place if they are, else in `room`.
template <typename T>
DCS_SHARED const T* gathered(const ScanProblem& problem, const Groups& groups, const T* operand, const Strides& strides,
    const Tile& tile, T* room) {
  const int64_t of_group = tile.steps * groups.lag, all = tile.groups * of_group;
  if (strides.inner == 1 && groups.lag > 1 && strides.time > groups.lag) {
    for (int64_t k = 0; k < tile.groups; ++k) {
      const T* const from = operand + ((tile.group + k) * strides.outer + tile.time * strides.time);
      copy_elements(room + k * of_group, from, tile.steps, strides.time, groups.lag);
    }
    return room;
  }
  const T* found = room;
  for_each_run(problem, groups, strides, tile,
      [&](int64_t offset, int64_t index, int64_t count, int64_t stride, int64_t apart) __attribute__((always_inline)) {
        if (count == all && stride == 1) {
          found = operand + offset;
          return;
        }
        for (int64_t i = 0; i < count; ++i) room[index + i * apart] = operand[offset + i * stride];
      });
  return found;
}

// Where to write the tile's elements in memory's order: in place, or into `room`; `scatter` does the rest.
template <typename T>
DCS_SHARED T* target(
    const ScanProblem& problem, const Groups& groups, T* result, const Strides& strides, const Tile& tile, T* room) {
  const int64_t all = tile.groups * tile.steps * groups.lag;
  T* found = room;
  for_each_run(problem, groups, strides, tile,
      [&](int64_t offset, int64_t, int64_t count, int64_t stride, int64_t) __attribute__((always_inline)) {
        if (count == all && stride == 1) found = result + offset;
      });
  return found;
}

template <typename T>
DCS_SHARED void scatter(const ScanProblem& problem, const Groups& groups, T* result, const Strides& strides,
    const Tile& tile, const T* room) {
  for_each_run(problem, groups, strides, tile,
      [&](int64_t offset, int64_t index, int64_t count, int64_t stride, int64_t apart) __attribute__((always_inline)) {
        for (int64_t i = 0; i < count; ++i) result[offset + i * stride] = room[index + i * apart];
      });
}

template <typename T>
DCS_SHARED void widen(double* to, const T* from, int64_t count, bool reverse) {
  int64_t i = 0;
  if (reverse) {
    for (; i + kWidth <= count; i += kWidth) store(to + i, reversed(load(from + (count - i - kWidth))));
    for (; i < count; ++i) to[i] = Element<T>::load(from[count - 1 - i]);
    return;
  }
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = Element<T>::load(from[i]);
}

template <typename T>
DCS_SHARED void narrow(T* to, const double* from, int64_t count, bool reverse) {
  int64_t i = 0;
  if (reverse) {
    for (; i + kWidth <= count; i += kWidth) store(to + (count - i - kWidth), reversed(load(from + i)));
    for (; i < count; ++i) to[count - 1 - i] = Element<T>::store(from[i]);
    return;
  }
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = Element<T>::store(from[i]);
}

DCS_SHARED void copy_flags(bool* to, const bool* from, int64_t count, bool reverse) {
  if (!reverse) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    return;
  }
  for (int64_t i = 0; i < count; ++i) to[i] = from[count - 1 - i];
}

// Zeros where a flag is set; most are not.
DCS_SHARED void zero_where(double* values, const bool* flags, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, flags + i, sizeof eight);
    if (eight == 0) continue;
    for (int64_t j = i; j < i + 8; ++j) values[j] = flags[j] ? 0.0 : values[j];
  }
  for (; i < count; ++i) values[i] = flags[i] ? 0.0 : values[i];
}

}  // namespace
}  // namespace dcs::cpu
