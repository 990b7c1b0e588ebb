#include "returns_launch.cuh"

namespace dcs {

cudaError_t launch_returns_half(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  return launch_returns<__half>(problem, device, stream);
}

}  // namespace dcs
