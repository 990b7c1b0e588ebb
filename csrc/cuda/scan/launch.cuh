// Launches a planned scan of aligned operands for one storage type.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>
#include <utility>

#include "scan/columns/block_columns.cuh"
#include "scan/columns/split_columns.cuh"
#include "scan/long_rows/launch.cuh"
#include "dcs/scan/forms.h"
#include "dcs/scan/plan/pieces.h"
#include "dcs/scan/plan/traits.h"
#include "scan/long_rows/few_rows_gated.cuh"
#include "scan/rows/tile_rows.cuh"
#include "scan/rows/packed_rows.cuh"
#include "scan/rows/thread_rows.cuh"
#include "scan/columns/warp_columns.cuh"
#include "scan/rows/warp_rows.cuh"

namespace dcs {

// Blocks that need no room together.
template <typename Kernel, typename... Arguments>
void launch_blocks(const AlignedPlan& plan, Kernel kernel, int64_t blocks, int64_t threads, int64_t shared,
    cudaStream_t stream, const Arguments&... arguments) {
  launch_dependent(kernel, blocks <= plan.early_blocks, blocks, threads, shared, stream, arguments...);
}

template <typename T, bool kStep, bool kBackward, bool kPacked, bool kReverse>
void launch_rows_in(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  RowsParams params{};
  params.problem = problem;
  params.tiles = plan.tiles;
  params.rows = problem.rows();
  params.packed_rows = plan.packed_rows;
  params.length = plan.packed_rows ? plan.packed_rows * problem.length : problem.length;
  params.padded = ceil_div(params.length, kVec) * kVec;
  if (plan.packed_rows) {
    params.whole_end = params.length == plan.tile_elements ? static_cast<uint32_t>(params.rows / plan.packed_rows) : 0;
  } else {
    params.whole_begin = problem.reverse && params.padded != params.length ? 1 : 0;
    params.whole_end = static_cast<uint32_t>(params.length / plan.tile_elements);
  }
  const int64_t blocks = plan.packed_rows ? ceil_div(params.rows, plan.packed_rows) : params.rows * plan.tiles;
  const bool sums = kBackward && !kStep && plan.packed_rows;
  const size_t shared = sums ? plan.tile_elements / kVec * sizeof(float) : 0;
  const auto kernel = rows_kernel<T, kStep, kBackward, kPacked, kReverse>;
  if (!kPacked && plan.cluster) {
    // More than 8 blocks need leave. The attribute belongs to the device; setting it again costs less than a launch.
    if (plan.tiles > 8) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaLaunchAttribute cluster = in_clusters_of(plan.tiles);
    const cudaLaunchConfig_t config =
        launch_config(blocks, 32 * plan.warps, static_cast<int64_t>(shared), stream, &cluster, 1);
    cudaLaunchKernelEx(&config, kernel, params);
    return;
  }
  launch_blocks(plan, kernel, blocks, 32 * plan.warps, static_cast<int64_t>(shared), stream, params);
}

template <typename T, bool kStep, bool kBackward, bool kPacked>
void launch_rows(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  if (problem.reverse) launch_rows_in<T, kStep, kBackward, kPacked, true>(problem, plan, stream);
  else launch_rows_in<T, kStep, kBackward, kPacked, false>(problem, plan, stream);
}

template <typename T, bool kBackward>
void launch_short_rows(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  ShortRowsParams params{};
  params.problem = problem;
  params.rows = problem.rows();
  params.span = static_cast<int>(problem.length * sizeof(T) / 16);
  params.together = 32 / params.span;
  int reach = 1;  // the farthest shuffle
  while (reach < params.span) reach *= 2;
  params.least = static_cast<float>(std::pow(1e-30, 1.0 / (16 / sizeof(T) * reach)));
  const int64_t blocks =
      ceil_div(params.rows, static_cast<int64_t>(params.together) * kShortChunks * (kShortThreads / 32));
  const bool each = !has_one_gamma(problem);
  const auto kernel = each
      ? problem.reverse ? short_rows_kernel<T, true, kBackward, true> : short_rows_kernel<T, true, kBackward, false>
      : problem.reverse ? short_rows_kernel<T, false, kBackward, true>
                        : short_rows_kernel<T, false, kBackward, false>;
  launch_blocks(plan, kernel, blocks, kShortThreads, 0, stream, params);
}

template <typename T, bool kBackward>
void launch_whole_rows(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T), kRowsOfBlock = kShortThreads / 32;
  const WholeRowsParams params{problem, problem.rows(), static_cast<int>(problem.length / kVec),
      static_cast<float>(std::pow(1e-30, 1.0 / (32 * kVec)))};
  const auto launch = [&](auto chunks, auto alone) {
    const auto kernel = problem.reverse ? whole_rows_kernel<T, kBackward, true, chunks(), alone()>
                                        : whole_rows_kernel<T, kBackward, false, chunks(), alone()>;
    const int64_t blocks = alone() ? ceil_div(params.rows, kRowsOfBlock) : params.rows;
    launch_blocks(plan, kernel, blocks, alone() ? kShortThreads : 32 * plan.warps, 0, stream, params);
  };
  if (plan.whole_chunks == 2) launch(std::integral_constant<int, 2>(), std::true_type());
  else if (plan.whole_chunks == 3) launch(std::integral_constant<int, 3>(), std::true_type());
  else if (plan.whole_chunks == 4) launch(std::integral_constant<int, 4>(), std::true_type());
  else if constexpr (sizeof(T) == 2) launch(std::integral_constant<int, 4>(), std::false_type());
}

// Clusters that begin as the launch before them ends (ptx/dependent_launch.cuh).
template <typename Kernel, typename Params>
void launch_dependent_clusters(Kernel kernel, const Params& params, int64_t clusters, int warps, cudaStream_t stream) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);  // as above
  cudaLaunchAttribute attributes[] = {in_clusters_of(kMaxCluster), programmatic_serialization()};
  const cudaLaunchConfig_t config = launch_config(clusters * kMaxCluster, 32 * warps, 0, stream, attributes, 2);
  cudaLaunchKernelEx(&config, kernel, params);
}

// The most clusters that a kernel for a row of so many is made for.
template <typename Launch>
void for_reread_clusters(const AlignedPlan& plan, const Launch& launch) {
  if (plan.reread == 1) launch(std::integral_constant<int, 1>());
  else if (plan.reread <= 4) launch(std::integral_constant<int, 4>());
  else launch(std::integral_constant<int, kRereadClusters>());
}

template <typename T>
void launch_reread(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  RereadParams params{};
  params.input = problem.input;
  params.output = problem.output;
  params.input_outer = problem.input_strides.outer;
  params.input_inner = problem.input_strides.inner;
  params.output_outer = problem.output_strides.outer;
  params.output_inner = problem.output_strides.inner;
  params.inner = problem.inner;
  params.length = static_cast<int>(problem.length);
  params.clusters = plan.reread;
  set_powers(params, problem.gamma_value, 16 / sizeof(T), plan.warps);
  for_reread_clusters(plan, [&](auto most) {
    const auto kernel = problem.reverse ? reread_kernel<T, true, most()> : reread_kernel<T, false, most()>;
    launch_dependent_clusters(kernel, params, problem.rows() * plan.reread, plan.warps, stream);
  });
}

template <typename T>
void launch_reread_steps(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  const RereadStepsParams params{problem.input, problem.gamma, problem.output, problem.input_strides,
      problem.gamma_strides, problem.output_strides, problem.inner, static_cast<int>(problem.length), plan.reread};
  for_reread_clusters(plan, [&](auto most) {
    const auto kernel = problem.reverse ? reread_steps_kernel<T, true, most()> : reread_steps_kernel<T, false, most()>;
    launch_dependent_clusters(kernel, params, problem.rows() * plan.reread, plan.warps, stream);
  });
}

template <typename T, bool kStep, bool kBackward>
void launch_walk(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  constexpr int kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0), kStages = walk_stages(kTensors, sizeof(T));
  const auto launch_over = [&](auto columns) {
    constexpr int kStageBytes = kTensors * kWalkCount * 32 * columns() * static_cast<int>(sizeof(T));
    static_assert(kStages * kStageBytes <= 48 << 10);
    const WalkParams params{problem, ceil_div(problem.inner, 32 * columns())};
    // Few steps leave most of the stages unused.
    const int64_t shared = std::min<int64_t>(kStages, ceil_div(problem.length, kWalkCount)) * kStageBytes;
    const auto kernel = problem.reverse ? walk_kernel<T, kStep, kBackward, true, columns(), kWalkCount, kStages>
                                        : walk_kernel<T, kStep, kBackward, false, columns(), kWalkCount, kStages>;
    launch_blocks(plan, kernel, problem.outer * params.blocks, 32, shared, stream, params);
  };
  if (plan.columns * sizeof(T) == 8) launch_over(std::integral_constant<int, 8 / sizeof(T)>());
  else launch_over(std::integral_constant<int, 4 / sizeof(T)>());
}

template <typename T, bool kBackward>
void launch_few_columns(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  const FewColumnsParams params{problem, ceil_div(problem.inner, kFewColumns), plan.in_turn};
  const auto kernel_of = [&](auto whole_block) {
    return problem.reverse ? few_columns_kernel<T, kBackward, true, whole_block()>
                           : few_columns_kernel<T, kBackward, false, whole_block()>;
  };
  const auto kernel = plan.warps <= kFewWholeBlock<T> ? kernel_of(std::true_type()) : kernel_of(std::false_type());
  constexpr int kBytes = (kBackward ? 2 : 1) * static_cast<int>(sizeof(T));  // of an element's operands
  const int shared = few_shared_bytes(plan.warps * 4 / sizeof(T), kBytes);
  allow_shared(kernel, shared, plan.most_shared);
  launch_blocks(plan, kernel, problem.outer * params.blocks, 32 * plan.warps, shared, stream, params);
}

template <typename T, bool kStep, bool kBackward>
void launch_block_columns(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  const auto launch_over = [&](auto columns, auto lanes, auto count) {
    launch_blocks(plan, columns_kernel<T, kStep, kBackward, columns(), lanes(), count()>,
        ceil_div(problem.rows(), lanes() * columns()), lanes() * plan.warps, 0, stream, problem);
  };
  const auto launch = [&](auto columns, auto count) { launch_over(columns, std::integral_constant<int, 32>(), count); };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, kSteps<kStep>> usual;
  constexpr bool kLong = !kBackward;  // where longer stretches are worth a kernel of their own
  constexpr std::integral_constant<int, (kLong ? 2 : 1) * kSteps<kStep>> longer;
  if constexpr (sizeof(T) == 2 || kLong) {
    constexpr std::integral_constant<int, 2> two;
    if constexpr (kLong && kStep && sizeof(T) == 2) {
      if (plan.half_warps) {
        launch_over(two, std::integral_constant<int, 16>(), std::integral_constant<int, kHalfWarpSteps>());
        return;
      }
    }
    if (plan.columns == 2) {
      if (plan.long_stretches) launch(two, longer);
      else launch(two, usual);
      return;
    }
  }
  if (plan.long_stretches) launch(one, longer);
  else launch(one, usual);
}

template <typename T>
void launch_thread_rows(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  const Gate<float> gate = split_gamma(problem.gamma_value);
  const int rows = static_cast<int>(problem.rows());
  const auto kernel = problem.gamma_kind == GammaKind::kStep ? tiny_kernel<T, true> : tiny_kernel<T, false>;
  launch_blocks(plan, kernel, ceil_div(rows, 32), 32, 0, stream, static_cast<const T*>(problem.input),
      static_cast<const T*>(problem.gamma), static_cast<T*>(problem.output), gate.value, gate.rest, rows,
      static_cast<int>(problem.length * sizeof(T) / 16), problem.reverse);
}

template <typename T, bool kStep, bool kBackward>
void launch_tile_rows(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  if constexpr (!kStep) {
    if (plan.packed_rows) return launch_rows<T, kStep, kBackward, true>(problem, plan, stream);
  }
  launch_rows<T, kStep, kBackward, false>(problem, plan, stream);
}

// The kernels that no plan has for all gates, or only forward, are compiled for those alone.
template <typename T, bool kStep, bool kBackward>
void launch_aligned(const ScanProblem& problem, const AlignedPlan& plan, void* workspace, cudaStream_t stream) {
  constexpr bool kHalf = sizeof(T) == 2;
  switch (plan.kernel) {
    case AlignedKernel::kThreadRows:
      if constexpr (!kBackward) launch_thread_rows<T>(problem, plan, stream);
      break;
    case AlignedKernel::kPackedRows:
      if constexpr (!kStep) launch_short_rows<T, kBackward>(problem, plan, stream);
      break;
    case AlignedKernel::kWarpRows:
      if constexpr (!kStep) launch_whole_rows<T, kBackward>(problem, plan, stream);
      break;
    case AlignedKernel::kTileRows:
      if constexpr (!kStep || kBackward) launch_tile_rows<T, kStep, kBackward>(problem, plan, stream);
      break;
    case AlignedKernel::kFewRows:
      if constexpr (!kBackward && kStep) launch_reread_steps<T>(problem, plan, stream);
      else if constexpr (!kBackward) launch_reread<T>(problem, plan, stream);
      break;
    case AlignedKernel::kResidentRows:
      if constexpr (kHalf && !kStep) launch_held<T, kBackward>(problem, plan, workspace, stream);
      break;
    case AlignedKernel::kBulkStream: launch_ring<T, kStep, kBackward>(problem, plan, workspace, stream); break;
    case AlignedKernel::kAsyncStream:
      if constexpr (kStep || !kBackward) launch_stream<T, kStep, kBackward>(problem, plan, stream);
      break;
    case AlignedKernel::kWarpColumns:
      if constexpr (kHalf || !kStep || kBackward) launch_walk<T, kStep, kBackward>(problem, plan, stream);
      break;
    case AlignedKernel::kSplitColumns:
      if constexpr (!kStep && (!kBackward || kHalf)) launch_few_columns<T, kBackward>(problem, plan, stream);
      break;
    case AlignedKernel::kBlockColumns: launch_block_columns<T, kStep, kBackward>(problem, plan, stream); break;
  }
}

template <typename T>
cudaError_t launch_aligned_of(
    const ScanProblem& problem, const AlignedPlan& plan, void* workspace, cudaStream_t stream) {
  by_form<T>(problem,
      [&](auto step, auto backward) { launch_aligned<T, step(), backward()>(problem, plan, workspace, stream); });
  return cudaGetLastError();
}

}  // namespace dcs
