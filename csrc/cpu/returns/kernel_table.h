// The kernels of `_temporal_difference_scan`; included by one file an instruction set, which defines DCS_RETURNS (the
// table's name) and DCS_ISA.
//
// Both kernels work on lines: adjacent elements of each operand, in place where they are adjacent in memory and
// gathered where not. In `columns` a line is one step of many columns, each with its own carry; in `rows` it is a
// segment of one row's steps, and the recurrence runs along the vectors. Arithmetic is double; within the vectors of a
// row of floats it can be float (float_lanes.h).
#pragma once

#include <algorithm>
#include <limits>

#include "returns/float_lanes.h"
#include "returns/lines.h"

namespace dcs::cpu {
namespace {

// Steps before the recurrence.
template <typename L>
struct Step {
  typename L::Number difference;  // r + boot - v
  typename L::Number delta;       // what the step adds
  typename L::Number gate;        // of what is carried
  typename L::Number rate;        // gamma * lambda
  typename L::Mask ends;
};

// What one call of a kernel's loops has in common.
struct Options {
  bool is_shifted;  // v' is the values of the next step: it is not known where truncated
  bool has_rhos, has_truncated;
  double gamma, trace;  // where they are numbers
  double clip_rho, clip_c, clip_pg;

  explicit Options(const ReturnsProblem& problem)
      : is_shifted(!problem.next_values.data),
        has_rhos(problem.rhos.data != nullptr),
        has_truncated(problem.truncated.data != nullptr),
        gamma(problem.gamma.value),
        trace(problem.trace.value),
        clip_rho(problem.clip_rho),
        clip_c(problem.clip_c),
        clip_pg(problem.clip_pg) {}
};

// Importance ratios cut to `bound`; 1 where there are none.
template <typename L, typename T>
DCS_INLINE typename L::Number clipped(const Options& options, const Line<T>& lines, int64_t j, double bound) {
  return options.has_rhos ? L::at_most(L::load(lines.rhos + j), L::splat(bound)) : L::splat(1.0);
}

template <bool kValues, bool kRhos, bool kNumbers, typename L, typename T>
DCS_INLINE Step<L> step_at(L, const Options& options, const Line<T>& lines, int64_t j, typename L::Mask is_last) {
  using Number = typename L::Number;
  Step<L> step;
  Number gamma, trace;
  if constexpr (kNumbers) gamma = L::splat(options.gamma), trace = L::splat(options.trace);
  else gamma = L::load(lines.gammas + j), trace = L::load(lines.traces + j);
  const Number next = L::load(lines.next + j), reward = L::load(lines.rewards + j);
  const auto terminated = L::flags(lines.terminated + j);
  const auto done = options.has_truncated ? L::either(terminated, L::flags(lines.truncated + j)) : terminated;
  auto lacks_next = options.is_shifted ? done : terminated;
  step.ends = L::either(done, is_last);
  step.gate = step.rate = multiply(gamma, trace);
  Number weight = gamma;
  if constexpr (!kValues) {
    weight = L::select(step.ends, gamma, multiply_add(L::subtract(L::splat(0.0), gamma), trace, gamma));
    lacks_next = L::either(lacks_next, L::is_zero(weight));
  }
  step.difference = L::select(lacks_next, reward, multiply_add(weight, next, reward));
  if constexpr (kValues) step.difference = L::subtract(step.difference, L::load(lines.values + j));
  step.delta = step.difference;
  if constexpr (kRhos) {
    step.delta = multiply(clipped<L>(options, lines, j, options.clip_rho), step.difference);
    step.gate = multiply(clipped<L>(options, lines, j, options.clip_c), step.rate);
  }
  return step;
}

// Results from the carry of a step and of the one after it. What is not asked for goes to a line that nobody reads.
template <bool kValues, bool kRhos, typename L, typename T>
DCS_INLINE void finish(L, const Options& options, const Line<T>& lines, const Step<L>& step, typename L::Number carry,
    typename L::Number after, int64_t j, T* advantages, T* targets, T* pg_advantages) {
  if constexpr (kValues) {
    L::store(advantages + j, carry);
    L::store(targets + j, L::add(carry, L::load(lines.values + j)));
    if constexpr (kRhos) {
      const auto whole = L::select(step.ends, step.difference, multiply_add(step.rate, after, step.difference));
      L::store(pg_advantages + j, multiply(clipped<L>(options, lines, j, options.clip_pg), whole));
    }
  } else {
    L::store(targets + j, carry);
  }
}

template <bool kValues, bool kRhos, bool kNumbers, typename T>
DCS_INLINE void column_steps(const Options options, const Line<T> lines, double* carries, T* advantages, T* targets,
    T* pg_advantages, bool is_last, int64_t begin, int64_t count) {
  for_lanes(begin, count, [&](auto lanes, int64_t j) __attribute__((always_inline)) {
    using L = decltype(lanes);
    const Step<L> step = step_at<kValues, kRhos, kNumbers>(lanes, options, lines, j, L::always(is_last));
    const auto after = L::load(carries + j);
    const auto carry = L::select(step.ends, step.delta, multiply_add(step.gate, after, step.delta));
    L::store(carries + j, carry);
    finish<kValues, kRhos>(lanes, options, lines, step, carry, after, j, advantages, targets, pg_advantages);
  });
}

#if defined(__AVX512F__)
// Differences of floats 16 in a vector, carries double: half the instructions.
template <bool kValues>
DCS_INLINE void column_step_of_floats(const Options options, const Line<float> lines, double* carries,
    float* advantages, float* targets, float* pg_advantages, bool is_last, int64_t count) {
  const int64_t whole = count / Floats::kCount * Floats::kCount;
  const Vector gate = splat(options.gamma * options.trace);
  for (int64_t j = 0; j < whole; j += Floats::kCount) {
    const Step<Floats> step = step_at<kValues, false, true>(Floats{}, options, lines, j, Floats::always(is_last));
    const auto pass = static_cast<uint16_t>(~step.ends);
    const Vector low =
        _mm512_mask3_fmadd_pd(gate, load(carries + j), Floats::low(step.delta), static_cast<__mmask8>(pass));
    const Vector high =
        _mm512_mask3_fmadd_pd(gate, load(carries + j + 8), Floats::high(step.delta), static_cast<__mmask8>(pass >> 8));
    store(carries + j, low), store(carries + j + 8, high);
    const auto own = Floats::join(low, high);
    finish<kValues, false>(Floats{}, options, lines, step, own, own, j, advantages, targets, pg_advantages);
  }
  column_steps<kValues, false, true>(
      options, lines, carries, advantages, targets, pg_advantages, is_last, whole, count);
}
#endif

template <typename T, bool kValues, bool kRhos, bool kNumbers>
void columns_of(const ReturnsProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  Lines<T, false> lines;
  Outputs<T, false> outputs;
  alignas(64) double carries[kReturnsColumns];
  lines.prepare(problem, count);
  lines.read_rows(problem, {outer, 0, inner, count});
  for (int64_t j = 0; j < count; ++j) carries[j] = 0.0;
  const Options options(problem);
  for (int64_t t = problem.length - 1; t >= 0; --t) {
    const LineIndex index{outer, t, inner, count};
    lines.read(problem, index);
    outputs.point(problem, index);
    const bool is_last = t == problem.length - 1;
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float> && kNumbers && !kRhos) {
      column_step_of_floats<kValues>(
          options, lines, carries, outputs.to[0], outputs.to[1], outputs.to[2], is_last, count);
      outputs.scatter(problem, index);
      continue;
    }
#endif
    column_steps<kValues, kRhos, kNumbers>(
        options, lines, carries, outputs.to[0], outputs.to[1], outputs.to[2], is_last, 0, count);
    outputs.scatter(problem, index);
  }
  outputs.finish(problem, {outer, 0, inner, count});
}

template <typename L, bool kValues, bool kRhos, bool kNumbers, typename T>
DCS_INLINE void row_steps(const Options options, const CallGates<L> call_gates, const Line<T> lines, double* carry,
    T* advantages, T* targets, T* pg_advantages, int64_t last, int64_t count) {
  for_lanes_back<L>(count, [&](auto lanes, int64_t j) __attribute__((always_inline)) {
    using Lanes = decltype(lanes);
    const Step<Lanes> step = step_at<kValues, kRhos, kNumbers>(lanes, options, lines, j, Lanes::only(last - j));
    Carried<Lanes> carried;
    if constexpr (kRhos || !kNumbers) carried = run_back(step.delta, Gates<Lanes>{step.gate}, step.ends, carry);
    else carried = run_back(step.delta, call_gates.of(lanes), step.ends, carry);
    finish<kValues, kRhos>(
        lanes, options, lines, step, carried.own, carried.after, j, advantages, targets, pg_advantages);
  });
}

template <typename L, typename T, bool kValues, bool kRhos, bool kNumbers>
void rows_by(const ReturnsProblem& problem, int64_t begin, int64_t end) {
  Lines<T, true> lines;
  Outputs<T, true> outputs;
  const int64_t most = problem.length < kLine ? problem.length : kLine;
  lines.prepare(problem, most);
  const Options options(problem);
  const CallGates<L> call_gates(options.gamma * options.trace);
  // Steps run down in memory, so the rows do: the prefetchers lose track where they turn.
  for (int64_t row = end - 1; row >= begin; --row) {
    LineIndex index{row / problem.inner, 0, row % problem.inner, most};
    lines.read_rows(problem, index);
    double carry = 0.0;
    for (int64_t stop = problem.length; stop > 0; stop -= kLine) {
      index.time = stop > kLine ? stop - kLine : 0;
      index.count = stop - index.time;
      lines.read(problem, index);
      outputs.point(problem, index);
      row_steps<L, kValues, kRhos, kNumbers>(options, call_gates, lines, &carry, outputs.to[0], outputs.to[1],
          outputs.to[2], problem.length - 1 - index.time, index.count);
      outputs.scatter(problem, index);
    }
  }
}

template <typename T, bool kValues, bool kRhos, bool kNumbers>
void rows_of(const ReturnsProblem& problem, int64_t begin, int64_t end) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float> && kNumbers && !kRhos) {
    if (holds_powers(problem.gamma.value * problem.trace.value))
      return rows_by<Floats, T, kValues, kRhos, kNumbers>(problem, begin, end);
  }
#endif
  rows_by<Wide, T, kValues, kRhos, kNumbers>(problem, begin, end);
}

template <typename T>
struct Tag {
  using type = T;
};

template <typename Run>
DCS_INLINE void with_dtype(const ReturnsProblem& problem, const Run& run) {
  switch (problem.dtype) {
    case ElementType::Half: return run(Tag<Half>{});
    case ElementType::BFloat16: return run(Tag<BFloat16>{});
    case ElementType::Float: return run(Tag<float>{});
    default: return run(Tag<double>{});
  }
}

DCS_INLINE bool needs_rhos(const ReturnsProblem& problem) { return problem.rhos.data || problem.pg_advantages.data; }

// run(dtype, whether there are values, ratios, and discounts that are numbers): what the loops are compiled for.
template <typename Run>
DCS_INLINE void with_form(const ReturnsProblem& problem, const Run& run) {
  using std::false_type;
  using std::true_type;
  const bool numbers = problem.gamma.kind == GammaKind::kNumber && problem.trace.kind == GammaKind::kNumber;
  with_dtype(problem, [&](auto tag) {
    const auto with_numbers = [&](auto values, auto rhos) {
      if (numbers) run(tag, values, rhos, true_type{});
      else run(tag, values, rhos, false_type{});
    };
    if (!problem.values.data || problem.values_are_next) return with_numbers(false_type{}, false_type{});
    if (needs_rhos(problem)) return with_numbers(true_type{}, true_type{});
    with_numbers(true_type{}, false_type{});
  });
}

// Returns over n steps, of columns; O(1) a step whatever n is: the steps are cut into blocks as long as the window, and
// a window is the end of one block and the beginning of the next (van Herk, 1992; Gil and Werman, 1993; scan/window.h
// has it for scans). `totals`, `gates`: n lines of what the steps up to a block's end make of what is after it, y =
// total + gate * y'; a gate of 0 reads nothing of it.
template <typename T>
void n_step_columns_of(
    const ReturnsProblem& problem, int64_t outer, int64_t inner, int64_t count, double* totals, double* gates) {
  Lines<T, false> lines;
  Outputs<T, false> outputs;
  alignas(64) double total[kReturnsColumns], gate[kReturnsColumns];  // of a block's first steps
  lines.prepare(problem, count);
  lines.read_rows(problem, {outer, 0, inner, count});
  const Options options(problem);
  const int64_t n = problem.steps, last = problem.length - 1;
  const auto join = [](auto lanes, auto own, auto gate, auto after) __attribute__((always_inline)) {
    using L = decltype(lanes);
    return L::select(L::is_zero(gate), own, multiply_add(gate, after, own));
  };
  for (int64_t begin = 0; begin <= last; begin += n) {
    for (int64_t t = std::min(begin + n - 2, last); t >= begin; --t) {
      lines.read(problem, {outer, t, inner, count});
      const Line<T> line = lines;
      double *const to = totals + (t - begin) * count, *const gates_to = gates + (t - begin) * count;
      const bool is_first = t == begin + n - 2, is_last = t == last;
      for_lanes(0, count, [&](auto lanes, int64_t j) __attribute__((always_inline)) {
        using L = decltype(lanes);
        const Step<L> step = step_at<false, false, false>(lanes, options, line, j, L::always(is_last));
        const auto own = L::select(step.ends, L::splat(0.0), step.gate);
        if (is_first || is_last) {
          L::store(to + j, step.delta), L::store(gates_to + j, own);
        } else {
          L::store(to + j, join(lanes, step.delta, own, L::load(to + count + j)));
          L::store(gates_to + j, L::select(L::is_zero(own), own, multiply(own, L::load(gates_to + count + j))));
        }
      });
    }
    for (int64_t j = 0; j < count; ++j) total[j] = 0.0, gate[j] = 1.0;
    for (int64_t t = begin; t < begin + n && t <= last; ++t) {
      const int64_t end = t + n - 1;
      const bool is_inside = end <= last, is_last = end == last, is_first = t == begin + n - 1;
      if (is_inside) lines.read(problem, {outer, end, inner, count});
      const Line<T> line = lines;
      const LineIndex index{outer, t, inner, count};
      outputs.point(problem, index);
      T* const targets = outputs.to[1];
      const double *const from = totals + (t - begin) * count, *const gates_from = gates + (t - begin) * count;
      for_lanes(0, count, [&](auto lanes, int64_t j) __attribute__((always_inline)) {
        using L = decltype(lanes);
        auto after = L::load(total + j);
        if (is_inside) {
          const auto all = L::load(gate + j);
          const Step<L> step = step_at<false, false, false>(lanes, options, line, j, L::always(is_last));
          const Step<L> end_of_window = step_at<false, false, false>(lanes, options, line, j, L::always(true));
          const auto own = L::select(step.ends, L::splat(0.0), step.gate);
          L::store(total + j, join(lanes, after, all, step.delta));
          // Finite: a carry of 0 stays 0.
          L::store(gate + j,
              L::select(
                  L::is_zero(all), all, L::at_most(multiply(all, own), L::splat(std::numeric_limits<double>::max()))));
          after = join(lanes, after, all, end_of_window.delta);
        }
        L::store(targets + j, is_first ? after : join(lanes, L::load(from + j), L::load(gates_from + j), after));
      });
      outputs.scatter(problem, index);
    }
  }
  outputs.finish(problem, {outer, 0, inner, count});
}

void n_step_columns(
    const ReturnsProblem& problem, int64_t outer, int64_t inner, int64_t count, double* totals, double* gates) {
  with_dtype(problem,
      [&](auto tag) { n_step_columns_of<typename decltype(tag)::type>(problem, outer, inner, count, totals, gates); });
}

void returns_columns(const ReturnsProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  with_form(problem, [&](auto tag, auto values, auto rhos, auto numbers) {
    columns_of<typename decltype(tag)::type, values(), rhos(), numbers()>(problem, outer, inner, count);
  });
}

void returns_rows(const ReturnsProblem& problem, int64_t begin, int64_t end) {
  with_form(problem, [&](auto tag, auto values, auto rhos, auto numbers) {
    rows_of<typename decltype(tag)::type, values(), rhos(), numbers()>(problem, begin, end);
  });
}

}  // namespace

extern const ReturnsKernels DCS_RETURNS = {DCS_ISA, returns_columns, returns_rows, n_step_columns};

}  // namespace dcs::cpu
