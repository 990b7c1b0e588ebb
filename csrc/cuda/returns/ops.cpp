// `_temporal_difference_scan` on CUDA.
#include "returns/launch.h"
#include "dcs/returns/ops.h"
#include "dcs/returns/plan.h"
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
    Tensor workspace;
    void* memory = nullptr;
    if (const auto plan = plan_chunks(problem, device.multiprocessors)) {
      const std::array<int64_t, 1> size{plan->workspace_bytes()};
      workspace =
          torch::stable::new_empty(rewards, torch::headeronly::IntHeaderOnlyArrayRef(size.data(), 1), ScalarType::Byte);
      memory = workspace.mutable_data_ptr();
    }
    check_cuda(
        launcher(problem.dtype)(problem, device, memory, current_stream(index)), kReturns, "launching the kernel");
  }
};

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) { dcs::register_returns<dcs::CudaReturns>(m); }
