// What every op's host code needs of CUDA and of torch.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <cuda_runtime.h>

#include <array>
#include <mutex>
#include <optional>

#include "dcs/validate.h"
#include "common/device.h"

// Only in libtorch_cuda, which this library is loaded beside but not linked with.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace dcs {

// `what` of the op `op` has failed: say so, and leave nothing that the next op to ask would take for its own.
inline void check_cuda(cudaError_t error, const char* op, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  fail(op, ": ", what, " failed: ", cudaGetErrorString(error));
}

inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Device memory beside `like`, for one op's kernels; none for 0 bytes.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Tensor& like, int64_t bytes) {
    if (bytes == 0) return;
    const std::array<int64_t, 1> size{bytes};
    memory_ =
        torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(size.data(), 1), ScalarType::Byte);
  }
  void* data() const { return memory_ ? memory_->mutable_data_ptr() : nullptr; }

 private:
  std::optional<Tensor> memory_;
};

// Of any kernel of this library (device.cu): they tell what it was compiled for on the current device.
cudaError_t kernel_attributes(cudaFuncAttributes& attributes);

inline Device describe_device(int32_t index, const char* op) {
  const torch::stable::accelerator::DeviceGuard guard(index);
  Device device;
  int major = 0, clusters = 0;
  const auto read = [&](int& to, cudaDeviceAttr attribute) {
    check_cuda(cudaDeviceGetAttribute(&to, attribute, index), op, "reading the device");
  };
  read(device.multiprocessors, cudaDevAttrMultiProcessorCount);
  read(device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  read(device.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  read(major, cudaDevAttrComputeCapabilityMajor);
  read(clusters, cudaDevAttrClusterLaunch);
  // A build for older devices can reach a newer one as PTX, without clusters.
  cudaFuncAttributes compiled;
  check_cuda(kernel_attributes(compiled), op, "loading the kernels");
  const bool usable = clusters && compiled.ptxVersion >= 90;
  device.cluster = !usable ? 1 : major == 9 || major == 10 ? 16 : 8;  // any device with clusters has 8
  return device;
}

// The same, asked for once.
inline const Device& device_of(int32_t index, const char* op) {
  constexpr int kKnown = 64;
  static Device devices[kKnown];
  static std::once_flag known[kKnown];
  if (index < 0 || index >= kKnown) fail(op, ": the device's index must be below ", kKnown, ", got ", index);
  std::call_once(known[index], [&] { devices[index] = describe_device(index, op); });
  return devices[index];
}

}  // namespace dcs
