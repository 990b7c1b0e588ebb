// Windowed scans in O(1) a step whatever the window: the steps are cut into blocks as long as the window, so that each
// window is a suffix of one block followed by a prefix of the next (van Herk 1992; Gil and Werman 1993), composed with
// the product of the prefix's gates. Nothing is ever subtracted: a NaN stays within the windows that contain it.
#pragma once

#include "scan/row_view.h"

namespace dcs::cpu {
namespace {

// A row's elements: `initial` first if there is one, then its steps.
template <typename T, typename Gate, bool kStep>
struct WindowRow {
  using Sum = typename Element<T>::Sum;

  const ScanProblem& problem;
  Steps steps;
  const T* input;
  T* output;
  const T* gate;
  const bool* reset;
  Gate constant;
  Sum initial;
  int64_t skipped;  // 1 with an initial value
  int64_t elements;

  WindowRow(const ScanProblem& given, int64_t outer, int64_t inner)
      : problem(given), steps(steps_of(given)), gate(nullptr), reset(nullptr), constant() {
    const int64_t shift = given.shifted ? 1 : 0;
    input = locate(given, static_cast<const T*>(given.input), given.input_strides, outer, inner, 0);
    output = locate(given, static_cast<T*>(given.output), given.output_strides, outer, inner, 0);
    if constexpr (kStep)
      gate = locate(given, static_cast<const T*>(given.gamma), given.gamma_strides, outer, inner, -shift);
    else constant = read_gate<Gate>(given, outer, inner);
    if (given.reset != nullptr) reset = locate(given, given.reset, given.reset_strides, outer, inner, -shift);
    skipped = given.initial != nullptr ? 1 : 0;
    initial = read_initial<T>(given, outer, inner);
    elements = given.length + skipped;
  }

  DCS_INLINE Sum element(int64_t i) const {
    return i < skipped ? initial : Element<T>::load(input[(i - skipped) * steps.input]);
  }

  // The gate, and whether a reset cuts, between elements i - 1 and i >= 1.
  DCS_INLINE Gate gate_before(int64_t i) const {
    if constexpr (kStep)
      return conjugate_if(problem.conjugate_gamma, GateFrom<Gate>::element(gate[(i - skipped) * steps.gate]));
    else return constant;
  }
  DCS_INLINE bool cut_before(int64_t i) const { return reset != nullptr && reset[(i - skipped) * steps.reset]; }

  DCS_INLINE void write(int64_t i, Sum y) const {
    if (i >= skipped) output[(i - skipped) * steps.output] = Element<T>::store(y);
  }

  // The window that ends in element i, step by step.
  Sum direct(int64_t i) const {
    int64_t from = i - problem.window + 1 > 0 ? i - problem.window + 1 : 0;
    Sum y = element(from);
    for (++from; from <= i; ++from) {
      const Sum x = element(from);
      y = select(cut_before(from), x, multiply_add(gate_before(from), y, x));
    }
    return y;
  }
};

// suffixes[i - begin]: what elements i .. end - 1 make of the last one's value. Returns false where a product of gates
// overflowed.
template <typename T, typename Gate, bool kStep>
bool window_suffixes(const WindowRow<T, Gate, kStep>& row, int64_t begin, int64_t end, Value* suffixes) {
  using Sum = typename Element<T>::Sum;
  Sum suffix = row.element(end - 1);
  Gate product = GateFrom<Gate>::real(1.0);
  keep(&suffixes[end - 1 - begin], suffix);
  bool overflowed = false;
  int64_t i = end - 2;
  for (; i >= begin && !row.cut_before(i + 1); --i) {
    product = multiply(product, row.gate_before(i + 1));
    overflowed = overflowed || is_infinite(product);
    suffix = multiply_add(product, row.element(i), suffix);
    keep(&suffixes[i - begin], suffix);
  }
  for (; i >= begin; --i) keep(&suffixes[i - begin], suffix);
  return !overflowed;
}

// Blocks [begin, end) of one row. Where a product of gates has overflowed (inf * 0 would follow), windows are run
// through step by step.
template <typename T, typename Gate, bool kStep>
void window_blocks(
    const ScanProblem& problem, int64_t outer, int64_t inner, int64_t begin, int64_t end, Value* suffixes) {
  using Sum = typename Element<T>::Sum;
  const WindowRow<T, Gate, kStep> row(problem, outer, inner);
  const int64_t window = problem.window;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t from = block * window, to = from + window < row.elements ? from + window : row.elements;
    const bool composes = block == 0 || window_suffixes(row, from - window, from, suffixes);
    Sum prefix{};
    Gate product = GateFrom<Gate>::real(1.0);
    bool cut = block == 0;  // whether the block before is cut off
    for (int64_t i = from; i < to; ++i) {
      const Sum x = row.element(i);
      Gate gate = GateFrom<Gate>::real(1.0);
      if (i > 0) {
        gate = row.gate_before(i);
        cut = cut || row.cut_before(i);
      }
      prefix = i == from || row.cut_before(i) ? x : multiply_add(gate, prefix, x);
      product = multiply(product, gate);
      const int64_t index = i - from + 1;  // the window's first element in the block before
      if (cut || index == window) row.write(i, prefix);
      else if (composes && !is_infinite(product))
        row.write(i, multiply_add(product, Kept<Sum>::get(suffixes[index]), prefix));
      else row.write(i, row.direct(i));
    }
  }
}

}  // namespace
}  // namespace dcs::cpu
