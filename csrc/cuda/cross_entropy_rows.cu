// `_cross_entropy_rows_` on CUDA.
#include <limits>

#include "cross_entropy.h"
#include "dcs/cross_entropy_rows.h"
#include "host.h"

namespace dcs {
namespace {

void check(cudaError_t error, const char* what) { check_cuda(error, kCrossEntropyRows, what); }

RowsDevice describe_device(int32_t index) {
  RowsDevice device;
  int major = 0;
  check(cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index), "reading the device");
  check(cudaDeviceGetAttribute(&device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, index), "reading the device");
  check(cudaDeviceGetAttribute(&device.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index), "reading the device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "reading the device");
  device.clusters = major >= 9;
  return device;
}

RowsLauncher* launcher(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half: return launch_cross_entropy_half;
    case ScalarType::BFloat16: return launch_cross_entropy_bfloat16;
    case ScalarType::Double: return launch_cross_entropy_double;
    default: return launch_cross_entropy_float;
  }
}

struct CudaRows {
  static void run(const RowsProblem& problem, const Tensor& logits) {
    // A position within a row is an int32.
    constexpr int64_t kMostColumns = std::numeric_limits<int32_t>::max() - (int64_t{1} << 16);
    if (problem.columns > kMostColumns) fail(kCrossEntropyRows, ": logits can have at most ", kMostColumns, " columns, got ", problem.columns);
    const int32_t index = logits.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(index);
    static RowsDevice devices[64];
    static bool known[64] = {};
    RowsDevice device;
    if (index < 0 || index >= 64) {
      device = describe_device(index);
    } else {
      // Two threads that come here first write the same.
      if (!known[index]) devices[index] = describe_device(index), known[index] = true;
      device = devices[index];
    }
    check(launcher(problem.dtype)(problem, device, current_stream(index)), "launching the kernel");
  }
};

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) { dcs::register_cross_entropy_rows<dcs::CudaRows>(m); }
