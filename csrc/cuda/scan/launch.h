// The scans' launchers, one a storage type; each in a file of its own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/scan/problem.h"
#include "scan/plan/planner.h"

namespace dcs {

using Launcher = void(const ScanProblem&, const Plan&, void* workspace, cudaStream_t);

Launcher launch_scan_float, launch_scan_half, launch_scan_bfloat16, launch_scan_double, launch_scan_complex_float,
    launch_scan_complex_double, launch_scan_int64;

}  // namespace dcs
