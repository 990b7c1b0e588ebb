// A scan on a GPU, for the ops that are made of one.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "dcs/scan/problem.h"

namespace dcs {

// `like`: for the stream, the device and workspaces.
void run_scan_on_gpu(const ScanProblem& problem, const torch::stable::Tensor& like);

}  // namespace dcs
