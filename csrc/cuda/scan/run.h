// A scan on a GPU, for the ops that are made of one.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "common/device.h"
#include "dcs/scan/plan/traits.h"

namespace dcs {

// What plans ask of a device.
inline DeviceLimits limits_of(const Device& device) {
  return {device.multiprocessors, device.shared_per_block, device.cluster > 1 ? device.cluster : 0};
}

// `like`: for the stream, the device and workspaces.
void run_scan_on_gpu(const ScanProblem& problem, const torch::stable::Tensor& like);

}  // namespace dcs
