// The first step of the sum of a tensor.
#pragma once

#include <cuda_runtime_api.h>

#include "common/device.h"
#include "dcs/types.h"

namespace dcs {

constexpr int kTotalSlice = 8192;

// The sums of all slices of so many floats or doubles, or of fewer at the end.
cudaError_t launch_totals(
    ElementType dtype, const void* values, int64_t count, void* totals, const Device& device, cudaStream_t stream);

}  // namespace dcs
