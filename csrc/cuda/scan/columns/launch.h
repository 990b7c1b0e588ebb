// The launchers of columns of any shape of an element type, null where no plan is for it; each type in a file of its
// own so that they compile side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/problem.h"

namespace dcs {

struct ColumnsLaunchers {
  cudaError_t (*few_steps)(const ScanProblem&, const FewStepsPlan&, cudaStream_t);
  cudaError_t (*staged)(const ScanProblem&, const StagedColumnsPlan&, cudaStream_t);
  cudaError_t (*serial)(const ScanProblem&, const SerialColumnsPlan&, cudaStream_t);
  cudaError_t (*small)(const ScanProblem&, const SmallColumnsPlan&, void* workspace, cudaStream_t);
  cudaError_t (*lookback)(const ScanProblem&, const LookbackColumnsPlan&, void* workspace, cudaStream_t);
  cudaError_t (*stream)(const ScanProblem&, const StreamColumnsPlan&, void* workspace, cudaStream_t);
  cudaError_t (*resident)(const ScanProblem&, const ResidentColumnsPlan&, void* workspace, cudaStream_t);
};

extern const ColumnsLaunchers columns_float, columns_half, columns_bfloat16, columns_double, columns_complex_float,
    columns_complex_double, columns_int64;

}  // namespace dcs
