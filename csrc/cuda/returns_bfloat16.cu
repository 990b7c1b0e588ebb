#include "returns_launch.cuh"

namespace dcs {

cudaError_t launch_returns_bfloat16(const ReturnsProblem& problem, const Device& device, cudaStream_t stream) {
  return launch_returns<__nv_bfloat16>(problem, device, stream);
}

}  // namespace dcs
