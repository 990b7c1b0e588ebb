// Few columns: y[i] = x[i] + g[i] * y[i - lag] over the elements as they follow each other in memory, with a gate of 0
// where a row begins or a reset cuts. Within a vector, log2(width / lag) steps of v += g * (v moved up by 2^k * lag
// lanes), g *= (g moved up) give the scan from a carry of 0. Products of gates may overflow or underflow, and inf * 0
// is NaN: a tile with a result that is not finite is run through again step by step.
#pragma once

#include <memory>
#include <type_traits>

#include "scan/lagged_vectors.h"
#include "scan/staging.h"

namespace dcs::cpu {
namespace {

template <typename T>
struct LaggedScan {
  const ScanProblem& problem;
  const Groups groups;
  const int64_t lag, shift;  // shift: how many elements on in scan order a gate acts
  const bool starts_empty;   // a row's first value is its input
  int levels = 1;
  bool begins = false, has_same_gates = false;  // has_same_gates: the gates are those of the tile before
  double carries[kMostLag], sums[kMostLag];
  double previous_gates[kMostLag];  // of the step before the tile
  bool previous_flags[kMostLag];
  alignas(64) double x[kTile + 2 * kWidth];
  alignas(64) double y[kTile + 2 * kWidth];
  alignas(64) double gates[kTile + 3 * kWidth];
  alignas(64) double next[kTile + 2 * kWidth];
  alignas(64) uint64_t masks[kTile];  // of short rows: 0 where one begins, else all bits
  bool flags[kTile + kWidth], flag_room[kTile];
  T room[kTile];
  std::unique_ptr<T[]> closed;  // a segment without its gaps
  int64_t closed_room = 0;

  DCS_SHARED explicit LaggedScan(const ScanProblem& given)
      : problem(given),
        groups(given),
        lag(groups.lag),
        shift(given.shifted ? groups.lag : 0),
        starts_empty(given.shifted || given.initial == nullptr) {
    for (int64_t reach = 2; reach * lag < kWidth && reach < problem.length; reach *= 2) ++levels;
    for (int c = 0; c < kMostLag; ++c) {
      carries[c] = sums[c] = previous_gates[c] = 0;
      previous_flags[c] = false;
    }
  }

  // Column c in scan order, as it lies in memory.
  DCS_INLINE int64_t column(int64_t c) const { return problem.reverse ? lag - 1 - c : c; }
  DCS_INLINE int64_t group_at(const Tile& tile, int64_t k) const {
    return tile.group + (problem.reverse ? tile.groups - 1 - k : k);
  }
  DCS_INLINE double initial(int64_t group, int64_t c) const { return read_initial<T>(problem, group, column(c)); }
  DCS_INLINE bool is_short() const { return groups.size <= kTile; }
  DCS_INLINE bool has_gaps() const { return problem.input_strides.time != lag; }
  // One gate, and steps that lie one behind the other, of the input in so many bytes if there are gaps between them:
  // nothing has to be put together in a tile.
  DCS_INLINE bool has_one_gate_alone(int64_t steps) const {
    const Strides &from = problem.input_strides, &to = problem.output_strides;
    const bool lies = from.inner == 1 && from.time >= lag && to.inner == 1 && to.time == lag;
    return problem.gamma_kind == GammaKind::kNumber && is_finite(problem.gamma_value) && problem.reset == nullptr &&
        !problem.backward && !problem.shifted && problem.input != problem.output && lies &&
        (!has_gaps() || steps * lag * int64_t{sizeof(T)} <= kClosedBytes);
  }

  DCS_SHARED void stage_gates(const Tile& tile, int64_t count) {
    double* to = gates + shift;
    if (problem.gamma_kind == GammaKind::kStep) {
      const T* from =
          gathered(problem, groups, static_cast<const T*>(problem.gamma), problem.gamma_strides, tile, room);
      return widen(to, from, count, problem.reverse);
    }
    if (problem.gamma_kind == GammaKind::kNumber) {
      for (int64_t i = 0; i < count; ++i) to[i] = problem.gamma_value;
      return;
    }
    const int64_t of_group = tile.steps * lag;
    for (int64_t k = 0; k < tile.groups; ++k, to += of_group) {
      const int64_t outer = group_at(tile, k);
      for (int64_t c = 0; c < lag; ++c) {
        const double gate = read_gate<double>(problem, outer, column(c));
        for (int64_t i = c; i < of_group; i += lag) to[i] = gate;
      }
    }
  }

  // Everything that the scan of a tile reads. `begins`: whether rows begin here.
  DCS_SHARED void stage(const Tile& tile, int64_t count) {
    widen(x, gathered(problem, groups, static_cast<const T*>(problem.input), problem.input_strides, tile, room), count,
        problem.reverse);
    for (int i = 0; i < 2 * kWidth; ++i) x[count + i] = 0;
    if (has_same_gates) return;
    for (int64_t c = 0; c < shift; ++c) gates[c] = previous_gates[c];
    stage_gates(tile, count);
    if (problem.reset != nullptr) {
      for (int64_t c = 0; c < shift; ++c) flags[c] = previous_flags[c];
      copy_flags(flags + shift, gathered(problem, groups, problem.reset, problem.reset_strides, tile, flag_room), count,
          problem.reverse);
      zero_where(gates + shift, flags + shift, count);
      for (int64_t c = 0; c < shift; ++c) previous_flags[c] = flags[count + c];
    }
    for (int64_t c = 0; c < shift; ++c) previous_gates[c] = gates[count + c];
    if (begins) {
      if (!starts_empty) begin_rows(tile);
      cut_rows(count);
    }
    for (int i = 0; i < 2 * kWidth; ++i) gates[count + i] = 0;
  }

  // An initial value enters the first step's input; of a long row it is the carry.
  DCS_SHARED void begin_rows(const Tile& tile) {
    for (int64_t k = 0; k < tile.groups; ++k) {
      const int64_t at = k * groups.size;
      for (int64_t c = 0; c < lag; ++c) {
        const bool is_cut = problem.reset != nullptr && flags[at + c];
        if (!is_cut) x[at + c] = multiply_add(gates[at + c], initial(group_at(tile, k), c), x[at + c]);
      }
    }
  }

  DCS_INLINE void cut_rows(int64_t count) {
    if (!is_short()) {
      for (int64_t c = 0; c < lag; ++c) gates[c] = 0;
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      uint64_t bits;
      std::memcpy(&bits, gates + i, sizeof bits);
      bits &= masks[i];
      std::memcpy(gates + i, &bits, sizeof bits);
    }
  }

  DCS_INLINE bool is_cut(int64_t i) const {
    return (begins && i % groups.size < lag) || (problem.reset != nullptr && flags[i]);
  }

  DCS_INLINE bool are_finite(const double* values) const {
    bool all = true;
    for (int64_t c = 0; c < lag; ++c) all = all && is_finite(values[c]);
    return all;
  }

  DCS_SHARED void step_by_step(int64_t count, const double* from, double* to) const {
    for (int64_t i = 0; i < count; ++i)
      to[i] = is_cut(i) ? x[i] : multiply_add(gates[i], i < lag ? from[i] : to[i - lag], x[i]);
  }

  // Scans what is staged.
  template <bool kFold>
  void scan(int64_t count, Folded* folded) {
    bool all_finite = true;
    Folded before{};
    if constexpr (kFold) before = *folded;
    with_lag<kLeastLag>(lag, [&](auto constant) {
      all_finite = scan_lagged<decltype(constant)::value, kFold>(
          x, gates, y, (count + 2 * kWidth - 1) / (2 * kWidth) * (2 * kWidth), levels, carries, folded);
    });
    if constexpr (kFold)
      if (!are_finite(folded->sums)) {
        step_by_step(count, before.sums, next);
        for (int64_t c = 0; c < lag; ++c) folded->sums[c] = next[count - lag + c];
      }
    if (!all_finite) step_by_step(count, carries, y);
    for (int64_t c = 0; c < lag; ++c) carries[c] = y[count - lag + c];
  }

  DCS_SHARED void write(T* result, const Strides& strides, const Tile& tile, int64_t count) {
    T* to = target(problem, groups, result, strides, tile, room);
    narrow(to, y, count, problem.reverse);
    if (to == room) scatter(problem, groups, result, strides, tile, room);
  }

  // y becomes output * saved[next step]; `ends`: the rows' last step is here.
  DCS_SHARED void gradients(const Tile& tile, int64_t count, bool ends) {
    const T* saved = static_cast<const T*>(problem.saved);
    widen(next, gathered(problem, groups, saved, problem.saved_strides, tile, room), count, problem.reverse);
    if (ends) {
      const int64_t of_group = tile.steps * lag;
      for (int64_t k = 0; k < tile.groups; ++k)
        for (int64_t c = 0; c < lag; ++c) next[(k + 1) * of_group + c] = initial(group_at(tile, k), c);
    } else {
      const Tile after{tile.group, 1, problem.reverse ? tile.time - 1 : tile.time + tile.steps, 1};
      widen(next + count, gathered(problem, groups, saved, problem.saved_strides, after, room), lag, problem.reverse);
    }
    for (int64_t i = 0; i < count; ++i) y[i] *= next[i + lag];
    if (problem.reset != nullptr) zero_where(y, flags + shift, count);
    if (problem.gamma_kind == GammaKind::kStep)
      return write(static_cast<T*>(problem.grad_gamma), problem.grad_gamma_strides, tile, count);
    const int64_t of_group = tile.steps * lag;
    for (int64_t k = 0; k < tile.groups; ++k)
      for (int64_t c = 0; c < lag; ++c) {
        const double* terms = y + k * of_group + c;
        double sum = is_short() ? 0.0 : sums[c];
        for (int64_t i = 0; i < of_group; i += lag) sum += terms[i];
        if (is_short()) write_sum(group_at(tile, k), c, sum);
        else sums[c] = sum;
      }
  }

  DCS_INLINE void write_sum(int64_t group, int64_t c, double sum) const {
    write_partial<T>(problem, group, column(c), sum);
  }

  void output(const Tile& tile, int64_t count, bool ends) {
    write(static_cast<T*>(problem.output), problem.output_strides, tile, count);
    if (problem.backward) gradients(tile, count, ends);
  }

  // Groups [begin, end) of short rows, several a tile.
  DCS_SHARED void short_rows(int64_t begin, int64_t end) {
    const int64_t most = kTile / groups.size;
    const bool keeps = problem.gamma_kind == GammaKind::kNumber && problem.reset == nullptr && starts_empty;
    begins = true;
    for (int64_t i = 0; i < most * groups.size; ++i) masks[i] = ~uint64_t{0};
    for (int64_t k = 0; k < most; ++k)
      for (int64_t c = 0; c < lag; ++c) masks[k * groups.size + c] = 0;
    // In a reverse scan tiles go down in memory, as their steps do: prefetchers follow one direction.
    const int64_t tiles = (end - begin + most - 1) / most;
    bool was_whole = false;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t group = begin + (problem.reverse ? tiles - 1 - i : i) * most, left = end - group;
      const bool is_whole = left >= most;
      const Tile tile{group, is_whole ? most : left, 0, problem.length};
      const int64_t count = tile.groups * groups.size;
      has_same_gates = keeps && was_whole && is_whole;
      was_whole = is_whole;
      for (int c = 0; c < kMostLag; ++c) carries[c] = 0;
      stage(tile, count);
      scan<false>(count, nullptr);
      output(tile, count, true);
    }
  }

  // Steps [first, stop) of a group, in scan order, from `carries` on, folded if asked for. No output in a fold alone.
  template <bool kFold>
  DCS_SHARED void segment(int64_t group, int64_t first, int64_t stop, bool writes, Folded* folded) {
    const int64_t most = kTile / lag / (2 * kWidth) * (2 * kWidth);
    if (has_one_gate_alone(stop - first) && segment_of_one_gate<kFold>(group, first, stop, writes, folded)) return;
    if (shift > 0 && first > 0) hold_before(group, first);
    for (int64_t step = first; step < stop; step += most) {
      const int64_t steps = stop - step < most ? stop - step : most;
      const Tile tile{group, 1, problem.reverse ? problem.length - step - steps : step, steps};
      begins = step == 0 && starts_empty;
      if (step == 0 && !starts_empty)
        for (int64_t c = 0; c < lag; ++c) carries[c] = initial(group, c);
      if constexpr (kFold)
        if (step == 0)
          for (int64_t c = 0; c < lag; ++c) folded->sums[c] = carries[c];
      stage(tile, steps * lag);
      scan<kFold>(steps * lag, folded);
      if (writes) output(tile, steps * lag, step + steps == problem.length);
    }
  }

  // False, and nothing is changed but the output, where a value is not finite.
  template <bool kFold>
  bool segment_of_one_gate(int64_t group, int64_t first, int64_t stop, bool writes, Folded* folded) {
    double before[kMostLag];
    for (int64_t c = 0; c < lag; ++c) before[c] = first == 0 && !starts_empty ? initial(group, c) : carries[c];
    Folded found{};
    if constexpr (kFold) {
      found = *folded;
      if (first == 0)
        for (int64_t c = 0; c < lag; ++c) found.sums[c] = before[c];
    }
    const int64_t time = problem.reverse ? problem.length - stop : first, count = (stop - first) * lag;
    const T* from =
        static_cast<const T*>(problem.input) + group * problem.input_strides.outer + time * problem.input_strides.time;
    if (has_gaps()) {
      if (closed_room < count) closed.reset(new T[count]), closed_room = count;
      copy_elements(closed.get(), from, stop - first, problem.input_strides.time, lag);
      from = closed.get();
    }
    T* const to =
        static_cast<T*>(problem.output) + group * problem.output_strides.outer + time * problem.output_strides.time;
    bool all_finite = false;
    with_lag<kLeastLag>(lag, [&](auto constant) {
      constexpr int kLag = decltype(constant)::value;
      const auto run = [&](auto write) {
        return scan_same_gates<T, kLag, kFold, decltype(write)::value>(
            from, to, count, problem.reverse, problem.gamma_value, levels, before, &found);
      };
      all_finite = writes ? run(std::true_type{}) : run(std::false_type{});
    });
    if constexpr (kFold)
      if (all_finite) *folded = found;
    return all_finite;
  }

  // The gates and flags of the step before `first`.
  DCS_SHARED void hold_before(int64_t group, int64_t first) {
    const Tile before{group, 1, problem.reverse ? problem.length - first : first - 1, 1};
    stage_gates(before, lag);
    if (problem.reset != nullptr)
      copy_flags(previous_flags, gathered(problem, groups, problem.reset, problem.reset_strides, before, flag_room),
          lag, problem.reverse);
    for (int64_t c = 0; c < lag; ++c) previous_gates[c] = previous_flags[c] ? 0.0 : gates[shift + c];
  }
};

// Whole rows [begin, end): whole groups.
template <typename T>
void lagged_rows(const ScanProblem& problem, int64_t begin, int64_t end) {
  LaggedScan<T> scan(problem);
  if (scan.is_short()) return scan.short_rows(begin / scan.lag, end / scan.lag);
  for (int64_t group = begin / scan.lag; group < end / scan.lag; ++group) {
    for (int64_t c = 0; c < scan.lag; ++c) scan.carries[c] = scan.sums[c] = 0;
    scan.template segment<false>(group, 0, problem.length, true, nullptr);
    if (problem.backward && problem.gamma_kind != GammaKind::kStep)
      for (int64_t c = 0; c < scan.lag; ++c) scan.write_sum(group, c, scan.sums[c]);
  }
}

// Chunks [begin, end) of the group that begins with `row`, column by column `stride` descriptions apart: their sums and
// products (kFold), their outputs from their carries (kWrite), or both.
template <typename T, bool kFold, bool kWrite>
void lagged_chunks(const ScanProblem& problem, int64_t row, int64_t begin, int64_t end, Chunk* chunks, int64_t stride) {
  LaggedScan<T> scan(problem);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const auto described = [&](int64_t c) -> Chunk& { return chunks[scan.column(c) * stride + chunk - begin]; };
    Folded folded{};
    for (int64_t c = 0; c < scan.lag; ++c) {
      scan.sums[c] = 0;
      scan.carries[c] = kWrite && chunk > 0 ? described(c).carry.re : 0;
      folded.products[c] = 1;
    }
    const int64_t first = chunk * kChunk, stop = first + chunk_length(problem, chunk);
    // No one asks what the row's last chunk ends in, and it may be no whole pairs of vectors.
    if (kFold && stop - first == kChunk) scan.template segment<true>(row / scan.lag, first, stop, kWrite, &folded);
    else scan.template segment<false>(row / scan.lag, first, stop, kWrite, nullptr);
    for (int64_t c = 0; c < scan.lag; ++c) {
      if constexpr (kFold) {
        keep(&described(c).sum, folded.sums[c]);
        keep(&described(c).product, folded.products[c]);
        described(c).cut = chunk == 0;
      }
      if constexpr (kWrite) keep(&described(c).partial, scan.sums[c]);
    }
  }
}

}  // namespace
}  // namespace dcs::cpu
