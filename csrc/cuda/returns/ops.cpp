// `_temporal_difference_scan` and its gradients on CUDA.
#include "returns/launch.h"
#include "returns/flat_rows/launch.h"
#include "dcs/returns/gradients.h"
#include "dcs/returns/ops.h"
#include "common/host.h"
#include "returns/gradients/launch.h"
#include "scan/run.h"

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

FlatReturnsLauncher* flat_launcher(ElementType dtype) {
  switch (dtype) {
    case ElementType::Half: return launch_flat_returns_half;
    case ElementType::BFloat16: return launch_flat_returns_bfloat16;
    case ElementType::Double: return launch_flat_returns_double;
    default: return launch_flat_returns_float;
  }
}

cudaError_t launch(const ReturnsProblem& problem, const ReturnsKernelPlan& plan, const Device& device,
    const Tensor& like, cudaStream_t stream) {
  if (plan.kernel == ReturnsKernel::kFlatRows) return flat_launcher(problem.dtype)(problem, plan.rows, device, stream);
  const Workspace workspace(like, plan.workspace_bytes());
  return launcher(problem.dtype)(problem, plan, device, workspace.data(), stream);
}

struct CudaReturns {
  static void run(const ReturnsProblem& problem, const Tensor& rewards) {
    const int32_t index = rewards.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(index);
    const Device& device = device_of(index, kReturns);
    const DeviceLimits limits{device.multiprocessors, device.shared_per_block, device.cluster};
    const cudaStream_t stream = current_stream(index);
    const auto run_planned = [&](const ReturnsProblem& part, const ReturnsKernelPlan& plan) {
      check_cuda(launch(part, plan, device, rewards, stream), kReturns, "launching the kernel");
    };
    const ReturnsProblem together = with_rows_together(problem);
    const ReturnsKernelPlan plan = plan_returns_kernel(together, limits);
    if (plan.kernel != ReturnsKernel::kAnyColumns) return run_planned(together, plan);
    each_counted_part(
        together, [&](const ReturnsProblem& part) { run_planned(part, plan_returns_kernel(part, limits)); });
  }

  static void run_gradients(const ReturnsGradientsProblem& problem, const Tensor& like) {
    if (problem.count() > kMostGradientElements)
      fail(kReturnsGradients, ": a gradient must have at most ", kMostGradientElements, " elements, got ",
          problem.count());
    const int32_t index = like.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(index);
    const Device& device = device_of(index, kReturnsGradients);
    const cudaStream_t stream = current_stream(index);
    const auto check = [](cudaError_t error, const char* what) { check_cuda(error, kReturnsGradients, what); };
    if (takes_walk(problem, device.multiprocessors))
      return check(launch_gradients_walk(problem, device, stream), "launching the kernel");
    const GradientsMemory memory(problem);
    const Workspace workspace(like, memory.bytes);
    auto* const at = static_cast<char*>(workspace.data());
    if (memory.has_sources())
      check(launch_gradient_sources(problem, memory, at, device, stream), "launching the kernel before the scan");
    run_scan_on_gpu(scan_of(problem, memory, at), like);
    check(launch_gradients(problem, memory, at, device, stream), "launching the kernel behind the scan");
  }
};

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) {
  dcs::register_returns<dcs::CudaReturns>(m);
  dcs::register_returns_gradients<dcs::CudaReturns>(m);
}
