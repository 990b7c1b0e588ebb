// `_mean_factors` and `_mean` on CUDA.
#include "cross_entropy/mean.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/host.h"

namespace dcs {
namespace {

constexpr const char *kFactors = "_mean_factors", *kMean = "_mean";

bool is_wide(ScalarType dtype) { return dtype == ScalarType::Float || dtype == ScalarType::Double; }

// The caller of both is torch_dcs_ops/ops/linear_cross_entropy/mean.py alone, with results of its own.
void mean_factors(Tensor target, std::optional<Tensor> weight, int64_t ignore_index, double boost, Tensor factors) {
  const ScalarType dtype = factors.scalar_type();
  if (target.scalar_type() != ScalarType::Long || !target.is_contiguous())
    fail(kFactors, ": target must be contiguous int64, got ", dtype_name(target.scalar_type()));
  if (!is_wide(dtype) || factors.numel() != 3 || !factors.is_contiguous())
    fail(kFactors, ": factors must be three floats or doubles, got ", shape_text(sizes_of(factors)), " of ",
        dtype_name(dtype));
  if (weight && (weight->scalar_type() != dtype || !weight->is_contiguous()))
    fail(kFactors, ": weight must be contiguous ", dtype_name(dtype), ", got ", dtype_name(weight->scalar_type()));
  const int32_t device = factors.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const MeanFactorsProblem problem{element_type(dtype), static_cast<const int64_t*>(target.const_data_ptr()),
      weight ? weight->const_data_ptr() : nullptr, factors.mutable_data_ptr(), target.numel(),
      weight ? weight->numel() : 0, ignore_index, boost};
  check_cuda(launch_mean_factors(problem, device_of(device, kFactors).cluster > 1, current_stream(device)), kFactors,
      "launching the kernel");
}

void mean(Tensor values, Tensor divisor, Tensor result) {
  const ScalarType dtype = values.scalar_type();
  if (!is_wide(dtype) || !values.is_contiguous())
    fail(kMean, ": values must be contiguous floats or doubles, got ", dtype_name(dtype));
  if (divisor.scalar_type() != dtype || result.scalar_type() != dtype || divisor.numel() != 1 || result.numel() != 1)
    fail(kMean, ": divisor and mean must be one ", dtype_name(dtype), " each, got ", shape_text(sizes_of(divisor)),
        " of ", dtype_name(divisor.scalar_type()), " and ", shape_text(sizes_of(result)), " of ",
        dtype_name(result.scalar_type()));
  const int32_t device = values.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const MeanProblem problem{element_type(dtype), values.const_data_ptr(), divisor.const_data_ptr(),
      result.mutable_data_ptr(), values.numel()};
  check_cuda(launch_mean(problem, device_of(device, kMean).cluster > 1, current_stream(device)), kMean,
      "launching the kernel");
}

}  // namespace
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CUDA, m) {
  m.impl(dcs::kFactors, TORCH_BOX(&dcs::mean_factors));
  m.impl(dcs::kMean, TORCH_BOX(&dcs::mean));
}
