// The operands and results of `_temporal_difference_scan` along lines: adjacent elements, in place where they are
// adjacent in memory and gathered where not.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "returns/kernels.h"
#include "common/simd.h"

namespace dcs::cpu {
namespace {

constexpr int64_t kLine = kReturnsColumns;

template <typename T>
DCS_INLINE const T* at(const ReturnsInput& input, int64_t outer, int64_t time, int64_t inner) {
  return static_cast<const T*>(input.data) + input.strides.at(outer, time, inner);
}

template <typename T>
DCS_INLINE T* at(const ReturnsOutput& output, int64_t outer, int64_t time, int64_t inner) {
  return static_cast<T*>(output.data) + output.strides.at(outer, time, inner);
}

template <typename T>
DCS_SHARED void gather(const T* from, int64_t stride, int64_t count, T* to) {
  if (stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
    return;
  }
  for (int64_t j = 0; j < count; ++j) to[j] = from[j * stride];
}

template <typename From>
DCS_SHARED void gather_doubles(const From* from, int64_t stride, int64_t count, double* to) {
  if (stride == 1)
    for (int64_t j = 0; j < count; ++j) to[j] = Element<From>::load(from[j]);
  else
    for (int64_t j = 0; j < count; ++j) to[j] = Element<From>::load(from[j * stride]);
}

template <typename T>
DCS_SHARED void gather_flags(const T* from, int64_t stride, int64_t count, uint8_t* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = !(Element<T>::load(from[j * stride]) == 0.0);
}

// Lines across columns whose steps are adjacent in memory instead: so many of them are read and written together, for a
// line of one step takes a few bytes of every cache line, and columns that are a power of two apart have their cache
// lines at few addresses.
constexpr int64_t kTileSteps = 16;
template <typename T>
struct Tile {
  alignas(64) T lines[kTileSteps][kTileColumns + 64 / sizeof(T)];  // apart by an odd number of cache lines
  int64_t begin = -1;                                              // its first step
  int64_t from = kTileSteps,
          to = -1;  // steps that have been written, of which a result's tile takes those in between as well
};

// Where a line begins and which way it runs. kAlongTime: along a row's steps, else across columns.
struct LineIndex {
  int64_t outer, time, inner, count;
};

// The operands along one line. The loops have them by value: results are written through pointers that could, for all
// the compiler knows, point here.
template <typename T>
struct Line {
  const T* rewards;
  const T* values;  // zeros where there are none
  const T* next;
  const T* rhos;
  const uint8_t* terminated;
  const uint8_t* truncated;
  const double* gammas;
  const double* traces;
};

template <typename T, bool kAlongTime>
struct Lines : Line<T> {
  using Line<T>::rewards, Line<T>::values, Line<T>::next, Line<T>::rhos, Line<T>::terminated, Line<T>::truncated,
      Line<T>::gammas, Line<T>::traces;

  // What is gathered or is the same on every line.
  alignas(64) T zeros[kLine], gathered_rewards[kLine], gathered_values[kLine], gathered_next[kLine],
      gathered_rhos[kLine];
  uint8_t no[kLine], gathered_terminated[kLine], gathered_truncated[kLine];
  double gathered_gammas[kLine], gathered_traces[kLine];
  std::conditional_t<kAlongTime, char, Tile<T>> tiled_rewards, tiled_values, tiled_next, tiled_rhos;
  std::conditional_t<kAlongTime, char, Tile<uint8_t>> tiled_terminated, tiled_truncated;
  int64_t length;

  // For lines of up to `most` elements.
  DCS_SHARED void prepare(const ReturnsProblem& problem, int64_t most) {
    length = problem.length;
    for (int64_t j = 0; j < most; ++j) {
      zeros[j] = Element<T>::store(0.0);
      no[j] = 0;
      gathered_gammas[j] = problem.gamma.value;
      gathered_traces[j] = problem.trace.value;
    }
    rewards = values = next = rhos = zeros;
    terminated = truncated = no;
    gammas = gathered_gammas;
    traces = gathered_traces;
  }

  // Gammas and traces that are one a row: once for columns, once a row along time.
  DCS_SHARED void read_rows(const ReturnsProblem& problem, const LineIndex& index) {
    read_rows_of(problem.gamma, index, gathered_gammas);
    read_rows_of(problem.trace, index, gathered_traces);
  }

  DCS_SHARED void read(const ReturnsProblem& problem, const LineIndex& index) {
    rewards = line(problem.rewards, index, gathered_rewards, tiled_rewards);
    if (problem.values.data && !problem.values_are_next)
      values = line(problem.values, index, gathered_values, tiled_values);
    if (problem.rhos.data) rhos = line(problem.rhos, index, gathered_rhos, tiled_rhos);
    if (problem.terminated.data)
      terminated = flags(problem.terminated, problem.terminated_is_bool, index, gathered_terminated, tiled_terminated);
    if (problem.truncated.data)
      truncated = flags(problem.truncated, problem.truncated_is_bool, index, gathered_truncated, tiled_truncated);
    if (problem.gamma.kind == GammaKind::kStep) read_steps(problem.gamma, index, gathered_gammas);
    if (problem.trace.kind == GammaKind::kStep) read_steps(problem.trace, index, gathered_traces);
    if (problem.next_values.data) next = line(problem.next_values, index, gathered_next, tiled_next);
    else read_shifted(problem, index);
  }

 private:
  static DCS_INLINE int64_t stride_of(const Strides& strides) { return kAlongTime ? strides.time : strides.inner; }

  template <typename From, typename Tiled>
  const From* line(const ReturnsInput& input, const LineIndex& index, From* gathered, Tiled& tile) const {
    const From* from = at<From>(input, index.outer, index.time, index.inner);
    if (stride_of(input.strides) == 1) return from;
    if constexpr (!kAlongTime) {
      if (input.strides.time == 1 && index.count <= kTileColumns) {
        const int64_t step = index.time % kTileSteps, begin = index.time - step;
        if (tile.begin != begin) {
          fill(tile, from - step, input.strides.inner, std::min(kTileSteps, length - begin), index.count);
          tile.begin = begin;
        }
        return tile.lines[step];
      }
    }
    gather(from, stride_of(input.strides), index.count, gathered);
    return gathered;
  }

  template <typename From>
  DCS_SHARED static void fill(Tile<From>& tile, const From* from, int64_t apart, int64_t steps, int64_t count) {
    for (int64_t j = 0; j < count; ++j, from += apart)
      for (int64_t s = 0; s < steps; ++s) tile.lines[s][j] = from[s];
  }

  template <typename Tiled>
  const uint8_t* flags(
      const ReturnsInput& input, bool is_bool, const LineIndex& index, uint8_t* gathered, Tiled& tile) const {
    if (is_bool) return line(input, index, gathered, tile);
    gather_flags(at<T>(input, index.outer, index.time, index.inner), stride_of(input.strides), index.count, gathered);
    return gathered;
  }

  template <typename From>
  static void read_discount(const ReturnsDiscount& discount, const LineIndex& index, int64_t stride, double* to) {
    gather_doubles(at<From>(discount.tensor, index.outer, index.time, index.inner), stride, index.count, to);
  }

  static void read_rows_of(const ReturnsDiscount& discount, const LineIndex& index, double* to) {
    if (discount.kind != GammaKind::kRow) return;
    const int64_t stride = kAlongTime ? 0 : discount.tensor.strides.inner;
    switch (discount.dtype) {
      case ElementType::Half: return read_discount<Half>(discount, index, stride, to);
      case ElementType::BFloat16: return read_discount<BFloat16>(discount, index, stride, to);
      case ElementType::Float: return read_discount<float>(discount, index, stride, to);
      default: return read_discount<double>(discount, index, stride, to);
    }
  }

  static void read_steps(const ReturnsDiscount& discount, const LineIndex& index, double* to) {
    const int64_t stride = stride_of(discount.tensor.strides);
    if (discount.dtype == ElementType::Float) return read_discount<float>(discount, index, stride, to);
    read_discount<double>(discount, index, stride, to);
  }

  // The values of the next step, and beyond the last one bootstrap_value.
  DCS_SHARED void read_shifted(const ReturnsProblem& problem, const LineIndex& index) {
    const int64_t last = problem.length - 1;
    const LineIndex after{index.outer, index.time + 1, index.inner, index.count};
    if constexpr (kAlongTime) {
      if (problem.values.data && index.time + index.count <= last) {
        next = line(problem.values, after, gathered_next, tiled_next);
        return;
      }
      if (problem.values.data)
        gather(at<T>(problem.values, after.outer, after.time, after.inner), problem.values.strides.time,
            last - index.time, gathered_next);
      else
        for (int64_t j = 0; j < index.count; ++j) gathered_next[j] = zeros[0];
      if (index.time + index.count > last)
        gathered_next[last - index.time] =
            problem.bootstrap_value.data ? *at<T>(problem.bootstrap_value, index.outer, 0, index.inner) : zeros[0];
      next = gathered_next;
    } else if (index.time < last) {
      next = problem.values.data ? line(problem.values, after, gathered_next, tiled_next) : zeros;
    } else {
      next = zeros;
      if (!problem.bootstrap_value.data) return;
      gather(at<T>(problem.bootstrap_value, index.outer, 0, index.inner), problem.bootstrap_value.strides.inner,
          index.count, gathered_next);
      next = gathered_next;
    }
  }
};

// Where a line's results go: in place, or by way of lines of their own. kAlongTime as above.
template <typename T, bool kAlongTime>
struct Outputs {
  T lines[3][kLine];
  std::conditional_t<kAlongTime, char, Tile<T>> tiles[3];
  T* to[3];

  DCS_INLINE static const ReturnsOutput& output(const ReturnsProblem& problem, int k) {
    return k == 0 ? problem.advantages : k == 1 ? problem.targets : problem.pg_advantages;
  }
  DCS_INLINE static int64_t stride(const ReturnsOutput& output) {
    return kAlongTime ? output.strides.time : output.strides.inner;
  }

  DCS_SHARED void point(const ReturnsProblem& problem, const LineIndex& index) {
    for (int k = 0; k < 3; ++k) {
      const ReturnsOutput& out = output(problem, k);
      to[k] = lines[k];
      if (!out.data) continue;
      if (stride(out) == 1) {
        to[k] = at<T>(out, index.outer, index.time, index.inner);
      } else if constexpr (!kAlongTime) {
        if (out.strides.time != 1 || index.count > kTileColumns) continue;
        const int64_t step = index.time % kTileSteps;
        if (tiles[k].begin != index.time - step) {
          put(out, index, tiles[k]);
          tiles[k].begin = index.time - step;
        }
        to[k] = tiles[k].lines[step];
        tiles[k].from = std::min(tiles[k].from, step);
        tiles[k].to = std::max(tiles[k].to, step);
      }
    }
  }
  DCS_SHARED void scatter(const ReturnsProblem& problem, const LineIndex& index) {
    for (int k = 0; k < 3; ++k) {
      const ReturnsOutput& out = output(problem, k);
      if (!out.data || to[k] != lines[k]) continue;
      T* first = at<T>(out, index.outer, index.time, index.inner);
      for (int64_t j = 0; j < index.count; ++j) first[j * stride(out)] = lines[k][j];
    }
  }
  // After the last line.
  DCS_SHARED void finish(const ReturnsProblem& problem, const LineIndex& index) {
    for (int k = 0; k < 3; ++k) put(output(problem, k), index, tiles[k]);
  }

 private:
  DCS_SHARED static void put(const ReturnsOutput& out, const LineIndex& index, Tile<T>& tile) {
    for (int64_t j = 0; tile.to >= 0 && j < index.count; ++j) {
      T* const column = at<T>(out, index.outer, tile.begin, index.inner + j);
      for (int64_t s = tile.from; s <= tile.to; ++s) column[s] = tile.lines[s][j];
    }
    tile.from = kTileSteps, tile.to = -1;
  }
};

}  // namespace
}  // namespace dcs::cpu
