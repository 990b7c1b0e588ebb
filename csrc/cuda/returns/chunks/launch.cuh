// Launches the temporal difference scan of any shape (kernels.cuh).
#pragma once

#include "common/device.h"
#include "returns/chunks/kernels.cuh"

namespace dcs {

template <typename T, bool kGates>
cudaError_t launch_chunks_as(
    const ReturnsChunksParams<typename Types<T>::Acc>& params, const Device& device, cudaStream_t stream) {
  const ReturnsPlan& plan = params.plan;
  constexpr int kBytes = sizeof(ReturnsTileMemory<T, kGates>);
  const auto launch = [&](auto kernel, int64_t chunks) {
    allow_shared(kernel, kBytes, device.shared_per_block);
    kernel<<<static_cast<unsigned>(plan.walks * chunks), kChunkThreads, kBytes, stream>>>(params);
  };
  if (!plan.whole) launch(returns_pieces_kernel<T, kGates>, plan.chunks - 1);
  launch(returns_chunks_kernel<T, kGates>, plan.chunks);
  return cudaGetLastError();
}

// `problem`: with_rows_together(...).
template <typename T>
cudaError_t launch_chunks(const ReturnsProblem& problem, const ReturnsPlan& plan, void* workspace, const Device& device,
    cudaStream_t stream) {
  const auto params = chunks_params<T>(problem, plan, workspace);
  return has_gates(problem) ? launch_chunks_as<T, true>(params, device, stream)
                            : launch_chunks_as<T, false>(params, device, stream);
}

}  // namespace dcs
