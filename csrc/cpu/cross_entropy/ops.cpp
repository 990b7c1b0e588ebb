// `_cross_entropy_rows_` on the CPU: rows shared out among torch's threads. A row's bits do not depend on how.
#include "cross_entropy/kernels.h"
#include "dcs/cross_entropy/ops.h"
#include "common/dispatch.h"

namespace dcs {
namespace cpu {
namespace {

const CrossEntropyKernels& cross_entropy_kernels() {
  static const CrossEntropyKernels& chosen = best_table(kCrossEntropyAvx512, kCrossEntropyAvx2, kCrossEntropyDefault);
  return chosen;
}

}  // namespace
}  // namespace cpu

struct CpuRows {
  static void run(const RowsProblem& problem, const Tensor&) {
    if (problem.saved.beside) fail(kCrossEntropyRows, ": within and beside must be None on a CPU, got tensors");
    for (int64_t row = 0; problem.target != nullptr && row < problem.rows; ++row) {
      const int64_t target = problem.target[row * problem.target_stride];
      if (target != problem.ignore_index && (target < 0 || target >= problem.columns))
        fail_index("linear_cross_entropy: target must be in [0, ", problem.columns - 1, "] or ignore_index (",
            problem.ignore_index, "), got ", target);
    }
    cpu::share_out(problem.rows, problem.rows * problem.columns,
        [&](int64_t begin, int64_t end) { cpu::cross_entropy_kernels().rows(problem, begin, end); });
  }
};

}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CPU, m) { dcs::register_cross_entropy_rows<dcs::CpuRows>(m); }
