// What the kernels of the temporal difference scan share: what they know of a call beforehand, and a row's discounts.
#pragma once

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "dcs/returns/forms.h"
#include "common/element_types.cuh"
#include "common/vector.cuh"

namespace dcs {

// Whether a step's own value is taken from its difference and added to its target.
constexpr bool has_own_values(int form) { return (form & kWithValues) && !(form & kValuesAreNext); }

template <int kForm>
struct ReturnsGiven {
  static constexpr bool kFull = kForm == kAnyForm;
  // Whether there may be policy-gradient advantages, and whether the gates of steps may differ.
  static constexpr bool kHasPg = kFull || (kForm & kWithRhos), kGates = kHasPg;
  static constexpr bool kOwnValues = has_own_values(kForm);
  bool values, own_values, next, rhos;
  __device__ __forceinline__ explicit ReturnsGiven(const ReturnsProblem& p)
      : values(kFull ? p.values.data != nullptr : (kForm & kWithValues) != 0),
        own_values(kFull ? values && !p.values_are_next : kOwnValues),
        next(kFull ? p.next_values.data != nullptr : (kForm & kWithNext) != 0),
        rhos(kFull ? p.rhos.data != nullptr : (kForm & kWithRhos) != 0) {}
};

// The discounts of a row. Those that are one a step are 1 here: they come in as factors of each step.
template <typename Acc>
struct Rates {
  Acc gamma = 1;
  Acc trace = 1;
  Acc rest = 0;        // gamma - gamma * trace
  Gate<Acc> gate{};    // gamma * trace, with the digits that Acc lacks: rounded to float it would shift every sum of a
                       // long row by 3e-8 / (1 - c)
  double carried = 1;  // the same
};

// `gamma_at`, `trace_at`: where the row's are, for those that are one a row.
template <typename Acc>
__device__ __forceinline__ Rates<Acc> rates_of(
    const ReturnsDiscount& gamma, const ReturnsDiscount& trace, int64_t gamma_at, int64_t trace_at) {
  const auto read = [](const ReturnsDiscount& discount, int64_t at) {
    if (discount.kind == GammaKind::kNumber) return discount.value;
    if (discount.kind == GammaKind::kStep) return 1.0;
    return load_gamma<double>(discount.tensor.data, discount.dtype, at, false);
  };
  const double g = read(gamma, gamma_at), l = read(trace, trace_at);
  Rates<Acc> rates;
  rates.gamma = static_cast<Acc>(g);
  rates.trace = static_cast<Acc>(l);
  rates.rest = static_cast<Acc>(g - g * l);
  rates.gate = make_gate<Acc>(g * l);
  rates.carried = g * l;
  return rates;
}

// Those of a call whose gamma and trace are numbers: made on the host, they take no registers.
template <typename Acc>
Rates<Acc> number_rates(double gamma, double trace) {
  Rates<Acc> rates;
  rates.gamma = static_cast<Acc>(gamma);
  rates.trace = static_cast<Acc>(trace);
  rates.rest = static_cast<Acc>(gamma - gamma * trace);
  rates.carried = gamma * trace;
  if constexpr (std::is_same_v<Acc, double>) rates.gate = {rates.carried};
  else rates.gate = split_gamma(rates.carried);
  return rates;
}

// Of a call: discounts that are one a step are 1.
template <typename Acc>
Rates<Acc> rates_beside_steps(const ReturnsProblem& p) {
  const auto beside = [](const ReturnsDiscount& rate) { return rate.kind == GammaKind::kStep ? 1.0 : rate.value; };
  return number_rates<Acc>(beside(p.gamma), beside(p.trace));
}

// base^exponent for a power of two; a finite base's stays finite.
inline double finite_power(double base, int exponent) {
  for (int e = 1; e < exponent; e *= 2)
    base = base == base && std::fabs(base) <= DBL_MAX ? std::fmin(base * base, DBL_MAX) : base * base;
  return base;
}

// A minimum that keeps a NaN.
template <typename Acc>
__device__ __forceinline__ Acc clipped(Acc rho, Acc most) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<Acc, float>) {
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(rho) : "f"(rho), "f"(most));
    return rho;
  }
#endif
  return rho > most ? most : rho;
}

// A value that the compiler takes for a new one.
__device__ __forceinline__ void reload(float& value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+f"(value));
#endif
}
__device__ __forceinline__ void reload(double& value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+d"(value));
#endif
}

// Whether a product of gates has lost nothing to the ends of its type's range.
__device__ __forceinline__ bool in_range(float product) {
  return fabsf(product) >= FLT_MIN && fabsf(product) <= FLT_MAX;
}
__device__ __forceinline__ bool in_range(double product) {
  return fabs(product) >= DBL_MIN && fabs(product) <= DBL_MAX;
}

// Of a kernel whose discounts are numbers: bit i, whether step i leaves the next state's value out.
template <typename Acc>
__device__ __forceinline__ uint32_t left_out(bool has_own, const Rates<Acc>& rates, uint32_t drops, uint32_t cuts) {
  if (has_own) return drops;
  return drops | (rates.rest == Acc(0) ? ~cuts : 0u) | (rates.gamma == Acc(0) ? cuts : 0u);
}

}  // namespace dcs
