// Launches the temporal difference scan in which blocks take tiles of columns (kernel.cuh).
#pragma once

#include "common/device.h"
#include "returns/tile_columns/flat.cuh"
#include "returns/tile_columns/kernel.cuh"
#include "common/call_tag.h"

namespace dcs {

template <typename T, ColumnForm kForm>
auto tile_columns_kernel_of(bool flat) {
  return flat ? flat_columns_kernel<T, kForm> : tile_columns_kernel<T, kForm>;
}
template <typename T>
auto tile_columns_kernel_of(ColumnForm form, bool flat) {
  return form == ColumnForm::kPlain ? tile_columns_kernel_of<T, ColumnForm::kPlain>(flat)
      : form == ColumnForm::kRatios ? tile_columns_kernel_of<T, ColumnForm::kRatios>(flat)
                                    : tile_columns_kernel_of<T, ColumnForm::kAll>(flat);
}

template <typename T>
cudaError_t launch_tile_columns(void (*kernel)(TileColumnsParams<typename Types<T>::Acc>),
    const ReturnsProblem& problem, const ResidentColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  const int64_t blocks = plan.strips * plan.tiles;
  CallTag tag{};
  // Many blocks take longer to count than their words to clear.
  if (plan.workspace_bytes > 0)
    tag = plan.dependent ? counted_tag(workspace, plan.workspace_bytes, blocks, stream)
                         : CallTag{call_tag(workspace, plan.workspace_bytes, stream), nullptr};
  const cudaError_t error = allow_shared(kernel, plan.shared_bytes, plan.most_shared, plan.exchange_bytes);
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel, plan.dependent, blocks, kColumnThreads, plan.shared_bytes, stream,
      tile_columns_params<T>(problem, plan, workspace, tag));
}

template <typename T>
cudaError_t launch_small_tiles(void (*kernel)(SmallTileParams<typename Types<T>::Acc>), const ReturnsProblem& problem,
    const SmallColumnsPlan& plan, cudaStream_t stream) {
  return launch_planned(kernel, plan, 0, stream, small_tile_params<T>(problem, plan));
}

template <typename T>
cudaError_t launch_tile_columns(
    const ReturnsProblem& problem, const TilesPlan& plan, void* workspace, cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4) {
    if (plan.small) return launch_small_tiles<T>(small_tile_columns_kernel<T>, problem, *plan.small, stream);
  }
  const auto kernel = tile_columns_kernel_of<T>(tile_form(problem), plan.resident->flat);
  return launch_tile_columns<T>(kernel, problem, *plan.resident, workspace, stream);
}

}  // namespace dcs
