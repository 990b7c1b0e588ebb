// The kernels of `_temporal_difference_scan`; included by one file an instruction set, which defines DCS_RETURNS (the table's name) and DCS_ISA.
//
// Both kernels work on lines: adjacent elements of each operand, in place where they are adjacent in memory and gathered where not. In `columns` a
// line is a step of many columns, and one loop does everything. In `rows` it is a stretch of one row's steps: a loop along it forms differences
// and gates, kAbreast rows then run through the recurrence side by side (a step waits for the one before it: 4 cycles and a select), and another
// loop forms the results. All loops but the recurrence are written for the compiler to vectorise; arithmetic is double.
#pragma once

#include "element.h"
#include "returns.h"

namespace dcs::cpu {
namespace {

constexpr int kAbreast = 8;
constexpr int64_t kStretch = 128;  // steps: 3 arrays of 8 rows of double are 24 KiB
constexpr int64_t kLine = kReturnsColumns > kStretch ? kReturnsColumns : kStretch;

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

// The operands along one line.
template <typename T, bool kAlongTime>
struct Lines {
  const T* rewards;
  const T* values;  // zeros where there are none
  const T* next;
  const T* rhos;
  const uint8_t* terminated;
  const uint8_t* truncated;
  const double* gammas;
  const double* traces;

  // What is gathered or is the same on every line.
  T zeros[kLine], gathered_rewards[kLine], gathered_values[kLine], gathered_next[kLine], gathered_rhos[kLine];
  uint8_t no[kLine], gathered_terminated[kLine], gathered_truncated[kLine];
  double gathered_gammas[kLine], gathered_traces[kLine];

  void prepare(const ReturnsProblem& problem) {
    for (int64_t j = 0; j < kLine; ++j) {
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

// One step of one row, before the recurrence.
struct Step {
  double difference;  // r + boot - v
  double delta;       // what the step adds
  double gate;        // of what is carried
  double rate;        // gamma * lambda
  bool ends;
};

// The importance ratio of a step, cut to `bound`: NaN where it is NaN, 1 where there are none.
template <typename T, bool kAlongTime>
DCS_INLINE double clipped(const ReturnsProblem& problem, const Lines<T, kAlongTime>& lines, int64_t j, double bound) {
  const double ratio = Element<T>::load(lines.rhos[j]);
  return !problem.rhos.data ? 1.0 : ratio > bound ? bound : ratio;
}

template <typename T, bool kValues, bool kRhos, bool kAlongTime>
DCS_INLINE Step step_at(const ReturnsProblem& problem, const Lines<T, kAlongTime>& lines, int64_t j, bool is_last, bool own_next) {
  Step step;
  const double gamma = lines.gammas[j], next = Element<T>::load(lines.next[j]), reward = Element<T>::load(lines.rewards[j]);
  const bool terminated = lines.terminated[j] != 0, truncated = lines.truncated[j] != 0;
  const bool lacks_next = terminated | (truncated & !own_next);
  step.ends = terminated | truncated | is_last;
  step.rate = gamma * lines.traces[j];
  step.gate = step.rate;
  if constexpr (kValues) {
    const double boot = gamma * next;
    step.difference = reward + (lacks_next ? 0.0 : boot) - Element<T>::load(lines.values[j]);
    step.delta = step.difference;
    if constexpr (kRhos) {
      step.delta = clipped(problem, lines, j, problem.clip_rho) * step.difference;
      step.gate = step.rate * clipped(problem, lines, j, problem.clip_c);
    }
  } else {
    const double weight = step.ends ? gamma : gamma - step.rate;
    const double boot = weight * next;
    step.delta = step.difference = reward + ((lacks_next | (weight == 0.0)) ? 0.0 : boot);
  }
  return step;
}

// Results from the carry of a step and of the one after it. What is not asked for goes to a line that nobody reads.
template <typename T, bool kValues, bool kRhos, bool kAlongTime>
DCS_INLINE void finish(const ReturnsProblem& problem, const Lines<T, kAlongTime>& lines, const Step& step, double carry, double after, int64_t j,
                       T* advantages, T* targets, T* pg_advantages) {
  if constexpr (kValues) {
    advantages[j] = Element<T>::store(carry);
    targets[j] = Element<T>::store(carry + Element<T>::load(lines.values[j]));
    if constexpr (kRhos) {
      const double carried = step.rate * after;
      pg_advantages[j] = Element<T>::store(clipped(problem, lines, j, problem.clip_pg) * (step.difference + (step.ends ? 0.0 : carried)));
    }
  } else {
    targets[j] = Element<T>::store(carry);
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

template <typename T, bool kValues, bool kRhos>
DCS_INLINE void column_step(const ReturnsProblem& problem, const Lines<T, false>& lines, double* __restrict carries, T* __restrict advantages,
                            T* __restrict targets, T* __restrict pg_advantages, bool is_last, bool own_next, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    const Step step = step_at<T, kValues, kRhos>(problem, lines, j, is_last, own_next);
    const double after = carries[j], joined = multiply_add(step.gate, after, step.delta);
    const double carry = step.ends ? step.delta : joined;
    carries[j] = carry;
    finish<T, kValues, kRhos>(problem, lines, step, carry, after, j, advantages, targets, pg_advantages);
  }
}

template <typename T, bool kValues, bool kRhos>
void columns_of(const ReturnsProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  Lines<T, false> lines;
  Outputs<T> outputs;
  double carries[kReturnsColumns];
  lines.prepare(problem);
  lines.read_rows(problem, {outer, 0, inner, count});
  for (int64_t j = 0; j < count; ++j) carries[j] = 0.0;
  const bool own_next = problem.next_values.data != nullptr;
  for (int64_t t = problem.length - 1; t >= 0; --t) {
    const Place place{outer, t, inner, count};
    lines.read(problem, place);
    outputs.point(problem, place, false);
    column_step<T, kValues, kRhos>(problem, lines, carries, outputs.to[0], outputs.to[1], outputs.to[2], t == problem.length - 1, own_next, count);
    outputs.scatter(problem, place, false);
  }
}

// kAbreast rows' stretch, in double. carries[w][place.count] is what is carried into the stretch's last step.
struct Stretch {
  double deltas[kAbreast][kStretch], gates[kAbreast][kStretch], carries[kAbreast][kStretch + 1];
};

// A NaN gate marks the end of an episode; where a gate is NaN itself, so is what the step adds.
template <typename T, bool kValues, bool kRhos>
DCS_INLINE void prepare_stretch(const ReturnsProblem& problem, const Lines<T, true>& lines, bool is_last, bool own_next, int64_t from, int64_t count,
                                double* __restrict deltas, double* __restrict gates) {
  for (int64_t j = from; j < count; ++j) {
    const Step step = step_at<T, kValues, kRhos>(problem, lines, j, is_last, own_next);
    const bool is_lost = !step.ends & (step.gate != step.gate);
    deltas[j] = is_lost ? step.gate : step.delta;
    gates[j] = step.ends ? __builtin_nan("") : step.gate;
  }
}

template <int W>
DCS_INLINE void run_abreast(Stretch& stretch, int64_t count) {
  double carry[W];
  for (int w = 0; w < W; ++w) carry[w] = stretch.carries[w][count];
  for (int64_t j = count - 1; j >= 0; --j)
    for (int w = 0; w < W; ++w) {
      const double gate = stretch.gates[w][j], delta = stretch.deltas[w][j];
      const double joined = multiply_add(gate, carry[w], delta);
      carry[w] = gate == gate ? joined : delta;
      stretch.carries[w][j] = carry[w];
    }
}

// Fewer rows than kAbreast, one after the other.
inline void run_some(Stretch& stretch, int rows, int64_t count) {
  for (int w = 0; w < rows; ++w) {
    double carry = stretch.carries[w][count];
    for (int64_t j = count - 1; j >= 0; --j) {
      const double gate = stretch.gates[w][j], delta = stretch.deltas[w][j];
      carry = gate == gate ? multiply_add(gate, carry, delta) : delta;
      stretch.carries[w][j] = carry;
    }
  }
}

template <typename T, bool kValues, bool kRhos>
DCS_INLINE void finish_stretch(const ReturnsProblem& problem, const Lines<T, true>& lines, bool is_last, bool own_next, int64_t from, int64_t count,
                               const double* __restrict carries, T* __restrict advantages, T* __restrict targets, T* __restrict pg_advantages) {
  for (int64_t j = from; j < count; ++j) {
    // Without rhos the step is not looked at, and the compiler drops it.
    const Step step = step_at<T, kValues, kRhos>(problem, lines, j, is_last, own_next);
    finish<T, kValues, kRhos>(problem, lines, step, carries[j], carries[j + 1], j, advantages, targets, pg_advantages);
  }
}

template <typename T, bool kValues, bool kRhos>
void rows_of(const ReturnsProblem& problem, int64_t begin, int64_t end) {
  Lines<T, true> lines;
  Outputs<T> outputs;
  Stretch stretch;
  lines.prepare(problem);
  const bool own_next = problem.next_values.data != nullptr;
  for (int64_t row = begin; row < end; row += kAbreast) {
    const int rows = end - row < kAbreast ? static_cast<int>(end - row) : kAbreast;
    for (int64_t stop = problem.length; stop > 0; stop -= kStretch) {
      const int64_t start = stop > kStretch ? stop - kStretch : 0, count = stop - start;
      const bool is_last = stop == problem.length;
      const int64_t body = is_last ? count - 1 : count;  // the row's last step is apart
      const auto lines_of = [&](int w) {
        const Place place{(row + w) / problem.inner, start, (row + w) % problem.inner, count};
        lines.read_rows(problem, place);
        lines.read(problem, place);
        return place;
      };
      for (int w = 0; w < rows; ++w) {
        lines_of(w);
        prepare_stretch<T, kValues, kRhos>(problem, lines, false, own_next, 0, body, stretch.deltas[w], stretch.gates[w]);
        if (is_last) prepare_stretch<T, kValues, kRhos>(problem, lines, true, own_next, body, count, stretch.deltas[w], stretch.gates[w]);
        stretch.carries[w][count] = is_last ? 0.0 : stretch.carries[w][0];
      }
      if (rows == kAbreast)
        run_abreast<kAbreast>(stretch, count);
      else
        run_some(stretch, rows, count);
      for (int w = 0; w < rows; ++w) {
        const Place place = lines_of(w);
        outputs.point(problem, place, true);
        finish_stretch<T, kValues, kRhos>(problem, lines, false, own_next, 0, body, stretch.carries[w], outputs.to[0], outputs.to[1], outputs.to[2]);
        if (is_last)
          finish_stretch<T, kValues, kRhos>(problem, lines, true, own_next, body, count, stretch.carries[w], outputs.to[0], outputs.to[1],
                                            outputs.to[2]);
        outputs.scatter(problem, place, true);
      }
    }
  }
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

void returns_columns(const ReturnsProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  with_dtype(problem, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!problem.values.data) return columns_of<T, false, false>(problem, outer, inner, count);
    if (needs_rhos(problem)) return columns_of<T, true, true>(problem, outer, inner, count);
    columns_of<T, true, false>(problem, outer, inner, count);
  });
}

void returns_rows(const ReturnsProblem& problem, int64_t begin, int64_t end) {
  with_dtype(problem, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!problem.values.data) return rows_of<T, false, false>(problem, begin, end);
    if (needs_rhos(problem)) return rows_of<T, true, true>(problem, begin, end);
    rows_of<T, true, false>(problem, begin, end);
  });
}

}  // namespace

extern const ReturnsKernels DCS_RETURNS = {DCS_ISA, returns_columns, returns_rows};

}  // namespace dcs::cpu
