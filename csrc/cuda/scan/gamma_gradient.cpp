// The sum of all elements of a tensor, a launch for up to 8192 of them: torch's own takes two for the sums of a few
// long rows, 4 us on an H200.
#include "scan/gamma_gradient.h"

#include <torch/csrc/stable/ops.h>

#include <array>

#include "common/host.h"
#include "scan/totals.h"

namespace dcs {

Tensor total(const Tensor& values) {
  const int32_t index = values.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(index);
  const int64_t count = values.numel();
  const std::array<int64_t, 1> size{ceil_div(count, kTotalSlice)};
  const bool is_last = size[0] <= 1;
  const Tensor totals =
      torch::stable::new_empty(values, torch::headeronly::IntHeaderOnlyArrayRef(size.data(), is_last ? 0 : 1));
  check_cuda(launch_totals(element_type(values.scalar_type()), values.const_data_ptr(), count,
                 totals.mutable_data_ptr(), device_of(index, "discounted_cumsum"), current_stream(index)),
      "discounted_cumsum", "launching the kernel");
  return is_last ? totals : total(totals);
}

}  // namespace dcs
