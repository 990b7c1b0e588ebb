// Copies elements that lie in runs into one range.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dcs {

// Elements of 2, 4 or 8 bytes, at least one, that lie in runs: `run` of them one behind the other, and `gap` from their
// end the next ones begin; below 0 they overlap. All runs are whole: `run` divides `elements`. The result is one range
// from a vector of 16 bytes on.
struct Runs {
  const void* input;
  void* output;
  int64_t elements, run, gap;
  int element_bytes;
};
cudaError_t copy_runs(const Runs& runs, cudaStream_t stream);

}  // namespace dcs
