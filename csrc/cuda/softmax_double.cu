#include "softmax_launch.cuh"

namespace dcs {

cudaError_t launch_softmax_double(const SoftmaxProblem& problem, const Device& device, const SoftmaxWorkspace& workspace, cudaStream_t stream) {
  return SoftmaxLaunch<double>(problem, device, workspace, stream).run();
}

}  // namespace dcs
