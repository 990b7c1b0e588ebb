// dcs::scan_plan: which CUDA kernel a scan of contiguous operands takes. No device is asked, and nothing is read: the
// plan is made of sizes, strides and addresses.
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "dcs/layout.h"
#include "dcs/scan/plan/describe.h"
#include "dcs/validate.h"

namespace dcs {
namespace {

constexpr const char* kScanPlan = "scan_plan";
constexpr int64_t kMostElements = int64_t{1} << 58;  // whose bytes an int64 counts
constexpr double kNumber = 0.99;                     // what gamma is where it is a number
constexpr uintptr_t kAddress = uintptr_t{1} << 20;   // of every operand: aligned, and never read

GammaKind gamma_kind(const std::string& gamma) {
  if (gamma == "number") return GammaKind::kNumber;
  if (gamma == "row") return GammaKind::kRow;
  if (gamma == "step") return GammaKind::kStep;
  fail(kScanPlan, ": gamma must be \"number\", \"row\" or \"step\", got \"", gamma, "\"");
}

void check_shape(const Sizes& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) {
    if (size < 1) fail(kScanPlan, ": shape must have sizes of at least 1, got ", shape_text(shape));
    if (size > kMostElements / count)
      fail(kScanPlan, ": shape must have at most 2^58 elements, got ", shape_text(shape));
    count *= size;
  }
}

void check_at_least(const char* name, int64_t value, int64_t least) {
  if (value < least || value > INT32_MAX)
    fail(kScanPlan, ": ", name, " must be in [", least, ", ", int64_t{INT32_MAX}, "], got ", value);
}

// Strides of a contiguous tensor, for each dimension of `shape`; a row operand lacks `dim`.
std::vector<int64_t> contiguous_strides(const Sizes& shape, int64_t dim, bool is_row) {
  std::vector<int64_t> strides(shape.size(), 0);
  int64_t stride = 1;
  for (int64_t d = static_cast<int64_t>(shape.size()) - 1; d >= 0; --d) {
    if (is_row && d == dim) continue;
    strides[d] = shape[d] == 1 ? 0 : stride;
    stride *= shape[d];
  }
  return strides;
}

std::string scan_plan(std::vector<int64_t> shape, ScalarType dtype, int64_t dim, std::string gamma, bool reset,
    bool initial, bool reverse, int64_t window, int64_t multiprocessors, int64_t shared_bytes, int64_t cluster) {
  GammaKind kind = gamma_kind(gamma);
  check_shape(shape);
  const bool is_integer_sum =
      dtype == ScalarType::Long && kind == GammaKind::kNumber && !reset && !initial && window == 0;
  if (dtype == ScalarType::Long && !is_integer_sum)
    fail(kScanPlan, ": dtype int64 is for sums, without gamma, reset, initial and window");
  if (!is_floating_or_complex(dtype) && !is_integer_sum)
    fail(kScanPlan, ": dtype must be floating-point, complex or int64, got ", dtype_name(dtype));
  dim = check_dim(kScanPlan, dim, static_cast<int64_t>(shape.size()));
  if (window < 0) fail(kScanPlan, ": window must be at least 1, or 0 for none, got ", window);
  check_at_least("multiprocessors", multiprocessors, 1);
  check_at_least("shared_bytes", shared_bytes, 0);
  check_at_least("cluster", cluster, 0);
  // A gamma that does not vary along time is one a row.
  if (kind == GammaKind::kStep && (shape.empty() || shape[dim] == 1)) kind = GammaKind::kRow;

  ScanProblem problem{};
  problem.dtype = element_type(dtype);
  problem.reverse = reverse;
  problem.window = window;
  problem.gamma_kind = kind;
  problem.gamma_value = is_integer_sum ? 1.0 : kNumber;
  problem.gamma_dtype = problem.dtype;
  Layout layout(shape, dim);
  const auto add = [&](const void** pointer, Strides* strides, ScalarType type, bool is_row) {
    *pointer = reinterpret_cast<const void*>(kAddress);
    layout.add(pointer, strides, element_size(type), contiguous_strides(shape, dim, is_row));
  };
  add(const_cast<const void**>(&problem.output), &problem.output_strides, dtype, false);
  add(&problem.input, &problem.input_strides, dtype, false);
  if (kind != GammaKind::kNumber) add(&problem.gamma, &problem.gamma_strides, dtype, kind == GammaKind::kRow);
  if (initial) add(&problem.initial, &problem.initial_strides, dtype, true);
  if (reset) add(reinterpret_cast<const void**>(&problem.reset), &problem.reset_strides, ScalarType::Bool, false);
  const DeviceLimits device{
      static_cast<int>(multiprocessors), static_cast<int>(shared_bytes), static_cast<int>(cluster)};
  std::string result;
  layout.for_each_problem(problem, [&](const ScanProblem& each) { result = describe_plan(each, device); });
  return result;
}

}  // namespace
}  // namespace dcs

// No argument is a tensor, so no device is asked for its kernel.
STABLE_TORCH_LIBRARY_IMPL(dcs, CompositeExplicitAutograd, m) { m.impl("scan_plan", TORCH_BOX(&dcs::scan_plan)); }
