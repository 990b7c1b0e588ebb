// `_temporal_difference_scan` on CUDA.
#include "returns/launch.h"
#include "dcs/returns/ops.h"
#include "common/host.h"

namespace dcs {
namespace {

ReturnsLauncher* launcher(ElementType dtype) {
  switch (dtype) {
    case ElementType::Half: return launch_returns_half;
    case ElementType::BFloat16: return launch_returns_bfloat16;
    case ElementType::Double: return launch_returns_double;
    default: return launch_returns_float;
  }
}

struct CudaReturns {
  static void run(const ReturnsProblem& problem, const Tensor& rewards) {
    const int32_t index = rewards.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(index);
    const Device& device = device_of(index, kReturns);
    const ReturnsProblem together = with_rows_together(problem);
    const std::optional<ReturnsPlan> chunks = plan_chunks(together, device.multiprocessors);
    const Workspace workspace(rewards, chunks ? chunks->workspace_bytes() : 0);
    check_cuda(launcher(problem.dtype)(chunks ? together : problem, device, chunks ? &*chunks : nullptr,
                   workspace.data(), current_stream(index)),
        kReturns, "launching the kernel");
  }
};

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) { dcs::register_returns<dcs::CudaReturns>(m); }
