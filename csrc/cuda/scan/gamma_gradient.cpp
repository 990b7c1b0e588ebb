// Sums of partial sums, a launch that overlaps the end of the scan's: torch's own takes 4 us on an H200, two for the
// sum of a few long rows.
#include "scan/gamma_gradient.h"

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "common/host.h"
#include "scan/totals.h"

namespace dcs {
namespace {

// The sums of slices of so many elements, in a tensor of the given shape.
Tensor slice_totals(const Tensor& values, int64_t slice, const std::vector<int64_t>& shape) {
  const int32_t index = values.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(index);
  const Tensor totals =
      torch::stable::new_empty(values, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()));
  check_cuda(launch_totals(element_type(values.scalar_type()), values.const_data_ptr(), values.numel(), slice,
                 totals.mutable_data_ptr(), device_of(index, "discounted_cumsum"), current_stream(index)),
      "discounted_cumsum", "launching the kernel");
  return totals;
}

}  // namespace

Tensor total(const Tensor& values) {
  const int64_t slices = ceil_div(values.numel(), kTotalSlice);
  if (slices <= 1) return slice_totals(values, kTotalSlice, {});
  return total(slice_totals(values, kTotalSlice, {slices}));
}

Tensor row_totals(const Tensor& values) {
  const auto sizes = values.sizes();
  return slice_totals(values, values.size(values.dim() - 1), {sizes.begin(), sizes.end() - 1});
}

}  // namespace dcs
