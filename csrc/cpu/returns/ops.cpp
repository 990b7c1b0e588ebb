// `_temporal_difference_scan` and `_n_step_returns` on the CPU: columns or rows shared out among torch's threads. Every
// row stands for itself, so no bit depends on how.
#include <algorithm>
#include <memory>
#include <utility>

#include "dcs/returns/ops.h"
#include "common/dispatch.h"
#include "common/huge_pages.h"
#include "returns/kernels.h"

namespace dcs {
namespace cpu {
namespace {

// With fewer columns than this, rows abreast beat loops over columns.
constexpr int64_t kFewReturnsColumns = 8;

const ReturnsKernels& returns_kernels() {
  static const ReturnsKernels& chosen = best_table(kReturnsAvx512, kReturnsAvx2, kReturnsDefault);
  return chosen;
}

void run_returns_columns(const ReturnsProblem& problem) {
  // Two blocks a thread, as for the scans (scan/ops.cpp has the reason).
  const int64_t shares = 2 * torch::stable::get_num_threads();
  const int64_t wanted = (problem.rows() + shares - 1) / shares;
  const int64_t width = std::min(kReturnsColumns, std::max<int64_t>(32, (wanted + 15) / 16 * 16));
  const int64_t blocks = (problem.inner + width - 1) / width;
  share_out(problem.outer * blocks, problem.rows() * problem.length, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t inner = block % blocks * width;
      returns_kernels().columns(problem, block / blocks, inner, std::min(width, problem.inner - inner));
    }
  });
}

// Columns, or rows taken for columns, few enough at a time that what is kept of a window's steps stays in the
// second-level cache.
void run_n_step(ReturnsProblem problem) {
  if (problem.inner == 1) {
    std::swap(problem.inner, problem.outer);
    for (ReturnsInput* input : {&problem.rewards, &problem.values, &problem.next_values, &problem.bootstrap_value,
             &problem.terminated, &problem.truncated, &problem.gamma.tensor, &problem.trace.tensor})
      std::swap(input->strides.inner, input->strides.outer);
    std::swap(problem.targets.strides.inner, problem.targets.strides.outer);
  }
  constexpr int64_t kKept = (512 << 10) / sizeof(double);
  const int64_t width = std::clamp<int64_t>(kKept / 2 / problem.steps / 16 * 16, 16, kTileColumns),
                blocks = (problem.inner + width - 1) / width;
  share_out(problem.outer * blocks, problem.rows() * problem.length, [&](int64_t begin, int64_t end) {
    const int64_t kept = problem.steps * std::min(width, problem.inner);
    const std::unique_ptr<double[]> totals(new double[kept]), gates(new double[kept]);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t inner = block % blocks * width;
      returns_kernels().n_step(
          problem, block / blocks, inner, std::min(width, problem.inner - inner), totals.get(), gates.get());
    }
  });
}

}  // namespace
}  // namespace cpu

struct CpuReturns {
  static constexpr bool kReadsNarrowRates = false;

  static void run(const ReturnsProblem& problem, const Tensor&) {
    for (const ReturnsOutput* output : {&problem.advantages, &problem.targets, &problem.pg_advantages})
      if (output->data)
        cpu::advise_huge_pages(
            output->data, output->strides, problem.outer, problem.length, problem.inner, element_size(problem.dtype));
    if (problem.steps) return cpu::run_n_step(problem);
    const ReturnsOutput& output = problem.advantages.data ? problem.advantages
        : problem.targets.data                            ? problem.targets
                                                          : problem.pg_advantages;
    if (output.strides.inner == 1 && problem.inner >= cpu::kFewReturnsColumns) return cpu::run_returns_columns(problem);
    cpu::share_out(problem.rows(), problem.rows() * problem.length,
        [&](int64_t begin, int64_t end) { cpu::returns_kernels().rows(problem, begin, end); });
  }
};

}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CPU, m) { dcs::register_returns<dcs::CpuReturns>(m); }
