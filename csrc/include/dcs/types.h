// Types that the problems of several families share.
#pragma once

#include <cstdint>

namespace dcs {

// The element types that kernels read and write, with the numbers of torch's ScalarType (`element_type` in validate.h).
// Kernels do without torch's headers, which take nvcc more than two seconds a translation unit.
enum class ElementType : int8_t {
  Long = 4,
  Half = 5,
  Float = 6,
  Double = 7,
  ComplexFloat = 9,
  ComplexDouble = 10,
  BFloat16 = 15
};

// Element strides of a tensor seen as (outer, time, inner); 0 where it is broadcast.
struct Strides {
  int64_t outer = 0;
  int64_t time = 0;
  int64_t inner = 0;

  // The offset of a row's first step.
  template <typename Outer, typename Inner>
  constexpr int64_t at(Outer outer_index, Inner inner_index) const {
    return outer_index * outer + inner_index * inner;
  }
  // That of any step.
  template <typename Outer, typename Time, typename Inner>
  constexpr int64_t at(Outer outer_index, Time step, Inner inner_index) const {
    return at(outer_index, inner_index) + step * time;
  }
};

}  // namespace dcs
