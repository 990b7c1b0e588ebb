// The kernels of `_scale`, launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dcs/types.h"

namespace dcs {

// `count` elements of `input`, times `factor`: a float, for doubles a double, that is read on the device. `output` has
// the input's dtype, or beside floats one of half precision.
struct ScaleProblem {
  ElementType from, to;
  const void *input, *factor;
  void* output;
  int64_t count;
};

cudaError_t launch_scale(const ScaleProblem& problem, cudaStream_t stream);

}  // namespace dcs
