// Launches the temporal difference scan in which blocks take tiles of columns (kernel.cuh).
#pragma once

#include "common/device.h"
#include "returns/tile_columns/kernel.cuh"
#include "scan/carry/call_tag.h"

namespace dcs {

template <typename T, int kUnit>
auto tile_columns_kernel_of(WalkForm form) {
  if constexpr (kUnit == 1) {
    if (form == WalkForm::kAll) return tile_columns_kernel<T, 1, WalkForm::kAll>;
  }
  return form == WalkForm::kRatios ? tile_columns_kernel<T, kUnit, WalkForm::kRatios>
                                   : tile_columns_kernel<T, kUnit, WalkForm::kPlain>;
}

template <typename T>
cudaError_t launch_tile_columns(
    const ReturnsProblem& problem, const HeldColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  const WalkForm form = tile_form(problem);
  const int64_t blocks = plan.walks * plan.tiles;
  CallTag tag{};
  // Many blocks take longer to count than their words to clear.
  if (plan.workspace_bytes > 0)
    tag = plan.dependent ? counted_tag(workspace, plan.workspace_bytes, blocks, stream)
                         : CallTag{call_tag(workspace, plan.workspace_bytes, stream), nullptr};
  auto kernel = tile_columns_kernel_of<T, 1>(form);
  if constexpr (sizeof(T) == 2) {
    if (plan.pairs) kernel = tile_columns_kernel_of<T, 2>(form);
  }
  return launch_dependent(
      kernel, plan.dependent, blocks, kColumnThreads, 0, stream, tile_columns_params<T>(problem, plan, workspace, tag));
}

}  // namespace dcs
