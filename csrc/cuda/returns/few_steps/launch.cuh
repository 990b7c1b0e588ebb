// Launches the temporal difference scan in which a thread takes several columns of few steps (kernel.cuh).
#pragma once

#include "common/device.h"
#include "returns/few_steps/kernel.cuh"

namespace dcs {

template <typename T, int kWide, ColumnForm kForm, bool kTwo = false>
cudaError_t launch_few_returns_as(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  const auto params = few_returns_params<T>(problem, kWide, kTwo);
  return launch_dependent(few_returns_kernel<T, kWide, kForm, kTwo>, device.cluster > 1,
      ceil_div(params.call.cells, kFewReturnsBlock), kFewReturnsBlock, 0, stream, params);
}

template <typename T, ColumnForm kForm>
cudaError_t launch_few_returns_in(const ReturnsProblem& problem, int wide, const Device& device, cudaStream_t stream) {
  constexpr int kWidest = few_returns_wide(sizeof(T), kForm);
  if constexpr (kWidest > 1) {
    if (wide == kWidest) return launch_few_returns_as<T, kWidest, kForm>(problem, device, stream);
  }
  const bool are_two = are_two_few_steps(problem, wide, device.multiprocessors);
  if constexpr (sizeof(T) == 2) {
    if (wide == 2) {
      return are_two ? launch_few_returns_as<T, 2, kForm, true>(problem, device, stream)
                     : launch_few_returns_as<T, 2, kForm>(problem, device, stream);
    }
  }
  return are_two ? launch_few_returns_as<T, 1, kForm, true>(problem, device, stream)
                 : launch_few_returns_as<T, 1, kForm>(problem, device, stream);
}

template <typename T>
cudaError_t launch_few_returns(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  const int wide = few_returns_word(problem);
  const ColumnForm form = few_form(problem);
  if (form == ColumnForm::kPlain) return launch_few_returns_in<T, ColumnForm::kPlain>(problem, wide, device, stream);
  if (form == ColumnForm::kRatios) return launch_few_returns_in<T, ColumnForm::kRatios>(problem, wide, device, stream);
  return launch_few_returns_in<T, ColumnForm::kAll>(problem, wide, device, stream);
}

}  // namespace dcs
