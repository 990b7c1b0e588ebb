// Where a row begins. Rows are numbered outer index first: row = outer index * `inner` + inner index.
#pragma once

#include <cstdint>

#include "dcs/types.h"

namespace dcs {

template <typename Index>
__device__ __forceinline__ int64_t row_offset(Index row, int64_t inner, int64_t outer_stride, int64_t inner_stride) {
  if (inner == 1) return row * outer_stride;
  const Index size = static_cast<Index>(inner), outer = row / size;
  return outer * outer_stride + (row - outer * size) * inner_stride;
}
template <typename Index>
__device__ __forceinline__ int64_t row_offset(Index row, int64_t inner, const Strides& strides) {
  return row_offset(row, inner, strides.outer, strides.inner);
}

}  // namespace dcs
