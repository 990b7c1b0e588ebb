// Launches the temporal difference scan of rows that fit into a block (kernel.cuh).
#pragma once

#include "returns/flat_rows/kernel.cuh"
#include "returns/flat_rows/launch.h"

namespace dcs {

template <typename T, FlatForm kForm, int kVectors>
cudaError_t launch_flat_returns_as(
    const ReturnsProblem& problem, const FlatReturnsPlan& plan, const Device& device, cudaStream_t stream) {
  const auto kernel = flat_returns_kernel<T, kForm, kVectors>;
  const cudaError_t error = allow_shared(kernel, plan.shared_bytes, device.shared_per_block);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (device.cluster > 1) attributes[count++] = programmatic_serialization();
  if (plan.cluster > 1) attributes[count++] = in_clusters_of(plan.cluster);
  // More than 8 blocks need leave, which belongs to the device.
  if (plan.cluster > 8) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  const cudaLaunchConfig_t config =
      launch_config(plan.tiles, 32 * plan.warps, plan.shared_bytes, stream, attributes, count);
  return cudaLaunchKernelEx(&config, kernel, flat_returns_params<T>(problem, plan));
}

template <typename T, FlatForm kForm>
cudaError_t launch_flat_returns_in(
    const ReturnsProblem& problem, const FlatReturnsPlan& plan, const Device& device, cudaStream_t stream) {
  constexpr int kMany = flat_vectors(sizeof(T));
  if constexpr (has_one_vector(kForm)) {
    if (plan.vectors == 1) return launch_flat_returns_as<T, kForm, 1>(problem, plan, device, stream);
  }
  return launch_flat_returns_as<T, kForm, kMany>(problem, plan, device, stream);
}

template <typename T>
cudaError_t launch_flat_returns(
    const ReturnsProblem& problem, const FlatReturnsPlan& plan, const Device& device, cudaStream_t stream) {
  switch (flat_form(problem)) {
    case FlatForm::kOwn: return launch_flat_returns_in<T, FlatForm::kOwn>(problem, plan, device, stream);
    case FlatForm::kLambda: return launch_flat_returns_in<T, FlatForm::kLambda>(problem, plan, device, stream);
    case FlatForm::kRatios: return launch_flat_returns_in<T, FlatForm::kRatios>(problem, plan, device, stream);
    case FlatForm::kRows: return launch_flat_returns_in<T, FlatForm::kRows>(problem, plan, device, stream);
    case FlatForm::kRowRatios: return launch_flat_returns_in<T, FlatForm::kRowRatios>(problem, plan, device, stream);
    default: return launch_flat_returns_in<T, FlatForm::kAll>(problem, plan, device, stream);
  }
}

}  // namespace dcs
