// Launches the kernels of columns of any number and alignment.
#pragma once

#include "common/device.h"
#include "scan/carry/call_tag.h"
#include "scan/columns/held_columns.cuh"
#include "scan/columns/walk_columns.cuh"
#include "dcs/scan/plan/kernels.h"

namespace dcs {

template <typename T, bool kStep, bool kBackward>
cudaError_t launch_walk_columns(const ScanProblem& problem, const WalkColumnsPlan& plan, cudaStream_t stream) {
  const auto launch = [&](auto kernel) {
    return launch_dependent(kernel, plan.dependent, plan.blocks, kColumnThreads, 0, stream, problem);
  };
  if constexpr (sizeof(T) == 2) {
    if (plan.pairs) return launch(walk_columns_kernel<T, kStep, kBackward, 2>);
  }
  return launch(walk_columns_kernel<T, kStep, kBackward, 1>);
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

template <typename T, bool kStep, bool kBackward>
cudaError_t launch_held_columns(
    const ScanProblem& problem, const HeldColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  HeldColumnsParams params{problem, plan, workspace, 0};
  if (plan.workspace_bytes > 0) params.tag = call_tag(workspace, plan.workspace_bytes, stream);
  const auto kernel = held_kernel_of<T, kStep, kBackward>(plan);
  if (plan.shared_bytes > 0) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostFlatBytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (plan.dependent) attributes[count++] = programmatic_serialization();
  if (plan.cluster) attributes[count++] = in_clusters_of(plan.tiles);
  const cudaLaunchConfig_t config =
      launch_config(plan.walks * plan.tiles, kColumnThreads, plan.shared_bytes, stream, attributes, count);
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <typename T, bool kStep, bool kBackward>
cudaError_t launch_columns_as(
    const ScanProblem& problem, const KernelPlan& plan, void* workspace, cudaStream_t stream) {
  if (const WalkColumnsPlan* const walk = std::get_if<WalkColumnsPlan>(&plan))
    return launch_walk_columns<T, kStep, kBackward>(problem, *walk, stream);
  return launch_held_columns<T, kStep, kBackward>(problem, std::get<HeldColumnsPlan>(plan), workspace, stream);
}

template <typename T>
cudaError_t launch_columns_of(
    const ScanProblem& problem, const KernelPlan& plan, void* workspace, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, int64_t>) {
    const bool step = problem.gamma_kind == GammaKind::kStep;
    if (problem.backward && step) return launch_columns_as<T, true, true>(problem, plan, workspace, stream);
    if (problem.backward) return launch_columns_as<T, false, true>(problem, plan, workspace, stream);
    if (step) return launch_columns_as<T, true, false>(problem, plan, workspace, stream);
  }
  return launch_columns_as<T, false, false>(problem, plan, workspace, stream);
}

}  // namespace dcs
