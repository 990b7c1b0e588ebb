// Launches the kernels of columns.
#pragma once

#include "scan/carry/call_tag.h"
#include "scan/columns/held_columns.cuh"
#include "scan/columns/walk_columns.cuh"

namespace dcs {

template <typename T, bool kStep, bool kBackward, int kUnit>
cudaError_t launch_columns_as(const ColumnsParams& params, cudaStream_t stream) {
  const ColumnsPlan& plan = params.plan;
  const auto launch = [&](auto kernel) {
    if (plan.shared_bytes > 0) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostFlatBytes);
      if (error != cudaSuccess) return error;
    }
    const cudaLaunchConfig_t config = launch_config(plan.blocks, kColumnThreads, plan.shared_bytes, stream, nullptr, 0);
    return cudaLaunchKernelEx(&config, kernel, params);
  };
  return plan.form == ColumnsForm::kWalk ? launch(walk_columns_kernel<T, kStep, kBackward, kUnit>)
                                         : launch(held_columns_kernel<T, kStep, kBackward>);
}

template <typename T, bool kStep, bool kBackward>
cudaError_t launch_columns_in(const ColumnsParams& params, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (params.plan.pairs) return launch_columns_as<T, kStep, kBackward, 2>(params, stream);
  }
  return launch_columns_as<T, kStep, kBackward, 1>(params, stream);
}

template <typename T>
cudaError_t launch_columns_of(
    const ScanProblem& problem, const ColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  ColumnsParams params{problem, plan, workspace, 0};
  if (plan.workspace_bytes > 0) params.tag = call_tag(workspace, plan.workspace_bytes, stream);
  if constexpr (!std::is_same_v<T, int64_t>) {
    const bool step = problem.gamma_kind == GammaKind::kStep;
    if (problem.backward && step) return launch_columns_in<T, true, true>(params, stream);
    if (problem.backward) return launch_columns_in<T, false, true>(params, stream);
    if (step) return launch_columns_in<T, true, false>(params, stream);
  }
  return launch_columns_in<T, false, false>(params, stream);
}

}  // namespace dcs
