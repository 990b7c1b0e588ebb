// The launchers of windows and aligned operands, one an element type; each in a file of its own so that they compile
// side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/scan/plan/kernels.h"

namespace dcs {

using Launcher = cudaError_t(const ScanProblem&, const KernelPlan&, void* workspace, cudaStream_t);

Launcher launch_scan_float, launch_scan_half, launch_scan_bfloat16, launch_scan_double, launch_scan_complex_float,
    launch_scan_complex_double, launch_scan_int64;

}  // namespace dcs
