// What the driver (ops.cpp) asks of the kernels, which are compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "dcs/cross_entropy/problem.h"

namespace dcs::cpu {

struct CrossEntropyKernels {
  const char* name;
  // Whole rows [begin, end). Targets are in range.
  void (*rows)(const RowsProblem&, int64_t begin, int64_t end);
};

extern const CrossEntropyKernels kCrossEntropyDefault;
extern const CrossEntropyKernels kCrossEntropyAvx2;
extern const CrossEntropyKernels kCrossEntropyAvx512;

}  // namespace dcs::cpu
