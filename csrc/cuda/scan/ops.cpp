// The scan ops on CUDA.
#include <optional>

#include "dcs/scan/ops.h"
#include "dcs/scan/plan/gaps.h"
#include "common/host.h"
#include "common/runs.h"
#include "scan/columns/launch.h"
#include "scan/launch.h"
#include "scan/rows/launch.h"
#include "scan/run.h"
#include "scan/gamma_gradient.h"

namespace dcs {
namespace {

void check(cudaError_t error, const char* what) { check_cuda(error, "discounted_cumsum", what); }

DeviceLimits limits_of(int32_t index) { return limits_of(device_of(index, "discounted_cumsum")); }

// Of an element type, with those of aligned operands where it has them.
struct Launch {
  AlignedLauncher* aligned;
  const RowsLaunchers& rows;
  const ColumnsLaunchers& columns;
  const ScanProblem& problem;
  void* workspace;
  cudaStream_t stream;

  cudaError_t operator()(const DirectWindowPlan&) const { return launch_direct_window(problem, stream); }
  cudaError_t operator()(const ComposedWindowPlan& plan) const {
    return launch_composed_window(problem, plan, workspace, stream);
  }
  cudaError_t operator()(const AlignedPlan& plan) const { return aligned(problem, plan, workspace, stream); }
  cudaError_t operator()(const SmallRowsPlan& plan) const { return rows.small(problem, plan, stream); }
  cudaError_t operator()(const FlatRowsPlan& plan) const { return rows.flat(problem, plan, stream); }
  cudaError_t operator()(const LongRowsPlan& plan) const { return rows.together(problem, plan, workspace, stream); }
  cudaError_t operator()(const FewStepsPlan& plan) const { return columns.few_steps(problem, plan, stream); }
  cudaError_t operator()(const StagedColumnsPlan& plan) const { return columns.staged(problem, plan, stream); }
  cudaError_t operator()(const SerialColumnsPlan& plan) const { return columns.serial(problem, plan, stream); }
  cudaError_t operator()(const SmallColumnsPlan& plan) const { return columns.small(problem, plan, workspace, stream); }
  cudaError_t operator()(const LookbackColumnsPlan& plan) const {
    return columns.lookback(problem, plan, workspace, stream);
  }
  cudaError_t operator()(const StreamColumnsPlan& plan) const {
    return columns.stream(problem, plan, workspace, stream);
  }
  cudaError_t operator()(const ResidentColumnsPlan& plan) const {
    return columns.resident(problem, plan, workspace, stream);
  }
};

cudaError_t launch(const ScanProblem& problem, const KernelPlan& plan, const Tensor& input, cudaStream_t stream) {
  const Workspace workspace(input, workspace_bytes(plan));
  void* const memory = workspace.data();
  const auto run = [&](AlignedLauncher* aligned, const RowsLaunchers& rows, const ColumnsLaunchers& columns) {
    return std::visit(Launch{aligned, rows, columns, problem, memory, stream}, plan);
  };
  switch (problem.dtype) {
    case ElementType::Float: return run(launch_aligned_float, rows_float, columns_float);
    case ElementType::Half: return run(launch_aligned_half, rows_half, columns_half);
    case ElementType::BFloat16: return run(launch_aligned_bfloat16, rows_bfloat16, columns_bfloat16);
    case ElementType::Double: return run(nullptr, rows_double, columns_double);
    case ElementType::ComplexFloat: return run(nullptr, rows_complex_float, columns_complex_float);
    case ElementType::ComplexDouble: return run(nullptr, rows_complex_double, columns_complex_double);
    case ElementType::Long: return run(nullptr, rows_int64, columns_int64);
  }
  fail("discounted_cumsum: input must be floating-point or complex, got ",
      dtype_name(static_cast<ScalarType>(problem.dtype)));
}

DeviceLimits lone_blocks(DeviceLimits limits) {
  limits.cluster = std::min(limits.cluster, 1);
  return limits;
}

struct Cuda {
  static int64_t partials(const ScanProblem& problem, const Tensor& input) {
    return dcs::partials(plan_scan(problem, limits_of(input.get_device_index())).plan);
  }

  static void run(const ScanProblem& given, const Tensor& input) {
    const int32_t device = input.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaStream_t stream = current_stream(device);
    const DeviceLimits limits = limits_of(device);
    KernelPlan plan = plan_scan(given, limits).plan;
    ScanProblem problem = given;
    Workspace copy;
    if (std::optional<ScanProblem> closed = without_gaps(given, plan, limits)) {
      const int64_t elements = given.rows() * given.length, bytes = bytes_of(given.dtype);
      copy = Workspace(input, elements * bytes);
      check(copy_runs({given.input, copy.data(), elements, given.inner, given.input_strides.time - given.inner,
                          static_cast<int>(bytes)},
                stream),
          "copying a padded input");
      problem = *closed;
      problem.input = copy.data();
      plan = plan_scan(problem, limits).plan;
    }
    cudaError_t error = launch(problem, plan, input, stream);
    if (error != cudaSuccess && runs_together(plan)) {
      // A green context or an instance of a part of the GPU may not have room for blocks that run together.
      cudaGetLastError();
      std::optional<KernelPlan> alone;
      if (std::holds_alternative<StreamColumnsPlan>(plan) || std::holds_alternative<LookbackColumnsPlan>(plan))
        alone = plan_by<plan_resident_columns>(problem, limits);
      if (std::holds_alternative<SmallRowsPlan>(plan)) alone = plan_by<plan_flat_rows>(problem, lone_blocks(limits));
      if (!alone) alone = plan_by<plan_any_columns>(problem, limits);
      error = launch(problem, *alone, input, stream);
    }
    check(error, "launching the kernel");
  }

  static bool is_real(const Tensor& values) {
    const ScalarType dtype = values.scalar_type();
    return dtype == ScalarType::Float || dtype == ScalarType::Double;
  }
  static Tensor sum(const Tensor& values) { return is_real(values) ? total(values) : sum_of_all(values); }
  static Tensor row_sums(const Tensor& values) { return is_real(values) ? row_totals(values) : sum_of_rows(values); }
};

}  // namespace

void run_scan_on_gpu(const ScanProblem& problem, const Tensor& like) { Cuda::run(problem, like); }

}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) { dcs::register_scan_ops<dcs::Cuda>(m); }
