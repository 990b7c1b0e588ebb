#include "launch.cuh"
#include "launch.h"

namespace dcs {

void launch_scan_bfloat16(const ScanProblem& problem, const Plan& plan, void* workspace, cudaStream_t stream) {
  launch_scan<__nv_bfloat16>(problem, plan, workspace, stream);
}

}  // namespace dcs
