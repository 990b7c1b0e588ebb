// The kernels of `_returns_gradients`.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/returns/gradients_plan.h"
#include "common/device.h"

namespace dcs {

// Before and behind the scan (stages.cuh). `workspace`: of `memory.bytes`.
cudaError_t launch_gradient_sources(
    const ReturnsGradientsProblem&, const GradientsMemory& memory, char* workspace, const Device&, cudaStream_t);
cudaError_t launch_gradients(
    const ReturnsGradientsProblem&, const GradientsMemory& memory, char* workspace, const Device&, cudaStream_t);
// All of it as a scan: windows of n steps (returns/n_step_shared_launch.cuh), flat rows (flat_rows.cuh), tiles of
// columns (flat_columns.cuh, tile_columns.cuh), else a thread takes columns (returns/serial_columns,
// returns/few_steps). One a storage type, each in a file of its own so that they compile side by side.
using GradientScanLauncher = cudaError_t(const GradientScanPlan&, const Device&, void* workspace, cudaStream_t);
GradientScanLauncher launch_gradient_scan_float, launch_gradient_scan_half, launch_gradient_scan_bfloat16,
    launch_gradient_scan_double;

}  // namespace dcs
