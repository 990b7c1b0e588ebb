// Launches the tiles of columns (tiled_columns.cuh).
#pragma once

#include "scan/carry/call_tag.h"
#include "scan/columns/tiled_columns.cuh"

namespace dcs {

template <typename T, bool kStep, bool kBackward, int kUnit>
cudaError_t launch_tiled_columns_as(const TiledColumnsParams& params, cudaStream_t stream) {
  const ColumnTiles& tiles = params.tiles;
  const auto kernel = tiled_columns_kernel<T, kStep, kBackward, kUnit>;
  int device = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const cudaError_t error = allow_shared(kernel, tiles.shared_bytes, most);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cooperative = cooperating();
  const int threads = tiles.threads + (tiles.walks_alone ? 0 : kCarryThreads);
  const cudaLaunchConfig_t config =
      launch_config(tiles.blocks, threads, tiles.shared_bytes, stream, &cooperative, tiles.peers > 1 ? 1 : 0);
  cudaLaunchKernelEx(&config, kernel, params);
  return cudaGetLastError();
}

template <typename T, bool kStep, bool kBackward>
cudaError_t launch_tiled_columns_in(const TiledColumnsParams& params, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (params.tiles.pairs) return launch_tiled_columns_as<T, kStep, kBackward, 2>(params, stream);
  }
  return launch_tiled_columns_as<T, kStep, kBackward, 1>(params, stream);
}

template <typename T>
cudaError_t launch_tiled_columns(
    const ScanProblem& problem, const ColumnTiles& tiles, void* workspace, cudaStream_t stream) {
  const uint64_t tag = tiles.peers > 1 ? call_tag(workspace, tiles.workspace_bytes, stream) : 0;
  const TiledColumnsParams params{problem, tiles, workspace, tag};
  if constexpr (!std::is_same_v<T, int64_t>) {
    const bool step = problem.gamma_kind == GammaKind::kStep;
    if (problem.backward && step) return launch_tiled_columns_in<T, true, true>(params, stream);
    if (problem.backward) return launch_tiled_columns_in<T, false, true>(params, stream);
    if (step) return launch_tiled_columns_in<T, true, false>(params, stream);
  }
  return launch_tiled_columns_in<T, false, false>(params, stream);
}

}  // namespace dcs
