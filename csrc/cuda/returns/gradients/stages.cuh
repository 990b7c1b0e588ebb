// Before and behind the scan that gradients are made of (the formulas: torch_dcs_ops/ops/returns/gradients.py).
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "returns/gradients/slots.cuh"

namespace dcs {

// What is scanned, and its gates, of steps or of rows, where these are asked for.
template <typename T>
__global__ void __launch_bounds__(kSlotThreads)
    gradient_sources_kernel(const __grid_constant__ GradientsParams<T> params) {
  using Acc = typename Types<T>::Acc;
  overlap_launches();
  const Slots<T> slots(params);
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
  slots.write(
      params.source, [&](int j) { return cast<Acc>(of_advantages[j]) + cast<Acc>(of_targets[j]) + carried[j]; });
  if (params.gates.data) {
    slots.read(params.rhos, rhos);
    slots.write(params.gates,
        [&](int j) { return rates_of(slots, j).product * ratio_of(has_ratios, cast<Acc>(rhos[j]), params.clip_c); });
  }
  if (!params.row_gates) return;
#pragma unroll
  for (int j = 0; j < kSlots; ++j)
    if (slots.is_there(j) && slots.is_last(j)) params.row_gates[slots.row(j, params.rows)] = rates_of(slots, j).gate;
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

  template <typename Which>
  __device__ __forceinline__ BaseGradients(const Slots<T, kForm>& of, int at, const Which& which)
      : params(of.params), slots(of), later(at) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) there[j] = which(j);
    slots.read(params.scanned, base, later, which);
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

// All gradients, from what has been scanned.
template <typename T, GradientsForm kForm>
__global__ void __launch_bounds__(kSlotThreads) gradients_kernel(const __grid_constant__ GradientsParams<T> params) {
  using Acc = typename Types<T>::Acc;
  overlap_launches();
  const Slots<T, kForm> slots(params);
  const auto all = [](int) { return true; };
  const BaseGradients<T, kForm> here(slots, 0, all);
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
      const BaseGradients<T, kForm> before(slots, -1, has_one_before);
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
  if (params.is_n_step && !params.has_own_values) {
    // A step's next state is the next step's own, whose value its target contains.
    bool ends[kSlots];
    T of_targets[kSlots];
    const auto goes_on = [&](int j) { return !slots.is_last(j); };
    slots.read(params.ends, ends);
    slots.read(params.of_targets, of_targets, 1, goes_on);
    const BaseGradients<T, kForm> after(slots, 1, goes_on);
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

}  // namespace dcs
