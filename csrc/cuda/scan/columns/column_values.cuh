// What the kernels of columns of any number and alignment read and write beside their steps.
#pragma once

#include "common/vector.cuh"
#include "dcs/scan/problem.h"

namespace dcs {

// An operand at a thread's next step, and how many bytes on the one after lies in the order of the scan.
template <typename Byte>
struct Steps {
  Byte* at;
  int64_t apart;
};

// A thread's columns: some neighboring ones from `column` on.
struct ColumnPlace {
  int64_t outer, column;
};

// Their values at one step, in the arithmetic's type, and back.
template <typename Sum, typename T, int kUnit>
__device__ __forceinline__ void values_of(const Vector<T, kUnit>& cell, Sum (&to)[kUnit]) {
  typename Types<T>::Acc values[kUnit];
  unpack(cell, values);
#pragma unroll
  for (int u = 0; u < kUnit; ++u) to[u] = cast<Sum>(values[u]);
}
template <typename T, typename Sum, int kUnit>
__device__ __forceinline__ Vector<T, kUnit> packed(const Sum (&from)[kUnit]) {
  using Acc = typename Types<T>::Acc;
  Acc values[kUnit];
#pragma unroll
  for (int u = 0; u < kUnit; ++u) values[u] = cast<Acc>(from[u]);
  return pack<Acc, T, kUnit>(values);
}

// Of the u-th of them.
template <typename T, bool kStep>
struct ColumnValues {
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;

  static __device__ __forceinline__ Wide initial_of(const ScanProblem& p, const ColumnPlace& at, int u) {
    if (!p.initial) return cast<Wide>(0.0);
    return cast<Wide>(cast<Acc>(static_cast<const T*>(
        p.initial)[at.outer * p.initial_strides.outer + (at.column + u) * p.initial_strides.inner]));
  }
  static __device__ __forceinline__ Wide gamma_of(const ScanProblem& p, const ColumnPlace& at, int u) {
    if (kStep || p.gamma_kind != GammaKind::kRow) return cast<Wide>(p.gamma_value);
    return load_gamma<Wide>(p.gamma, p.gamma_dtype,
        at.outer * p.gamma_strides.outer + (at.column + u) * p.gamma_strides.inner, p.conjugate_gamma);
  }
  // Gamma's gradient of a column, or a block's part of it.
  static __device__ __forceinline__ void put_sum(
      const ScanProblem& p, const ColumnPlace& at, int u, int64_t partial, int64_t partials, Wide sum) {
    Acc* const to = static_cast<Acc*>(p.grad_gamma) + at.outer * p.grad_gamma_strides.outer +
        (at.column + u) * p.grad_gamma_strides.inner;
    to[partial] = cast<Acc>(sum);
    if (partial == 0)
      for (int64_t j = partials; j < p.partials; ++j) to[j] = cast<Acc>(0.0);
  }
};

}  // namespace dcs
