// Launches the kernels of the temporal difference scan for little work (small.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "common/device.h"
#include "returns/small.cuh"

namespace dcs {

template <typename T>
class SmallReturnsLaunch {
 public:
  SmallReturnsLaunch(const ReturnsProblem& problem, const Device& device, cudaStream_t stream)
      : p_(problem), device_(device), stream_(stream) {}

  cudaError_t run(ReturnsKernel kernel) {
    const int form = form_of(p_);
    // The types that the forms beside kAdvantages are worth their code for.
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>) {
      if (form == kRatios) return run<kRatios>(kernel);
      if (form == kMixed) return run<kMixed>(kernel);
      if (form == kMixedShifted) return run<kMixedShifted>(kernel);
      if (form == kAdvantagesNext) return run<kAdvantagesNext>(kernel);
      if (form == kRatiosNext) return run<kRatiosNext>(kernel);
    }
    return run<kAdvantages>(kernel);
  }

 private:
  using Acc = typename Types<T>::Acc;

  template <int kForm>
  cudaError_t run(ReturnsKernel kernel) {
    if (kernel == ReturnsKernel::kShortRows) short_rows<kForm>();
    else few_columns<kForm>();
    return cudaGetLastError();
  }

  // launch(what goes between lanes): float where it holds gamma * lambda's powers, over 32 steps at most, as well as
  // double. With ratios no gate may exceed 1: a product that has left float's range does not come back then.
  template <int kForm, typename Launch>
  void by_width(const Launch& launch) {
    const double carried = std::fabs(p_.gamma.value * p_.trace.value);
    if (carried <= 1 && (carried == 0 || finite_power(carried, 32) >= FLT_MIN) &&
        (!(kForm & kWithRhos) || p_.clip_c <= 1))
      launch(float{});
    else launch(double{});
  }

  template <int kForm>
  void short_rows() {
    by_width<kForm>([&](auto wide) {
      const int64_t blocks = ceil_div(p_.rows() * p_.length * sizeof(T) / 16, kShortRowThreads);
      using Wide = std::conditional_t<(kForm & kWithRhos) != 0, double, decltype(wide)>;
      launch_dependent(returns_short_rows_kernel<T, kForm, Wide>, device_.cluster > 1, blocks, kShortRowThreads, 0,
          stream_, short_rows_call());
    });
  }

  template <int kForm>
  void few_columns() {
    by_width<kForm>([&](auto wide) {
      using Wide = decltype(wide);
      constexpr int kHalf = kSmallWarps / 2;
      if (!columns_are_even(kForm)) launch_few_columns<kForm, kSmallWarps, Wide, false>();
      else if (p_.length <= kSmallWarpSteps * kHalf) launch_few_columns<kForm, kHalf, Wide, true>();
      else launch_few_columns<kForm, kSmallWarps, Wide, true>();
    });
  }

  // The common call of few columns (returns_few_columns_kernel).
  bool columns_are_even(int form) const {
    const bool rhos = form & kWithRhos;
    const bool outputs = p_.targets.data && (p_.advantages.data != nullptr) == (has_own_values(form) && !rhos) &&
        (!rhos || p_.pg_advantages.data);
    return p_.length % kSmallWarpSteps == 0 && p_.rows() % kSmallColumns == 0 && p_.terminated.data &&
        !p_.truncated.data && outputs && (p_.next_values.data || p_.bootstrap_value.data);
  }

  template <int kForm, int kWarps, typename Wide, bool kEven>
  void launch_few_columns() {
    ReturnsFewCall<Acc> call{};
    set_operands(call);
    call.next_values = p_.next_values.data ? p_.next_values.data : p_.bootstrap_value.data;
    call.columns = static_cast<int>(p_.rows());
    call.length = static_cast<int>(p_.length);
    const Rates<Acc> rates = number_rates<Acc>(p_.gamma.value, p_.trace.value);
    call.gamma = rates.gamma;
    call.rest = rates.rest;
    call.gate = rates.gate;
    call.carried = rates.carried;
    call.clip_rho = static_cast<Acc>(p_.clip_rho);
    call.clip_c = static_cast<Acc>(p_.clip_c);
    call.clip_pg = static_cast<Acc>(p_.clip_pg);
    const int64_t warps = ceil_div(p_.length, kSmallWarpSteps);
    launch_dependent(returns_few_columns_kernel<T, kForm, kWarps, Wide, kEven>, device_.cluster > 1,
        ceil_div(p_.rows(), kSmallColumns), 32 * warps, 0, stream_, call);
  }

  ReturnsSmallCall<Acc> short_rows_call() const {
    ReturnsSmallCall<Acc> call{known_of<Acc>(p_, 16 / sizeof(T))};
    set_operands(call);
    call.next_values = p_.next_values.data;
    call.bootstrap = p_.bootstrap_value.data;
    call.rows = p_.rows();
    call.length = static_cast<int>(p_.length);
    call.lanes = call.length * static_cast<int>(sizeof(T)) / 16;
    return call;
  }

  // What both kernels are given.
  template <typename Call>
  void set_operands(Call& call) const {
    call.rewards = p_.rewards.data;
    call.values = p_.values.data;
    call.rhos = p_.rhos.data;
    call.terminated = static_cast<const uint8_t*>(p_.terminated.data);
    call.truncated = static_cast<const uint8_t*>(p_.truncated.data);
    call.advantages = p_.advantages.data;
    call.targets = p_.targets.data;
    call.pg_advantages = p_.pg_advantages.data;
    const Strides& last = p_.bootstrap_value.strides;
    call.bootstrap_stride = p_.inner > 1 ? last.inner : last.outer;
  }

  const ReturnsProblem& p_;
  const Device& device_;
  cudaStream_t stream_;
};

}  // namespace dcs
