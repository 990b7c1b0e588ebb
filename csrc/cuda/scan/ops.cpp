// The scan ops on CUDA.
#include "dcs/scan/ops.h"
#include "common/host.h"
#include "scan/columns/launch.h"
#include "scan/launch.h"
#include "scan/plan/any_shape.h"
#include "scan/plan/planner.h"
#include "scan/gamma_gradient.h"
#include "scan/rows/launch.h"

namespace dcs {
namespace {

void check(cudaError_t error, const char* what) { check_cuda(error, "discounted_cumsum", what); }

DeviceLimits limits_of(int32_t index) {
  const Device& device = device_of(index, "discounted_cumsum");
  return {device.multiprocessors, device.shared_per_block, device.cluster > 1 ? device.cluster : 0};
}

Launcher* launcher(ElementType dtype) {
  switch (dtype) {
    case ElementType::Float: return launch_scan_float;
    case ElementType::Half: return launch_scan_half;
    case ElementType::BFloat16: return launch_scan_bfloat16;
    case ElementType::Double: return launch_scan_double;
    case ElementType::ComplexFloat: return launch_scan_complex_float;
    case ElementType::ComplexDouble: return launch_scan_complex_double;
    case ElementType::Long: return launch_scan_int64;
    default:
      fail("discounted_cumsum: input must be floating-point or complex, got ",
          dtype_name(static_cast<ScalarType>(dtype)));
  }
}

#ifdef DCS_ANY_SHAPE
RowsLauncher* rows_launcher(ElementType dtype) {
  switch (dtype) {
    case ElementType::Float: return launch_rows_float;
    case ElementType::Half: return launch_rows_half;
    case ElementType::BFloat16: return launch_rows_bfloat16;
    case ElementType::Double: return launch_rows_double;
    case ElementType::ComplexFloat: return launch_rows_complex_float;
    case ElementType::ComplexDouble: return launch_rows_complex_double;
    default: return launch_rows_int64;
  }
}

ColumnsLauncher* columns_launcher(ElementType dtype) {
  switch (dtype) {
    case ElementType::Float: return launch_columns_float;
    case ElementType::Half: return launch_columns_half;
    case ElementType::BFloat16: return launch_columns_bfloat16;
    case ElementType::Double: return launch_columns_double;
    case ElementType::ComplexFloat: return launch_columns_complex_float;
    case ElementType::ComplexDouble: return launch_columns_complex_double;
    default: return launch_columns_int64;
  }
}

void run_plan(const ScanProblem& problem, const KernelPlan& plan, const Tensor& input, cudaStream_t stream) {
  Tensor workspace;
  void* memory = nullptr;
  if (const std::array<int64_t, 1> size{workspace_bytes(plan)}; size[0] > 0) {
    workspace =
        torch::stable::new_empty(input, torch::headeronly::IntHeaderOnlyArrayRef(size.data(), 1), ScalarType::Byte);
    memory = workspace.mutable_data_ptr();
  }
  const ColumnsPlan* const columns = std::get_if<ColumnsPlan>(&plan);
  check(columns ? columns_launcher(problem.dtype)(problem, *columns, memory, stream)
                : rows_launcher(problem.dtype)(problem, plan, memory, stream),
      "launching the kernel");
}
#endif

struct Cuda {
  static int64_t partials(const ScanProblem& problem, const Tensor& input) {
#ifdef DCS_ANY_SHAPE
    if (const auto plan = plan_any_shape(problem, limits_of(input.get_device_index()))) return dcs::partials(*plan);
#endif
    return Planner(problem, limits_of(input.get_device_index())).plan().partials();
  }

  static void run(const ScanProblem& problem, const Tensor& input) {
    const int32_t device = input.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaStream_t stream = current_stream(device);
#ifdef DCS_ANY_SHAPE
    if (const auto any_shape = plan_any_shape(problem, limits_of(device)))
      return run_plan(problem, *any_shape, input, stream);
#endif
    const Planner planner(problem, limits_of(device));
    const Plan plan = planner.plan();
    Tensor workspace;
    void* memory = nullptr;
    if (plan.workspace_bytes > 0) {
      const std::array<int64_t, 1> size{plan.workspace_bytes};
      workspace =
          torch::stable::new_empty(input, torch::headeronly::IntHeaderOnlyArrayRef(size.data(), 1), ScalarType::Byte);
      memory = workspace.mutable_data_ptr();
      if (plan.zeroed_bytes > 0) check(cudaMemsetAsync(memory, 0, plan.zeroed_bytes, stream), "clearing the workspace");
    }
    launcher(problem.dtype)(problem, plan, memory, stream);
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess &&
        plan.needs_room()) {  // a green context or an instance of a part of the GPU may not have it
      launcher(problem.dtype)(problem, planner.plan_apart(), nullptr, stream);
      error = cudaGetLastError();
    }
    check(error, "launching the kernel");
  }

  static Tensor sum(const Tensor& values) {
    const ScalarType dtype = values.scalar_type();
    return dtype == ScalarType::Float || dtype == ScalarType::Double ? total(values) : sum_of_all(values);
  }
};

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) { dcs::register_scan_ops<dcs::Cuda>(m); }
