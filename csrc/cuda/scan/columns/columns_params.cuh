// What the kernels of columns are launched with.
#pragma once

#include "common/element_types.cuh"
#include "scan/plan/columns.h"

namespace dcs {

struct ColumnsParams {
  ScanProblem problem;
  ColumnsPlan plan;
  void* workspace;  // words that blocks leave each other
  uint64_t tag;
};

}  // namespace dcs
