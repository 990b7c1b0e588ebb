// Launches the temporal difference scan of any shape (kernels.cuh).
#pragma once

#include "common/device.h"
#include "returns/chunks/kernels.cuh"

namespace dcs {

template <typename T, bool kGates>
cudaError_t launch_chunks_as(const ReturnsChunksParams<typename Types<T>::Acc>& params, cudaStream_t stream) {
  const ReturnsPlan& plan = params.plan;
  const auto blocks = [&](int64_t chunks) { return static_cast<unsigned>(plan.walks * chunks); };
  returns_pieces_kernel<T, kGates><<<blocks(plan.chunks - 1), kChunkThreads, 0, stream>>>(params);
  returns_chunks_kernel<T, kGates><<<blocks(plan.chunks), kChunkThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_chunks(
    const ReturnsProblem& problem, const ReturnsPlan& plan, void* workspace, cudaStream_t stream) {
  const auto params = chunks_params<T>(problem, plan, workspace);
  return has_gates(problem) ? launch_chunks_as<T, true>(params, stream) : launch_chunks_as<T, false>(params, stream);
}

}  // namespace dcs
