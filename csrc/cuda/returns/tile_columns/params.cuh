// What the kernel of the temporal difference scan is launched with in which blocks take tiles of columns.
#pragma once

#include "dcs/returns/tile_plan.h"
#include "returns/walk/params.cuh"
#include "scan/columns/columns_params.cuh"

namespace dcs {

template <typename Acc>
struct TileColumnsParams {
  HeldColumnsParams carries;  // of the scan of differences
  ReturnsWalkParams<Acc> call;
};

template <typename T>
TileColumnsParams<typename Types<T>::Acc> tile_columns_params(
    const ReturnsProblem& problem, const HeldColumnsPlan& plan, void* workspace, const CallTag& tag) {
  return {{carried_scan(problem), plan, workspace, tag}, walk_params<T>(problem, plan.pairs ? 2 : 1)};
}

}  // namespace dcs
