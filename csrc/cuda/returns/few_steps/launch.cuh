// Launches the temporal difference scan in which a thread takes several columns of few steps (kernel.cuh).
#pragma once

#include "common/device.h"
#include "returns/few_steps/kernel.cuh"

namespace dcs {

template <typename T, int kWide, WalkForm kForm>
cudaError_t launch_few_returns_as(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  const auto params = few_returns_params<T>(problem, kWide);
  return launch_dependent(few_returns_kernel<T, kWide, kForm>, device.cluster > 1,
      ceil_div(params.call.cells, kFewReturnsBlock), kFewReturnsBlock, 0, stream, params);
}

template <typename T, WalkForm kForm>
cudaError_t launch_few_returns_in(const ReturnsProblem& problem, int wide, const Device& device, cudaStream_t stream) {
  constexpr int kWidest = few_returns_wide(sizeof(T), kForm);
  if constexpr (kWidest > 1) {
    if (wide == kWidest) return launch_few_returns_as<T, kWidest, kForm>(problem, device, stream);
  }
  if constexpr (sizeof(T) == 2) {
    if (wide == 2) return launch_few_returns_as<T, 2, kForm>(problem, device, stream);
  }
  return launch_few_returns_as<T, 1, kForm>(problem, device, stream);
}

template <typename T>
cudaError_t launch_few_returns(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  const int wide = few_returns_word(problem);
  const WalkForm form = walk_form(problem);
  if (form == WalkForm::kPlain) return launch_few_returns_in<T, WalkForm::kPlain>(problem, wide, device, stream);
  if (form == WalkForm::kRatios) return launch_few_returns_in<T, WalkForm::kRatios>(problem, wide, device, stream);
  return launch_few_returns_in<T, WalkForm::kAll>(problem, wide, device, stream);
}

}  // namespace dcs
