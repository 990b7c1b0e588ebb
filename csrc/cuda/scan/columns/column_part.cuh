// What a thread does with some neighboring steps of its columns: it reads them from global memory a batch at a time,
// all loads of a batch before the first use.
#pragma once

#include "common/vector.cuh"
#include "common/element_types.cuh"
#include "dcs/scan/problem.h"

namespace dcs {

enum class Reading { kTotals, kResults, kWalk };

// An operand at a thread's next step, and how many bytes on the one after lies in the order of the scan.
template <typename Byte>
struct Steps {
  Byte* at;
  int64_t apart;
};

// kUnit neighboring columns of T. Floats are scanned in double; halves in float, for the steps of a part, or with what
// rounding takes from them where a thread walks along all steps.
template <typename T, bool kStep, bool kBackward, int kUnit>
struct ColumnPart {
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  using Sum = std::conditional_t<sizeof(T) == 2, float, Wide>;
  using Cell = Vector<T, kUnit>;
  static constexpr int kCellBytes = kUnit * static_cast<int>(sizeof(T)),
                       kTensors = (kStep ? 2 : 1) + (kBackward ? 1 : 0);
  // Loads of a batch: 16 of four bytes, or fewer.
  static constexpr int kBatch = kCellBytes <= 4 ? (kTensors == 1 ? 16 : 8)
      : kCellBytes == 8                         ? (kTensors == 1 ? 8 : 4)
                                                : 2;
  static constexpr int kGuardedBatch = kBatch > 8 ? 8 : kBatch;
  static constexpr bool kHalf = sizeof(T) == 2, kShort = std::is_same_v<T, __nv_bfloat16>;

  Steps<const char> input, gates, saved, flags;
  Steps<char> output, grad_gamma;
  int64_t to_end;   // steps to the row's end
  bool starts;      // the next step is its row's first one
  bool carries_in;  // which then has a carry all the same: an initial value
  bool shifted, conjugate, has_flags;
  int64_t flags_after;                // from the flag that cuts before a step to the step's own, bytes
  int64_t flag_apart;                 // between columns
  Sum beyond[kBackward ? kUnit : 1];  // what comes behind a row's last step

  Wide gamma[kUnit];
  Gate<float, kShort> gate[kHalf ? kUnit : 1];
  Sum y[kUnit];
  float lost[kUnit];
  Wide product[kUnit], sum[kUnit];
  uint32_t closed;  // a bit a column

  __device__ __forceinline__ void set_gamma(int u, Wide value) {
    gamma[u] = value;
    if constexpr (kHalf) gate[u] = make_gate<float, kShort>(value);
  }
  __device__ __forceinline__ static Cell load(const Steps<const char>& steps, int i) {
    return *reinterpret_cast<const Cell*>(steps.at + i * steps.apart);
  }
  __device__ __forceinline__ static void values_of(const Cell& cell, Sum (&to)[kUnit]) {
    Acc values[kUnit];
    unpack(cell, values);
#pragma unroll
    for (int u = 0; u < kUnit; ++u) to[u] = cast<Sum>(values[u]);
  }
  __device__ __forceinline__ static Cell packed(const Sum (&from)[kUnit]) {
    Acc values[kUnit];
#pragma unroll
    for (int u = 0; u < kUnit; ++u) values[u] = cast<Acc>(from[u]);
    return pack<Acc, T, kUnit>(values);
  }

  template <Reading kReading>
  __device__ __forceinline__ void advance(int u, Sum value, Sum factor_read, bool is_cut) {
    if constexpr (kReading == Reading::kWalk && kHalf) {
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

  // The next `here` steps, kCount at most; kGuarded: fewer of them, cut where the row starts and at flags.
  template <Reading kReading, bool kGuarded, int kCount>
  __device__ __forceinline__ void batch(int here) {
    constexpr bool kWrites = kReading != Reading::kTotals, kTerms = kBackward && kWrites;
    Cell x[kCount], g[kStep ? kCount : 1], after[kTerms ? kCount : 1];
    uint32_t cuts[kUnit] = {}, drops[kUnit] = {};
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      if (kGuarded && b >= here) continue;
      const bool is_first = kGuarded && b == 0 && starts;
      x[b] = load(input, b);
      if constexpr (kStep) {
        if (is_first && shifted) g[b] = Cell{};
        else g[b] = load(gates, b);
      }
      if constexpr (kTerms) {
        if (kGuarded && b + 1 == to_end) after[b] = Cell{};
        else after[b] = load(saved, b);
      }
      if (kGuarded && has_flags) {
#pragma unroll
        for (int u = 0; u < kUnit; ++u) {
          const char* const flag = flags.at + b * flags.apart + u * flag_apart;
          if (!(is_first && shifted) && flag[0]) cuts[u] |= 1u << b;
          if (kTerms && flag[flags_after]) drops[u] |= 1u << b;
        }
      }
    }
    Wide factors[kUnit];
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      if (kGuarded && b >= here) break;
      const bool is_start = kGuarded && b == 0 && starts && !carries_in;
      Sum values[kUnit], factor[kUnit] = {};
      values_of(x[b], values);
      if constexpr (kStep) {
        values_of(g[b], factor);
#pragma unroll
        for (int u = 0; u < kUnit; ++u) factor[u] = conj_if(conjugate, factor[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        const bool is_cut = is_start || (kGuarded && (cuts[u] >> b & 1));
        advance<kReading>(u, values[u], factor[u], is_cut);
        if constexpr (!kWrites) {
          if (is_cut) closed |= 1u << u;
          if constexpr (kStep) {
            // Eight floats' product is within a double.
            const Wide next = cast<Wide>(factor[u]);
            factors[u] = b == 0 ? next : sizeof(T) <= 4 ? factors[u] * next : power_mul(factors[u], next);
          }
        }
      }
      if constexpr (kWrites) *reinterpret_cast<Cell*>(output.at + b * output.apart) = packed(y);
      if constexpr (kTerms) {
        const bool is_last = kGuarded && b + 1 == to_end;
        Sum others[kUnit], terms[kUnit];
        values_of(after[b], others);
#pragma unroll
        for (int u = 0; u < kUnit; ++u) {
          const Sum other = is_last ? beyond[u] : others[u];
          terms[u] =
              kGuarded && (drops[u] >> b & 1) ? cast<Sum>(0.0) : plain_step(cast<Sum>(0.0), conj_if(true, other), y[u]);
          if constexpr (!kStep) sum[u] = sum[u] + cast<Wide>(terms[u]);
        }
        if constexpr (kStep) *reinterpret_cast<Cell*>(grad_gamma.at + b * grad_gamma.apart) = packed(terms);
      }
    }
    if constexpr (!kWrites && kStep) {
#pragma unroll
      for (int u = 0; u < kUnit; ++u) product[u] = power_mul(product[u], factors[u]);
    }
    input.at += kCount * input.apart;
    if constexpr (kStep) gates.at += kCount * gates.apart;
    if constexpr (kTerms) saved.at += kCount * saved.apart;
    if constexpr (kWrites) output.at += kCount * output.apart;
    if constexpr (kTerms && kStep) grad_gamma.at += kCount * grad_gamma.apart;
    if (kGuarded && has_flags) flags.at += kCount * flags.apart;
    to_end -= kCount;
    starts = false;
  }

  // The next `count` steps.
  template <Reading kReading>
  __device__ __forceinline__ void scan(int64_t count) {
#pragma unroll 1
    while (count > 0) {
      const bool plain = count >= kBatch && !starts && !has_flags && (!kBackward || to_end > kBatch);
      if (plain) batch<kReading, false, kBatch>(kBatch);
      else batch<kReading, true, kGuardedBatch>(static_cast<int>(min(count, int64_t{kGuardedBatch})));
      count -= plain ? kBatch : kGuardedBatch;
    }
  }
};

// A thread's columns: kUnit of them from `column` on.
struct ColumnPlace {
  int64_t outer, column;
};

// A part of `at`'s columns from `position` on, in the order of the scan.
template <typename T, bool kStep, bool kBackward, int kUnit>
__device__ __forceinline__ void view(
    ColumnPart<T, kStep, kBackward, kUnit>& part, const ScanProblem& p, const ColumnPlace& at, int64_t position) {
  using Acc = typename Types<T>::Acc;
  using Sum = typename ColumnPart<T, kStep, kBackward, kUnit>::Sum;
  constexpr int64_t kSize = sizeof(T);
  const int64_t row = p.reverse ? p.length - 1 - position : position, sign = p.reverse ? -1 : 1;
  const int shift = p.shifted ? 1 : 0;
  const auto steps_of = [&](auto* pointer, const Strides& strides, int64_t size, int64_t later) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(pointer)>>, const char, char>;
    Byte* const begin = reinterpret_cast<Byte*>(pointer) +
        (at.outer * strides.outer + at.column * strides.inner + (row + sign * later) * strides.time) * size;
    return Steps<Byte>{begin, sign * strides.time * size};
  };
  part.input = steps_of(static_cast<const char*>(p.input), p.input_strides, kSize, 0);
  part.output = steps_of(static_cast<char*>(p.output), p.output_strides, kSize, 0);
  if constexpr (kStep) part.gates = steps_of(static_cast<const char*>(p.gamma), p.gamma_strides, kSize, -shift);
  if constexpr (kBackward) part.saved = steps_of(static_cast<const char*>(p.saved), p.saved_strides, kSize, 1);
  if constexpr (kBackward && kStep)
    part.grad_gamma = steps_of(static_cast<char*>(p.grad_gamma), p.grad_gamma_strides, kSize, 0);
  part.has_flags = p.reset != nullptr;
  if (p.reset) {
    part.flags = steps_of(reinterpret_cast<const char*>(p.reset), p.reset_strides, 1, -shift);
    part.flag_apart = p.reset_strides.inner;
    part.flags_after = shift * part.flags.apart;
  }
  part.starts = position == 0;
  part.carries_in = p.initial && !p.backward;
  part.to_end = p.length - position;
  part.shifted = p.shifted;
  part.conjugate = p.conjugate_gamma;
}

template <typename T, bool kStep, bool kBackward, int kUnit>
struct ColumnValues {
  using Part = ColumnPart<T, kStep, kBackward, kUnit>;
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  using Sum = typename Part::Sum;

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
  // What does not change along a column.
  static __device__ __forceinline__ void set(Part& part, const ScanProblem& p, const ColumnPlace& at) {
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      part.set_gamma(u, gamma_of(p, at, u));
      if constexpr (kBackward) part.beyond[u] = cast<Sum>(initial_of(p, at, u));
      part.sum[u] = cast<Wide>(0.0);
    }
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
