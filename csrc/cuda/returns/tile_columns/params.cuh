// What the kernel of the temporal difference scan is launched with in which blocks take tiles of columns.
#pragma once

#include "dcs/returns/tile_plan.h"
#include "returns/serial_columns/params.cuh"
#include "scan/columns/columns_params.cuh"

namespace dcs {

template <typename Acc>
struct TileColumnsParams {
  ResidentColumnsParams carries;  // of the scan of differences
  ReturnsColumnParams<Acc> call;
  // Of tiles that are contiguous ranges of memory: steps of a strip, one row or all of them; a row's.
  TileTensors tensors;
  int lines;
  Divisor length;
};

template <typename T>
TileColumnsParams<typename Types<T>::Acc> tile_columns_params(
    const ReturnsProblem& problem, const ResidentColumnsPlan& plan, void* workspace, const CallTag& tag) {
  TileColumnsParams<typename Types<T>::Acc> params{
      {carried_scan(problem), plan, workspace, tag}, returns_column_params<T>(problem, 1)};
  if (!plan.flat) return params;
  params.tensors = tile_tensors(problem, int64_t{plan.part_steps} * plan.parts);
  params.lines = static_cast<int>(problem.outer * problem.length / plan.strips);
  params.length = Divisor(static_cast<uint32_t>(problem.length));
  return params;
}

}  // namespace dcs
