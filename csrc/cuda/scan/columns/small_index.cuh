// A thread's position in columns/small_columns.cuh, the addresses of its operands, and its loads and stores.
#pragma once

#include <cstring>

#include "common/element_types.cuh"
#include "common/ptx/global_load.cuh"
#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/powers.h"
#include "dcs/scan/plan/tuning.h"
#include "dcs/scan/problem.h"
#include "scan/lines/place.cuh"

namespace dcs {

// A gamma's powers over 1, 2, 4, ... times the steps of a thread, over a warp's slots of them, and over a block's
// warps.
struct SmallPowers {
  double each[kSmallLevels], far, block;
};

// A thread's steps are a multiple of kSmallBatch.
struct SmallColumnsParams : SmallLinesParams {
  SmallColumnOperand gates, reset, gamma;
  SmallColumnOperand saved, grad_gamma;  // of the backward
  uint32_t column_lanes;                 // bits of a column's lanes
  int back;                              // 1 where gates and resets are those of the step before
  int partials;                          // of gamma's gradient: the first is the sum, or each block's part
  ElementType gamma_dtype;
  double number;  // gamma, and its powers
  SmallPowers lane_powers;
};

// The powers of a number.
inline void fill_small_powers(SmallColumnsParams& params, double gamma, const SmallColumnsPlan& plan) {
  double power = bounded_power(gamma, plan.steps);
  for (double& each : params.lane_powers.each) {
    each = power;
    power = bounded_power(power, 2);
    if (&each == params.lane_powers.each + kSmallLevels - plan.span_bits - 1) params.lane_powers.far = power;
  }
  params.lane_powers.block = bounded_power(params.lane_powers.far, plan.warps);
}

// All but the operands; in float powers are others.
inline SmallColumnsParams small_place_params(const ScanProblem& problem, const SmallColumnsPlan& plan) {
  SmallColumnsParams params{};
  params.spans = Divisor(static_cast<uint32_t>(plan.spans));
  params.cluster = Divisor(static_cast<uint32_t>(plan.cluster * plan.sharers));
  params.length = static_cast<int>(problem.length);
  params.columns = static_cast<int>(problem.inner);
  params.span = plan.span;
  params.span_bits = plan.span_bits;
  const int slots = 32 >> plan.span_bits;
  for (int slot = 0; slot < slots; ++slot) params.column_lanes |= 1u << (slot << plan.span_bits);
  params.steps = plan.steps;
  params.number = problem.gamma_value;
  if (problem.gamma_kind == GammaKind::kNumber && !plan.in_float) fill_small_powers(params, problem.gamma_value, plan);
  return params;
}

// A thread's place in small columns.
using SmallPlace = SmallPlaceOf<SmallColumnsParams>;

// A thread's place, and the addresses of its operands.
template <typename T, bool kStep, bool kBackward>
struct SmallColumnIndex : SmallPlace {
  static constexpr int kMost = small_column_steps(kStep, kBackward);
  using Words = uint32_t[kMost];  // an element each
  int column, count;              // the thread's, of which it has so many steps
  int warp_elements;              // of the warp's contiguous range

  __device__ __forceinline__ explicit SmallColumnIndex(const SmallColumnsParams& params) : SmallPlace(params) {
    // A contiguous range in reverse has its columns in reverse, too.
    const int existing = min(span_column, width - 1);
    column = p.flat && p.reverse ? width - 1 - existing : first_column + existing;
    count = span_column < width ? max(0, min(p.steps, p.length - first_step)) : 0;
    warp_elements = max(0, min(slots * p.steps, p.length - warp_step)) * width;
  }

  template <typename Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll
    for (int k = 0; k < kMost; k += kSmallBatch) {
      if (k >= p.steps) break;
#pragma unroll
      for (int i = k; i < k + kSmallBatch; ++i) visit(i);
    }
  }
  __device__ __forceinline__ int offset(const SmallColumnOperand& of) const {
    return outer * of.outer + column * of.inner;
  }
  // The elements of an operand that a thread loads and stores: its own steps, or every 32nd one of the warp's range; or
  // those of the step before, or of the one after.
  struct Range {
    int at, stride, least, most;
  };
  __device__ __forceinline__ Range range(const SmallColumnOperand& of, int back, bool after = false) const {
    const int from = after ? 1 : -back;
    if (!p.flat)
      return {offset(of) + (first_step + from) * of.time, of.time, first_step < back ? 1 : 0,
          after ? min(count, p.length - first_step - 1) : count};
    const int index = (warp_step + from) * width + lane,
              elements = after ? min(warp_elements, (p.length - warp_step - 1) * width) : warp_elements;
    return {outer * of.outer + (p.reverse ? width - 1 - index : index), p.reverse ? -32 : 32, index < 0 ? 1 : 0,
        (elements - lane + 31) >> 5};
  }
  __device__ __forceinline__ void ask(const SmallColumnOperand& of, Words& to, int back = 0, bool after = false) const {
    const Range steps = range(of, back, after);
    const T* const from = static_cast<const T*>(of.data) + steps.at;
    each([&](int k) { load_words_where(k >= steps.least && k < steps.most, from + k * steps.stride, &to[k]); });
  }
  __device__ __forceinline__ void ask_flags(Words& to) const {
    const uint8_t* const from =
        static_cast<const uint8_t*>(p.reset.data) + offset(p.reset) + (first_step - p.back) * p.reset.time;
    each([&](int k) { load_words_where(k < count && first_step + k >= p.back, from + k * p.reset.time, &to[k]); });
  }
  // That of the thread's last step.
  __device__ __forceinline__ void ask_last_flag(uint32_t& to) const {
    const uint8_t* const from = static_cast<const uint8_t*>(p.reset.data) + offset(p.reset);
    load_words_where(count > 0, from + (first_step + count - 1) * p.reset.time, &to);
  }

  // A bit a step.
  __device__ __forceinline__ uint32_t bits_of(const Words& flags) const {
    uint32_t bits = 0;
    each([&](int k) { bits |= (flags[k] ? 1u : 0u) << k; });
    return bits;
  }
  // Where it is the first step's, or follows the last one.
  __device__ __forceinline__ void ask_initial(uint32_t& to) const {
    const bool wanted = kBackward ? count > 0 && first_step + count == p.length : first_step == 0;
    load_words_where(wanted, static_cast<const T*>(p.initial.data) + offset(p.initial), &to);
  }

  // A range of shared memory of the warp, one for each operand.
  __device__ __forceinline__ uint32_t* range_of(uint32_t* shared, int operand, int operands) const {
    return shared + (warp * operands + operand) * (p.steps * kSmallPitch);
  }
  // The thread's own steps to shared memory, where they are already if they have been turned around, and from there.
  __device__ __forceinline__ void park(const Words& words, uint32_t* shared) const {
    if (!p.flat) each([&](int k) { shared[k * kSmallPitch + lane] = words[k]; });
  }
  __device__ __forceinline__ void unpark(Words& words, const uint32_t* shared) const {
    each([&](int k) { words[k] = shared[p.flat ? own_index(k) : k * kSmallPitch + lane]; });
  }

  // From words in the order of memory to the thread's own steps, and back.
  __device__ __forceinline__ void transpose_to_own(Words& words, uint32_t* shared) const {
    __syncwarp();
    each([&](int k) { shared[k * kSmallPitch + lane] = words[k]; });
    __syncwarp();
    each([&](int k) { words[k] = shared[own_index(k)]; });
  }
  __device__ __forceinline__ void transpose_to_memory(Words& words, uint32_t* shared) const {
    __syncwarp();
    each([&](int k) {
      if (span_column < width) shared[own_index(k)] = words[k];
    });
    __syncwarp();
    each([&](int k) { words[k] = shared[k * kSmallPitch + lane]; });
  }
  __device__ __forceinline__ void store(Words& words, const SmallColumnOperand& operand, uint32_t* shared) const {
    if (p.flat) transpose_to_memory(words, shared);
    const Range steps = range(operand, 0);
    T* const to = static_cast<T*>(const_cast<void*>(operand.data)) + steps.at;
    each([&](int k) {
      T out;
      memcpy(&out, &words[k], sizeof out);
      if (k < steps.most) to[k * steps.stride] = out;
    });
  }

  __device__ __forceinline__ double row_gamma() const {
    return load_gamma<double>(p.gamma.data, p.gamma_dtype, offset(p.gamma), false);
  }
  // Of a column, once; or a part of it, of each block.
  template <bool kShares>
  __device__ __forceinline__ void store_sum(double sum) const {
    if (slot > 0 || span_column >= width) return;
    float* const to = static_cast<float*>(const_cast<void*>(p.grad_gamma.data)) + offset(p.grad_gamma);
    to[kShares ? rank : 0] = static_cast<float>(sum);
    if (kShares && rank + 1 < static_cast<int>(p.cluster.divisor)) return;
#pragma unroll 1
    for (int j = kShares ? rank + 1 : 1; j < p.partials; ++j) to[j] = 0.f;
  }

 private:
  __device__ __forceinline__ int own_index(int k) const {
    const int index = (slot * p.steps + k) * width + span_column;
    return index + (index >> 5);
  }
};

// As a word.
template <typename T, typename Acc>
__device__ __forceinline__ uint32_t word_of_value(Acc value) {
  const T element = cast<T>(static_cast<float>(value));
  uint32_t word = 0;
  memcpy(&word, &element, sizeof element);
  return word;
}

}  // namespace dcs
