// `_scale` on CUDA.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/host.h"
#include "cross_entropy/scale.h"

namespace dcs {
namespace {

constexpr const char* kScale = "_scale";

// The caller is torch_dcs_ops/ops/linear_cross_entropy/scale.py alone, with buffers of its own.
void scale(Tensor input, std::optional<Tensor> factor, Tensor output, std::optional<Tensor> other, double number) {
  const ScalarType from = input.scalar_type(), to = output.scalar_type();
  if (input.numel() != output.numel() || !input.is_contiguous() || !output.is_contiguous())
    fail(kScale, ": input and output must be contiguous and of one size, got ", shape_text(sizes_of(input)), " and ",
        shape_text(sizes_of(output)));
  const ScalarType wide = from == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const auto checked = [&](const std::optional<Tensor>& one, const char* name) -> const void* {
    if (!one) return nullptr;
    if (one->numel() != 1 || one->scalar_type() != wide)
      fail(kScale, ": ", name, " must be one ", dtype_name(wide), ", got ", dtype_name(one->scalar_type()),
          " of the shape ", shape_text(sizes_of(*one)));
    return one->const_data_ptr();
  };
  const void *first = checked(factor, "factor"), *second = checked(other, "other");
  if (input.numel() == 0) return;
  const bool is_half = to == ScalarType::Half || to == ScalarType::BFloat16;
  if (!is_real_floating(from) || (from != to && !(from == ScalarType::Float && is_half)))
    fail(kScale, ": output must be ", dtype_name(from), " or a half of float32, got ", dtype_name(to));
  const int32_t device = input.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const ScaleProblem problem{element_type(from), element_type(to), input.const_data_ptr(), first, second, number,
      output.mutable_data_ptr(), input.numel()};
  const bool can_wait = device_of(device, kScale).cluster > 1;
  check_cuda(launch_scale(problem, can_wait, current_stream(device)), kScale, "launching the kernel");
}

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) { m.impl(dcs::kScale, TORCH_BOX(&dcs::scale)); }
