// The elements of a thread before and behind the scan. They are a block apart, so that a warp reads neighboring memory
// whatever its alignment.
#pragma once

#include "returns/gradients/params.cuh"

namespace dcs {

constexpr int kSlotThreads = 256, kSlots = 4;

// Their indices. Those behind the last one are read as it is. Of what kind all of the call is: `kForm`.
template <typename T, GradientsForm kForm = GradientsForm::kAny>
struct Slots {
  using Acc = typename Types<T>::Acc;
  static constexpr bool kDense = kForm != GradientsForm::kAny;
  struct Coordinates {
    uint32_t slow, mid, fast;
  };
  const GradientsParams<T>& params;
  uint32_t at[kSlots];
  Coordinates of_slots[kDense ? 1 : kSlots];  // else found where they are asked for: what is dense does not
  uint32_t there = 0, firsts = 0, lasts = 0;  // a bit a slot; of time

  __device__ __forceinline__ explicit Slots(const GradientsParams<T>& given) : params(given) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const uint32_t index = blockIdx.x * (kSlotThreads * kSlots) + threadIdx.x + j * kSlotThreads;
      at[j] = min(index, params.count - 1);
      const Coordinates coordinates = coordinates_at(at[j]);
      if constexpr (!kDense) of_slots[j] = coordinates;
      const uint32_t time = params.shape.time_is_fast ? coordinates.fast : coordinates.mid;
      if (index < params.count) there |= 1u << j;
      if (time == 0) firsts |= 1u << j;
      if (time == params.length - 1) lasts |= 1u << j;
    }
  }
  __device__ __forceinline__ bool is_there(int j) const { return there >> j & 1; }
  __device__ __forceinline__ bool is_first(int j) const { return firsts >> j & 1; }
  __device__ __forceinline__ bool is_last(int j) const { return lasts >> j & 1; }
  __device__ __forceinline__ Coordinates coordinates_at(uint32_t index) const {
    const uint32_t line = params.by_fast.of(index), slow = params.shape.slow == 1 ? 0 : params.by_mid.of(line);
    return {slow, line - slow * params.by_mid.divisor, index - line * params.by_fast.divisor};
  }
  __device__ __forceinline__ Coordinates coordinates_of(int j) const {
    if constexpr (kDense) return coordinates_at(at[j]);
    else return of_slots[j];
  }
  // The offset of a per-row value.
  __device__ __forceinline__ int64_t row(int j, const Strides& strides) const {
    const Coordinates coordinates = coordinates_of(j);
    return coordinates.slow * strides.outer +
        (params.shape.time_is_fast ? coordinates.mid : coordinates.fast) * strides.inner;
  }
  template <typename Element>
  __device__ __forceinline__ Element* address(const GradientsOperand<Element>& operand, int j, int later = 0) const {
    int64_t offset = at[j];
    if (!kDense && !operand.dense) {
      const Coordinates coordinates = coordinates_of(j);
      offset = coordinates.slow * operand.slow + coordinates.mid * operand.mid + coordinates.fast * operand.fast;
    }
    return operand.data + (offset + later * operand.time);
  }
  // The elements of a tensor `later` steps after the slots', of those slots that `which(j)` says; 0 of the others,
  // whose own are read: without a branch, so that all loads are on their way at once.
  template <typename To, typename Element, typename Which>
  __device__ __forceinline__ void read(
      const GradientsOperand<Element>& from, To (&to)[kSlots], int later, const Which& which) const {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) to[j] = To();
    if (!from.data) return;
    std::remove_const_t<Element> found[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) found[j] = *address(from, j, which(j) ? later : 0);
#pragma unroll
    for (int j = 0; j < kSlots; ++j)
      if (which(j)) to[j] = static_cast<To>(found[j]);
  }
  template <typename To, typename Element>
  __device__ __forceinline__ void read(const GradientsOperand<Element>& from, To (&to)[kSlots]) const {
    read(from, to, 0, [](int) { return true; });
  }
  template <typename Element, typename Value>
  __device__ __forceinline__ void write(const GradientsOperand<Element>& to, const Value& value) const {
    if (!to.data) return;
#pragma unroll
    for (int j = 0; j < kSlots; ++j)
      if (is_there(j)) *address(to, j) = cast<Element>(value(j));
  }
};

// The discounts of a step.
template <typename Acc>
struct SlotRates {
  Acc gamma, rest, product;  // rest: gamma - gamma * lambda
  double gate;               // gamma * lambda, where both are shared or per row
};

// `later` steps after the slot.
template <typename T, GradientsForm kForm>
__device__ __forceinline__ SlotRates<typename Types<T>::Acc> rates_of(
    const Slots<T, kForm>& slots, int j, int later = 0) {
  using Acc = typename Types<T>::Acc;
  const GradientsParams<T>& params = slots.params;
  Rates<Acc> rates = params.rates;
  if (kForm == GradientsForm::kAny && params.row_rates)
    rates = rates_of<Acc>(params.gamma, params.trace, slots.row(j, params.gamma.tensor.strides),
        slots.row(j, params.trace.tensor.strides));
  if (!params.step_rates) return {rates.gamma, rates.rest, static_cast<Acc>(rates.carried), rates.carried};
  const Acc gamma = params.step_gamma.data ? *slots.address(params.step_gamma, j, later) : rates.gamma,
            trace = params.step_trace.data ? *slots.address(params.step_trace, j, later) : rates.trace;
  return {gamma, gamma - gamma * trace, gamma * trace, 0.0};
}

}  // namespace dcs
