// The launchers of rows of any shape, three an element type; each type in a file of its own so that they compile side
// by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/problem.h"

namespace dcs {

struct RowsLaunchers {
  cudaError_t (*small)(const ScanProblem&, const SmallRowsPlan&, cudaStream_t);
  cudaError_t (*flat)(const ScanProblem&, const FlatRowsPlan&, cudaStream_t);
  cudaError_t (*together)(const ScanProblem&, const LongRowsPlan&, void* workspace, cudaStream_t);
};

extern const RowsLaunchers rows_float, rows_half, rows_bfloat16, rows_double, rows_complex_float, rows_complex_double,
    rows_int64;

}  // namespace dcs
