// The launchers of the temporal difference scan, one a storage type; each in a file of its own so that they compile
// side by side.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "dcs/returns/tile_plan.h"
#include "common/device.h"

namespace dcs {

using ReturnsLauncher = cudaError_t(
    const ReturnsProblem&, const Device&, const std::optional<TilesPlan>& tiles, void* workspace, cudaStream_t);

ReturnsLauncher launch_returns_float, launch_returns_half, launch_returns_bfloat16, launch_returns_double;

}  // namespace dcs
