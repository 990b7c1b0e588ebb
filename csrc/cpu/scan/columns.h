// Columns side by side in memory: every step is a loop over a block of them; carries stay in the first-level cache.
#pragma once

#include "scan/row_view.h"
#include "common/simd.h"

namespace dcs::cpu {
namespace {

// What is not a step's arithmetic is in functions that all forms of the loops share.
template <typename T>
DCS_SHARED void gather_line(const T* from, int64_t stride, int64_t count, T* gathered) {
  for (int64_t j = 0; j < count; ++j) gathered[j] = from[j * stride];
}

// `count` adjacent elements of an operand: in place where its inner stride is 1, else gathered.
template <typename T>
DCS_INLINE const T* line(const T* from, int64_t stride, int64_t count, T* gathered) {
  if (stride == 1) return from;
  gather_line(from, stride, count, gathered);
  return gathered;
}

template <typename T>
DCS_SHARED void scatter_line(T* to, int64_t stride, int64_t count, const T* from) {
  for (int64_t j = 0; j < count; ++j) to[j * stride] = from[j];
}

template <typename T>
DCS_SHARED void begin_line(
    const T* __restrict input, T* __restrict output, typename Element<T>::Sum* __restrict carries, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    carries[j] = Element<T>::load(input[j]);
    output[j] = input[j];
  }
}

template <typename T>
DCS_SHARED void round_line(T* __restrict to, const typename Element<T>::Sum* __restrict from, int64_t count) {
  for (int64_t j = 0; j < count; ++j) to[j] = Element<T>::store(from[j]);
}

template <typename T>
DCS_SHARED void read_column_initials(
    const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count, typename Element<T>::Sum* values) {
  for (int64_t j = 0; j < count; ++j) values[j] = read_initial<T>(problem, outer, inner + j);
}

template <typename Gate>
DCS_SHARED void read_column_gates(
    const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count, Gate* gates) {
  for (int64_t j = 0; j < count; ++j) gates[j] = read_gate<Gate>(problem, outer, inner + j);
}

// sums[j + beyond] is column j's from `whole` on.
template <typename T>
DCS_SHARED void write_column_partials(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count,
    const typename Element<T>::Sum* sums, int64_t whole, int64_t beyond) {
  for (int64_t j = 0; j < count; ++j) write_partial<T>(problem, outer, inner + j, sums[j < whole ? j : j + beyond]);
}

template <typename T, typename Gate, bool kStep, bool kReset>
DCS_INLINE void step_columns(const T* __restrict input, T* __restrict output, const T* __restrict step_gates,
    const Gate* __restrict row_gates, const bool* __restrict reset, typename Element<T>::Sum* __restrict carries,
    bool conjugate, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    const typename Element<T>::Sum x = Element<T>::load(input[j]);
    Gate gate;
    if constexpr (kStep) gate = conjugate_if(conjugate, GateFrom<Gate>::element(step_gates[j]));
    else gate = row_gates[j];
    auto y = multiply_add(gate, carries[j], x);
    if constexpr (kReset) y = select(reset[j], x, y);
    carries[j] = y;
    output[j] = Element<T>::store(y);
  }
}

template <typename T, bool kStep, bool kReset>
DCS_INLINE void step_gradients(const typename Element<T>::Sum* __restrict carries, const T* __restrict saved,
    const bool* __restrict reset, typename Element<T>::Sum* __restrict sums, T* __restrict grad_gamma, int64_t stride,
    int64_t count) {
  using Sum = typename Element<T>::Sum;
  for (int64_t j = 0; j < count; ++j) {
    const bool own = kReset && reset[j];
    const Sum next = Element<T>::load(saved[j]);
    if constexpr (kStep)
      grad_gamma[j * stride] = Element<T>::store(select(own, Sum{}, gradient_term(carries[j], next, Sum{})));
    else sums[j] = select(own, sums[j], gradient_term(carries[j], next, sums[j]));
  }
}

template <typename T, typename Gate, bool kStep, bool kReset, bool kBackward>
void scan_columns(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  using Sum = typename Element<T>::Sum;
  Sum carries[kMostColumns], sums[kBackward ? kMostColumns : 1];
  Gate gates[kMostColumns];
  T gathered_input[kMostColumns], gathered_gates[kStep ? kMostColumns : 1],
      gathered_saved[kBackward ? kMostColumns : 1];
  bool gathered_reset[kReset ? kMostColumns : 1], gathered_own[kReset ? kMostColumns : 1];
  if (!problem.shifted) read_column_initials<T>(problem, outer, inner, count, carries);
  if constexpr (!kStep) read_column_gates(problem, outer, inner, count, gates);
  if constexpr (kBackward) std::memset(sums, 0, count * sizeof(Sum));
  const bool begins = problem.shifted || problem.initial == nullptr;
  const int64_t shift = problem.shifted ? 1 : 0;
  for (int64_t k = 0; k < problem.length; ++k) {
    const T* input = line(locate(problem, static_cast<const T*>(problem.input), problem.input_strides, outer, inner, k),
        problem.input_strides.inner, count, gathered_input);
    T* output = locate(problem, static_cast<T*>(problem.output), problem.output_strides, outer, inner, k);
    if (k == 0 && begins) {
      begin_line(input, output, carries, count);
    } else {
      const T* step_gates = nullptr;
      const bool* reset = nullptr;
      if constexpr (kStep)
        step_gates =
            line(locate(problem, static_cast<const T*>(problem.gamma), problem.gamma_strides, outer, inner, k - shift),
                problem.gamma_strides.inner, count, gathered_gates);
      if constexpr (kReset)
        reset = line(locate(problem, problem.reset, problem.reset_strides, outer, inner, k - shift),
            problem.reset_strides.inner, count, gathered_reset);
      step_columns<T, Gate, kStep, kReset>(
          input, output, step_gates, gates, reset, carries, problem.conjugate_gamma, count);
    }
    if constexpr (kBackward) {
      const bool* own = nullptr;
      if constexpr (kReset)
        own = line(locate(problem, problem.reset, problem.reset_strides, outer, inner, k), problem.reset_strides.inner,
            count, gathered_own);
      const T* saved = gathered_saved;
      if (k + 1 < problem.length) {
        saved = line(locate(problem, static_cast<const T*>(problem.saved), problem.saved_strides, outer, inner, k + 1),
            problem.saved_strides.inner, count, gathered_saved);
      } else {
        Sum ends[kMostColumns];
        read_column_initials<T>(problem, outer, inner, count, ends);
        round_line(gathered_saved, ends, count);
      }
      T* grad_gamma = nullptr;
      if constexpr (kStep)
        grad_gamma = locate(problem, static_cast<T*>(problem.grad_gamma), problem.grad_gamma_strides, outer, inner, k);
      step_gradients<T, kStep, kReset>(carries, saved, own, sums, grad_gamma, problem.grad_gamma_strides.inner, count);
    }
  }
  if constexpr (kBackward && !kStep) write_column_partials<T>(problem, outer, inner, count, sums, count, 0);
}

// What a step reads and writes of the columns of a block; null where the problem has none.
template <typename T>
struct ColumnStep {
  const T* input;
  T* output;
  const T* gates;
  const bool* reset;      // of the gate's step
  const bool* own_reset;  // of the step itself
  const T* saved;         // of the step after it
  T* grad_gamma;
};

// One step of real columns in vectors; the last vector overlaps the one before it if they do not divide `count`, and
// has carries, gates and sums of its own. kBegins: the step's output is its input.
template <typename T, bool kBegins, bool kStep, bool kReset, bool kBackward>
DCS_INLINE void step_vectors(
    const ColumnStep<T>& step, const double* row_gates, double* carries, double* sums, int64_t count) {
  for (int64_t slot = 0; slot < count; slot += kWidth) {
    const int64_t j = slot + kWidth <= count ? slot : count - kWidth;
    const Vector x = load(step.input + j);
    Vector y = x;
    if constexpr (!kBegins) {
      if constexpr (kStep) y = multiply_add(load(step.gates + j), load(carries + slot), x);
      else y = multiply_add(load(row_gates + slot), load(carries + slot), x);
      if constexpr (kReset) y = select(step.reset + j, x, y);
    }
    store(carries + slot, y);
    store(step.output + j, y);
    if constexpr (kBackward) {
      const Vector saved = load(step.saved + j);
      if constexpr (kStep) {
        Vector term = multiply(y, saved);
        if constexpr (kReset) term = select(step.own_reset + j, splat(0.0), term);
        store(step.grad_gamma + j, term);
      } else {
        const Vector sum = load(sums + slot);
        Vector next = multiply_add(y, saved, sum);
        if constexpr (kReset) next = select(step.own_reset + j, sum, next);
        store(sums + slot, next);
      }
    }
  }
}

// Moves what the last vector needs into its slot.
DCS_INLINE void fill_last_slot(double* values, int64_t count) {
  const int64_t slot = count / kWidth * kWidth;
  double last[kWidth];
  for (int i = 0; i < kWidth; ++i) last[i] = values[count - kWidth + i];
  if (slot < count)
    for (int i = 0; i < kWidth; ++i) values[slot + i] = last[i];
}

// Few columns, forward, in kSlots vectors: carries stay in registers, so that a step waits for a multiply-add and not
// for memory. Vectors that do not divide `count` overlap.
constexpr int kMostSlots = 4;

template <typename T, bool kStep, bool kReset, int kSlots>
DCS_SHARED void scan_slots(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count,
    const double* carries, const double* row_gates) {
  const bool begins = problem.shifted || problem.initial == nullptr;
  const int64_t sign = problem.reverse ? -1 : 1, shift = problem.shifted ? 1 : 0, first = begins ? 1 : 0;
  const int64_t in_step = sign * problem.input_strides.time, out_step = sign * problem.output_strides.time;
  const T* input = locate(problem, static_cast<const T*>(problem.input), problem.input_strides, outer, inner, 0);
  T* output = locate(problem, static_cast<T*>(problem.output), problem.output_strides, outer, inner, 0);
  int64_t at[kSlots];
  Vector y[kSlots], gates[kSlots];
  for (int s = 0; s < kSlots; ++s) {
    at[s] = s * kWidth + kWidth <= count ? s * kWidth : count - kWidth;
    if constexpr (!kStep) gates[s] = load(row_gates + at[s]);
    if (begins) {
      y[s] = load(input + at[s]);
      store(output + at[s], y[s]);
    } else {
      y[s] = load(carries + at[s]);
    }
  }
  input += first * in_step, output += first * out_step;
  const T* step_gates = nullptr;
  const bool* reset = nullptr;
  if (kStep && first < problem.length)
    step_gates =
        locate(problem, static_cast<const T*>(problem.gamma), problem.gamma_strides, outer, inner, first - shift);
  if (kReset && first < problem.length)
    reset = locate(problem, problem.reset, problem.reset_strides, outer, inner, first - shift);
  for (int64_t k = first; k < problem.length; ++k, input += in_step, output += out_step) {
    for (int s = 0; s < kSlots; ++s) {
      const Vector x = load(input + at[s]);
      if constexpr (kStep) gates[s] = load(step_gates + at[s]);
      y[s] = multiply_add(gates[s], y[s], x);
      if constexpr (kReset) y[s] = select(reset + at[s], x, y[s]);
      store(output + at[s], y[s]);
    }
    if constexpr (kStep) step_gates += sign * problem.gamma_strides.time;
    if constexpr (kReset) reset += sign * problem.reset_strides.time;
  }
}

// False where the columns are too many, or apart.
template <typename T, bool kStep, bool kReset>
DCS_INLINE bool scan_few(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count, const double* carries,
    const double* gates) {
  if (count > kMostSlots * kWidth || problem.input_strides.inner != 1 || (kStep && problem.gamma_strides.inner != 1) ||
      (kReset && problem.reset_strides.inner != 1))
    return false;
  if (count <= kWidth) scan_slots<T, kStep, kReset, 1>(problem, outer, inner, count, carries, gates);
  else if (count <= 2 * kWidth) scan_slots<T, kStep, kReset, 2>(problem, outer, inner, count, carries, gates);
  else scan_slots<T, kStep, kReset, kMostSlots>(problem, outer, inner, count, carries, gates);
  return true;
}

template <typename T, bool kStep, bool kReset, bool kBackward>
void scan_vectors(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  constexpr int64_t kMost = kMostColumns + kWidestVector;
  if (count < kWidth) __builtin_unreachable();
  alignas(64) double carries[kMost];
  alignas(64) double gates[kStep ? kWidth : kMost];
  alignas(64) double sums[kBackward && !kStep ? kMost : kWidth];
  alignas(64) double ends[kBackward ? kMost : kWidth];
  T input[kMost], step_gates[kStep ? kMost : 1], saved[kBackward ? kMost : 1], terms[kBackward && kStep ? kMost : 1];
  bool reset[kReset ? kMost : 1], own_reset[kReset && kBackward ? kMost : 1];
  if (problem.shifted)
    for (int64_t j = 0; j < count; ++j) carries[j] = 0;
  else read_initials<T>(problem, outer, inner, count, carries);
  if constexpr (!kStep) read_gates(problem, outer, inner, count, gates);
  if constexpr (!kBackward)
    if (scan_few<T, kStep, kReset>(problem, outer, inner, count, carries, gates)) return;
  fill_last_slot(carries, count);
  if constexpr (!kStep) fill_last_slot(gates, count);
  if constexpr (kBackward) read_initials<T>(problem, outer, inner, count, ends);
  if constexpr (kBackward && !kStep)
    for (int64_t j = 0; j < kMost; ++j) sums[j] = 0;

  const int64_t shift = problem.shifted ? 1 : 0;
  const auto row = [&](const auto* base, const Strides& strides, int64_t k, auto* room) {
    return line(locate(problem, base, strides, outer, inner, k), strides.inner, count, room);
  };
  for (int64_t k = 0; k < problem.length; ++k) {
    const bool begins = k == 0 && (problem.shifted || problem.initial == nullptr);
    ColumnStep<T> step{};
    step.input = row(static_cast<const T*>(problem.input), problem.input_strides, k, input);
    step.output = locate(problem, static_cast<T*>(problem.output), problem.output_strides, outer, inner, k);
    if (!begins) {
      if constexpr (kStep)
        step.gates = row(static_cast<const T*>(problem.gamma), problem.gamma_strides, k - shift, step_gates);
      if constexpr (kReset) step.reset = row(problem.reset, problem.reset_strides, k - shift, reset);
    }
    const bool in_place = problem.grad_gamma_strides.inner == 1;
    if constexpr (kBackward) {
      if constexpr (kReset) step.own_reset = row(problem.reset, problem.reset_strides, k, own_reset);
      if (k + 1 < problem.length) {
        step.saved = row(static_cast<const T*>(problem.saved), problem.saved_strides, k + 1, saved);
      } else {
        round_line(saved, ends, count);
        step.saved = saved;
      }
      if constexpr (kStep) {
        step.grad_gamma =
            locate(problem, static_cast<T*>(problem.grad_gamma), problem.grad_gamma_strides, outer, inner, k);
        if (!in_place) step.grad_gamma = terms;
      }
    }
    if (begins) step_vectors<T, true, kStep, kReset, kBackward>(step, gates, carries, sums, count);
    else step_vectors<T, false, kStep, kReset, kBackward>(step, gates, carries, sums, count);
    if constexpr (kBackward && kStep)
      if (!in_place) {
        T* to = locate(problem, static_cast<T*>(problem.grad_gamma), problem.grad_gamma_strides, outer, inner, k);
        scatter_line(to, problem.grad_gamma_strides.inner, count, terms);
      }
  }
  if constexpr (kBackward && !kStep) {
    const int64_t whole = count / kWidth * kWidth, beyond = whole + kWidth - count;
    write_column_partials<T>(problem, outer, inner, count, sums, whole, beyond);
  }
}

template <typename T, typename Gate, bool kStep, bool kReset, bool kBackward>
void scan_some_columns(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  if constexpr (IsReal<T>::value) return scan_vectors<T, kStep, kReset, kBackward>(problem, outer, inner, count);
  else return scan_columns<T, Gate, kStep, kReset, kBackward>(problem, outer, inner, count);
}

template <typename T, typename Gate, bool kStep>
void scan_columns_any(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  const bool reset = problem.reset != nullptr;
  if (problem.backward) {
    if (reset) return scan_some_columns<T, Gate, kStep, true, true>(problem, outer, inner, count);
    return scan_some_columns<T, Gate, kStep, false, true>(problem, outer, inner, count);
  }
  if (reset) return scan_some_columns<T, Gate, kStep, true, false>(problem, outer, inner, count);
  return scan_some_columns<T, Gate, kStep, false, false>(problem, outer, inner, count);
}

}  // namespace
}  // namespace dcs::cpu
