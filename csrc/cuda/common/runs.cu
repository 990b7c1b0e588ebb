#include "common/runs.cuh"

namespace dcs {

cudaError_t copy_runs(const Runs& runs, cudaStream_t stream) {
  switch (runs.element_bytes) {
    case 2: return launch_copy_runs<uint16_t>(runs, stream);
    case 4: return launch_copy_runs<uint32_t>(runs, stream);
    default: return launch_copy_runs<uint64_t>(runs, stream);
  }
}

}  // namespace dcs
