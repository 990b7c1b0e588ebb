// Launches the temporal difference scan of contiguous rows as one flat sequence (kernel.cuh).
#pragma once

#include "returns/flat_rows/kernel.cuh"
#include "returns/flat_rows/launch.h"
#include "common/call_tag.h"

namespace dcs {

template <typename T>
using FlatReturnsKernel = void (*)(FlatReturnsParams<T>);

template <typename T, FlatForm kForm>
FlatReturnsKernel<T> flat_returns_kernel_in(const FlatReturnsPlan& plan) {
  if constexpr (has_one_vector(kForm)) {
    if (plan.vectors == 1) return flat_returns_kernel<T, kForm, 1>;
  }
  return flat_returns_kernel<T, kForm, flat_vectors(sizeof(T))>;
}

template <typename T>
FlatReturnsKernel<T> flat_returns_kernel_of(FlatForm form, const FlatReturnsPlan& plan) {
  switch (form) {
    case FlatForm::kOwn: return flat_returns_kernel_in<T, FlatForm::kOwn>(plan);
    case FlatForm::kLambda: return flat_returns_kernel_in<T, FlatForm::kLambda>(plan);
    case FlatForm::kRatios: return flat_returns_kernel_in<T, FlatForm::kRatios>(plan);
    case FlatForm::kRows: return flat_returns_kernel_in<T, FlatForm::kRows>(plan);
    case FlatForm::kSteps: return flat_returns_kernel_in<T, FlatForm::kSteps>(plan);
    case FlatForm::kRowRatios: return flat_returns_kernel_in<T, FlatForm::kRowRatios>(plan);
    default: return flat_returns_kernel_in<T, FlatForm::kAll>(plan);
  }
}

// params(tag) of the kernel's call.
template <typename Params, typename MakeParams>
cudaError_t launch_flat_rows(void (*kernel)(Params), const MakeParams& params, const FlatReturnsPlan& plan,
    const Device& device, void* workspace, cudaStream_t stream) {
  const cudaError_t error = allow_shared(kernel, plan.shared_bytes, device.shared_per_block);
  if (error != cudaSuccess) return error;
  CallTag tag{};
  bool is_dependent = device.cluster > 1;
  if (plan.is_linked()) {
    // Many blocks take longer to count than their words to clear.
    is_dependent = is_dependent && plan.tiles <= kDependentBlocks * device.multiprocessors;
    tag = is_dependent ? counted_tag(workspace, plan.workspace_bytes, plan.tiles, stream)
                       : CallTag{call_tag(workspace, plan.workspace_bytes, stream), nullptr};
  }
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (is_dependent) attributes[count++] = programmatic_serialization();
  if (plan.cluster > 1) attributes[count++] = in_clusters_of(plan.cluster);
  const cudaLaunchConfig_t config =
      launch_config(plan.tiles, 32 * plan.warps, plan.shared_bytes, stream, attributes, count);
  return cudaLaunchKernelEx(&config, kernel, params(tag));
}

template <typename T>
cudaError_t launch_flat_returns(const ReturnsProblem& problem, const FlatReturnsPlan& plan, const Device& device,
    void* workspace, cudaStream_t stream) {
  const auto params = [&](const CallTag& tag) { return flat_returns_params<T>(problem, plan, workspace, tag); };
  return launch_flat_rows(flat_returns_kernel_of<T>(flat_form(problem), plan), params, plan, device, workspace, stream);
}

}  // namespace dcs
