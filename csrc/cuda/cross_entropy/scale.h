// The kernels of `_scale`, launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dcs/types.h"

namespace dcs {

// `count` elements of `input`, times `factor`, `other` and `number`: floats, for doubles doubles, of which the first
// two are read on the device, or null for 1. `output` has the input's dtype, or beside floats one of half
// precision.
struct ScaleProblem {
  ElementType from, to;
  const void *input, *factor, *other;
  double number;
  void* output;
  int64_t count;
};

// `can_wait`: whether kernels are compiled to wait for the launches before them.
cudaError_t launch_scale(const ScaleProblem& problem, bool can_wait, cudaStream_t stream);

}  // namespace dcs
