// Launches the temporal difference scan in which blocks take tiles of columns (kernel.cuh).
#pragma once

#include "common/device.h"
#include "returns/tile_columns/flat.cuh"
#include "returns/tile_columns/kernel.cuh"
#include "scan/carry/call_tag.h"

namespace dcs {

template <typename T, int kUnit, ColumnForm kForm>
auto tile_columns_kernel_of(bool flat) {
  return flat ? flat_columns_kernel<T, kUnit, kForm> : tile_columns_kernel<T, kUnit, kForm>;
}
template <typename T, int kUnit>
auto tile_columns_kernel_of(ColumnForm form, bool flat) {
  if constexpr (kUnit == 1) {
    if (form == ColumnForm::kAll) return tile_columns_kernel_of<T, 1, ColumnForm::kAll>(flat);
  }
  return form == ColumnForm::kRatios ? tile_columns_kernel_of<T, kUnit, ColumnForm::kRatios>(flat)
                                     : tile_columns_kernel_of<T, kUnit, ColumnForm::kPlain>(flat);
}

template <typename T>
cudaError_t launch_tile_columns(
    const ReturnsProblem& problem, const ResidentColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  const ColumnForm form = tile_form(problem);
  const int64_t blocks = plan.strips * plan.tiles;
  CallTag tag{};
  // Many blocks take longer to count than their words to clear.
  if (plan.workspace_bytes > 0)
    tag = plan.dependent ? counted_tag(workspace, plan.workspace_bytes, blocks, stream)
                         : CallTag{call_tag(workspace, plan.workspace_bytes, stream), nullptr};
  auto kernel = tile_columns_kernel_of<T, 1>(form, plan.flat);
  if constexpr (sizeof(T) == 2) {
    if (plan.pairs) kernel = tile_columns_kernel_of<T, 2>(form, plan.flat);
  }
  const cudaError_t error = allow_shared(kernel, plan.shared_bytes, plan.most_shared, plan.exchange_bytes);
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel, plan.dependent, blocks, kColumnThreads, plan.shared_bytes, stream,
      tile_columns_params<T>(problem, plan, workspace, tag));
}

}  // namespace dcs
