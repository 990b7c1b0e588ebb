#include "cross_entropy_launch.cuh"

namespace dcs {

cudaError_t launch_cross_entropy_double(const RowsProblem& problem, const Device& device, cudaStream_t stream) {
  return launch_cross_entropy<double>(problem, device, stream);
}

}  // namespace dcs
