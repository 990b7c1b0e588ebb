// Launches the temporal difference scan in which a thread takes a column serially (kernel.cuh), or several of few
// steps.
#pragma once

#include "returns/few_steps/launch.cuh"
#include "returns/serial_columns/kernel.cuh"
#include "returns/serial_columns/launch.h"

namespace dcs {

// Enough columns to fill multiprocessors with large blocks; with fewer, blocks of a warp share them out evenly.
constexpr int64_t kColumnsOfLargeBlocks = 4 * kSerialReturnsThreads;

template <typename T, int kUnit, ColumnForm kForm>
cudaError_t launch_serial_returns_as(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  const auto params = returns_column_params<T>(problem, kUnit);
  const int threads = params.cells >= kColumnsOfLargeBlocks * device.multiprocessors ? kSerialReturnsThreads : 32;
  return launch_dependent(returns_serial_columns_kernel<T, kUnit, kForm>, device.cluster > 1,
      ceil_div(params.cells, threads), threads, 0, stream, params);
}

// Pairs are half the threads: only where enough are left. Single columns take 0.89 of their time with 160 to 384
// columns a multiprocessor, 1.09 up to 530 and 1.28 beyond (random problems of 64 and more steps on an H200).
constexpr int64_t kSerialReturnsPairedColumns = 384;

inline bool takes_serial_pairs(const ReturnsProblem& problem, const Device& device) {
  return columns_pair(problem) && problem.rows() >= kSerialReturnsPairedColumns * device.multiprocessors;
}

template <ColumnForm kForm>
using FormConstant = std::integral_constant<ColumnForm, kForm>;

template <typename T>
cudaError_t launch_serial_returns(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {
    if (takes_few_returns(problem, device.multiprocessors)) return launch_few_returns<T>(problem, device, stream);
  }
  const ColumnForm form = serial_form(problem);
  const auto launch_of = [&](auto unit) {
    const auto launch = [&](auto of) { return launch_serial_returns_as<T, unit(), of()>(problem, device, stream); };
    if (form == ColumnForm::kPlain) return launch(FormConstant<ColumnForm::kPlain>());
    if (form == ColumnForm::kNext) return launch(FormConstant<ColumnForm::kNext>());
    if (form == ColumnForm::kRatios) return launch(FormConstant<ColumnForm::kRatios>());
    return launch(FormConstant<ColumnForm::kRatiosNext>());
  };
  if (form == ColumnForm::kAll) return launch_serial_returns_as<T, 1, ColumnForm::kAll>(problem, device, stream);
  if constexpr (sizeof(T) == 2) {
    if (takes_serial_pairs(problem, device)) return launch_of(std::integral_constant<int, 2>());
  }
  return launch_of(std::integral_constant<int, 1>());
}

}  // namespace dcs
