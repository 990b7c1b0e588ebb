// New tensors straight from the allocator: by way of the dispatcher's table of names each takes 0.8 us more.
#pragma once

#include <algorithm>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include "dcs/validate.h"

namespace dcs {

// Of the dtype and device of `like`.
inline Tensor new_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides, int64_t ndim) {
  int32_t dtype = 0, device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(ndim, sizes, strides, dtype, device, like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor new_contiguous(const Tensor& like, const Sizes& sizes) {
  Sizes strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return new_strided(like, sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()));
}

// Whether the elements fill one range of memory, each once, in whatever order of the dimensions.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t numel = tensor.numel();
  int64_t expected = 1;
  while (expected != numel) {
    size_t d = 0;
    while (d < sizes.size() && (sizes[d] == 1 || strides[d] != expected)) ++d;
    if (d == sizes.size()) return false;
    expected *= sizes[d];
  }
  return true;
}

// As `like`, which is dense.
inline Tensor new_dense(const Tensor& like) {
  const auto sizes = like.sizes();
  return new_strided(like, sizes.data(), like.strides().data(), static_cast<int64_t>(sizes.size()));
}

// torch.empty_like, which makes one with gaps dense and keeps the order of its dimensions.
inline Tensor new_like(const Tensor& like) {
  if (is_dense(like)) return new_dense(like);
  const auto strides = like.strides();
  for (size_t d = 0; d < strides.size(); ++d)
    if (strides[d] <= (d + 1 < strides.size() ? strides[d + 1] : 0)) return torch::stable::empty_like(like);
  return new_contiguous(like, sizes_of(like));
}

}  // namespace dcs
