// The scan ops' checks, in the sentences of torch_dcs_ops/ops/scan/validate.py (tests compare the two).
#pragma once

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "dcs/types.h"

namespace dcs {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr bool is_same_number(ElementType ours, ScalarType theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(is_same_number(ElementType::Long, ScalarType::Long) &&
    is_same_number(ElementType::Half, ScalarType::Half) && is_same_number(ElementType::Float, ScalarType::Float) &&
    is_same_number(ElementType::Double, ScalarType::Double) &&
    is_same_number(ElementType::ComplexFloat, ScalarType::ComplexFloat) &&
    is_same_number(ElementType::ComplexDouble, ScalarType::ComplexDouble) &&
    is_same_number(ElementType::BFloat16, ScalarType::BFloat16));
// What kernels call a type that has been checked to be one of theirs.
inline ElementType element_type(ScalarType dtype) { return static_cast<ElementType>(dtype); }

// Messages are built from strings: stream formatting of numbers needs libstdc++'s locale facets, which a process can
// hold in several copies.
inline std::string text(const char* part) { return part; }
inline std::string text(const std::string& part) { return part; }
inline std::string text(int64_t number) { return std::to_string(number); }

template <typename... Parts>
std::string sentence(const Parts&... parts) {
  std::string message;
  ((message += text(parts)), ...);
  return message;
}

template <typename... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  throw std::runtime_error(sentence(parts...));
}

template <typename... Parts>
[[noreturn]] inline void fail_index(const Parts&... parts) {
  throw std::out_of_range(sentence(parts...));  // reaches Python as IndexError
}

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    case ScalarType::Bool: return "bool";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::UInt16: return "uint16";
    case ScalarType::UInt32: return "uint32";
    case ScalarType::UInt64: return "uint64";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2fnuz: return "float8_e5m2fnuz";
    case ScalarType::Float8_e4m3fnuz: return "float8_e4m3fnuz";
    case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
    default: return "an unsupported dtype";
  }
}

inline bool is_complex(ScalarType dtype) {
  return dtype == ScalarType::ComplexFloat || dtype == ScalarType::ComplexDouble;
}

inline bool is_real_floating(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float ||
      dtype == ScalarType::Double;
}

inline void check_real_floating(const char* op, const char* name, const Tensor& tensor) {
  if (!is_real_floating(tensor.scalar_type()))
    fail(op, ": ", name, " must be float16, bfloat16, float32 or float64, got ", dtype_name(tensor.scalar_type()));
}

inline bool is_floating_or_complex(ScalarType dtype) { return is_real_floating(dtype) || is_complex(dtype); }

inline bool is_integer(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Bool:
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::Int:
    case ScalarType::Long:
    case ScalarType::UInt16:
    case ScalarType::UInt32:
    case ScalarType::UInt64: return true;
    default: return false;
  }
}

using Sizes = std::vector<int64_t>;

inline Sizes sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  const auto of_a = a.sizes(), of_b = b.sizes();
  return std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end());
}

// A shape as Python prints a tuple.
inline std::string shape_text(const Sizes& sizes) {
  std::string result = "(";
  for (size_t i = 0; i < sizes.size(); ++i) result += (i ? ", " : "") + std::to_string(sizes[i]);
  return result + (sizes.size() == 1 ? ",)" : ")");
}

inline Sizes without_dim(Sizes sizes, int64_t dim) {
  if (!sizes.empty()) sizes.erase(sizes.begin() + dim);
  return sizes;
}

// Whether `from` broadcasts to exactly `to` (aligned at the right).
inline bool broadcasts_to(const Sizes& from, const Sizes& to) {
  if (from.size() > to.size()) return false;
  const size_t offset = to.size() - from.size();
  for (size_t i = 0; i < from.size(); ++i)
    if (from[i] != 1 && from[i] != to[offset + i]) return false;
  return true;
}

inline std::string device_text(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "another device";
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  if (a.is_cpu() || b.is_cpu()) return a.is_cpu() && b.is_cpu();
  return a.is_cuda() && b.is_cuda() && a.get_device_index() == b.get_device_index();
}

inline void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  if (!same_device(tensor, input))
    fail(op, ": ", name, " must be on input's device ", device_text(input), ", got ", device_text(tensor));
}

// Returns dim as a non-negative index (0 for a 0-D input).
inline int64_t check_dim(const char* op, int64_t dim, int64_t ndim) {
  const int64_t bound = ndim > 0 ? ndim : 1;
  if (dim < -bound || dim >= bound)
    fail_index(op, ": dim must be in [", -bound, ", ", bound - 1, "] for a ", ndim, "-D input, got ", dim);
  return dim < 0 ? dim + bound : dim;
}

inline bool check_direction(const char* op, const std::string& direction) {
  if (direction == "right") return true;
  if (direction == "left") return false;
  fail(op, ": direction must be \"left\" or \"right\", got \"", direction, "\"");
}

inline void check_gamma(const char* op, const Tensor& gamma, const Tensor& input, int64_t dim) {
  const ScalarType dtype = gamma.scalar_type();
  if (!is_floating_or_complex(dtype))
    fail(op, ": gamma must be a floating-point or complex tensor, got ", dtype_name(dtype));
  if (is_complex(dtype) && !is_complex(input.scalar_type()))
    fail(op, ": gamma must be real for a real input of dtype ", dtype_name(input.scalar_type()), ", got ",
        dtype_name(dtype));
  if (!(gamma.dim() == 0 && gamma.is_cpu())) check_device(op, "gamma", gamma, input);
  const int64_t ndim = input.dim();
  if (gamma.dim() == 0) return;
  const Sizes have = sizes_of(gamma), full = sizes_of(input);
  if (gamma.dim() > ndim)
    fail(op, ": gamma must have at most input's number of dimensions (", ndim, "), got ", gamma.dim());
  if (gamma.dim() == ndim) {
    if (!broadcasts_to(have, full))
      fail(op, ": gamma must broadcast to input's shape ", shape_text(full), ", got ", shape_text(have));
    return;
  }
  const Sizes rows = without_dim(full, dim);
  if (!broadcasts_to(have, rows))
    fail(op, ": gamma must broadcast to input's shape without dim ", dim, ", ", shape_text(rows),
        ", to give one discount a row, got ", shape_text(have),
        "; a per-step gamma needs input's number of dimensions (", ndim, ")");
}

inline void check_initial(const char* op, const Tensor& initial, const Tensor& input, int64_t dim) {
  if (initial.scalar_type() != input.scalar_type())
    fail(op, ": initial must have input's dtype ", dtype_name(input.scalar_type()), ", got ",
        dtype_name(initial.scalar_type()));
  check_device(op, "initial", initial, input);
  const Sizes rows = without_dim(sizes_of(input), dim), have = sizes_of(initial);
  if (!broadcasts_to(have, rows))
    fail(op, ": initial must broadcast to input's shape without dim ", dim, ", ", shape_text(rows), ", got ",
        shape_text(have));
}

inline void check_reset(const char* op, const Tensor& reset, const Tensor& input) {
  if (reset.scalar_type() != ScalarType::Bool) fail(op, ": reset must be bool, got ", dtype_name(reset.scalar_type()));
  check_device(op, "reset", reset, input);
  if (!same_sizes(reset, input))
    fail(op, ": reset must have input's shape ", shape_text(sizes_of(input)), ", got ", shape_text(sizes_of(reset)));
}

inline void check_window(const char* op, int64_t window) {
  if (window < 1) fail(op, ": window must be at least 1, got ", window);
}

}  // namespace dcs
