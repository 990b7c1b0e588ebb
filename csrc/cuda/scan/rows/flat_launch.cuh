// Launches the kernels of contiguous time (flat.cuh).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "common/device.h"
#include "common/call_tag.h"
#include "dcs/scan/forms.h"
#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/powers.h"
#include "dcs/scan/plan/traits.h"
#include "scan/rows/flat_rows.cuh"
#include "scan/rows/float_rows.cuh"
#include "scan/rows/launch.h"
#include "scan/rows/long_rows.cuh"
#include "scan/rows/small_params.cuh"
#include "scan/rows/small_rows.cuh"

namespace dcs {

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
  params.inner_inverse = ~uint64_t{0} / static_cast<uint64_t>(problem.inner);
  for (int64_t i = 0; i < 64; i += problem.length) params.starts |= uint64_t{1} << i;
  params.lift = ceil_div(kFlatGrain, problem.length);
  params.vectors = plan.vectors;
  if constexpr (std::is_same_v<Plan, FlatRowsPlan>) params.cluster = plan.cluster;
  if (problem.gamma_kind == GammaKind::kNumber) {
    for (int j = 0; j < 6; ++j)
      params.lane_powers[j] =
          bounded_power(problem.gamma_value, (int64_t{plan.vectors} * (16 / static_cast<int>(sizeof(T)))) << j);
    params.lane_weights[0] = 1.0;
    for (int j = 0; j < 5; ++j)
      for (int lane = 0; lane < 1 << j; ++lane)
        params.lane_weights[lane + (1 << j)] =
            bounded(params.lane_weights[lane] * params.lane_powers[j], problem.gamma_value);
  }
  params.one_gamma = has_one_gamma(problem);
  const auto flat = [&](bool is_used, const void* pointer, const Strides& strides) {
    return !is_used || is_flat(problem, pointer, strides);
  };
  const bool step = problem.gamma_kind == GammaKind::kStep;
  FlatParams::Flat& of = params.flat;
  of.input = flat(true, problem.input, problem.input_strides);
  of.gates = flat(step, problem.gamma, problem.gamma_strides);
  of.saved = flat(problem.backward, problem.saved, problem.saved_strides);
  of.reset = flat(problem.reset, problem.reset, problem.reset_strides);
  of.output = flat(true, problem.output, problem.output_strides);
  of.gradient = flat(step && problem.backward, problem.grad_gamma, problem.grad_gamma_strides);
  params.all_flat = of.input && of.gates && of.saved && of.reset && of.output && of.gradient;
  return params;
}

template <typename T>
SmallRowsParams small_params(const ScanProblem& problem, const SmallRowsPlan& plan) {
  const SmallOperands<ScanProblem> of(problem, problem.reverse, 16 / sizeof(T));
  SmallRowsParams params{};
  params.by_step = problem.gamma_kind == GammaKind::kStep;
  params.input = of.operand(problem.input, problem.input_strides, sizeof(T));
  params.output = of.operand(problem.output, problem.output_strides, sizeof(T));
  params.reset = of.operand(problem.reset, problem.reset_strides, 1);
  params.initial = of.row_operand(problem.initial, problem.initial_strides, sizeof(T));
  if (params.by_step) params.gates = of.operand(problem.gamma, problem.gamma_strides, sizeof(T));
  else params.gamma = of.row_operand(problem.gamma, problem.gamma_strides, bytes_of(problem.gamma_dtype));
  params.back = problem.shifted ? 1 : 0;
  if (problem.backward) {
    params.saved = of.operand(problem.saved, problem.saved_strides, sizeof(T));
    params.saved.in_words = params.saved.in_words && !problem.initial;  // which is behind a row's last element
    if (params.by_step) params.gradient = of.operand(problem.grad_gamma, problem.grad_gamma_strides, sizeof(T));
    else params.sums = of.row_operand(problem.grad_gamma, problem.grad_gamma_strides, sizeof(float));
    params.partials = problem.partials;
  } else if (problem.shifted) {
    params.gates.in_words = params.reset.in_words = false;
  }
  params.reverse = problem.reverse;
  params.gamma_dtype = problem.gamma_dtype;
  params.number = problem.gamma_value;
  of.place(params, plan, problem.gamma_kind == GammaKind::kNumber ? problem.gamma_value : 0.0);
  return params;
}

// launch(whether there are gates, gamma's gradient), both as types.
template <typename T, typename Launch>
auto in_small_form(const ScanProblem& problem, const Launch& launch) {
  const auto in = [&](auto gates, auto sums) {
    // No plan is for gradients of double.
    if constexpr (sizeof(T) <= 4)
      if (problem.backward) return launch(gates, sums);
    return launch(gates, std::integral_constant<SmallGradient, SmallGradient::kNone>());
  };
  const std::integral_constant<SmallGradient, SmallGradient::kSums> sums;
  if (problem.gamma_kind == GammaKind::kNumber) return in(std::false_type(), sums);
  if (problem.gamma_kind == GammaKind::kRow) return in(std::true_type(), sums);
  return in(std::true_type(), std::integral_constant<SmallGradient, SmallGradient::kSteps>());
}

// Of rows of which a block has one or a part.
template <typename T>
FloatLinesParams float_rows_params(const ScanProblem& problem, const SmallRowsPlan& plan) {
  constexpr int kVec = 16 / sizeof(T);
  const SmallOperands<ScanProblem> of(problem, problem.reverse, kVec);
  const auto operand = [](const SmallOperand& from) { return SmallColumnOperand{from.data, from.pitch, from.time, 0}; };
  FloatLinesParams params{};
  const SmallOperand input = of.operand(problem.input, problem.input_strides, sizeof(T)),
                     output = of.operand(problem.output, problem.output_strides, sizeof(T));
  const SmallRowOperand initial = of.row_operand(problem.initial, problem.initial_strides, sizeof(T));
  params.input = operand(input);
  params.output = operand(output);
  params.initial = {initial.data, problem.inner > 1 ? initial.inner : initial.outer, 0, 0};
  params.spans = Divisor(1);
  params.cluster = Divisor(static_cast<uint32_t>(plan.cluster));
  params.length = static_cast<int>(problem.length);
  params.columns = params.span = 1;
  params.steps = kVec;
  params.reverse = problem.reverse;
  params.shifts = problem.length + kVec - 1 <= int64_t{32} * kVec * plan.warps * plan.cluster;
  const auto beyond = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16; };
  params.flat =
      (problem.rows() > 1 && (input.pitch - output.pitch) % kVec) || beyond(input.data) != beyond(output.data);
  fill_float_powers(params.powers, problem.gamma_value, kVec, 0, plan.warps);
  return params;
}

// Of a vector a thread, in a block.
inline int64_t vector_bytes(const SmallRowsPlan& plan) { return int64_t{32} * plan.warps * 16; }

template <typename T>
cudaError_t launch_float_rows(const ScanProblem& problem, const SmallRowsPlan& plan, cudaStream_t stream) {
  const FloatLinesParams params = float_rows_params<T>(problem, plan);
  return launch_planned(float_rows_kernel<T>, plan, params.flat ? vector_bytes(plan) : 0, stream, params);
}

template <typename T>
cudaError_t launch_small_rows(const ScanProblem& problem, const SmallRowsPlan& plan, cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4)
    if (plan.in_float) return launch_float_rows<T>(problem, plan, stream);
  const SmallRowsParams params = small_params<T>(problem, plan);
  const bool in_words = params.output.in_words && (!params.gradient.data || params.gradient.in_words);
  return in_small_form<T>(problem, [&](auto gates, auto gradient) {
    const auto kernel = small_rows_kernel<T, gates(), gradient()>;
    return launch_planned(kernel, plan, in_words ? 0 : vector_bytes(plan), stream, params);
  });
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

// get(a kernel's direction, as a type). As a value it costs an instruction an element: a tenth of the time of floats;
// half as much of wider elements, which are rare.
template <typename T, typename Get>
auto in_direction(const ScanProblem& problem, const Get& get) {
  if constexpr (sizeof(T) > 4) {
    return get(std::integral_constant<Direction, Direction::kEither>());
  } else {
    if (problem.reverse) return get(std::integral_constant<Direction, Direction::kReverse>());
    return get(std::integral_constant<Direction, Direction::kForward>());
  }
}

template <typename T>
cudaError_t launch_flat_rows(const ScanProblem& problem, const FlatRowsPlan& plan, cudaStream_t stream) {
  return by_form<T>(problem, [&](auto step, auto backward) {
    const auto kernel = in_direction<T>(problem, [](auto direction) {
      return flat_rows_kernel<T, decltype(step)::value, decltype(backward)::value, direction()>;
    });
    const FlatParams params = flat_params<T>(problem, plan);
    cudaLaunchAttribute attributes[2];
    const int count = find_attributes(kernel, plan, attributes);
    return launch_flat_kernel(
        kernel, params, 32 * plan.warps, plan.tiles, plan.shared_bytes, attributes, count, stream);
  });
}

template <typename T>
cudaError_t launch_long_rows(
    const ScanProblem& problem, const LongRowsPlan& plan, void* workspace, cudaStream_t stream) {
  FlatParams params = flat_params<T>(problem, plan);
  params.stages = plan.stages;
  params.segments = workspace;
  params.tag = counted_tag(workspace, plan.workspace_bytes, plan.blocks, stream);
  cudaLaunchAttribute attribute = plan.dependent ? programmatic_serialization() : cooperating();
  const auto launch = [&](const auto& kernel_of) {
    return launch_flat_kernel(in_direction<T>(problem, kernel_of), params, 32 * (kLongWarps + 1), plan.blocks,
        plan.shared_bytes, &attribute, 1, stream);
  };
  if constexpr (sizeof(T) <= 4) {
    if (plan.apart) return launch([](auto direction) { return long_rows_kernel<T, false, false, direction(), true>; });
  }
  return by_form<T>(problem, [&](auto step, auto backward) {
    return launch([](auto direction) {
      return long_rows_kernel<T, decltype(step)::value, decltype(backward)::value, direction()>;
    });
  });
}

template <typename T>
constexpr RowsLaunchers rows_launchers() {
  // No plan is for small problems of complex numbers and integers, nor for long rows of the former.
  if constexpr (sizeof(T) <= 4 || std::is_same_v<T, double>)
    return {launch_small_rows<T>, launch_flat_rows<T>, launch_long_rows<T>};
  else if constexpr (!kIsComplex<T>) return {nullptr, launch_flat_rows<T>, launch_long_rows<T>};
  else return {nullptr, launch_flat_rows<T>, nullptr};
}

}  // namespace dcs
