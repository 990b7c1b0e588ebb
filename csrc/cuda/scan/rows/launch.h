// The launchers of rows of any shape, one an element type; each in a file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/scan/plan/kernels.h"

namespace dcs {

cudaError_t launch_rows_float(const ScanProblem&, const KernelPlan&, void* workspace, cudaStream_t);
decltype(launch_rows_float) launch_rows_half, launch_rows_bfloat16, launch_rows_double, launch_rows_complex_float,
    launch_rows_complex_double, launch_rows_int64;

}  // namespace dcs
