// Launches the kernels of contiguous time (flat.cuh).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "common/device.h"
#include "scan/carry/call_tag.h"
#include "dcs/scan/forms.h"
#include "dcs/scan/plan/pieces.h"
#include "dcs/scan/plan/powers.h"
#include "dcs/scan/plan/traits.h"
#include "scan/rows/flat_rows.cuh"
#include "scan/rows/launch.h"
#include "scan/rows/long_rows.cuh"

namespace dcs {

// FlatParams::Units of an operand with elements of so many bytes.
inline int unit_of(const ScanProblem& p, const void* pointer, const Strides& strides, int bytes) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const bool is_contiguous = p.length == 1 || strides.time == 1;
  if (address % 16 == 0 && is_contiguous && (p.inner == 1 || strides.inner == p.length) &&
      (p.outer == 1 || strides.outer == p.inner * p.length))
    return 0;
  for (const int unit : {16 / bytes, 8 / bytes, 4 / bytes}) {
    const auto fits = [&](int64_t rows, int64_t stride) { return rows == 1 || stride % unit == 0; };
    if (unit <= 1) break;
    if (is_contiguous && address % (unit * bytes) == 0 && p.length % unit == 0 && fits(p.inner, strides.inner) &&
        fits(p.outer, strides.outer))
      return unit;
  }
  return 1;
}

template <typename T, typename Plan>
FlatParams flat_params(const ScanProblem& problem, const Plan& plan) {
  FlatParams params{};
  params.problem = problem;
  params.rows = problem.rows();
  params.count = params.rows * problem.length;
  params.phase = problem.reverse ? (kFlatGrain - params.count % kFlatGrain) % kFlatGrain : 0;
  params.tile = plan.tile;
  params.tiles = plan.tiles;
  params.inverse = ~uint64_t{0} / static_cast<uint64_t>(problem.length);
  for (int64_t i = 0; i < 64; i += problem.length) params.starts |= uint64_t{1} << i;
  params.lift = ceil_div(kFlatGrain, problem.length);
  params.vectors = plan.vectors;
  if constexpr (std::is_same_v<Plan, FlatRowsPlan>) params.cluster = plan.cluster;
  if (problem.gamma_kind == GammaKind::kNumber)
    for (int j = 0; j < 6; ++j)
      params.lane_powers[j] =
          bounded_power(problem.gamma_value, (int64_t{plan.vectors} * (16 / static_cast<int>(sizeof(T)))) << j);
  params.one_gamma = has_one_gamma(problem);
  const auto unit = [&](bool is_used, const void* pointer, const Strides& strides, int bytes) {
    return is_used ? unit_of(problem, pointer, strides, bytes) : 0;
  };
  const bool step = problem.gamma_kind == GammaKind::kStep;
  FlatParams::Units& units = params.units;
  units.input = unit(true, problem.input, problem.input_strides, sizeof(T));
  units.gates = unit(step, problem.gamma, problem.gamma_strides, sizeof(T));
  units.saved = unit(problem.backward, problem.saved, problem.saved_strides, sizeof(T));
  units.reset = unit(problem.reset, problem.reset, problem.reset_strides, 1);
  units.output = unit(true, problem.output, problem.output_strides, sizeof(T));
  units.gradient = unit(step && problem.backward, problem.grad_gamma, problem.grad_gamma_strides, sizeof(T));
  params.all_flat = !(units.input || units.gates || units.saved || units.reset || units.output || units.gradient);
  return params;
}

template <typename Kernel>
cudaError_t launch_flat_kernel(Kernel kernel, const FlatParams& params, int threads, int64_t blocks, int64_t shared,
    cudaLaunchAttribute* attributes, int count, cudaStream_t stream) {
  int device = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaError_t error = allow_shared(kernel, shared, most);
  if (error != cudaSuccess) return error;
  while (true) {
    const cudaLaunchConfig_t config = launch_config(blocks, threads, shared, stream, attributes, count);
    error = cudaLaunchKernelEx(&config, kernel, params);
    // A green context has fewer multiprocessors than its device: any number of blocks will do.
    if (error != cudaErrorCooperativeLaunchTooLarge || blocks == 1) return error;
    cudaGetLastError();
    blocks = (blocks + 1) / 2;
  }
}

template <typename T>
cudaError_t launch_flat_rows(const ScanProblem& problem, const FlatRowsPlan& plan, cudaStream_t stream) {
  return by_form<T>(problem, [&](auto step, auto backward) {
    const auto kernel = problem.reverse ? flat_rows_kernel<T, step(), backward(), true>
                                        : flat_rows_kernel<T, step(), backward(), false>;
    const FlatParams params = flat_params<T>(problem, plan);
    cudaLaunchAttribute attributes[2];
    int count = 0;
    if (plan.dependent) attributes[count++] = programmatic_serialization();
    if (plan.cluster > 1) attributes[count++] = in_clusters_of(plan.cluster);
    // More than 8 blocks need leave, which belongs to the device.
    if (plan.cluster > 8) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    return launch_flat_kernel(
        kernel, params, 32 * plan.warps, plan.tiles, plan.shared_bytes, attributes, count, stream);
  });
}

template <typename T>
cudaError_t launch_long_rows(
    const ScanProblem& problem, const LongRowsPlan& plan, void* workspace, cudaStream_t stream) {
  return by_form<T>(problem, [&](auto step, auto backward) {
    FlatParams params = flat_params<T>(problem, plan);
    params.stages = plan.stages;
    params.pieces = workspace;
    params.tag = call_tag(workspace, plan.workspace_bytes, stream);
    const auto kernel = problem.reverse ? long_rows_kernel<T, step(), backward(), true>
                                        : long_rows_kernel<T, step(), backward(), false>;
    cudaLaunchAttribute cooperative = cooperating();
    return launch_flat_kernel(
        kernel, params, 32 * (kLongWarps + 1), plan.blocks, plan.shared_bytes, &cooperative, 1, stream);
  });
}

template <typename T>
constexpr RowsLaunchers rows_launchers() {
  if constexpr (sizeof(T) <= kMostLongBytes) return {launch_flat_rows<T>, launch_long_rows<T>};
  else return {launch_flat_rows<T>, nullptr};  // no plan is for their long rows
}

}  // namespace dcs
