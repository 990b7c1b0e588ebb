// Types that the problems of several families share.
#pragma once

#include <cstdint>

#include <torch/headeronly/core/ScalarType.h>

namespace dcs {

using torch::headeronly::ScalarType;

// Element strides of a tensor seen as (outer, time, inner); 0 where it is broadcast.
struct Strides {
  int64_t outer = 0;
  int64_t time = 0;
  int64_t inner = 0;
};

}  // namespace dcs
