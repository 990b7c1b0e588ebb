// Where a row begins. Rows are numbered outer index first: row = outer index * `inner` + inner index.
#pragma once

#include <cstdint>

#include "dcs/types.h"

namespace dcs {

template <typename Index>
__device__ __forceinline__ int64_t row_offset(Index row, int64_t inner, const Strides& strides) {
  if (inner == 1) return row * strides.outer;
  const Index size = static_cast<Index>(inner), outer = row / size;
  return strides.at(outer, row - outer * size);
}

}  // namespace dcs
