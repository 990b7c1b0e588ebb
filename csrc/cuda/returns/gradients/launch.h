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
// All of it, one thread per column (serial_columns.cuh).
cudaError_t launch_gradients_serial_columns(const ReturnsGradientsProblem&, const Device&, cudaStream_t);
// All of it, a tile a block (tile.cuh). `workspace`: of so many bytes, for what tiles carry.
inline int64_t gradient_tiles_workspace(const GradientTilesPlan& plan) { return plan.carries() * 32; }
cudaError_t launch_gradient_tiles(
    const ReturnsGradientsProblem&, const GradientTilesPlan&, void* workspace, const Device&, cudaStream_t);

}  // namespace dcs
