// What the kernel of the temporal difference scan is called with in which a thread takes several columns of few steps.
#pragma once

#include "dcs/returns/few_steps_plan.h"
#include "returns/serial_columns/params.cuh"

namespace dcs {

// A row's discount: where it is none, a number and what its type lacks of it.
template <typename Acc>
struct FewReturnsRate {
  ColumnTensor<const char> rows;
  ElementType dtype;
  bool makes_words;
  Acc value, rest;
};

// A cell of `call` is a word of columns, and its `cells` are those of threads: they have several words each, of one
// outer index.
template <typename Acc>
struct FewReturnsParams {
  ReturnsColumnParams<Acc> call;
  FewReturnsRate<Acc> gamma, trace;
  bool bootstrap_makes_words;
  uint32_t begins[kMostFewReturnsWords];  // a thread's words, from its first one on
};

template <typename T>
FewReturnsParams<typename Types<T>::Acc> few_returns_params(const ReturnsProblem& p, int wide, bool are_two = false) {
  using Acc = typename Types<T>::Acc;
  const int words = few_returns_words(sizeof(T), wide, few_form(p), are_two);
  FewReturnsParams<Acc> params{returns_column_params<T>(p, wide)};
  // The last words of some threads are the first ones of others, too, so that all threads have as many.
  const auto of_line = static_cast<uint32_t>(p.inner / wide),
             threads = static_cast<uint32_t>(ceil_div(p.inner / wide, words));
  for (int w = 0; w < words; ++w) params.begins[w] = std::min(w * threads, of_line - threads);
  params.call.in_line = Divisor(threads);
  params.call.cells = static_cast<uint32_t>(p.outer) * threads;
  const auto makes_words = [&](const ReturnsInput& of, int64_t bytes) {
    return of.strides.inner == 1 && reinterpret_cast<uintptr_t>(of.data) % (wide * bytes) == 0 &&
        (p.outer == 1 || of.strides.outer % wide == 0);
  };
  params.bootstrap_makes_words = makes_words(p.bootstrap_value, sizeof(T));
  const auto set = [&](FewReturnsRate<Acc>& to, const ReturnsDiscount& from) {
    to.dtype = from.dtype;
    if (from.kind == GammaKind::kRow) {
      const int64_t bytes = bytes_of(from.dtype);
      to.rows = {static_cast<const char*>(from.tensor.data), p.outer > 1 ? from.tensor.strides.outer * bytes : 0,
          static_cast<int>(from.tensor.strides.inner * bytes * wide), 0};
      to.makes_words = makes_words(from.tensor, bytes);
    } else {
      const double value = from.kind == GammaKind::kNumber ? from.value : 1.0;
      to.value = static_cast<Acc>(value);
      to.rest = std::isfinite(value) ? static_cast<Acc>(value - static_cast<double>(to.value)) : Acc(0);
    }
  };
  set(params.gamma, p.gamma);
  set(params.trace, p.trace);
  return params;
}

}  // namespace dcs
