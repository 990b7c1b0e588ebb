// Sums of partial sums, for gamma's gradient.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace dcs {

// Of all elements of a contiguous tensor on a GPU, float or double: 0-D, summed in double in a fixed order, rounded
// once for every 8192.
torch::stable::Tensor total(const torch::stable::Tensor& values);

// The same over the last dimension, rounded once.
torch::stable::Tensor row_totals(const torch::stable::Tensor& values);

}  // namespace dcs
