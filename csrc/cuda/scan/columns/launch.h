// The launchers of columns of any shape, one an element type; each in a file of its own so that they compile side by
// side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/scan/plan/kernels.h"

namespace dcs {

cudaError_t launch_columns_float(const ScanProblem&, const KernelPlan&, void* workspace, cudaStream_t);
decltype(launch_columns_float) launch_columns_half, launch_columns_bfloat16, launch_columns_double,
    launch_columns_complex_float, launch_columns_complex_double, launch_columns_int64;

}  // namespace dcs
