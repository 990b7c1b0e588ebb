// Host code that the ops of the log-semiring family share: their operands, checked, as the kernels see them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>

#include "dcs/log_bmm/ops.h"
#include "common/host.h"
#include "log_bmm/operands.cuh"

namespace dcs {

// What the kernels can do: a position along k is an int32.
inline void check_operands(const char* op, const Tensor& a, const Tensor& b) {
  check_matrices(op, a, b);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;
  if (a.size(2) > kMost) fail(op, ": a can have at most ", kMost, " columns on CUDA, got ", a.size(2));
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

inline unsigned grid_of(const char* op, int64_t blocks) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (blocks > kMost) fail(op, ": a and b can have at most ", kMost, " tiles on CUDA, got ", blocks);
  return static_cast<unsigned>(blocks);
}

inline Tensor widened(const Tensor& tensor) {
  return tensor.scalar_type() == sum_dtype(tensor.scalar_type()) ? tensor
                                                                 : torch::stable::to(tensor, ScalarType::Float);
}

// The terms of a tile that a block takes: all, or where tiles would not fill the device a part, of at least `least`.
inline int64_t split_depth_of(int64_t tiles, int64_t depth, int multiprocessors, int64_t least) {
  const int64_t parts = std::min(2 * multiprocessors / tiles, ceil_div(depth, least));
  return parts <= 1 ? depth : ceil_div(ceil_div(depth, parts), 16) * 16;
}

inline bool is_small(int64_t rows, int64_t columns) { return std::max(rows, columns) <= 32; }

}  // namespace dcs
