// The sum of all elements, for the gradient of one gamma.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace dcs {

// Of a contiguous tensor on a GPU, float or double: 0-D, summed in double in a fixed order, rounded once for every
// 8192.
torch::stable::Tensor total(const torch::stable::Tensor& values);

}  // namespace dcs
