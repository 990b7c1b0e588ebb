// The scan ops on CUDA.
#include "dcs/scan/ops.h"
#include "common/host.h"
#include "scan/columns/launch.h"
#include "scan/launch.h"
#include "scan/rows/launch.h"
#include "scan/run.h"
#include "scan/gamma_gradient.h"

namespace dcs {
namespace {

void check(cudaError_t error, const char* what) { check_cuda(error, "discounted_cumsum", what); }

DeviceLimits limits_of(int32_t index) {
  const Device& device = device_of(index, "discounted_cumsum");
  return {device.multiprocessors, device.shared_per_block, device.cluster > 1 ? device.cluster : 0};
}

struct Launchers {
  Launcher *scan, *rows, *columns;
};
Launchers launchers_of(ElementType dtype) {
  switch (dtype) {
    case ElementType::Float: return {launch_scan_float, launch_rows_float, launch_columns_float};
    case ElementType::Half: return {launch_scan_half, launch_rows_half, launch_columns_half};
    case ElementType::BFloat16: return {launch_scan_bfloat16, launch_rows_bfloat16, launch_columns_bfloat16};
    case ElementType::Double: return {launch_scan_double, launch_rows_double, launch_columns_double};
    case ElementType::ComplexFloat:
      return {launch_scan_complex_float, launch_rows_complex_float, launch_columns_complex_float};
    case ElementType::ComplexDouble:
      return {launch_scan_complex_double, launch_rows_complex_double, launch_columns_complex_double};
    case ElementType::Long: return {launch_scan_int64, launch_rows_int64, launch_columns_int64};
    default:
      fail("discounted_cumsum: input must be floating-point or complex, got ",
          dtype_name(static_cast<ScalarType>(dtype)));
  }
}

cudaError_t launch(const ScanProblem& problem, const KernelPlan& plan, const Tensor& input, cudaStream_t stream) {
  const Workspace workspace(input, workspace_bytes(plan));
  void* const memory = workspace.data();
  if (const int64_t zeroed = zeroed_bytes(plan); zeroed > 0)
    check(cudaMemsetAsync(memory, 0, zeroed, stream), "clearing the workspace");
  const Launchers launchers = launchers_of(problem.dtype);
  switch (kernel_of(plan)) {
    case Kernel::kFlatRows:
    case Kernel::kLongRows: return launchers.rows(problem, plan, memory, stream);
    case Kernel::kWalkColumns:
    case Kernel::kHeldColumns: return launchers.columns(problem, plan, memory, stream);
    default: return launchers.scan(problem, plan, memory, stream);
  }
}

struct Cuda {
  static int64_t partials(const ScanProblem& problem, const Tensor& input) {
    return dcs::partials(plan_scan(problem, limits_of(input.get_device_index())).plan);
  }

  static void run(const ScanProblem& problem, const Tensor& input) {
    const int32_t device = input.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaStream_t stream = current_stream(device);
    const DeviceLimits limits = limits_of(device);
    const KernelPlan plan = plan_scan(problem, limits).plan;
    cudaError_t error = launch(problem, plan, input, stream);
    if (error != cudaSuccess && runs_together(plan)) {
      // A green context or an instance of a part of the GPU may not have room for blocks that run together.
      cudaGetLastError();
      error = launch(problem, *plan_by<plan_any_columns>(problem, limits), input, stream);
    }
    check(error, "launching the kernel");
  }

  static Tensor sum(const Tensor& values) {
    const ScalarType dtype = values.scalar_type();
    return dtype == ScalarType::Float || dtype == ScalarType::Double ? total(values) : sum_of_all(values);
  }
};

}  // namespace

void run_scan_on_gpu(const ScanProblem& problem, const Tensor& like) { Cuda::run(problem, like); }

}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) { dcs::register_scan_ops<dcs::Cuda>(m); }
