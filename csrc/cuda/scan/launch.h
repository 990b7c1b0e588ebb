// The scans' launchers, three an element type; each in a file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "scan/plan/kernels.h"

namespace dcs {

using Launcher = cudaError_t(const ScanProblem&, const KernelPlan&, void* workspace, cudaStream_t);

// Windows and aligned operands; rows of any length; columns.
Launcher launch_scan_float, launch_scan_half, launch_scan_bfloat16, launch_scan_double, launch_scan_complex_float,
    launch_scan_complex_double, launch_scan_int64;
Launcher launch_rows_float, launch_rows_half, launch_rows_bfloat16, launch_rows_double, launch_rows_complex_float,
    launch_rows_complex_double, launch_rows_int64;
Launcher launch_columns_float, launch_columns_half, launch_columns_bfloat16, launch_columns_double,
    launch_columns_complex_float, launch_columns_complex_double, launch_columns_int64;

}  // namespace dcs
