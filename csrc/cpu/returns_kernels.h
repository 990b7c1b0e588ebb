// The kernels of `_temporal_difference_scan`; included by one file an instruction set, which defines DCS_RETURNS (the table's name) and DCS_ISA.
//
// Both kernels work on lines: adjacent elements of each operand, in place where they are adjacent in memory and gathered where not. In `columns` a
// line is one step of many columns, each with its own carry; in `rows` it is a stretch of one row's steps, and the recurrence runs along the vectors.
// Arithmetic is double; within the vectors of a row of floats it can be float (returns_floats.h).
#pragma once

#include "returns.h"
#include "returns_floats.h"

namespace dcs::cpu {
namespace {

constexpr int64_t kLine = kReturnsColumns;

template <typename T>
DCS_INLINE const T* at(const ReturnsInput& input, int64_t outer, int64_t time, int64_t inner) {
  return static_cast<const T*>(input.data) + (outer * input.strides.outer + time * input.strides.time + inner * input.strides.inner);
}

template <typename T>
DCS_INLINE T* at(const ReturnsOutput& output, int64_t outer, int64_t time, int64_t inner) {
  return static_cast<T*>(output.data) + (outer * output.strides.outer + time * output.strides.time + inner * output.strides.inner);
}

template <typename T>
void gather(const T* from, int64_t stride, int64_t count, T* to) {
  if (stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
    return;
  }
  for (int64_t j = 0; j < count; ++j) to[j] = from[j * stride];
}

template <typename From>
void gather_doubles(const From* from, int64_t stride, int64_t count, double* to) {
  if (stride == 1)
    for (int64_t j = 0; j < count; ++j) to[j] = Element<From>::load(from[j]);
  else
    for (int64_t j = 0; j < count; ++j) to[j] = Element<From>::load(from[j * stride]);
}

template <typename T>
void gather_flags(const T* from, int64_t stride, int64_t count, uint8_t* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = !(Element<T>::load(from[j * stride]) == 0.0);
}

// Where a line begins and which way it runs. kAlongTime: along a row's steps, else across columns.
struct Place {
  int64_t outer, time, inner, count;
};

// The operands along one line. The loops have them by value: results are written through pointers that could, for all the compiler knows, point here.
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
  using Line<T>::rewards, Line<T>::values, Line<T>::next, Line<T>::rhos, Line<T>::terminated, Line<T>::truncated, Line<T>::gammas, Line<T>::traces;

  // What is gathered or is the same on every line.
  alignas(64) T zeros[kLine], gathered_rewards[kLine], gathered_values[kLine], gathered_next[kLine], gathered_rhos[kLine];
  uint8_t no[kLine], gathered_terminated[kLine], gathered_truncated[kLine];
  double gathered_gammas[kLine], gathered_traces[kLine];

  // For lines of up to `most` elements.
  void prepare(const ReturnsProblem& problem, int64_t most) {
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
  void read_rows(const ReturnsProblem& problem, const Place& place) {
    read_rows_of(problem.gamma, place, gathered_gammas);
    read_rows_of(problem.trace, place, gathered_traces);
  }

  void read(const ReturnsProblem& problem, const Place& place) {
    rewards = line(problem.rewards, place, gathered_rewards);
    if (problem.values.data) values = line(problem.values, place, gathered_values);
    if (problem.rhos.data) rhos = line(problem.rhos, place, gathered_rhos);
    if (problem.terminated.data) terminated = flags(problem.terminated, problem.terminated_is_bool, place, gathered_terminated);
    if (problem.truncated.data) truncated = flags(problem.truncated, problem.truncated_is_bool, place, gathered_truncated);
    if (problem.gamma.kind == GammaKind::kStep) read_steps(problem.gamma, place, gathered_gammas);
    if (problem.trace.kind == GammaKind::kStep) read_steps(problem.trace, place, gathered_traces);
    if (problem.next_values.data)
      next = line(problem.next_values, place, gathered_next);
    else
      read_shifted(problem, place);
  }

 private:
  static DCS_INLINE int64_t stride_of(const Strides& strides) { return kAlongTime ? strides.time : strides.inner; }

  static const T* line(const ReturnsInput& input, const Place& place, T* gathered) {
    const T* from = at<T>(input, place.outer, place.time, place.inner);
    if (stride_of(input.strides) == 1) return from;
    gather(from, stride_of(input.strides), place.count, gathered);
    return gathered;
  }

  static const uint8_t* flags(const ReturnsInput& input, bool is_bool, const Place& place, uint8_t* gathered) {
    const int64_t stride = stride_of(input.strides);
    if (!is_bool) {
      gather_flags(at<T>(input, place.outer, place.time, place.inner), stride, place.count, gathered);
      return gathered;
    }
    const uint8_t* from = at<uint8_t>(input, place.outer, place.time, place.inner);
    if (stride == 1) return from;
    gather(from, stride, place.count, gathered);
    return gathered;
  }

  template <typename From>
  static void read_discount(const ReturnsDiscount& discount, const Place& place, int64_t stride, double* to) {
    gather_doubles(at<From>(discount.tensor, place.outer, place.time, place.inner), stride, place.count, to);
  }

  static void read_rows_of(const ReturnsDiscount& discount, const Place& place, double* to) {
    if (discount.kind != GammaKind::kRow) return;
    const int64_t stride = kAlongTime ? 0 : discount.tensor.strides.inner;
    switch (discount.dtype) {
      case ScalarType::Half: return read_discount<Half>(discount, place, stride, to);
      case ScalarType::BFloat16: return read_discount<BFloat16>(discount, place, stride, to);
      case ScalarType::Float: return read_discount<float>(discount, place, stride, to);
      default: return read_discount<double>(discount, place, stride, to);
    }
  }

  static void read_steps(const ReturnsDiscount& discount, const Place& place, double* to) {
    const int64_t stride = stride_of(discount.tensor.strides);
    if (discount.dtype == ScalarType::Float) return read_discount<float>(discount, place, stride, to);
    read_discount<double>(discount, place, stride, to);
  }

  // The values of the next step, and beyond the last one bootstrap_value.
  void read_shifted(const ReturnsProblem& problem, const Place& place) {
    const int64_t last = problem.length - 1;
    const Place after{place.outer, place.time + 1, place.inner, place.count};
    if constexpr (kAlongTime) {
      if (problem.values.data && place.time + place.count <= last) {
        next = line(problem.values, after, gathered_next);
        return;
      }
      if (problem.values.data)
        gather(at<T>(problem.values, after.outer, after.time, after.inner), problem.values.strides.time, last - place.time, gathered_next);
      else
        for (int64_t j = 0; j < place.count; ++j) gathered_next[j] = zeros[0];
      if (place.time + place.count > last)
        gathered_next[last - place.time] = problem.bootstrap_value.data ? *at<T>(problem.bootstrap_value, place.outer, 0, place.inner) : zeros[0];
      next = gathered_next;
    } else if (place.time < last) {
      next = problem.values.data ? line(problem.values, after, gathered_next) : zeros;
    } else {
      next = problem.bootstrap_value.data ? line(problem.bootstrap_value, {place.outer, 0, place.inner, place.count}, gathered_next) : zeros;
    }
  }
};

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
  bool is_shifted;   // v' is the values of the next step: it is not known where truncated
  bool has_rhos, has_truncated;
  double gamma, trace;  // where they are numbers
  double clip_rho, clip_c, clip_pg;

  explicit Options(const ReturnsProblem& problem)
      : is_shifted(!problem.next_values.data), has_rhos(problem.rhos.data != nullptr), has_truncated(problem.truncated.data != nullptr),
        gamma(problem.gamma.value), trace(problem.trace.value), clip_rho(problem.clip_rho), clip_c(problem.clip_c),
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

// Where a line's results go: in place, or by way of a line of their own.
template <typename T>
struct Outputs {
  T lines[3][kLine];
  T* to[3];

  DCS_INLINE static const ReturnsOutput& output(const ReturnsProblem& problem, int k) {
    return k == 0 ? problem.advantages : k == 1 ? problem.targets : problem.pg_advantages;
  }
  DCS_INLINE static int64_t stride(const ReturnsOutput& output, bool along_time) { return along_time ? output.strides.time : output.strides.inner; }

  void point(const ReturnsProblem& problem, const Place& place, bool along_time) {
    for (int k = 0; k < 3; ++k) {
      const ReturnsOutput& out = output(problem, k);
      to[k] = out.data && stride(out, along_time) == 1 ? at<T>(out, place.outer, place.time, place.inner) : lines[k];
    }
  }
  void scatter(const ReturnsProblem& problem, const Place& place, bool along_time) {
    for (int k = 0; k < 3; ++k) {
      const ReturnsOutput& out = output(problem, k);
      if (!out.data || to[k] != lines[k]) continue;
      T* first = at<T>(out, place.outer, place.time, place.inner);
      for (int64_t j = 0; j < place.count; ++j) first[j * stride(out, along_time)] = lines[k][j];
    }
  }
};

template <bool kValues, bool kRhos, bool kNumbers, typename T>
DCS_INLINE void column_step(const Options options, const Line<T> lines, double* carries, T* advantages, T* targets, T* pg_advantages,
                            bool is_last, int64_t count) {
  for_lanes(count, [&](auto lanes, int64_t j) __attribute__((always_inline)) {
    using L = decltype(lanes);
    const Step<L> step = step_at<kValues, kRhos, kNumbers>(lanes, options, lines, j, L::always(is_last));
    const auto after = L::load(carries + j);
    const auto carry = L::select(step.ends, step.delta, multiply_add(step.gate, after, step.delta));
    L::store(carries + j, carry);
    finish<kValues, kRhos>(lanes, options, lines, step, carry, after, j, advantages, targets, pg_advantages);
  });
}

template <typename T, bool kValues, bool kRhos, bool kNumbers>
void columns_of(const ReturnsProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  Lines<T, false> lines;
  Outputs<T> outputs;
  alignas(64) double carries[kReturnsColumns];
  lines.prepare(problem, count);
  lines.read_rows(problem, {outer, 0, inner, count});
  for (int64_t j = 0; j < count; ++j) carries[j] = 0.0;
  const Options options(problem);
  for (int64_t t = problem.length - 1; t >= 0; --t) {
    const Place place{outer, t, inner, count};
    lines.read(problem, place);
    outputs.point(problem, place, false);
    column_step<kValues, kRhos, kNumbers>(options, lines, carries, outputs.to[0], outputs.to[1], outputs.to[2], t == problem.length - 1, count);
    outputs.scatter(problem, place, false);
  }
}

template <typename L, bool kValues, bool kRhos, bool kNumbers, typename T>
DCS_INLINE void row_steps(const Options options, const CallGates<L> call_gates, const Line<T> lines, double* carry, T* advantages, T* targets,
                          T* pg_advantages, int64_t last, int64_t count) {
  for_lanes_back<L>(count, [&](auto lanes, int64_t j) __attribute__((always_inline)) {
    using Lanes = decltype(lanes);
    const Step<Lanes> step = step_at<kValues, kRhos, kNumbers>(lanes, options, lines, j, Lanes::only(last - j));
    Carried<Lanes> carried;
    if constexpr (kRhos || !kNumbers) carried = run_back(step.delta, Gates<Lanes>{step.gate}, step.ends, carry);
    else carried = run_back(step.delta, call_gates.of(lanes), step.ends, carry);
    finish<kValues, kRhos>(lanes, options, lines, step, carried.own, carried.after, j, advantages, targets, pg_advantages);
  });
}

template <typename L, typename T, bool kValues, bool kRhos, bool kNumbers>
void rows_by(const ReturnsProblem& problem, int64_t begin, int64_t end) {
  Lines<T, true> lines;
  Outputs<T> outputs;
  const int64_t most = problem.length < kLine ? problem.length : kLine;
  lines.prepare(problem, most);
  const Options options(problem);
  const CallGates<L> call_gates(options.gamma * options.trace);
  // Steps run down in memory, so the rows do: the prefetchers lose track where they turn.
  for (int64_t row = end - 1; row >= begin; --row) {
    Place place{row / problem.inner, 0, row % problem.inner, most};
    lines.read_rows(problem, place);
    double carry = 0.0;
    for (int64_t stop = problem.length; stop > 0; stop -= kLine) {
      place.time = stop > kLine ? stop - kLine : 0;
      place.count = stop - place.time;
      lines.read(problem, place);
      outputs.point(problem, place, true);
      row_steps<L, kValues, kRhos, kNumbers>(options, call_gates, lines, &carry, outputs.to[0], outputs.to[1], outputs.to[2],
                                             problem.length - 1 - place.time, place.count);
      outputs.scatter(problem, place, true);
    }
  }
}

template <typename T, bool kValues, bool kRhos, bool kNumbers>
void rows_of(const ReturnsProblem& problem, int64_t begin, int64_t end) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float> && kNumbers && !kRhos) {
    if (holds_powers(problem.gamma.value * problem.trace.value)) return rows_by<Floats, T, kValues, kRhos, kNumbers>(problem, begin, end);
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
    case ScalarType::Half: return run(Tag<Half>{});
    case ScalarType::BFloat16: return run(Tag<BFloat16>{});
    case ScalarType::Float: return run(Tag<float>{});
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
    if (!problem.values.data) return with_numbers(false_type{}, false_type{});
    if (needs_rhos(problem)) return with_numbers(true_type{}, true_type{});
    with_numbers(true_type{}, false_type{});
  });
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

extern const ReturnsKernels DCS_RETURNS = {DCS_ISA, returns_columns, returns_rows};

}  // namespace dcs::cpu
