#include "cross_entropy_launch.cuh"

namespace dcs {

cudaError_t launch_cross_entropy_float(const RowsProblem& problem, const Device& device, cudaStream_t stream) {
  return launch_cross_entropy<float>(problem, device, stream);
}

}  // namespace dcs
