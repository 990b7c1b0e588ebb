// What every op's host code needs of CUDA and of torch.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>

#include <cuda_runtime.h>

#include "dcs/validate.h"

// Only in libtorch_cuda, which this library is loaded beside but not linked with.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace dcs {

// `what` of the op `op` has failed: say so.
inline void check_cuda(cudaError_t error, const char* op, const char* what) {
  if (error != cudaSuccess) fail(op, ": ", what, " failed: ", cudaGetErrorString(error));
}

inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace dcs
