// Before and behind the scan that gradients are made of (the formulas: torch_dcs_ops/ops/returns/gradients.py).
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "returns/gradients/slots.cuh"

namespace dcs {

// What is scanned, for `to`, and its gates, which that wants or not: of steps, of rows.
template <typename T, GradientsForm kForm, typename To>
__device__ __forceinline__ void make_sources(const Slots<T, kForm>& slots, const To& to) {
  using Acc = typename Types<T>::Acc;
  const GradientsParams<T>& params = slots.params;
  const bool has_ratios = params.rhos.data;
  T of_advantages[kSlots], of_targets[kSlots], rhos[kSlots];
  slots.read(params.of_advantages, of_advantages);
  slots.read(params.of_targets, of_targets);
  Acc carried[kSlots] = {};  // from the step before's policy gradient
  if (params.of_pg.data) {
    bool ends[kSlots];
    T of_pg[kSlots], rhos_before[kSlots];
    const auto has_one_before = [&](int j) { return !slots.is_first(j); };
    slots.read(params.ends, ends, -1, has_one_before);
    slots.read(params.of_pg, of_pg, -1, has_one_before);
    slots.read(params.rhos, rhos_before, -1, has_one_before);
#pragma unroll
    for (int j = 0; j < kSlots; ++j)
      if (has_one_before(j) && !ends[j])
        carried[j] = rates_of(slots, j, -1).product *
            (ratio_of(has_ratios, cast<Acc>(rhos_before[j]), params.clip_pg) * cast<Acc>(of_pg[j]));
  }
  to.store_sources([&](int j) { return cast<Acc>(of_advantages[j]) + cast<Acc>(of_targets[j]) + carried[j]; });
  if (to.wants_gates()) {
    slots.read(params.rhos, rhos);
    to.store_gates(
        [&](int j) { return rates_of(slots, j).product * ratio_of(has_ratios, cast<Acc>(rhos[j]), params.clip_c); });
  }
  if (kForm == GradientsForm::kAny && to.wants_row_gates())
    to.store_row_gates([&](int j) { return rates_of(slots, j).gate; });
}

// For a scan that is launched.
template <typename T>
struct SourcesInMemory {
  const Slots<T>& slots;
  const GradientsParams<T>& params = slots.params;

  template <typename Value>
  __device__ __forceinline__ void store_sources(const Value& value) const {
    slots.write(params.source, value);
  }
  __device__ __forceinline__ bool wants_gates() const { return params.gates.data; }
  template <typename Value>
  __device__ __forceinline__ void store_gates(const Value& value) const {
    slots.write(params.gates, value);
  }
  __device__ __forceinline__ bool wants_row_gates() const { return params.row_gates; }
  template <typename Value>
  __device__ __forceinline__ void store_row_gates(const Value& value) const {
#pragma unroll
    for (int j = 0; j < kSlots; ++j)
      if (slots.is_there(j) && slots.is_last(j)) params.row_gates[slots.row(j, params.rows)] = value(j);
  }
};

template <typename T>
__global__ void __launch_bounds__(kSlotThreads)
    gradient_sources_kernel(const __grid_constant__ GradientsParams<T> params) {
  overlap_launches();
  const Slots<T> slots(params);
  make_sources(slots, SourcesInMemory<T>{slots});
}

// The gradients of a base, r + boot - v, and what is made of it; of slots `later` steps on.
template <typename T, GradientsForm kForm>
struct BaseGradients {
  using Acc = typename Types<T>::Acc;
  const GradientsParams<T>& params;
  const Slots<T, kForm>& slots;
  const int later;
  Acc base[kSlots];
  bool there[kSlots];

  template <typename Scanned, typename Which>
  __device__ __forceinline__ BaseGradients(
      const Slots<T, kForm>& of, const Scanned& scanned, int at, const Which& which)
      : params(of.params), slots(of), later(at) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) there[j] = which(j);
    scanned.read(base, later, which);
    weigh(which);
  }
  // By ratios.
  template <typename Which>
  __device__ __forceinline__ void weigh(const Which& which) {
    T rhos[kSlots], of_pg[kSlots];
    slots.read(params.rhos, rhos, later, which);
    slots.read(params.of_pg, of_pg, later, which);
    const bool has_ratios = params.rhos.data;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const Acc rho = cast<Acc>(rhos[j]);
      if (has_ratios) base[j] *= ratio_of(true, rho, params.clip_rho);
      if (params.of_pg.data) base[j] += ratio_of(has_ratios, rho, params.clip_pg) * cast<Acc>(of_pg[j]);
    }
  }
  // Of the values of next states. `is_last`: of a row.
  template <typename Last>
  __device__ __forceinline__ void of_next(Acc (&to)[kSlots], const Last& is_last) const {
    bool lacks[kSlots], ends[kSlots];
    const auto which = [&](int j) { return there[j]; };
    slots.read(params.lacks_after, lacks, later, which);
    const bool leaves_rest = !params.has_own_values && !params.is_n_step;
    if (leaves_rest) slots.read(params.ends, ends, later, which);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      to[j] = 0;
      if (!there[j] || lacks[j]) continue;
      const SlotRates<Acc> rates = rates_of(slots, j, later);
      to[j] = (leaves_rest && !ends[j] && !is_last(j) ? rates.rest : rates.gamma) * base[j];
    }
  }
};

// All gradients, from what has been scanned. kNSteps: it may be over a window.
template <bool kNSteps, typename T, GradientsForm kForm, typename Scanned>
__device__ __forceinline__ void write_gradients(const Slots<T, kForm>& slots, const Scanned& scanned) {
  using Acc = typename Types<T>::Acc;
  const GradientsParams<T>& params = slots.params;
  const auto all = [](int) { return true; };
  const BaseGradients<T, kForm> here(slots, scanned, 0, all);
  slots.write(params.rewards, [&](int j) { return here.base[j]; });
  if (params.values.data) {
    Acc of_values[kSlots] = {};
    if (params.has_own_values) {
      T of_targets[kSlots];
      slots.read(params.of_targets, of_targets);
#pragma unroll
      for (int j = 0; j < kSlots; ++j) of_values[j] = cast<Acc>(of_targets[j]) - here.base[j];
    }
    if (!params.has_next_values) {
      // A state is the next one of the step before.
      const auto has_one_before = [&](int j) { return !slots.is_first(j); };
      const BaseGradients<T, kForm> before(slots, scanned, -1, has_one_before);
      Acc of_next[kSlots];
      before.of_next(of_next, [](int) { return false; });
#pragma unroll
      for (int j = 0; j < kSlots; ++j) of_values[j] += of_next[j];
    }
    slots.write(params.values, [&](int j) { return of_values[j]; });
  }
  if (!params.next_values.data && !params.bootstrap_value) return;
  Acc of_next[kSlots];
  here.of_next(of_next, [&](int j) { return slots.is_last(j); });
  if (kNSteps && params.is_n_step && !params.has_own_values) {
    // A step's next state is the next step's own, whose value its target contains.
    bool ends[kSlots];
    T of_targets[kSlots];
    const auto goes_on = [&](int j) { return !slots.is_last(j); };
    slots.read(params.ends, ends);
    slots.read(params.of_targets, of_targets, 1, goes_on);
    const BaseGradients<T, kForm> after(slots, scanned, 1, goes_on);
#pragma unroll
    for (int j = 0; j < kSlots; ++j)
      if (goes_on(j) && !ends[j]) of_next[j] += cast<Acc>(of_targets[j]) - after.base[j];
  }
  slots.write(params.next_values, [&](int j) { return of_next[j]; });
  if (!params.bootstrap_value) return;
#pragma unroll
  for (int j = 0; j < kSlots; ++j)
    if (slots.is_there(j) && slots.is_last(j))
      params.bootstrap_value[slots.row(j, params.of_bootstrap)] = cast<T>(of_next[j]);
}

template <typename T, GradientsForm kForm>
struct ScannedInMemory {
  const Slots<T, kForm>& slots;

  template <typename Which>
  __device__ __forceinline__ void read(typename Types<T>::Acc (&to)[kSlots], int later, const Which& which) const {
    slots.read(slots.params.scanned, to, later, which);
  }
};

template <typename T, GradientsForm kForm>
__global__ void __launch_bounds__(kSlotThreads) gradients_kernel(const __grid_constant__ GradientsParams<T> params) {
  overlap_launches();
  const Slots<T, kForm> slots(params);
  write_gradients<true>(slots, ScannedInMemory<T, kForm>{slots});
}

}  // namespace dcs
