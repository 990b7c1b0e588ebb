#include "launch.cuh"
#include "launch.h"

namespace dcs {

void launch_scan_half(const ScanProblem& problem, const Plan& plan, void* workspace, cudaStream_t stream) {
  launch_scan<__half>(problem, plan, workspace, stream);
}

}  // namespace dcs
