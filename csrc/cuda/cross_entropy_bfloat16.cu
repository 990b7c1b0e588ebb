#include "cross_entropy_launch.cuh"

namespace dcs {

cudaError_t launch_cross_entropy_bfloat16(const RowsProblem& problem, const Device& device, cudaStream_t stream) {
  return launch_cross_entropy<__nv_bfloat16>(problem, device, stream);
}

}  // namespace dcs
