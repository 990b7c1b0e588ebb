// Where the steps of a row lie, in scan order, and what its gate is when it has one for all steps.
#pragma once

#include "common/simd.h"
#include "scan/kernels.h"

namespace dcs::cpu {
namespace {

// The rows one after another, without a division for each (40 cycles, as long as a row of 16 steps takes).
struct RowCursor {
  int64_t outer, inner, size;

  RowCursor(const ScanProblem& problem, int64_t row)
      : outer(row / problem.inner), inner(row % problem.inner), size(problem.inner) {}
  template <bool kDown = false>
  DCS_INLINE void next() {
    if constexpr (kDown) {
      if (--inner < 0) {
        inner = size - 1;
        --outer;
      }
    } else if (++inner == size) {
      inner = 0;
      ++outer;
    }
  }
};

// Element strides from one step to the next in scan order.
struct Steps {
  int64_t input, output, gate, reset, saved, grad_gamma;
};

DCS_INLINE Steps steps_of(const ScanProblem& problem) {
  const int64_t sign = problem.reverse ? -1 : 1;
  return {sign * problem.input_strides.time, sign * problem.output_strides.time, sign * problem.gamma_strides.time,
      sign * problem.reset_strides.time, sign * problem.saved_strides.time, sign * problem.grad_gamma_strides.time};
}

// Step `step` (in scan order) of a row's operand.
template <typename T>
DCS_INLINE T* locate(
    const ScanProblem& problem, T* base, const Strides& strides, int64_t outer, int64_t inner, int64_t step) {
  const int64_t time = problem.reverse ? problem.length - 1 - step : step;
  return base + strides.at(outer, time, inner);
}

// The row's gate from gamma's tensor or number. Gate double: gamma is real; its dtype may be wider or narrower than the
// input's.
template <typename Gate>
DCS_INLINE Gate read_gate(const ScanProblem& problem, int64_t outer, int64_t inner) {
  if (problem.gamma_kind != GammaKind::kRow) return GateFrom<Gate>::real(problem.gamma_value);
  const int64_t offset = problem.gamma_strides.at(outer, inner);
  switch (problem.gamma_dtype) {
    case ElementType::Half:
      return GateFrom<Gate>::real(Element<Half>::load(static_cast<const Half*>(problem.gamma)[offset]));
    case ElementType::BFloat16:
      return GateFrom<Gate>::real(Element<BFloat16>::load(static_cast<const BFloat16*>(problem.gamma)[offset]));
    case ElementType::Float: return GateFrom<Gate>::real(static_cast<const float*>(problem.gamma)[offset]);
    default: return GateFrom<Gate>::real(static_cast<const double*>(problem.gamma)[offset]);
  }
}

template <>
DCS_INLINE One read_gate<One>(const ScanProblem&, int64_t, int64_t) {
  return {};
}

template <>
DCS_INLINE Complex read_gate<Complex>(const ScanProblem& problem, int64_t outer, int64_t inner) {
  const int64_t offset = problem.gamma_strides.at(outer, inner);
  const Complex gate = problem.gamma_dtype == ElementType::ComplexFloat
      ? Element<ComplexFloat>::load(static_cast<const ComplexFloat*>(problem.gamma)[offset])
      : static_cast<const Complex*>(problem.gamma)[offset];
  return conjugate_if(problem.conjugate_gamma, gate);
}

DCS_INLINE void keep(Value* value, double number) { value->re = number; }
DCS_INLINE void keep(Value* value, Complex number) { *value = {number.re, number.im}; }
DCS_INLINE void keep(Value* value, uint64_t number) { std::memcpy(&value->re, &number, sizeof number); }
DCS_INLINE void keep(Value*, One) {}

template <typename Number>
struct Kept;
template <>
struct Kept<double> {
  static DCS_INLINE double get(const Value& value) { return value.re; }
};
template <>
struct Kept<Complex> {
  static DCS_INLINE Complex get(const Value& value) { return {value.re, value.im}; }
};
template <>
struct Kept<uint64_t> {
  static DCS_INLINE uint64_t get(const Value& value) {
    uint64_t number;
    std::memcpy(&number, &value.re, sizeof number);
    return number;
  }
};
template <>
struct Kept<One> {
  static DCS_INLINE One get(const Value&) { return {}; }
};

template <typename Pointer>
struct Plain;
template <typename T>
struct Plain<const T*> {
  using type = T;
};

// The value beyond the row's end in the forward scan's order: `initial`, or 0.
template <typename T>
DCS_INLINE typename Element<T>::Sum read_initial(const ScanProblem& problem, int64_t outer, int64_t inner) {
  if (problem.initial == nullptr) return typename Element<T>::Sum{};
  return Element<T>::load(static_cast<const T*>(problem.initial)[problem.initial_strides.at(outer, inner)]);
}

// What `count` rows have one of each.
template <typename From>
DCS_INLINE void read_values(const From* from, int64_t stride, int64_t count, double* values) {
  int64_t r = 0;
  for (; stride == 1 && r + kWidth <= count; r += kWidth) store(values + r, load(from + r));
  for (; r < count; ++r) values[r] = Element<From>::load(from[r * stride]);
}

// What `count` columns from `inner` on read.
template <typename T>
DCS_SHARED void read_initials(const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count, double* values) {
  if (problem.initial == nullptr) {
    for (int64_t j = 0; j < count; ++j) values[j] = 0;
    return;
  }
  const int64_t stride = problem.initial_strides.inner;
  const T* initial = static_cast<const T*>(problem.initial) + problem.initial_strides.at(outer, inner);
  for (int64_t j = 0; j < count; ++j) values[j] = Element<T>::load(initial[j * stride]);
}

DCS_SHARED inline void read_gates(
    const ScanProblem& problem, int64_t outer, int64_t inner, int64_t count, double* gates) {
  const int64_t stride = problem.gamma_strides.inner, offset = problem.gamma_strides.at(outer, inner);
  const auto read = [&](auto* gamma) {
    using From = typename Plain<decltype(gamma)>::type;
    for (int64_t j = 0; j < count; ++j) gates[j] = Element<From>::load(gamma[offset + j * stride]);
  };
  if (problem.gamma_kind != GammaKind::kRow) {
    for (int64_t j = 0; j < count; ++j) gates[j] = problem.gamma_value;
    return;
  }
  switch (problem.gamma_dtype) {
    case ElementType::Half: return read(static_cast<const Half*>(problem.gamma));
    case ElementType::BFloat16: return read(static_cast<const BFloat16*>(problem.gamma));
    case ElementType::Float: return read(static_cast<const float*>(problem.gamma));
    default: return read(static_cast<const double*>(problem.gamma));
  }
}

template <typename T>
DCS_INLINE void write_partial(const ScanProblem& problem, int64_t outer, int64_t inner, typename Element<T>::Sum sum) {
  using Partial = typename Element<T>::Partial;
  static_cast<Partial*>(problem.grad_gamma)[problem.grad_gamma_strides.at(outer, inner)] = Element<Partial>::store(sum);
}

template <typename T>
struct Type {
  using type = T;
};

// Constants as arguments, for generic lambdas.
template <bool kValue>
struct Bool {
  static constexpr bool value = kValue;
};
template <int kValue>
struct Number {
  static constexpr int value = kValue;
};

inline bool is_real(const ScanProblem& problem) {
  return problem.dtype == ElementType::Float || problem.dtype == ElementType::Double ||
      problem.dtype == ElementType::Half || problem.dtype == ElementType::BFloat16;
}

// Rows whose steps are adjacent in memory, with one gate.
DCS_SHARED inline bool is_contiguous(const ScanProblem& problem) {
  return problem.input_strides.time == 1 && problem.output_strides.time == 1 &&
      (!problem.backward || problem.saved_strides.time == 1) && problem.gamma_kind != GammaKind::kStep &&
      problem.reset == nullptr && is_real(problem);
}

// Columns side by side in memory that are fewer than a vector's lanes, or 1.
DCS_SHARED inline int64_t columns_together(const ScanProblem& problem) {
  const bool are_few = problem.inner > 1 && problem.inner < kWidth && problem.output_strides.inner == 1;
  return are_few ? problem.inner : 1;
}

// Contiguous rows of this length are scanned along memory, shorter ones abreast, unless they are few.
constexpr int64_t kLongRow = 32, kFewContiguous = 8, kLongFewRow = 8;

// Steps of a few rows with a gate each: beyond the second-level TLB, chunks that are read in turn wait for memory, and
// those in step (lanes.h) do not.
constexpr int64_t kMostOfFew = 1 << 19;

// Whether rows, or chunks of a few of them, are scanned abreast, lines of several at a time.
DCS_SHARED inline bool is_abreast(const ScanProblem& problem) {
  if (!is_real(problem) || columns_together(problem) > 1) return false;
  const bool is_step = problem.gamma_kind == GammaKind::kStep && problem.reset == nullptr;
  if (is_step && problem.rows() < kAbreast && problem.rows() * problem.length > kMostOfFew) return false;
  if (!is_contiguous(problem)) return true;
  return problem.length < (problem.rows() < kFewContiguous ? kLongFewRow : kLongRow);
}

// Of chunks abreast: they begin in different sets of the first-level cache, whatever the element's size.
constexpr int64_t kAbreastChunk = 1152;

// Steps of a chunk, but for the last, which has the rest.
DCS_SHARED inline int64_t chunk_steps(const ScanProblem& problem) {
  if (!is_abreast(problem)) return kChunk;
  return problem.length < kAbreast * kAbreastChunk ? problem.length / kAbreast : kAbreastChunk;
}

DCS_SHARED inline int64_t chunk_length(const ScanProblem& problem, int64_t chunk) {
  const int64_t steps = chunk_steps(problem), rest = problem.length - chunk * steps;
  return rest < steps ? rest : steps;
}

// Calls run(Type<element>, Type<gate>, Bool<one gate a step>) for the problem.
template <typename Run>
DCS_INLINE void with_types(const ScanProblem& problem, const Run& run) {
  const bool is_step = problem.gamma_kind == GammaKind::kStep;
  const bool complex_gate = problem.gamma_kind == GammaKind::kRow &&
      (problem.gamma_dtype == ElementType::ComplexFloat || problem.gamma_dtype == ElementType::ComplexDouble);
  switch (problem.dtype) {
#define DCS_REAL(scalar_type, type)                                      \
  case ElementType::scalar_type:                                         \
    if (is_step) return run(Type<type>{}, Type<double>{}, Bool<true>{}); \
    return run(Type<type>{}, Type<double>{}, Bool<false>{});
    DCS_REAL(Half, Half)
    DCS_REAL(BFloat16, BFloat16)
    DCS_REAL(Float, float)
    DCS_REAL(Double, double)
#undef DCS_REAL
#define DCS_COMPLEX(scalar_type, type)                                          \
  case ElementType::scalar_type:                                                \
    if (is_step) return run(Type<type>{}, Type<Complex>{}, Bool<true>{});       \
    if (complex_gate) return run(Type<type>{}, Type<Complex>{}, Bool<false>{}); \
    return run(Type<type>{}, Type<double>{}, Bool<false>{});
    DCS_COMPLEX(ComplexFloat, ComplexFloat)
    DCS_COMPLEX(ComplexDouble, Complex)
#undef DCS_COMPLEX
    default: return run(Type<int64_t>{}, Type<One>{}, Bool<false>{});
  }
}

}  // namespace
}  // namespace dcs::cpu
