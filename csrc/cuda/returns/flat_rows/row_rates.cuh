// Discounts that rows have of their own, and what is behind rows: read by the lanes of a warp for the rows that it has
// a part of, some of a lane at once, so that short rows wait for memory once.
#pragma once

#include "returns/flat_rows/params.cuh"

namespace dcs {

__device__ __forceinline__ double number_of(Gate<double> digits) { return digits.value; }
__device__ __forceinline__ float number_of(Gate<float> digits) { return digits.value + digits.rest; }
__device__ __forceinline__ double carried_by(Gate<double> gate) { return gate.value; }
__device__ __forceinline__ double carried_by(Gate<float> gate) { return whole_gamma(gate); }

// As split_gamma has it, without numbers in double.
__device__ __forceinline__ Gate<double> gate_of(Gate<double> gamma, Gate<double> trace) {
  return {gamma.value * trace.value};
}
__device__ __forceinline__ Gate<float> gate_of(Gate<float> gamma, Gate<float> trace) {
  float value = gamma.value * trace.value, rest = fmaf(gamma.value, trace.value, -value);
  if (value > 0.f ? rest < 0.f : rest > 0.f) {
    value = __uint_as_float(__float_as_uint(value) - 1);
    rest = fmaf(gamma.value, trace.value, -value);
  }
  rest += fmaf(gamma.value, trace.rest, gamma.rest * trace.value);
  if (!(fabsf(rest) <= FLT_MAX)) {
    if (fabsf(gamma.value) <= FLT_MAX && fabsf(trace.value) <= FLT_MAX) value = copysignf(FLT_MAX, value);
    return {value, value};
  }
  return {value, rest == 0.f ? value * 0x1p-60f : rest};
}

// gamma - gamma * trace.
__device__ __forceinline__ double rest_of(Gate<double> gamma, Gate<double> trace) {
  return gamma.value - gamma.value * trace.value;
}
__device__ __forceinline__ float rest_of(Gate<float> gamma, Gate<float> trace) {
  const float beside = gamma.rest - fmaf(gamma.value, trace.rest, gamma.rest * trace.value);
  return fmaf(-gamma.value, trace.value, gamma.value) + beside;
}

// `number`, or those of some rows. each(visit(which, row)) for those that there are; offset(row): where one is.
template <typename Acc, int kCount, typename Each, typename Offset>
__device__ __forceinline__ void read_row_rates(
    const ReturnsDiscount& rate, Gate<Acc> number, const Each& each, const Offset& offset, Gate<Acc> (&to)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) to[j] = number;
  if (rate.kind != GammaKind::kRow) return;
  int64_t at[kCount];
  each([&](int j, int64_t row) { at[j] = offset(row); });
  const auto read = [&](auto zero) {
    using E = decltype(zero);
    E elements[kCount];
    each([&](int j, int64_t) { elements[j] = static_cast<const E*>(rate.tensor.data)[at[j]]; });
    each([&](int j, int64_t) {
      if constexpr (std::is_same_v<E, double>) to[j] = digits_of<Acc>(elements[j]);
      else to[j] = {cast<Acc>(elements[j])};
    });
  };
  switch (rate.dtype) {
    case ElementType::Half: read(__half{}); break;
    case ElementType::BFloat16: read(__nv_bfloat16{}); break;
    case ElementType::Float: read(float{}); break;
    default: read(double{}); break;
  }
}

// Of the rows of a tile from `begin` on, the first of which is `tile_row`. Those behind rows are weighed where
// `weighs`. Not inlined: it is the same code for all kernels of a type.
template <typename T, typename Acc>
__device__ __forceinline__ void read_flat_rows(const FlatReturnsParams<T>& p, FlatRow<Acc>* rows, Acc* last_values,
    int64_t tile_row, int begin, int end, bool weighs) {
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int first = begin + static_cast<int>(threadIdx.x % 32); first < end; first += 32 * kAtOnce) {
    const auto each = [&](const auto& visit) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (first + 32 * j < end) visit(j, tile_row + first + 32 * j);
    };
    T behind[kAtOnce];
    Gate<Acc> gammas[kAtOnce] = {}, traces[kAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) behind[j] = cast<T>(Acc(0));
    if (p.is_shifted && p.bootstrap) each([&](int j, int64_t row) { behind[j] = p.bootstrap_of(row); });
    // Gamma, then the trace, by the same code.
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const ReturnsDiscount& rate = i == 0 ? p.gamma : p.trace;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) gammas[j] = traces[j];
      read_row_rates(
          rate, i == 0 ? p.gamma_digits : p.trace_digits, each,
          [&](int64_t row) { return RowIndex(p.of_rows, row).offset(rate.tensor.strides); }, traces);
    }
    each([&](int j, int64_t) {
      const Acc gamma = number_of(gammas[j]);
      const bool has_own = p.has_own_values;
      rows[first + 32 * j] = {
          gamma, weighs && has_own ? gamma : rest_of(gammas[j], traces[j]), gate_of(gammas[j], traces[j])};
      if (!p.is_shifted) return;
      Acc value = cast<Acc>(behind[j]);
      if (weighs) value = has_own || gamma != Acc(0) ? gamma * value : Acc(0);
      last_values[first + 32 * j] = value;
    });
  }
}

}  // namespace dcs
