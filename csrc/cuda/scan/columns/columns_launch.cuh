// Launches the kernels of columns of any number and alignment.
#pragma once

#include <type_traits>

#include "common/device.h"
#include "scan/carry/call_tag.h"
#include "scan/columns/few_steps.cuh"
#include "scan/columns/held_columns.cuh"
#include "scan/columns/walk_columns.cuh"
#include "dcs/scan/forms.h"

namespace dcs {

// kernel_of(whether there is a gamma a step, whether it is the backward, columns of a cell), all as types.
template <typename T, typename Plan, typename KernelOf, typename... Arguments>
cudaError_t launch_cells(const ScanProblem& problem, const Plan& plan, cudaStream_t stream, const KernelOf& kernel_of,
    const Arguments&... arguments) {
  return by_form<T>(problem, [&](auto step, auto backward) {
    auto kernel = kernel_of(step, backward, std::integral_constant<int, 1>());
    if constexpr (sizeof(T) == 2) {
      if (plan.pairs) kernel = kernel_of(step, backward, std::integral_constant<int, 2>());
    }
    return launch_dependent(kernel, plan.dependent, plan.blocks, kColumnThreads, 0, stream, problem, arguments...);
  });
}

template <typename T>
cudaError_t launch_walk_columns(const ScanProblem& problem, const WalkColumnsPlan& plan, cudaStream_t stream) {
  return launch_cells<T>(problem, plan, stream,
      [](auto step, auto backward, auto unit) { return walk_columns_kernel<T, step(), backward(), unit()>; });
}

template <typename T>
cudaError_t launch_few_steps(const ScanProblem& problem, const FewStepsPlan& plan, cudaStream_t stream) {
  return launch_cells<T>(
      problem, plan, stream,
      [](auto step, auto backward, auto unit) { return few_steps_kernel<T, step(), backward(), unit()>; }, plan.cells);
}

template <typename T, bool kStep, bool kBackward>
auto held_kernel_of(const HeldColumnsPlan& plan) {
  if constexpr (sizeof(T) == 2) {
    if (plan.pairs)
      return plan.flat ? held_columns_kernel<T, kStep, kBackward, 2, true>
                       : held_columns_kernel<T, kStep, kBackward, 2, false>;
  }
  return plan.flat ? held_columns_kernel<T, kStep, kBackward, 1, true>
                   : held_columns_kernel<T, kStep, kBackward, 1, false>;
}

template <typename T>
cudaError_t launch_held_columns(
    const ScanProblem& problem, const HeldColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  const int64_t blocks = plan.walks * plan.tiles;
  CallTag tag{};
  // Many blocks take longer to count than their words to clear.
  if (plan.workspace_bytes > 0)
    tag = plan.dependent ? counted_tag(workspace, plan.workspace_bytes, blocks, stream)
                         : CallTag{call_tag(workspace, plan.workspace_bytes, stream), nullptr};
  const HeldColumnsParams params{problem, plan, workspace, tag};
  const auto kernel =
      by_form<T>(problem, [&](auto step, auto backward) { return held_kernel_of<T, step(), backward()>(plan); });
  const cudaError_t error = allow_shared(kernel, plan.shared_bytes, plan.most_shared, plan.exchange_bytes);
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel, plan.dependent, blocks, kColumnThreads, plan.shared_bytes, stream, params);
}

}  // namespace dcs
