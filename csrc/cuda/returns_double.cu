#include "returns_launch.cuh"

namespace dcs {

cudaError_t launch_returns_double(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  return launch_returns<double>(problem, device, stream);
}

}  // namespace dcs
