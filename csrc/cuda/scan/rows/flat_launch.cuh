// Launches the kernels of contiguous time (flat.cuh).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "scan/carry/call_tag.h"
#include "scan/plan/any_shape.h"
#include "scan/rows/flat_rows.cuh"
#include "scan/rows/long_rows.cuh"

namespace dcs {

// A number's power, which neither overflows nor vanishes but for a base of 0, as power_mul has it.
inline double bounded_power(double base, int64_t exponent) {
  constexpr double kLeast = 2.2250738585072014e-308, kMost = 1.7976931348623157e308;
  double power = 1.0, square = base;
  const auto bound = [&](double value) {
    if (base == 0.0 || value != value) return value;
    return std::copysign(std::clamp(std::fabs(value), kLeast, kMost), value);
  };
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) power = bound(power * square);
    square = bound(square * square);
  }
  return power;
}

inline bool is_flat(const ScanProblem& p, const void* pointer, const Strides& strides) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && (p.length == 1 || strides.time == 1) &&
      (p.inner == 1 || strides.inner == p.length) && (p.outer == 1 || strides.outer == p.inner * p.length);
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
  if (problem.gamma_kind == GammaKind::kNumber)
    for (int j = 0; j < 6; ++j)
      params.lane_powers[j] =
          bounded_power(problem.gamma_value, (int64_t{plan.vectors} * (16 / static_cast<int>(sizeof(T)))) << j);
  params.one_gamma = has_one_gamma(problem);
  params.flat_input = is_flat(problem, problem.input, problem.input_strides);
  params.flat_gates = is_flat(problem, problem.gamma, problem.gamma_strides);
  params.flat_saved = is_flat(problem, problem.saved, problem.saved_strides);
  params.flat_reset = is_flat(problem, problem.reset, problem.reset_strides);
  params.flat_output = is_flat(problem, problem.output, problem.output_strides);
  params.flat_gradient = is_flat(problem, problem.grad_gamma, problem.grad_gamma_strides);
  const bool step = problem.gamma_kind == GammaKind::kStep;
  params.all_flat = params.flat_input && params.flat_output && (!problem.reset || params.flat_reset) &&
      (!step || params.flat_gates) && (!problem.backward || (params.flat_saved && (!step || params.flat_gradient)));
  return params;
}

template <typename Kernel>
cudaError_t launch_flat_kernel(Kernel kernel, const FlatParams& params, int threads, int64_t blocks, int64_t shared,
    bool together, cudaStream_t stream) {
  int device = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaError_t error = allow_shared(kernel, shared, most);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cooperative = cooperating();
  while (true) {
    const cudaLaunchConfig_t config = launch_config(blocks, threads, shared, stream, &cooperative, together ? 1 : 0);
    error = cudaLaunchKernelEx(&config, kernel, params);
    // A green context has fewer multiprocessors than its device: any number of blocks will do.
    if (error != cudaErrorCooperativeLaunchTooLarge || blocks == 1) return error;
    cudaGetLastError();
    blocks = (blocks + 1) / 2;
  }
}

template <typename T, bool kStep, bool kBackward>
cudaError_t launch_flat(const ScanProblem& problem, const KernelPlan& plan, void* workspace, cudaStream_t stream) {
  if (const FlatRowsPlan* const whole = std::get_if<FlatRowsPlan>(&plan)) {
    const auto kernel =
        problem.reverse ? flat_rows_kernel<T, kStep, kBackward, true> : flat_rows_kernel<T, kStep, kBackward, false>;
    return launch_flat_kernel(
        kernel, flat_params<T>(problem, *whole), 32 * whole->warps, whole->tiles, whole->shared_bytes, false, stream);
  }
  const LongRowsPlan& shared = std::get<LongRowsPlan>(plan);
  FlatParams params = flat_params<T>(problem, shared);
  params.stages = shared.stages;
  params.pieces = workspace;
  params.tag = call_tag(workspace, shared.workspace_bytes, stream);
  const auto kernel =
      problem.reverse ? long_rows_kernel<T, kStep, kBackward, true> : long_rows_kernel<T, kStep, kBackward, false>;
  return launch_flat_kernel(kernel, params, 32 * (kLongWarps + 1), shared.blocks, shared.shared_bytes, true, stream);
}

template <typename T>
cudaError_t launch_rows_of(const ScanProblem& problem, const KernelPlan& plan, void* workspace, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, int64_t>) {
    return launch_flat<T, false, false>(problem, plan, workspace, stream);
  } else if (problem.gamma_kind == GammaKind::kStep) {
    return problem.backward ? launch_flat<T, true, true>(problem, plan, workspace, stream)
                            : launch_flat<T, true, false>(problem, plan, workspace, stream);
  } else {
    return problem.backward ? launch_flat<T, false, true>(problem, plan, workspace, stream)
                            : launch_flat<T, false, false>(problem, plan, workspace, stream);
  }
}

}  // namespace dcs
