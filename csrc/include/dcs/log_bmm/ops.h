// The checks of the log-semiring family's private ops, in the sentences of torch_dcs_ops/ops/log_bmm/validate.py (tests
// compare the two).
#pragma once

#include <optional>
#include <string>

#include <torch/csrc/stable/tensor.h>

#include "dcs/validate.h"

namespace dcs {

// The dtype of the sums, of log_s and of the uniforms.
inline ScalarType sum_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_device_of_a(const char* op, const char* name, const Tensor& tensor, const Tensor& a) {
  if (!same_device(tensor, a))
    fail(op, ": ", name, " must be on a's device ", device_text(a), ", got ", device_text(tensor));
}

// a (B, I, K) and b (B, K, J) of one dtype.
inline void check_matrices(const char* op, const Tensor& a, const Tensor& b) {
  const ScalarType dtype = a.scalar_type();
  check_real_floating(op, "a", a);
  if (b.scalar_type() != dtype)
    fail(op, ": b must have a's dtype ", dtype_name(dtype), ", got ", dtype_name(b.scalar_type()));
  check_device_of_a(op, "b", b, a);
  if (a.dim() != 3) fail(op, ": a must have three dimensions, got the shape ", shape_text(sizes_of(a)));
  if (b.dim() != 3) fail(op, ": b must have three dimensions, got the shape ", shape_text(sizes_of(b)));
  if (a.size(0) != b.size(0)) fail(op, ": b must have a's batch size ", a.size(0), ", got ", b.size(0));
  if (a.size(2) != b.size(1))
    fail(op, ": b must have as many rows as a has columns, ", a.size(2), ", got ", b.size(1), " (a is ",
        shape_text(sizes_of(a)), ", b is ", shape_text(sizes_of(b)), ")");
}

inline void check_beside_a(
    const char* op, const char* name, const Tensor& tensor, const Tensor& a, ScalarType dtype, const Sizes& shape) {
  if (tensor.scalar_type() != dtype)
    fail(op, ": ", name, " must be ", dtype_name(dtype), " for ", dtype_name(a.scalar_type()), " a, got ",
        dtype_name(tensor.scalar_type()));
  check_device_of_a(op, name, tensor, a);
  if (sizes_of(tensor) != shape)
    fail(op, ": ", name, " must have the shape ", shape_text(shape), ", got ", shape_text(sizes_of(tensor)));
}

inline void check_precision(const char* op, const std::string& precision) {
  if (precision != "highest" && precision != "high" && precision != "medium")
    fail(op, ": precision must be \"highest\", \"high\" or \"medium\", got \"", precision, "\"");
}

// A maximum needs a k.
inline void check_not_empty(const char* op, const Tensor& a) {
  if (a.size(2) == 0)
    fail(op, ": a must have at least one column to take the maximum over, got the shape ", shape_text(sizes_of(a)));
}

// The results' shape.
inline Sizes products_shape(const Tensor& a, const Tensor& b) { return {a.size(0), a.size(1), b.size(2)}; }

}  // namespace dcs
