// The launchers of columns, one an element type; each in a file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/scan/problem.h"
#include "scan/plan/columns.h"

namespace dcs {

using ColumnsLauncher = cudaError_t(const ScanProblem&, const ColumnsPlan&, void* workspace, cudaStream_t);

ColumnsLauncher launch_columns_float, launch_columns_half, launch_columns_bfloat16, launch_columns_double,
    launch_columns_complex_float, launch_columns_complex_double, launch_columns_int64;

}  // namespace dcs
