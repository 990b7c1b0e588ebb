// Complex and integer rows or chunks of any strides, gates and resets, W of them abreast: one step of a row waits for
// the step before it (a multiply-add, 4 cycles), so the processor needs several rows to be busy. Real ones
// where powers or products of their gates leave the range of a double, and long ones with a gate for every step.
#pragma once

#include "scan/row_view.h"

namespace dcs::cpu {
namespace {

constexpr int kLanes = 4;

// How many chunks go abreast; real ones with one gate a row are here only one by one.
template <typename T, bool kStep>
constexpr int kChunksAbreast = IsReal<T>::value && !kStep ? 1 : kLanes;

template <typename T, typename Gate>
struct Lane {
  using Sum = typename Element<T>::Sum;

  const T* input;
  T* output;
  const T* gate;          // of the first step's carry
  const bool* reset;      // likewise
  const bool* own_reset;  // of the first step
  const T* saved;         // of the second step
  T* grad_gamma;
  Gate constant;  // the gate where there is one for all steps
  Sum carry;
  Sum sum;           // of gamma's gradient over the steps
  Sum tail;          // the forward value beyond the row's last step
  bool first, last;  // whether the row begins (without a carry) and ends here
};

// The lane of `row` that begins at `step`.
template <typename T, typename Gate, bool kStep>
DCS_SHARED Lane<T, Gate> make_lane(
    const ScanProblem& problem, int64_t outer, int64_t inner, int64_t step, int64_t count) {
  using Sum = typename Element<T>::Sum;
  const int64_t gate_step = problem.shifted ? step - 1 : step;
  Lane<T, Gate> lane{};
  lane.input = locate(problem, static_cast<const T*>(problem.input), problem.input_strides, outer, inner, step);
  lane.output = locate(problem, static_cast<T*>(problem.output), problem.output_strides, outer, inner, step);
  if (kStep)
    lane.gate = locate(problem, static_cast<const T*>(problem.gamma), problem.gamma_strides, outer, inner, gate_step);
  else lane.constant = read_gate<Gate>(problem, outer, inner);
  if (problem.reset != nullptr) {
    lane.reset = locate(problem, problem.reset, problem.reset_strides, outer, inner, gate_step);
    lane.own_reset = locate(problem, problem.reset, problem.reset_strides, outer, inner, step);
  }
  if (problem.backward) {
    lane.saved = locate(problem, static_cast<const T*>(problem.saved), problem.saved_strides, outer, inner, step + 1);
    lane.tail = read_initial<T>(problem, outer, inner);
    if (kStep)
      lane.grad_gamma =
          locate(problem, static_cast<T*>(problem.grad_gamma), problem.grad_gamma_strides, outer, inner, step);
  }
  lane.sum = Sum{};
  lane.carry = problem.shifted ? Sum{} : read_initial<T>(problem, outer, inner);
  lane.first = step == 0 && (problem.shifted || problem.initial == nullptr);
  lane.last = step + count == problem.length;
  return lane;
}

template <typename T, typename Gate, bool kStep, bool kReset, bool kBackward, int W>
DCS_SHARED void run_lanes(const ScanProblem& problem, Lane<T, Gate>* lanes, int64_t count) {
  using Sum = typename Element<T>::Sum;
  const Steps steps = steps_of(problem);
  const bool conjugate = problem.conjugate_gamma;
  Lane<T, Gate> lane[W];
  for (int w = 0; w < W; ++w) lane[w] = lanes[w];

  const auto advance = [&](int64_t k, bool may_begin, bool may_end) __attribute__((always_inline)) {
    for (int w = 0; w < W; ++w) {
      Lane<T, Gate>& row = lane[w];
      const Sum x = Element<T>::load(row.input[k * steps.input]);
      Sum y = x;
      if (!(may_begin && row.first)) {
        Gate gate = row.constant;
        if constexpr (kStep) gate = conjugate_if(conjugate, GateFrom<Gate>::element(row.gate[k * steps.gate]));
        y = multiply_add(gate, row.carry, x);
        if constexpr (kReset) y = select(row.reset[k * steps.reset], x, y);
      }
      row.carry = y;
      row.output[k * steps.output] = Element<T>::store(y);
      if constexpr (kBackward) {
        const Sum next = may_end && row.last ? row.tail : Element<T>::load(row.saved[k * steps.saved]);
        bool own = false;
        if constexpr (kReset) own = row.own_reset[k * steps.reset];
        if constexpr (kStep)
          row.grad_gamma[k * steps.grad_gamma] = Element<T>::store(select(own, Sum{}, gradient_term(y, next, Sum{})));
        else row.sum = select(own, row.sum, gradient_term(y, next, row.sum));
      }
    }
  };
  advance(0, true, count == 1);
  const int64_t ends = kBackward && count > 1 ? count - 1 : count;  // the last step is apart in the backward alone
  for (int64_t k = 1; k < ends; ++k) advance(k, false, false);
  if (ends < count) advance(ends, false, true);
  for (int w = 0; w < W; ++w) {
    lanes[w].carry = lane[w].carry;
    lanes[w].sum = lane[w].sum;
  }
}

// run_lanes for the problem's options; W is 1 or kLanes. Real rows are here without resets.
template <typename T, typename Gate, bool kStep, int W>
void run_lanes_any(const ScanProblem& problem, Lane<T, Gate>* lanes, int64_t count) {
  if constexpr (IsReal<T>::value) {
    if (problem.backward) return run_lanes<T, Gate, kStep, false, true, W>(problem, lanes, count);
    return run_lanes<T, Gate, kStep, false, false, W>(problem, lanes, count);
  } else {
    const bool reset = problem.reset != nullptr;
    if (problem.backward) {
      if (reset) return run_lanes<T, Gate, kStep, true, true, W>(problem, lanes, count);
      return run_lanes<T, Gate, kStep, false, true, W>(problem, lanes, count);
    }
    if (reset) return run_lanes<T, Gate, kStep, true, false, W>(problem, lanes, count);
    return run_lanes<T, Gate, kStep, false, false, W>(problem, lanes, count);
  }
}

template <typename T, typename Gate, bool kStep>
void lane_rows(const ScanProblem& problem, int64_t begin, int64_t end) {
  Lane<T, Gate> lanes[kLanes];
  RowCursor cursor(problem, begin), written = cursor;
  for (int64_t row = begin; row < end;) {
    const int count = end - row >= kLanes ? kLanes : 1;
    for (int w = 0; w < count; ++w, cursor.next())
      lanes[w] = make_lane<T, Gate, kStep>(problem, cursor.outer, cursor.inner, 0, problem.length);
    if (count == kLanes) run_lanes_any<T, Gate, kStep, kLanes>(problem, lanes, problem.length);
    else run_lanes_any<T, Gate, kStep, 1>(problem, lanes, problem.length);
    if (problem.backward && !kStep)
      for (int w = 0; w < count; ++w, written.next())
        write_partial<T>(problem, written.outer, written.inner, lanes[w].sum);
    row += count;
  }
}

// Chunks [begin, end) of a row, with their carries.
template <typename T, typename Gate, bool kStep>
DCS_SHARED void lane_chunks(
    const ScanProblem& problem, int64_t outer, int64_t inner, int64_t begin, int64_t end, Chunk* chunks) {
  using Sum = typename Element<T>::Sum;
  constexpr int kMost = kChunksAbreast<T, kStep>;
  const int64_t steps = chunk_steps(problem);
  Lane<T, Gate> lanes[kMost];
  for (int64_t chunk = begin; chunk < end;) {
    const bool abreast = end - chunk >= kMost && chunk_length(problem, chunk + kMost - 1) == steps;
    const int count = abreast ? kMost : 1;
    for (int w = 0; w < count; ++w) {
      lanes[w] =
          make_lane<T, Gate, kStep>(problem, outer, inner, (chunk + w) * steps, chunk_length(problem, chunk + w));
      if (chunk + w > 0) lanes[w].carry = Kept<Sum>::get(chunks[chunk + w - begin].carry);
    }
    if (abreast) run_lanes_any<T, Gate, kStep, kMost>(problem, lanes, steps);
    else run_lanes_any<T, Gate, kStep, 1>(problem, lanes, chunk_length(problem, chunk));
    for (int w = 0; w < count; ++w) keep(&chunks[chunk + w - begin].partial, lanes[w].sum);
    chunk += count;
  }
}

// Over whole chunks: the values that they end in, from carries (`carry` in, `sum` out), and the products of their
// gates.
template <typename T, typename Gate, bool kStep, bool kReset, int W>
DCS_SHARED void fold_lanes(
    const ScanProblem& problem, Lane<T, Gate>* lanes, Gate* products, bool* cuts, int64_t count) {
  using Sum = typename Element<T>::Sum;
  const Steps steps = steps_of(problem);
  const bool conjugate = problem.conjugate_gamma;
  Lane<T, Gate> lane[W];
  Gate product[W];
  bool cut[W];
  for (int w = 0; w < W; ++w) {
    lane[w] = lanes[w];
    product[w] = GateFrom<Gate>::real(1.0);
    cut[w] = lane[w].first;
  }
  for (int64_t k = 0; k < count; ++k) {
    for (int w = 0; w < W; ++w) {
      const Sum x = Element<T>::load(lane[w].input[k * steps.input]);
      Sum y = x;
      if (!(k == 0 && lane[w].first)) {
        Gate gate = lane[w].constant;
        if constexpr (kStep) gate = conjugate_if(conjugate, GateFrom<Gate>::element(lane[w].gate[k * steps.gate]));
        y = multiply_add(gate, lane[w].carry, x);
        product[w] = multiply(product[w], gate);
        if constexpr (kReset) {
          const bool reset = lane[w].reset[k * steps.reset];
          y = select(reset, x, y);
          cut[w] = cut[w] || reset;
        }
      }
      lane[w].carry = y;
    }
  }
  for (int w = 0; w < W; ++w) {
    lanes[w].carry = lane[w].carry;
    products[w] = product[w];
    cuts[w] = cut[w];
  }
}

template <typename T, typename Gate, bool kStep, int W>
void fold_lanes_any(const ScanProblem& problem, Lane<T, Gate>* lanes, Gate* products, bool* cuts, int64_t count) {
  if constexpr (!IsReal<T>::value || W == 1)
    if (problem.reset != nullptr) return fold_lanes<T, Gate, kStep, true, W>(problem, lanes, products, cuts, count);
  fold_lanes<T, Gate, kStep, false, W>(problem, lanes, products, cuts, count);
}

// Sums and products of chunks [begin, end), from a carry of 0 (chunk 0: from `initial`).
template <typename T, typename Gate, bool kStep>
DCS_SHARED void fold_chunks(
    const ScanProblem& problem, int64_t outer, int64_t inner, int64_t begin, int64_t end, Chunk* chunks) {
  constexpr int kMost = kChunksAbreast<T, kStep>;
  const int64_t steps = chunk_steps(problem);
  Lane<T, Gate> lanes[kMost];
  Gate products[kMost];
  bool cuts[kMost];
  for (int64_t chunk = begin; chunk < end;) {
    const bool abreast = end - chunk >= kMost && chunk_length(problem, chunk + kMost - 1) == steps;
    const int count = abreast ? kMost : 1;
    for (int w = 0; w < count; ++w) {
      lanes[w] = make_lane<T, Gate, kStep>(problem, outer, inner, (chunk + w) * steps, steps);
      if (chunk + w > 0) lanes[w].carry = typename Element<T>::Sum{};
    }
    if (abreast) fold_lanes_any<T, Gate, kStep, kMost>(problem, lanes, products, cuts, steps);
    else fold_lanes_any<T, Gate, kStep, 1>(problem, lanes, products, cuts, chunk_length(problem, chunk));
    for (int w = 0; w < count; ++w) {
      Chunk& described = chunks[chunk + w - begin];
      keep(&described.sum, lanes[w].carry);
      keep(&described.product, products[w]);
      described.cut = cuts[w] || chunk + w == 0;
    }
    chunk += count;
  }
}

// Hands the row's value on from chunk to chunk. Where the product of a chunk's gates has overflowed, product * carry
// may be inf * 0 though every step is finite; where it has underflowed, an infinite carry would become a NaN: that
// chunk is run through step by step.
template <typename T, typename Gate, bool kStep>
void carry_chunks(
    const ScanProblem& problem, int64_t outer, int64_t inner, int64_t begin, int64_t end, Chunk* chunks, Value* value) {
  using Sum = typename Element<T>::Sum;
  const int64_t steps = chunk_steps(problem);
  Sum carry = Kept<Sum>::get(*value);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    Chunk& described = chunks[chunk - begin];
    keep(&described.carry, carry);
    const Sum sum = Kept<Sum>::get(described.sum);
    const Gate product = Kept<Gate>::get(described.product);
    if (described.cut) {
      carry = sum;
    } else if (is_finite(product) && (!is_zero(product) || is_finite(carry))) {
      carry = multiply_add(product, carry, sum);
    } else {
      Lane<T, Gate> lane = make_lane<T, Gate, kStep>(problem, outer, inner, chunk * steps, steps);
      Gate ignored;
      bool cut;
      lane.carry = carry;
      fold_lanes_any<T, Gate, kStep, 1>(problem, &lane, &ignored, &cut, chunk_length(problem, chunk));
      carry = lane.carry;
    }
  }
  keep(value, carry);
}

}  // namespace
}  // namespace dcs::cpu
