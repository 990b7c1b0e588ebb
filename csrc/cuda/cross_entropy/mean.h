// The kernels of `_mean_factors` and `_mean`, launched: one block each, for some ten thousand rows at most.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dcs/types.h"

namespace dcs {

// Three numbers at `factors`, in `dtype` (Float or Double) as `weight` is: what a mean over the rows divides by, the
// number of those whose target is not `ignore_index` or the sum of their weights; what the logits' gradient is
// multiplied by; and what it lacks then. Without a boost (0) these are the divisor's reciprocal and 1. A target that is
// no class has no weight.
struct MeanFactorsProblem {
  ElementType dtype;
  const int64_t* target;
  const void* weight;  // (classes,), or null
  void* factors;
  int64_t rows, classes, ignore_index;
  double boost;
};

// The sum of `count` values over `divisor`, at `mean`.
struct MeanProblem {
  ElementType dtype;
  const void *values, *divisor;
  void* mean;
  int64_t count;
};

// `can_wait`: whether kernels are compiled to wait for the launches before them.
cudaError_t launch_mean_factors(const MeanFactorsProblem& problem, bool can_wait, cudaStream_t stream);
cudaError_t launch_mean(const MeanProblem& problem, bool can_wait, cudaStream_t stream);

}  // namespace dcs
