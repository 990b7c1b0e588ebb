#include "returns_launch.cuh"

namespace dcs {

cudaError_t launch_returns_float(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  return launch_returns<float>(problem, device, stream);
}

}  // namespace dcs
