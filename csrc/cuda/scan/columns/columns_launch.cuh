// Launches the kernels of columns of any number and alignment.
#pragma once

#include <type_traits>

#include "common/device.h"
#include "common/call_tag.h"
#include "scan/columns/few_steps.cuh"
#include "scan/columns/float_columns.cuh"
#include "scan/columns/resident_columns.cuh"
#include "scan/columns/launch.h"
#include "scan/columns/lookback_columns.cuh"
#include "scan/columns/small_columns.cuh"
#include "scan/columns/serial_columns.cuh"
#include "scan/columns/staged_columns.cuh"
#include "scan/columns/staged_parts.cuh"
#include "scan/columns/stream_columns.cuh"
#include "dcs/scan/forms.h"
#include "dcs/scan/plan/powers.h"
#include "dcs/scan/plan/traits.h"

namespace dcs {

template <typename T>
cudaError_t launch_serial_columns(const ScanProblem& problem, const SerialColumnsPlan& plan, cudaStream_t stream) {
  return by_form<T>(problem, [&](auto step, auto backward) {
    const auto run = [&](auto unit) {
      const auto kernel = problem.reset ? serial_columns_kernel<T, step(), backward(), unit(), true>
                                        : serial_columns_kernel<T, step(), backward(), unit(), false>;
      return launch_dependent(kernel, plan.dependent, plan.blocks, kColumnThreads, 0, stream, problem);
    };
    if constexpr (sizeof(T) == 2) {
      if (plan.pairs) return run(std::integral_constant<int, 2>());
    }
    return run(std::integral_constant<int, 1>());
  });
}

template <typename T>
cudaError_t launch_staged_columns(const ScanProblem& problem, const StagedColumnsPlan& plan, cudaStream_t stream) {
  const auto kernel = plan.part_steps > 0 ? staged_parts_kernel<T> : staged_columns_kernel<T>;
  const cudaError_t error = allow_shared(kernel, plan.shared_bytes, plan.most_shared);
  if (error != cudaSuccess) return error;
  return launch_dependent(
      kernel, plan.dependent, plan.blocks, plan.threads, plan.shared_bytes, stream, StagedColumnsParams{problem, plan});
}

// Of the plan's unit.
template <typename T, bool kStep, bool kBackward>
auto few_steps_kernel_of(const FewStepsPlan& plan) {
  if constexpr (sizeof(T) == 2) {
    if (plan.unit == 8) return few_steps_kernel<T, kStep, kBackward, 8>;
  }
  if constexpr (sizeof(T) <= 4) {
    if (plan.unit == 4) return few_steps_kernel<T, kStep, kBackward, 4>;
    if (plan.unit == 2) return few_steps_kernel<T, kStep, kBackward, 2>;
  }
  return few_steps_kernel<T, kStep, kBackward, 1>;
}

// With operands from the scan's first step on, so that threads need not ask which way it goes.
inline FewStepsParams few_steps_params(ScanProblem problem, const FewStepsPlan& plan) {
  const int64_t bytes = bytes_of(problem.dtype), side_by_side = problem.inner / plan.unit;
  const auto turn = [&](auto& pointer, Strides& strides, int64_t size, int64_t later = 0) {
    if (!pointer) return;
    const int64_t first = problem.reverse ? problem.length - 1 - later : later;
    pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(
        reinterpret_cast<uintptr_t>(pointer) + static_cast<uintptr_t>(first * strides.time * size));
    if (problem.reverse) strides.time = -strides.time;
  };
  turn(problem.input, problem.input_strides, bytes);
  turn(problem.output, problem.output_strides, bytes);
  turn(problem.saved, problem.saved_strides, bytes, 1);
  turn(problem.reset, problem.reset_strides, 1);
  turn(problem.gamma, problem.gamma_strides, bytes);
  turn(problem.grad_gamma, problem.grad_gamma_strides, bytes);  // a row's stays as gamma: their time strides are 0
  problem.reverse = false;
  return {problem, Divisor(static_cast<uint32_t>(side_by_side)), static_cast<uint32_t>(problem.outer * side_by_side),
      plan.cells};
}

template <typename T>
cudaError_t launch_few_steps(const ScanProblem& problem, const FewStepsPlan& plan, cudaStream_t stream) {
  const auto kernel =
      by_form<T>(problem, [&](auto step, auto backward) { return few_steps_kernel_of<T, step(), backward()>(plan); });
  return launch_dependent(
      kernel, plan.dependent, plan.blocks, kColumnThreads, 0, stream, few_steps_params(problem, plan));
}

inline SmallColumnsParams small_columns_params(const ScanProblem& problem, const SmallColumnsPlan& plan) {
  const int sign = problem.reverse ? -1 : 1;
  // A reverse scan's first step is the last one in memory.
  const auto operand = [&](const void* pointer, const Strides& strides, int64_t bytes) {
    const int64_t first = problem.reverse ? (problem.length - 1) * strides.time * bytes : 0;
    return SmallColumnOperand{pointer ? static_cast<const char*>(pointer) + first : nullptr,
        static_cast<int>(strides.outer), sign * static_cast<int>(strides.time), static_cast<int>(strides.inner)};
  };
  const int64_t bytes = bytes_of(problem.dtype);
  SmallColumnsParams params = small_place_params(problem, plan);
  params.input = operand(problem.input, problem.input_strides, bytes);
  params.output = operand(problem.output, problem.output_strides, bytes);
  params.saved = operand(problem.saved, problem.saved_strides, bytes);
  params.grad_gamma = operand(problem.grad_gamma, problem.grad_gamma_strides, bytes);
  params.partials = static_cast<int>(problem.partials);
  params.reset = operand(problem.reset, problem.reset_strides, 1);
  params.initial = operand(problem.initial, {problem.initial_strides.outer, 0, problem.initial_strides.inner}, bytes);
  const bool by_step = problem.gamma_kind == GammaKind::kStep;
  if (by_step) params.gates = operand(problem.gamma, problem.gamma_strides, bytes);
  else params.gamma = operand(problem.gamma, {problem.gamma_strides.outer, 0, problem.gamma_strides.inner}, 0);
  params.back = problem.shifted ? 1 : 0;
  params.flat = plan.flat;
  params.reverse = problem.reverse;
  params.gamma_dtype = problem.gamma_dtype;
  return params;
}

inline void set_small_words(
    SmallColumnsParams& params, const SmallColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  params.words = workspace;
  params.tag = counted_tag(workspace, plan.workspace_bytes, plan.blocks, stream);
}

template <typename T, bool kShares>
auto small_columns_kernel_of(GammaKind kind, bool backward) {
  using K = GammaKind;
  if (backward)
    return kind == K::kStep ? small_columns_kernel<T, K::kStep, true, kShares>
                            : small_columns_kernel<T, K::kRow, true, kShares>;
  if (kind == K::kStep) return small_columns_kernel<T, K::kStep, false, kShares>;
  return kind == K::kRow ? small_columns_kernel<T, K::kRow, false, kShares>
                         : small_columns_kernel<T, K::kNumber, false, kShares>;
}

inline FloatLinesParams float_columns_params(const SmallColumnsParams& of, int warps) {
  FloatLinesParams params{};
  static_cast<SmallLinesParams&>(params) = of;
  fill_float_powers(params.powers, of.number, of.steps, of.span_bits, warps);
  return params;
}

template <typename T, bool kShares>
auto float_columns_kernel_of(int steps) {
  static_assert(small_column_steps(false, false) == 4 * kSmallBatch);
  switch (steps / kSmallBatch) {
    case 1: return float_columns_kernel<T, kSmallBatch, kShares>;
    case 2: return float_columns_kernel<T, 2 * kSmallBatch, kShares>;
    case 3: return float_columns_kernel<T, 3 * kSmallBatch, kShares>;
    default: return float_columns_kernel<T, 4 * kSmallBatch, kShares>;
  }
}

template <typename Kernel, typename Params>
cudaError_t launch_small(Kernel kernel, const SmallColumnsPlan& plan, const Params& params, cudaStream_t stream) {
  if (plan.shared_bytes > 0) {
    const cudaError_t error = allow_shared(kernel, plan.shared_bytes, plan.most_shared, kSmallColumnsStatics);
    if (error != cudaSuccess) return error;
  }
  return launch_planned(kernel, plan, plan.shared_bytes, stream, params);
}

template <typename T>
cudaError_t launch_small_columns(
    const ScanProblem& problem, const SmallColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  SmallColumnsParams params = small_columns_params(problem, plan);
  if (plan.sharers > 1) set_small_words(params, plan, workspace, stream);
  if (plan.in_float) {
    const auto kernel =
        plan.sharers > 1 ? float_columns_kernel_of<T, true>(plan.steps) : float_columns_kernel_of<T, false>(plan.steps);
    return launch_small(kernel, plan, float_columns_params(params, plan.warps), stream);
  }
  const auto kernel = plan.sharers > 1 ? small_columns_kernel_of<T, true>(problem.gamma_kind, problem.backward)
                                       : small_columns_kernel_of<T, false>(problem.gamma_kind, problem.backward);
  return launch_small(kernel, plan, params, stream);
}

template <typename T>
auto lookback_columns_kernel_of(const LookbackColumnsPlan& plan) {
  if constexpr (sizeof(T) == 2) {
    if (plan.apart) return lookback_columns_kernel<T, true>;
  }
  return lookback_columns_kernel<T, false>;
}

// Of words that blocks publish. Many blocks take longer to count than their words to clear.
inline CallTag tag_of_words(bool counts, void* workspace, int64_t bytes, int64_t blocks, cudaStream_t stream) {
  return counts ? counted_tag(workspace, bytes, blocks, stream) : CallTag{call_tag(workspace, bytes, stream), nullptr};
}

template <typename T>
cudaError_t launch_lookback_columns(
    const ScanProblem& problem, const LookbackColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  LookbackParams params = lookback_params(problem, plan, sizeof(T));
  if (plan.workspace_bytes > 0) {
    params.words = static_cast<Word*>(workspace);
    params.tag = tag_of_words(plan.dependent, workspace, plan.workspace_bytes, plan.blocks, stream);
  }
  return launch_planned(lookback_columns_kernel_of<T>(plan), plan, 0, stream, params);
}

template <typename T>
cudaError_t launch_stream_columns(
    const ScanProblem& problem, const StreamColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  CallTag tag{};
  if (plan.workspace_bytes > 0) tag = counted_tag(workspace, plan.workspace_bytes, plan.blocks, stream);
  const StreamColumnsParams params{problem, plan, workspace, tag};
  const auto kernel = stream_columns_kernel<T>;
  const cudaError_t error = allow_shared(kernel, plan.shared_bytes, plan.most_shared, 0);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cooperative = cooperating();
  const cudaLaunchConfig_t config =
      launch_config(plan.blocks, kStreamThreads, plan.shared_bytes, stream, &cooperative, 1);
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <typename T>
cudaError_t launch_resident_columns(
    const ScanProblem& problem, const ResidentColumnsPlan& plan, void* workspace, cudaStream_t stream) {
  const int64_t blocks = plan.strips * plan.tiles;
  CallTag tag{};
  if (plan.workspace_bytes > 0) tag = tag_of_words(plan.dependent, workspace, plan.workspace_bytes, blocks, stream);
  const ResidentColumnsParams params{problem, plan, workspace, tag};
  const auto kernel = by_form<T>(problem, [&](auto step, auto backward) {
    return plan.flat ? resident_columns_kernel<T, step(), backward(), true>
                     : resident_columns_kernel<T, step(), backward(), false>;
  });
  const cudaError_t error = allow_shared(kernel, plan.shared_bytes, plan.most_shared, plan.exchange_bytes);
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel, plan.dependent, blocks, kColumnThreads, plan.shared_bytes, stream, params);
}

template <typename T>
constexpr ColumnsLaunchers columns_launchers() {
  // No plan is for small problems of wide elements.
  ColumnsLaunchers launchers{
      launch_few_steps<T>, nullptr, launch_serial_columns<T>, nullptr, nullptr, nullptr, launch_resident_columns<T>};
  if constexpr (sizeof(T) <= 4 || std::is_same_v<T, double>) {
    launchers.staged = launch_staged_columns<T>;
    launchers.stream = launch_stream_columns<T>;
  }
  if constexpr (sizeof(T) <= 4) {
    launchers.small = launch_small_columns<T>;
    launchers.lookback = launch_lookback_columns<T>;
  }
  return launchers;
}

}  // namespace dcs
