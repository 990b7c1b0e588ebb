#include "launch.cuh"
#include "launch.h"

namespace dcs {

void launch_scan_int64(const ScanProblem& problem, const Plan& plan, void* workspace, cudaStream_t stream) {
  launch_scan<int64_t>(problem, plan, workspace, stream);
}

}  // namespace dcs
