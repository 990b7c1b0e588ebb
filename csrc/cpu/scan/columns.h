// Columns side by side in memory: every step is a loop over a block of them, which the compiler vectorises; carries
// stay in the first-level cache.
#pragma once

#include "scan/row_view.h"

namespace dcs::cpu {
namespace {

// `count` adjacent elements of an operand: in place where its inner stride is 1, else gathered.
template <typename T>
DCS_INLINE const T* line(const T* from, int64_t stride, int64_t count, T* gathered) {
  if (stride == 1) return from;
  for (int64_t j = 0; j < count; ++j) gathered[j] = from[j * stride];
  return gathered;
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
  Sum carries[kColumns], sums[kBackward ? kColumns : 1];
  Gate gates[kColumns];
  T gathered_input[kColumns], gathered_gates[kStep ? kColumns : 1], gathered_saved[kBackward ? kColumns : 1];
  bool gathered_reset[kReset ? kColumns : 1], gathered_own[kReset ? kColumns : 1];
  for (int64_t j = 0; j < count; ++j) {
    carries[j] = problem.shifted ? Sum{} : read_initial<T>(problem, outer, inner + j);
    if constexpr (!kStep) gates[j] = read_gate<Gate>(problem, outer, inner + j);
    if constexpr (kBackward) sums[j] = Sum{};
  }
  const bool begins = problem.shifted || problem.initial == nullptr;
  const int64_t shift = problem.shifted ? 1 : 0;
  for (int64_t k = 0; k < problem.length; ++k) {
    const T* input = line(locate(problem, static_cast<const T*>(problem.input), problem.input_strides, outer, inner, k),
        problem.input_strides.inner, count, gathered_input);
    T* output = locate(problem, static_cast<T*>(problem.output), problem.output_strides, outer, inner, k);
    if (k == 0 && begins) {
      for (int64_t j = 0; j < count; ++j) {
        carries[j] = Element<T>::load(input[j]);
        output[j] = input[j];
      }
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
      if (k + 1 < problem.length)
        saved = line(locate(problem, static_cast<const T*>(problem.saved), problem.saved_strides, outer, inner, k + 1),
            problem.saved_strides.inner, count, gathered_saved);
      else
        for (int64_t j = 0; j < count; ++j)
          gathered_saved[j] = Element<T>::store(read_initial<T>(problem, outer, inner + j));
      T* grad_gamma = nullptr;
      if constexpr (kStep)
        grad_gamma = locate(problem, static_cast<T*>(problem.grad_gamma), problem.grad_gamma_strides, outer, inner, k);
      step_gradients<T, kStep, kReset>(carries, saved, own, sums, grad_gamma, problem.grad_gamma_strides.inner, count);
    }
  }
  if constexpr (kBackward && !kStep)
    for (int64_t j = 0; j < count; ++j) write_partial<T>(problem, outer, inner + j, sums[j]);
}

template <typename T, typename Gate, bool kStep>
void scan_columns_any(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count) {
  const bool reset = problem.reset != nullptr;
  if (problem.backward) {
    if (reset) return scan_columns<T, Gate, kStep, true, true>(problem, outer, inner, count);
    return scan_columns<T, Gate, kStep, false, true>(problem, outer, inner, count);
  }
  if (reset) return scan_columns<T, Gate, kStep, true, false>(problem, outer, inner, count);
  return scan_columns<T, Gate, kStep, false, false>(problem, outer, inner, count);
}

}  // namespace
}  // namespace dcs::cpu
