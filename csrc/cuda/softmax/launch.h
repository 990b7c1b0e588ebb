// What a softmax kernel is asked to do, free of torch types, and the launchers, one a storage type.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/device.h"

namespace dcs {

// Tensors seen as (outer, length, inner), contiguous; all sizes are at least 1. Forward: output = softmax(input) along
// length. Backward: output = (input - sum(input * saved)) * saved, where input is the gradient and saved the softmax.
// output may be input. Where `run` is not 0 the input's elements lie in runs instead, as in common/runs.h, and output
// is other memory.
struct SoftmaxProblem {
  int64_t outer = 1, length = 1, inner = 1;
  bool backward = false;
  const void* input = nullptr;
  const void* saved = nullptr;
  void* output = nullptr;
  int64_t run = 0, gap = 0;
};

// Gives device memory of so many bytes that lasts for the launch.
class SoftmaxWorkspace {
 public:
  virtual void* allocate(int64_t bytes) = 0;

 protected:
  ~SoftmaxWorkspace() = default;
};

using SoftmaxLauncher = cudaError_t(const SoftmaxProblem&, const Device&, SoftmaxWorkspace&, cudaStream_t);

SoftmaxLauncher launch_softmax_float, launch_softmax_half, launch_softmax_bfloat16, launch_softmax_double;

}  // namespace dcs
