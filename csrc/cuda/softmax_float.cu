#include "softmax_launch.cuh"

namespace dcs {

cudaError_t launch_softmax_float(const SoftmaxProblem& problem, const Device& device, const SoftmaxWorkspace& workspace, cudaStream_t stream) {
  return SoftmaxLaunch<float>(problem, device, workspace, stream).run();
}

}  // namespace dcs
