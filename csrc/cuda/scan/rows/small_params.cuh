// What kernels of small rows are launched with (small_elements.cuh): those of scans, and of returns.
#pragma once

#include <cstdint>

#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/powers.h"
#include "dcs/scan/plan/traits.h"
#include "scan/rows/small_elements.cuh"

namespace dcs {

// Operands of a problem whose threads have `vec` elements each. A reverse scan's first element is the last one in
// memory.
template <typename Problem>
class SmallOperands {
 public:
  SmallOperands(const Problem& problem, bool reverse, int vec) : p_(problem), reverse_(reverse), vec_(vec) {}

  SmallOperand operand(const void* pointer, const Strides& strides, int64_t bytes) const {
    // A single step has no distance in time, but elements of a word before the first row are counted in it.
    const int64_t pitch = p_.inner > 1 ? strides.inner : strides.outer, time = p_.length == 1 ? 1 : strides.time;
    const auto word = static_cast<uintptr_t>(std::min<int64_t>(vec_ * bytes, 16));
    const bool are_words =
        p_.length % vec_ == 0 && pitch % vec_ == 0 && time == 1 && reinterpret_cast<uintptr_t>(pointer) % word == 0;
    const int64_t last = (p_.rows() - 1) * pitch + (p_.length - 1) * time;
    return SmallOperand{moved_to_first(pointer, last, bytes), sign() * static_cast<int>(pitch),
        sign() * static_cast<int>(time), pointer && (are_words || is_flat(p_, pointer, strides))};
  }
  SmallRowOperand row_operand(const void* pointer, const Strides& strides, int64_t bytes) const {
    const int64_t last = strides.at(p_.outer - 1, p_.inner - 1);
    return SmallRowOperand{moved_to_first(pointer, last, bytes), sign() * static_cast<int>(strides.outer),
        sign() * static_cast<int>(strides.inner)};
  }
  // Where elements are, and powers of a number `gate` over lanes.
  template <typename Params>
  void place(Params& params, const SmallRowsPlan& plan, double gate) const {
    params.length = Divisor(static_cast<uint32_t>(p_.length));
    params.inner = Divisor(static_cast<uint32_t>(p_.inner));
    params.cluster = Divisor(static_cast<uint32_t>(plan.cluster));
    params.rows = static_cast<int>(p_.rows());
    params.group_rows = static_cast<int>(plan.group_rows);
    while (params.levels < 5 && int64_t{1} << params.levels <= (p_.length + vec_ - 2) / vec_) ++params.levels;
    for (int j = 0; j < 6; ++j) params.powers[j] = bounded_power(gate, int64_t{vec_} << j);
  }

 private:
  int sign() const { return reverse_ ? -1 : 1; }
  const void* moved_to_first(const void* pointer, int64_t last, int64_t bytes) const {
    return pointer && reverse_ ? static_cast<const char*>(pointer) + last * bytes : pointer;
  }
  const Problem& p_;
  const bool reverse_;
  const int vec_;
};

}  // namespace dcs
