// What a thread does with its part of a tile of columns: neighboring columns of some steps in shared memory.
#pragma once

#include "common/element_types.cuh"
#include "common/vector.cuh"
#include "scan/columns/tile_layout.cuh"

namespace dcs {

enum class Reading { kTotals, kResults, kWalk };

// Where a part's first step is, and how far the next one in the order of the scan.
template <typename Byte>
struct PartRows {
  Byte* at;
  int64_t step;
};

// kUnit neighboring columns of T. Floats are scanned in double; halves in float, for the steps of a tile, or with what
// rounding takes from them where a thread walks along all steps.
template <typename T, bool kStep, bool kBackward, int kUnit>
struct ColumnPart {
  using Acc = typename Types<T>::Acc;
  using Wide = typename Types<T>::Wide;
  using Sum = std::conditional_t<sizeof(T) == 2, float, Wide>;
  using Cell = Vector<T, kUnit>;
  static constexpr int kCellBytes = kUnit * sizeof(T), kBatch = kCellBytes <= 4 ? 8 : kCellBytes == 8 ? 4 : 2;
  static constexpr bool kHalf = sizeof(T) == 2, kShort = std::is_same_v<T, __nv_bfloat16>;

  PartRows<const unsigned char> input, gates, saved, flags;
  PartRows<unsigned char> output, grad_gamma;
  int count, cut, period;  // steps; to the first row that starts, from that one to the next
  int flags_after;         // from a step's cut to its own flag, bytes
  int flag_apart;          // between columns
  bool conjugate, has_flags;
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
  __device__ __forceinline__ static Cell load(const PartRows<const unsigned char>& rows, int i) {
    return *reinterpret_cast<const Cell*>(rows.at + i * rows.step);
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
  __device__ __forceinline__ void advance(int u, Sum value, Sum gates_value, bool is_cut) {
    if constexpr (kReading == Reading::kWalk && kHalf) {
      Sum factor, small = value;
      if constexpr (kStep) {
        factor = gates_value;
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
      if constexpr (kStep) next = plain_step(value, gates_value, y[u]);
      else if constexpr (kHalf) next = gate[u].step(value, y[u]);
      else next = fold(value, gamma[u], y[u]);
      y[u] = is_cut ? value : next;
    }
  }

  // kCount steps from `i` on; kGuarded: as many of them as there are, cut where rows start and at flags.
  template <Reading kReading, bool kGuarded, int kCount>
  __device__ __forceinline__ void batch(int i) {
    constexpr bool kWrites = kReading != Reading::kTotals, kTerms = kBackward && kWrites;
    Cell x[kCount], g[kStep ? kCount : 1], after[kTerms ? kCount : 1];
    uint32_t cuts[kUnit] = {}, drops[kUnit] = {};
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      if (kGuarded && i + b >= count) continue;
      x[b] = load(input, b);
      if constexpr (kStep) g[b] = load(gates, b);
      if constexpr (kTerms) after[b] = load(saved, b);
      if (kGuarded && has_flags) {
#pragma unroll
        for (int u = 0; u < kUnit; ++u) {
          const unsigned char* const flag = flags.at + b * flags.step + u * flag_apart;
          if (flag[0]) cuts[u] |= 1u << b;
          if (kTerms && flag[flags_after]) drops[u] |= 1u << b;
        }
      }
    }
    Wide factors[kUnit];
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      if (kGuarded && i + b >= count) break;
      const bool starts = kGuarded && i + b == cut;
      if (starts) cut += period;
      Sum values[kUnit], factor[kUnit] = {};
      values_of(x[b], values);
      if constexpr (kStep) {
        values_of(g[b], factor);
#pragma unroll
        for (int u = 0; u < kUnit; ++u) factor[u] = conj_if(conjugate, factor[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnit; ++u) {
        const bool is_cut = starts || (kGuarded && (cuts[u] >> b & 1));
        advance<kReading>(u, values[u], factor[u], is_cut || (!kWrites && b == 0 && i == 0));
        if constexpr (!kWrites) {
          if (is_cut) closed |= 1u << u;
          if constexpr (kStep) {
            // Eight floats' product is within a double.
            const Wide next = cast<Wide>(factor[u]);
            factors[u] = b == 0 ? next : sizeof(T) <= 4 ? factors[u] * next : power_mul(factors[u], next);
          }
        }
      }
      if constexpr (kWrites) *reinterpret_cast<Cell*>(output.at + b * output.step) = packed(y);
      if constexpr (kTerms) {
        const bool last = kGuarded && i + b + 1 == cut;
        Sum others[kUnit], terms[kUnit];
        values_of(after[b], others);
#pragma unroll
        for (int u = 0; u < kUnit; ++u) {
          const Sum other = last ? beyond[u] : others[u];
          terms[u] =
              kGuarded && (drops[u] >> b & 1) ? cast<Sum>(0.0) : plain_step(cast<Sum>(0.0), conj_if(true, other), y[u]);
          if constexpr (!kStep) sum[u] = sum[u] + cast<Wide>(terms[u]);
        }
        if constexpr (kStep) *reinterpret_cast<Cell*>(grad_gamma.at + b * grad_gamma.step) = packed(terms);
      }
    }
    if constexpr (!kWrites && kStep) {
#pragma unroll
      for (int u = 0; u < kUnit; ++u) product[u] = power_mul(product[u], factors[u]);
    }
    input.at += kCount * input.step;
    if constexpr (kStep) gates.at += kCount * gates.step;
    if constexpr (kTerms) saved.at += kCount * saved.step;
    if constexpr (kWrites) output.at += kCount * output.step;
    if constexpr (kTerms && kStep) grad_gamma.at += kCount * grad_gamma.step;
    if (kGuarded && has_flags) flags.at += kCount * flags.step;
  }

  template <Reading kReading>
  __device__ __forceinline__ void scan() {
    constexpr int kGuardedBatch = kBatch > 4 ? 4 : kBatch;
    int i = 0;
    if (!has_flags && cut > count) {
#pragma unroll 1
      for (; i + kBatch <= count; i += kBatch) batch<kReading, false, kBatch>(i);
    }
#pragma unroll 1
    for (; i < count; i += kGuardedBatch) batch<kReading, true, kGuardedBatch>(i);
  }
};

}  // namespace dcs
