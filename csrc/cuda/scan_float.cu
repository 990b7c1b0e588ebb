#include "launch.cuh"
#include "launch.h"

namespace dcs {

void launch_scan_float(const ScanProblem& problem, const Plan& plan, void* workspace, cudaStream_t stream) {
  launch_scan<float>(problem, plan, workspace, stream);
}

}  // namespace dcs
