// Launches small temporal difference scans of contiguous time (kernel.cuh).
#pragma once

#include <type_traits>

#include "common/device.h"
#include "returns/small_rows/kernel.cuh"
#include "returns/small_rows/launch.h"

namespace dcs {

// launch(form, steps of a thread), both as types.
template <typename T, typename Launch>
auto in_small_returns_form(const ReturnsProblem& problem, const SmallReturnsPlan& plan, const Launch& launch) {
  const auto in = [&](auto form) {
    constexpr bool kRatios = has_factors(form());
    constexpr int kFewest = small_returns_fewest(sizeof(T), kRatios), kMost = small_returns_most(kRatios);
    if (plan.steps == kFewest) return launch(form, std::integral_constant<int, kFewest>());
    return launch(form, std::integral_constant<int, kMost>());
  };
  if (problem.rhos.data) return in(std::integral_constant<ColumnForm, ColumnForm::kRatios>());
  return in(std::integral_constant<ColumnForm, ColumnForm::kPlain>());
}

template <typename T>
cudaError_t launch_small_returns(const ReturnsProblem& problem, const SmallReturnsPlan& plan, cudaStream_t stream) {
  const auto params = small_returns_params<T>(problem, plan);
  return in_small_returns_form<T>(problem, plan, [&](auto form, auto steps) {
    const auto kernel = small_returns_rows_kernel<T, form(), steps()>;
    const int staged = 32 * plan.warps * steps() * static_cast<int>(sizeof(T));
    return launch_planned(kernel, plan, params.stores_words() ? 0 : staged, stream, params);
  });
}

}  // namespace dcs
