// The sums of slices of a tensor.
#pragma once

#include <cuda_runtime_api.h>

#include "common/device.h"
#include "dcs/types.h"

namespace dcs {

constexpr int64_t kTotalSlice = 8192;  // that a block sums at once

// Of all slices of so many floats or doubles, or of fewer at the end.
cudaError_t launch_totals(ElementType dtype, const void* values, int64_t count, int64_t slice, void* totals,
    const Device& device, cudaStream_t stream);

}  // namespace dcs
