#include "returns/gradients/launch.h"

#include "dcs/limits.h"
#include "returns/gradients/stages.cuh"

namespace dcs {
namespace {

template <typename Launch>
cudaError_t by_dtype(ElementType dtype, const Launch& launch) {
  switch (dtype) {
    case ElementType::Half: return launch(__half());
    case ElementType::BFloat16: return launch(__nv_bfloat16());
    case ElementType::Double: return launch(double());
    default: return launch(float());
  }
}

template <typename T>
cudaError_t launch(void (*kernel)(GradientsParams<T>), const GradientsParams<T>& params, int64_t threads, int per_block,
    const Device& device, cudaStream_t stream) {
  return launch_dependent(kernel, device.cluster > 1, ceil_div(threads, per_block), per_block, 0, stream, params);
}

}  // namespace

cudaError_t launch_gradient_sources(const ReturnsGradientsProblem& problem, const GradientsMemory& memory,
    char* workspace, const Device& device, cudaStream_t stream) {
  return by_dtype(problem.dtype, [&](auto type) {
    using T = decltype(type);
    const GradientsParams<T> params(problem, memory, workspace);
    return launch(gradient_sources_kernel<T>, params, ceil_div(problem.count(), kSlots), kSlotThreads, device, stream);
  });
}

cudaError_t launch_gradients(const ReturnsGradientsProblem& problem, const GradientsMemory& memory, char* workspace,
    const Device& device, cudaStream_t stream) {
  return by_dtype(problem.dtype, [&](auto type) {
    using T = decltype(type);
    const GradientsParams<T> params(problem, memory, workspace);
    return by_form(params.form, [&](auto form) {
      return launch(gradients_kernel<T, decltype(form)::value>, params, ceil_div(problem.count(), kSlots), kSlotThreads,
          device, stream);
    });
  });
}

}  // namespace dcs
