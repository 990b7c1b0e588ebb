// The launchers of the kernels of contiguous time, one an element type; each in a file of its own.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/scan/problem.h"
#include "scan/plan/any_shape.h"

namespace dcs {

using RowsLauncher = cudaError_t(const ScanProblem&, const KernelPlan&, void* workspace, cudaStream_t);

RowsLauncher launch_rows_float, launch_rows_half, launch_rows_bfloat16, launch_rows_double, launch_rows_complex_float,
    launch_rows_complex_double, launch_rows_int64;

}  // namespace dcs
