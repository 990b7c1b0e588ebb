// Launches the kernels of windowed scans, which are few and small: one translation unit for all storage types.
#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "dcs/limits.h"
#include "scan/launch.h"
#include "scan/window.cuh"

namespace dcs {
namespace {

// Of 256 threads, which stride over so many values.
unsigned window_blocks(int64_t count) {
  return static_cast<unsigned>(std::min<int64_t>(ceil_div(count, 256), 1 << 20));
}

template <typename T>
void launch_direct(const ScanProblem& problem, cudaStream_t stream) {
  window_direct_kernel<T><<<window_blocks(problem.rows() * problem.length), 256, 0, stream>>>(problem);
}

template <typename T>
void launch_composed(const ScanProblem& problem, const ComposedWindowPlan& plan, void* workspace, cudaStream_t stream) {
  using Wide = typename Types<T>::Wide;
  const int64_t length = problem.length + (problem.initial ? 1 : 0);
  const int64_t capacity = plan.rows * length;
  Segments<Wide> buffers[4];
  Wide* wides = static_cast<Wide*>(workspace);
  bool* bools = reinterpret_cast<bool*>(wides + 8 * capacity);
  for (int i = 0; i < 4; ++i)
    buffers[i] = {wides + 2 * i * capacity, wides + (2 * i + 1) * capacity, bools + i * capacity};
  for (int64_t row = 0; row < problem.rows(); row += plan.rows) {
    const int64_t rows = std::min(plan.rows, problem.rows() - row);
    const unsigned grid = window_blocks(rows * length);
    Segments<Wide> doubled = buffers[0], spare = buffers[1], result = buffers[2], other = buffers[3];
    window_leaves_kernel<T><<<grid, 256, 0, stream>>>(problem, row, rows, doubled);
    int64_t have = 0;
    for (int64_t step = 1; step <= problem.window; step *= 2) {
      if (problem.window & step) {
        if (have == 0) {
          // A distance past the row copies.
          window_compose_kernel<Wide><<<grid, 256, 0, stream>>>(result, doubled, doubled, length, rows, length);
        } else {
          window_compose_kernel<Wide><<<grid, 256, 0, stream>>>(other, result, doubled, have, rows, length);
          std::swap(other, result);
        }
        have += step;
      }
      if (step * 2 <= problem.window) {
        window_compose_kernel<Wide><<<grid, 256, 0, stream>>>(spare, doubled, doubled, step, rows, length);
        std::swap(spare, doubled);
      }
    }
    window_store_kernel<T><<<window_blocks(rows * problem.length), 256, 0, stream>>>(problem, row, rows, result);
  }
}

// launch(an element of the problem's type)
template <typename Launch>
cudaError_t by_dtype(ElementType dtype, const Launch& launch) {
  switch (dtype) {
    case ElementType::Half: launch(__half()); break;
    case ElementType::BFloat16: launch(__nv_bfloat16()); break;
    case ElementType::Float: launch(float()); break;
    case ElementType::Double: launch(double()); break;
    case ElementType::ComplexFloat: launch(Complex<float>()); break;
    case ElementType::ComplexDouble: launch(Complex<double>()); break;
    case ElementType::Long: launch(int64_t()); break;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_direct_window(const ScanProblem& problem, cudaStream_t stream) {
  return by_dtype(problem.dtype, [&](auto element) { launch_direct<decltype(element)>(problem, stream); });
}

cudaError_t launch_composed_window(
    const ScanProblem& problem, const ComposedWindowPlan& plan, void* workspace, cudaStream_t stream) {
  return by_dtype(
      problem.dtype, [&](auto element) { launch_composed<decltype(element)>(problem, plan, workspace, stream); });
}

}  // namespace dcs
