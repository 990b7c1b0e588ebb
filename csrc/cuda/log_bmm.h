// Host code that the ops of the log-semiring family share: their operands, checked, as the kernels see them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>

#include "host.h"
#include "log_bmm.cuh"

namespace dcs {

inline void check_matrices(const char* op, const Tensor& a, const Tensor& b) {
  if (!is_real_floating(a.scalar_type()))
    fail(op, ": a must be float16, bfloat16, float32 or float64, got ", dtype_name(a.scalar_type()));
  if (b.scalar_type() != a.scalar_type()) fail(op, ": b must have a's dtype ", dtype_name(a.scalar_type()), ", got ", dtype_name(b.scalar_type()));
  if (!same_device(a, b)) fail(op, ": b must be on a's device ", device_text(a), ", got ", device_text(b));
  const auto check_dims = [op](const char* name, const Tensor& tensor) {
    if (tensor.dim() != 3) fail(op, ": ", name, " must have three dimensions, got the shape ", shape_text(sizes_of(tensor)));
  };
  check_dims("a", a);
  check_dims("b", b);
  if (b.size(0) != a.size(0)) fail(op, ": b must have a's batch size ", a.size(0), ", got ", b.size(0));
  if (b.size(1) != a.size(2))
    fail(op, ": b must have as many rows as a has columns, ", a.size(2), ", got ", b.size(1), " (a is ", shape_text(sizes_of(a)), ", b is ",
         shape_text(sizes_of(b)), ")");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;  // a position along k is an int32
  if (a.size(2) > kMost) fail(op, ": a can have at most ", kMost, " elements along its last dimension, got ", a.size(2));
}

inline void check_beside(const char* op, const char* name, const Tensor& tensor, const Tensor& a, ScalarType dtype, const Sizes& shape) {
  if (tensor.scalar_type() != dtype)
    fail(op, ": ", name, " must be ", dtype_name(dtype), " for ", dtype_name(a.scalar_type()), " a, got ", dtype_name(tensor.scalar_type()));
  if (!same_device(tensor, a)) fail(op, ": ", name, " must be on a's device ", device_text(a), ", got ", device_text(tensor));
  if (sizes_of(tensor) != shape) fail(op, ": ", name, " must have the shape ", shape_text(shape), ", got ", shape_text(sizes_of(tensor)));
}

inline Tensor make(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.begin(), shape.size()), dtype);
}

// The rows of a (batch, I, K), or the columns of a (batch, K, J).
template <typename T>
Vectors<T> rows_of(const Tensor& a) {
  return {static_cast<const T*>(a.const_data_ptr()), a.stride(0), a.stride(1), a.stride(2), a.size(1)};
}
template <typename T>
Vectors<T> columns_of(const Tensor& b) {
  return {static_cast<const T*>(b.const_data_ptr()), b.stride(0), b.stride(2), b.stride(1), b.size(2)};
}

inline unsigned grid_of(int64_t blocks) { return static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, (int64_t{1} << 31) - 1)); }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool is_small(int64_t rows, int64_t columns) { return std::max(rows, columns) <= 32; }

}  // namespace dcs
