// `_temporal_difference_scan` and its gradients on CUDA.
#include "returns/launch.h"
#include "returns/flat_rows/launch.h"
#include "returns/small_rows/launch.h"
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

SmallReturnsLauncher* small_launcher(ElementType dtype) {
  switch (dtype) {
    case ElementType::Half: return launch_small_returns_half;
    case ElementType::BFloat16: return launch_small_returns_bfloat16;
    default: return launch_small_returns_float;  // no plan is for double
  }
}

GradientScanLauncher* gradient_scan_launcher(ElementType dtype) {
  switch (dtype) {
    case ElementType::Half: return launch_gradient_scan_half;
    case ElementType::BFloat16: return launch_gradient_scan_bfloat16;
    case ElementType::Double: return launch_gradient_scan_double;
    default: return launch_gradient_scan_float;
  }
}

struct CudaReturns {
  static constexpr bool kReadsNarrowRates = true;

  static void run(const ReturnsProblem& problem, const Tensor& rewards) {
    const int32_t index = rewards.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(index);
    const Device& device = device_of(index, kReturns);
    const ReturnsProblem together = with_rows_together(problem);
    if (const auto small = plan_small_returns(together, limits_of(device))) {
      const cudaError_t error = small_launcher(problem.dtype)(together, *small, current_stream(index));
      // A part of the GPU (a green context) may have no room for such a cluster.
      if (error == cudaSuccess || small->cluster == 1) return check_cuda(error, kReturns, "launching the kernel");
      cudaGetLastError();
    }
    const auto rows =
        plan_flat_returns(together, device.multiprocessors, device.shared_per_block - kStaticBytes, device.cluster);
    if (rows) {
      const Workspace workspace(rewards, rows->workspace_bytes);
      return check_cuda(flat_launcher(problem.dtype)(together, *rows, device, workspace.data(), current_stream(index)),
          kReturns, "launching the kernel");
    }
    const auto tiles = plan_tile_columns(problem, limits_of(device));
    const Workspace workspace(rewards, tiles ? tiles->workspace_bytes() : 0);
    check_cuda(launcher(problem.dtype)(problem, device, tiles, workspace.data(), current_stream(index)), kReturns,
        "launching the kernel");
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
    if (const auto plan = plan_gradient_scan(problem, limits_of(device), kStaticBytes)) {
      const Workspace workspace(like, plan->workspace_bytes());
      return check(
          gradient_scan_launcher(problem.dtype)(*plan, device, workspace.data(), stream), "launching the kernel");
    }
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
