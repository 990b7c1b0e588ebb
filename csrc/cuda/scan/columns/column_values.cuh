// What the kernels of columns of any number and alignment read and write beside their steps.
#pragma once

#include "common/divisor.cuh"
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
struct ColumnIndex {
  int64_t outer, column;
};
// Of a cell of `unit` columns, of which `cells` lie side by side.
__device__ __forceinline__ ColumnIndex column_index_of(int64_t cell, int64_t cells, int64_t outers, int unit) {
  const int64_t outer = outers == 1 ? 0 : divided(cell, cells);
  return {outer, (cell - outer * cells) * unit};
}

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

  static __device__ __forceinline__ Wide initial_of(const ScanProblem& p, const ColumnIndex& at, int u) {
    if (!p.initial) return cast<Wide>(0.0);
    return cast<Wide>(cast<Acc>(static_cast<const T*>(p.initial)[p.initial_strides.at(at.outer, at.column + u)]));
  }
  static __device__ __forceinline__ bool has_own_gamma(const ScanProblem& p) {
    return !kStep && p.gamma_kind == GammaKind::kRow;
  }
  static __device__ __forceinline__ Wide gamma_of(const ScanProblem& p, const ColumnIndex& at, int u) {
    if (!has_own_gamma(p)) return cast<Wide>(p.gamma_value);
    return load_gamma<Wide>(p.gamma, p.gamma_dtype, p.gamma_strides.at(at.outer, at.column + u), p.conjugate_gamma);
  }
  // Gamma's gradient of a column, or a block's part of it.
  static __device__ __forceinline__ void store_sum(
      const ScanProblem& p, const ColumnIndex& at, int u, int64_t partial, int64_t partials, Wide sum) {
    Acc* const to = static_cast<Acc*>(p.grad_gamma) + p.grad_gamma_strides.at(at.outer, at.column + u);
    to[partial] = cast<Acc>(sum);
    if (partial == 0)
#pragma unroll 1
      for (int64_t j = partials; j < p.partials; ++j) to[j] = cast<Acc>(0.0);
  }
};

// The scan of kUnit neighboring columns that one thread takes, step after step. Floats are scanned in double; half
// precision in float, kCareful: with what rounding takes from them.
template <typename T, bool kStep, bool kBackward, int kUnit, bool kCareful = true>
struct ColumnScan {
  using Wide = typename Types<T>::Wide;
  using Sum = std::conditional_t<sizeof(T) == 2, float, Wide>;
  using Values = ColumnValues<T, kStep>;
  using Cell = Vector<T, kUnit>;
  static constexpr bool kHalf = sizeof(T) == 2, kShort = std::is_same_v<T, __nv_bfloat16>;

  Sum beyond[kBackward ? kUnit : 1];  // what comes behind a row's last step
  Wide gamma[kUnit];
  Gate<float, kShort> gate[kHalf ? kUnit : 1];
  Sum y[kUnit];
  float lost[kUnit];
  Wide sum[kUnit];

  __device__ __forceinline__ void begin(const ScanProblem& p, const ColumnIndex& at) {
    Gate<float, kShort> shared{};  // a number's is made once for all columns
    if constexpr (kHalf) shared = make_gate<float, kShort>(p.gamma_value);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      gamma[u] = Values::gamma_of(p, at, u);
      if constexpr (kHalf) gate[u] = Values::has_own_gamma(p) ? make_gate<float, kShort>(gamma[u]) : shared;
      if constexpr (kBackward) beyond[u] = cast<Sum>(Values::initial_of(p, at, u));
      sum[u] = cast<Wide>(0.0);
      y[u] = cast<Sum>(kBackward ? cast<Wide>(0.0) : Values::initial_of(p, at, u));
      lost[u] = 0.f;
    }
  }

  // Bits say before which columns' step the scan starts anew.
  __device__ __forceinline__ Cell step(const Cell& x, const Cell& g, bool conjugate, uint32_t cuts) {
    Sum values[kUnit], factor[kUnit] = {};
    values_of(x, values);
    if constexpr (kStep) {
      values_of(g, factor);
#pragma unroll
      for (int u = 0; u < kUnit; ++u) factor[u] = conj_if(conjugate, factor[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnit; ++u) advance(u, values[u], factor[u], cuts >> u & 1);
    return packed<T>(y);
  }

  // Of gamma's gradient, grad_gamma[t] = output[t] * conj(saved[next(t)]): `after` is what was saved of the next step.
  __device__ __forceinline__ Cell gradient(const Cell& after, bool is_last, uint32_t drops) {
    Sum others[kUnit], terms[kUnit];
    values_of(after, others);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      const Sum other = is_last ? beyond[u] : others[u];
      terms[u] = drops >> u & 1 ? cast<Sum>(0.0) : plain_step(cast<Sum>(0.0), conj_if(true, other), y[u]);
      if constexpr (!kStep) sum[u] = sum[u] + cast<Wide>(terms[u]);
    }
    return packed<T>(terms);
  }

 private:
  __device__ __forceinline__ void advance(int u, Sum value, Sum factor_read, bool is_cut) {
    if constexpr (kHalf && kCareful) {
      Sum factor, small = value;
      if constexpr (kStep) {
        factor = factor_read;
      } else {
        factor = gate[u].value;
        if constexpr (!kShort) small = fmaf(gate[u].rest, y[u], value);
      }
      float left = lost[u];
      const Sum next = careful_step(small, factor, y[u], left);
      y[u] = is_cut ? value : next;
      lost[u] = is_cut ? 0.f : left;
    } else {
      Sum next;
      if constexpr (kStep) next = plain_step(value, factor_read, y[u]);
      else if constexpr (kHalf) next = gate[u].step(value, y[u]);
      else next = fold(value, gamma[u], y[u]);
      y[u] = is_cut ? value : next;
    }
  }
};

}  // namespace dcs
