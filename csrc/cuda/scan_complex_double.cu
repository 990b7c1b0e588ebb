#include "launch.cuh"
#include "launch.h"

namespace dcs {

void launch_scan_complex_double(const ScanProblem& problem, const Plan& plan, void* workspace, cudaStream_t stream) {
  launch_scan<Complex<double>>(problem, plan, workspace, stream);
}

}  // namespace dcs
