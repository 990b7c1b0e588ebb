#include "softmax_launch.cuh"

namespace dcs {

cudaError_t launch_softmax_bfloat16(const SoftmaxProblem& problem, const Device& device, const SoftmaxWorkspace& workspace, cudaStream_t stream) {
  return SoftmaxLaunch<__nv_bfloat16>(problem, device, workspace, stream).run();
}

}  // namespace dcs
