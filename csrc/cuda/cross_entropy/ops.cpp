// `_cross_entropy_rows_` on CUDA.
#include <limits>

#include "cross_entropy/launch.h"
#include "dcs/cross_entropy/ops.h"
#include "common/host.h"

namespace dcs {
namespace {

void check(cudaError_t error, const char* what) { check_cuda(error, kCrossEntropyRows, what); }

RowsLauncher* launcher(ElementType dtype) {
  switch (dtype) {
    case ElementType::Half: return launch_cross_entropy_half;
    case ElementType::BFloat16: return launch_cross_entropy_bfloat16;
    case ElementType::Double: return launch_cross_entropy_double;
    default: return launch_cross_entropy_float;
  }
}

struct CudaRows {
  static void run(const RowsProblem& problem, const Tensor& logits) {
    // A position within a row is an int32.
    constexpr int64_t kMostColumns = std::numeric_limits<int32_t>::max() - (int64_t{1} << 16);
    if (problem.columns > kMostColumns)
      fail(kCrossEntropyRows, ": logits can have at most ", kMostColumns, " columns, got ", problem.columns);
    const int32_t index = logits.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(index);
    check(launcher(problem.dtype)(problem, device_of(index, kCrossEntropyRows), current_stream(index)),
        "launching the kernel");
  }
};

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) { dcs::register_cross_entropy_rows<dcs::CudaRows>(m); }
