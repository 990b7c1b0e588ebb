// The (outer, time, inner) view of an op's operands: dimensions merged where strides allow.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "dcs/types.h"
#include "dcs/validate.h"

namespace dcs {

using OptionalTensor = std::optional<Tensor>;

inline void convert(OptionalTensor& tensor, ScalarType dtype) {
  if (tensor && tensor->scalar_type() != dtype) tensor = torch::stable::to(*tensor, dtype);
}

inline int64_t element_size(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Bool: return 1;
    case ScalarType::Half:
    case ScalarType::BFloat16: return 2;
    case ScalarType::Float: return 4;
    case ScalarType::ComplexDouble: return 16;
    default: return 8;
  }
}
inline int64_t element_size(ElementType dtype) { return element_size(static_cast<ScalarType>(dtype)); }

inline double read_number(const Tensor& zero_dim_cpu) {
  const void* data = zero_dim_cpu.const_data_ptr();
  switch (zero_dim_cpu.scalar_type()) {
    case ScalarType::Half: return static_cast<float>(*static_cast<const torch::headeronly::Half*>(data));
    case ScalarType::BFloat16: return static_cast<float>(*static_cast<const torch::headeronly::BFloat16*>(data));
    case ScalarType::Float: return *static_cast<const float*>(data);
    default: return *static_cast<const double*>(data);
  }
}

// One operand's strides for each dimension of the input (0 where it is broadcast). A row operand lacks `dim`.
inline std::vector<int64_t> strides_in(const Tensor& operand, const Sizes& full, int64_t dim, bool is_row) {
  const int64_t ndim = static_cast<int64_t>(full.size());
  std::vector<int64_t> strides(ndim, 0);
  const auto sizes = operand.sizes();
  const auto have = operand.strides();
  int64_t from = operand.dim() - 1;
  for (int64_t d = ndim - 1; d >= 0 && from >= 0; --d) {
    if (is_row && d == dim) continue;
    strides[d] = sizes[from] == 1 ? 0 : have[from];
    --from;
  }
  return strides;
}

// The operands of a problem, gathered so that their dimensions can be merged together.
class Layout {
 public:
  Layout(Sizes sizes, int64_t dim) : sizes_(std::move(sizes)), dim_(dim) { operands_.reserve(kMostOperands); }

  void add(const void** pointer, Strides* strides, int64_t element_size, std::vector<int64_t> by_dim) {
    if (static_cast<int64_t>(operands_.size()) == kMostOperands)
      fail("a layout has at most ", kMostOperands, " operands");
    operands_.push_back({pointer, strides, element_size, std::move(by_dim)});
  }

  // Merges the dimensions other than `dim` down to two at most where strides allow, fills the problem's sizes and
  // strides, and calls `run` once for each index of the dimensions left over (the smallest ones).
  template <typename Problem, typename Run>
  void for_each_problem(Problem& problem, const Run& run) {
    std::vector<Dim> dims = merged_dims();
    std::vector<Dim> extra;
    while (dims.size() > 2) {
      const auto smallest =
          std::min_element(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.size < b.size; });
      extra.push_back(*smallest);
      dims.erase(smallest);
    }
    const bool has_time = !sizes_.empty();
    problem.length = has_time ? sizes_[dim_] : 1;
    Dim outer, inner;
    if (dims.size() == 2) {
      outer = dims[0];
      inner = dims[1];
    } else if (dims.size() == 1) {
      // Rows lie inside a step where their stride is the smaller one.
      const int64_t time = has_time ? operands_[0].by_dim[dim_] : 1;
      (dims[0].strides[0] < time ? inner : outer) = dims[0];
    }
    problem.outer = outer.size;
    problem.inner = inner.size;
    for (size_t k = 0; k < operands_.size(); ++k)
      *operands_[k].strides = {outer.strides[k], has_time ? operands_[k].by_dim[dim_] : 0, inner.strides[k]};
    int64_t count = 1;
    for (const Dim& d : extra) count *= d.size;
    std::array<const void*, kMostOperands> bases;
    for (size_t k = 0; k < operands_.size(); ++k) bases[k] = *operands_[k].pointer;
    for (int64_t i = 0; i < count; ++i) {
      int64_t rest = i;
      std::array<int64_t, kMostOperands> offsets{};
      for (const Dim& d : extra) {
        const int64_t index = rest % d.size;
        rest /= d.size;
        for (size_t k = 0; k < operands_.size(); ++k) offsets[k] += index * d.strides[k];
      }
      for (size_t k = 0; k < operands_.size(); ++k)
        *operands_[k].pointer = static_cast<const char*>(bases[k]) + offsets[k] * operands_[k].element_size;
      run(problem);
    }
    for (size_t k = 0; k < operands_.size(); ++k) *operands_[k].pointer = bases[k];
  }

 private:
  static constexpr int64_t kMostOperands = 16;  // returns have 12

  struct Operand {
    const void** pointer;
    Strides* strides;
    int64_t element_size;
    std::vector<int64_t> by_dim;
  };
  struct Dim {
    int64_t size = 1;
    std::array<int64_t, kMostOperands> strides{};  // one an operand; operand 0 is the output
  };

  std::vector<Dim> merged_dims() const {
    std::vector<Dim> dims;
    for (int64_t d = 0; d < static_cast<int64_t>(sizes_.size()); ++d) {
      if (d == dim_ || sizes_[d] == 1) continue;
      dims.emplace_back().size = sizes_[d];
      for (size_t k = 0; k < operands_.size(); ++k) dims.back().strides[k] = operands_[k].by_dim[d];
    }
    std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.strides[0] > b.strides[0]; });
    std::vector<Dim> merged;
    for (Dim& next : dims) {
      bool merges = !merged.empty();
      if (merges)
        for (size_t k = 0; k < operands_.size(); ++k)
          merges = merges && merged.back().strides[k] == next.size * next.strides[k];
      if (merges) {
        next.size *= merged.back().size;
        merged.back() = next;
      } else {
        merged.push_back(next);
      }
    }
    return merged;
  }

  Sizes sizes_;
  int64_t dim_;
  std::vector<Operand> operands_;
};

}  // namespace dcs
