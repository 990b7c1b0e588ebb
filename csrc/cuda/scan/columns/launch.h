// The launchers of tiled columns, one an element type; each in a file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/scan/problem.h"
#include "scan/plan/column_tiles.h"

namespace dcs {

using TiledColumnsLauncher = cudaError_t(const ScanProblem&, const ColumnTiles&, void* workspace, cudaStream_t);

TiledColumnsLauncher launch_tiled_columns_float, launch_tiled_columns_half, launch_tiled_columns_bfloat16,
    launch_tiled_columns_double, launch_tiled_columns_complex_float, launch_tiled_columns_complex_double,
    launch_tiled_columns_int64;

}  // namespace dcs
