// What the kernels of columns are launched with.
#pragma once

#include "common/element_types.cuh"
#include "dcs/scan/problem.h"
#include "dcs/scan/plan/pieces.h"

namespace dcs {

struct HeldColumnsParams {
  ScanProblem problem;
  HeldColumnsPlan plan;
  void* workspace;  // words that blocks leave each other (carry/piece_words.cuh)
  uint64_t tag;
};

}  // namespace dcs
