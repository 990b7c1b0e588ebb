// What a kernel of `_cross_entropy_rows_` is asked to do, free of torch types, and the op over a backend: checks and
// outputs. A backend gives
//   static void run(const RowsProblem&, const Tensor& logits)   logits: for the stream and the device
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "dcs/cross_entropy/problem.h"
#include "dcs/validate.h"

namespace dcs {

constexpr const char* kCrossEntropyRows = "_cross_entropy_rows_";

// The dtype of the arithmetic and of every row's results.
inline ScalarType row_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline std::string strides_text(const Tensor& tensor) {
  const auto strides = tensor.strides();
  return shape_text(Sizes(strides.begin(), strides.end()));
}

inline void check_logits(const Tensor& logits) {
  check_real_floating(kCrossEntropyRows, "logits", logits);
  if (logits.dim() != 2 || logits.size(1) < 1)
    fail(kCrossEntropyRows, ": logits must have the shape (rows, classes) with one class at least, got ",
        shape_text(sizes_of(logits)));
  if (logits.size(0) > 1 && logits.stride(0) < logits.size(1))
    fail(kCrossEntropyRows, ": logits must have rows that do not overlap, got the strides ", strides_text(logits));
  if (logits.size(1) > 1 && logits.stride(1) != 1)
    fail(kCrossEntropyRows, ": logits must have a last dimension of stride 1, got the strides ", strides_text(logits));
}

inline void check_beside_logits(
    const char* name, const Tensor& tensor, const Tensor& logits, ScalarType dtype, const Sizes& shape) {
  if (tensor.scalar_type() != dtype)
    fail(kCrossEntropyRows, ": ", name, " must be ", dtype_name(dtype), " for ", dtype_name(logits.scalar_type()),
        " logits, got ", dtype_name(tensor.scalar_type()));
  if (!same_device(tensor, logits))
    fail(kCrossEntropyRows, ": ", name, " must be on logits' device ", device_text(logits), ", got ",
        device_text(tensor));
  if (sizes_of(tensor) != shape)
    fail(kCrossEntropyRows, ": ", name, " must have the shape ", shape_text(shape), ", got ",
        shape_text(sizes_of(tensor)));
}

// The kernels' own wish.
inline void check_last_stride(const char* name, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1)
    fail(kCrossEntropyRows, ": ", name, " must have a last dimension of stride 1, got the strides ",
        strides_text(tensor));
}

// Class indices, or class probabilities.
inline void set_target(RowsProblem& problem, const Tensor& target, const Tensor& logits) {
  if (is_real_floating(target.scalar_type())) {
    check_beside_logits("target", target, logits, row_dtype(logits.scalar_type()), {problem.rows, problem.columns});
    check_last_stride("target", target);
    problem.probabilities = target.const_data_ptr();
    problem.probabilities_stride = target.stride(0);
  } else {
    check_beside_logits("target", target, logits, ScalarType::Long, {problem.rows});
    problem.target = static_cast<const int64_t*>(target.const_data_ptr());
    problem.target_stride = target.stride(0);
  }
}

// One number a column.
inline const void* column_operand(const char* name, const std::optional<Tensor>& tensor, const Tensor& logits) {
  if (!tensor) return nullptr;
  check_beside_logits(name, *tensor, logits, row_dtype(logits.scalar_type()), {logits.size(1)});
  check_last_stride(name, *tensor);
  return tensor->const_data_ptr();
}

// One number a row, or one for all.
inline RowScalar row_operand(const char* name, const std::optional<Tensor>& tensor, const Tensor& logits) {
  if (!tensor) return {};
  const bool one = tensor->numel() == 1;
  check_beside_logits(name, *tensor, logits, row_dtype(logits.scalar_type()), {one ? 1 : logits.size(0)});
  return {tensor->const_data_ptr(), one ? 0 : tensor->stride(0)};
}

// The private ops' own arguments: what does not fit together is an error of theirs.
inline SavedGradient saved_gradient(const RowsProblem& problem, const Tensor& logits, const Tensor& within,
    const Tensor& beside, int64_t first_row, int64_t rows, int64_t width, int64_t inner, int64_t slices) {
  const int64_t padding = 16 / static_cast<int64_t>(logits.element_size()), columns = problem.columns;
  const auto padded = [&](int64_t size) { return (size + padding - 1) / padding * padding; };
  const bool sizes = width > 0 && inner >= 0 && inner <= width && slices > 0 && (slices - 1) * width < columns &&
      first_row >= 0 && first_row + problem.rows <= rows;
  const int64_t stride = sizes && slices > 1 ? within.numel() / (slices - 1) : 0;
  const bool fits = sizes && within.numel() == (slices - 1) * stride && (slices == 1 || rows * inner <= stride) &&
      beside.numel() >= rows * ((slices - 1) * padded(width - inner) + padded(columns - (slices - 1) * width));
  if (!problem.gradient || !fits || !within.is_contiguous() || !beside.is_contiguous() ||
      within.scalar_type() != logits.scalar_type() || beside.scalar_type() != logits.scalar_type() ||
      !same_device(within, logits) || !same_device(beside, logits))
    fail(kCrossEntropyRows,
        ": within and beside must be contiguous, of logits' dtype and device, and have room for slices of the gradient, got ",
        shape_text(sizes_of(within)), ", ", shape_text(sizes_of(beside)), " and the sizes ",
        shape_text({first_row, rows, width, inner, slices}));
  return {within.mutable_data_ptr(), beside.mutable_data_ptr(), stride, rows, first_row, width, inner, slices};
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_rows(Tensor logits, Tensor target,
    std::optional<Tensor> linear_bias, std::optional<Tensor> weight, std::optional<Tensor> grad_loss,
    std::optional<Tensor> grad_lse, std::optional<Tensor> grad_entropy, int64_t ignore_index, double label_smoothing,
    double softcap, double logit_scale, double z_loss, bool gradient, bool predictions, bool entropy,
    std::optional<Tensor> within, std::optional<Tensor> beside, int64_t first_row, int64_t saved_rows, int64_t width,
    int64_t inner, int64_t slices) {
  check_logits(logits);
  RowsProblem problem;
  problem.dtype = element_type(logits.scalar_type());
  problem.rows = logits.size(0);
  problem.columns = logits.size(1);
  problem.stride = logits.stride(0);
  set_target(problem, target, logits);
  problem.bias = column_operand("linear_bias", linear_bias, logits);
  problem.weight = column_operand("weight", weight, logits);
  problem.grad_loss = row_operand("grad_loss", grad_loss, logits);
  problem.grad_lse = row_operand("grad_lse", grad_lse, logits);
  problem.grad_entropy = row_operand("grad_entropy", grad_entropy, logits);
  problem.ignore_index = ignore_index;
  problem.label_smoothing = label_smoothing;
  problem.softcap = softcap;
  problem.logit_scale = logit_scale;
  problem.z_loss = z_loss;
  problem.gradient = gradient;
  if (within && beside)
    problem.saved = saved_gradient(problem, logits, *within, *beside, first_row, saved_rows, width, inner, slices);

  const auto make = [&](bool wanted, ScalarType dtype) {
    const std::array<int64_t, 1> size{wanted ? problem.rows : 0};
    return torch::stable::new_empty(logits, torch::headeronly::IntHeaderOnlyArrayRef(size.data(), 1), dtype);
  };
  const ScalarType results = row_dtype(logits.scalar_type());
  Tensor loss = make(true, results), lse = make(true, results), argmax = make(predictions, ScalarType::Long),
         entropies = make(entropy, results);
  if (problem.rows == 0) return {loss, lse, argmax, entropies};
  problem.logits = logits.mutable_data_ptr();
  problem.loss = loss.mutable_data_ptr();
  problem.lse = lse.mutable_data_ptr();
  problem.predictions = predictions ? static_cast<int64_t*>(argmax.mutable_data_ptr()) : nullptr;
  problem.entropy = entropy ? entropies.mutable_data_ptr() : nullptr;
  Backend::run(problem, logits);
  return {loss, lse, argmax, entropies};
}

template <typename Backend>
void register_cross_entropy_rows(torch::stable::detail::StableLibrary& m) {
  m.impl(kCrossEntropyRows, TORCH_BOX(&cross_entropy_rows<Backend>));
}

}  // namespace dcs
