// Launches a planned scan of aligned operands for one storage type.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>
#include <utility>

#include "scan/columns/block_columns.cuh"
#include "scan/columns/split_columns.cuh"
#include "scan/long_rows/launch.cuh"
#include "dcs/scan/forms.h"
#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/traits.h"
#include "scan/long_rows/few_rows_gated.cuh"
#include "scan/rows/tile_rows.cuh"
#include "scan/rows/packed_rows.cuh"
#include "scan/rows/thread_rows.cuh"
#include "scan/columns/warp_columns.cuh"
#include "scan/rows/warp_rows.cuh"

namespace dcs {

// Blocks that need not be resident together.
template <typename Kernel, typename... Arguments>
void launch_blocks(const AlignedPlan& plan, Kernel kernel, int64_t blocks, int64_t threads, int64_t shared,
    cudaStream_t stream, const Arguments&... arguments) {
  launch_dependent(kernel, blocks <= plan.dependent_blocks, blocks, threads, shared, stream, arguments...);
}

template <typename T, bool kStep, bool kBackward>
void launch_tile_rows(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  RowsParams params{};
  params.problem = problem;
  params.tiles = plan.tiles;
  params.padded = ceil_div(problem.length, kVec) * kVec;
  params.whole_begin = problem.reverse && params.padded != problem.length ? 1 : 0;
  params.whole_end = static_cast<uint32_t>(problem.length / plan.tile_elements);
  const int64_t blocks = problem.rows() * plan.tiles;
  const auto kernel =
      problem.reverse ? tile_rows_kernel<T, kStep, kBackward, true> : tile_rows_kernel<T, kStep, kBackward, false>;
  if (plan.cluster) {
    // More than 8 blocks need leave. The attribute belongs to the device; setting it again costs less than a launch.
    if (plan.tiles > 8) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaLaunchAttribute cluster = in_clusters_of(plan.tiles);
    const cudaLaunchConfig_t config = launch_config(blocks, 32 * plan.warps, 0, stream, &cluster, 1);
    cudaLaunchKernelEx(&config, kernel, params);
    return;
  }
  launch_blocks(plan, kernel, blocks, 32 * plan.warps, 0, stream, params);
}

template <typename T, bool kBackward>
void launch_packed_rows(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  PackedRowsParams params{};
  params.problem = problem;
  params.rows = problem.rows();
  params.span = static_cast<int>(problem.length * sizeof(T) / 16);
  params.together = 32 / params.span;
  int reach = 1;  // the farthest shuffle
  while (reach < params.span) reach *= 2;
  params.least = static_cast<float>(std::pow(1e-30, 1.0 / (16 / sizeof(T) * reach)));
  const int64_t blocks =
      ceil_div(params.rows, static_cast<int64_t>(params.together) * kPackedChunks * (kPackedThreads / 32));
  const bool each = !has_one_gamma(problem);
  const auto kernel = each
      ? problem.reverse ? packed_rows_kernel<T, true, kBackward, true> : packed_rows_kernel<T, true, kBackward, false>
      : problem.reverse ? packed_rows_kernel<T, false, kBackward, true>
                        : packed_rows_kernel<T, false, kBackward, false>;
  launch_blocks(plan, kernel, blocks, kPackedThreads, 0, stream, params);
}

template <typename T, bool kBackward>
void launch_warp_rows(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T), kRowsOfBlock = kPackedThreads / 32;
  const WarpRowsParams params{problem, problem.rows(), static_cast<int>(problem.length / kVec),
      static_cast<float>(std::pow(1e-30, 1.0 / (32 * kVec)))};
  const auto launch = [&](auto chunks, auto row_per_warp) {
    const auto kernel = problem.reverse ? warp_rows_kernel<T, kBackward, true, chunks(), row_per_warp()>
                                        : warp_rows_kernel<T, kBackward, false, chunks(), row_per_warp()>;
    const int64_t blocks = row_per_warp() ? ceil_div(params.rows, kRowsOfBlock) : params.rows;
    launch_blocks(plan, kernel, blocks, row_per_warp() ? kPackedThreads : 32 * plan.warps, 0, stream, params);
  };
  if (plan.warp_chunks == 2) launch(std::integral_constant<int, 2>(), std::true_type());
  else if (plan.warp_chunks == 3) launch(std::integral_constant<int, 3>(), std::true_type());
  else if (plan.warp_chunks == 4) launch(std::integral_constant<int, 4>(), std::true_type());
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
void for_row_clusters(const AlignedPlan& plan, const Launch& launch) {
  if (plan.row_clusters == 1) launch(std::integral_constant<int, 1>());
  else if (plan.row_clusters <= 4) launch(std::integral_constant<int, 4>());
  else launch(std::integral_constant<int, kFewRowsClusters>());
}

template <typename T>
void launch_few_rows(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  FewRowsParams params{};
  params.input = problem.input;
  params.output = problem.output;
  params.input_outer = problem.input_strides.outer;
  params.input_inner = problem.input_strides.inner;
  params.output_outer = problem.output_strides.outer;
  params.output_inner = problem.output_strides.inner;
  params.inner = problem.inner;
  params.length = static_cast<int>(problem.length);
  params.clusters = plan.row_clusters;
  set_powers(params, problem.gamma_value, 16 / sizeof(T), plan.warps);
  for_row_clusters(plan, [&](auto most) {
    const auto kernel = problem.reverse ? few_rows_kernel<T, true, most()> : few_rows_kernel<T, false, most()>;
    launch_dependent_clusters(kernel, params, problem.rows() * plan.row_clusters, plan.warps, stream);
  });
}

template <typename T>
void launch_few_rows_gated(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  const FewRowsGatedParams params{problem.input, problem.gamma, problem.output, problem.input_strides,
      problem.gamma_strides, problem.output_strides, problem.inner, static_cast<int>(problem.length),
      plan.row_clusters};
  for_row_clusters(plan, [&](auto most) {
    const auto kernel =
        problem.reverse ? few_rows_gated_kernel<T, true, most()> : few_rows_gated_kernel<T, false, most()>;
    launch_dependent_clusters(kernel, params, problem.rows() * plan.row_clusters, plan.warps, stream);
  });
}

template <typename T, bool kStep, bool kBackward>
void launch_warp_columns(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  constexpr int kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0), kStages = warp_column_stages(kTensors, sizeof(T));
  const auto launch_over = [&](auto columns) {
    constexpr int kStageBytes = kTensors * kWarpColumnsSteps * 32 * columns() * static_cast<int>(sizeof(T));
    static_assert(kStages * kStageBytes <= 48 << 10);
    const WarpColumnsParams params{problem, ceil_div(problem.inner, 32 * columns())};
    // Few steps leave most of the stages unused.
    const int64_t shared = std::min<int64_t>(kStages, ceil_div(problem.length, kWarpColumnsSteps)) * kStageBytes;
    const auto kernel = problem.reverse
        ? warp_columns_kernel<T, kStep, kBackward, true, columns(), kWarpColumnsSteps, kStages>
        : warp_columns_kernel<T, kStep, kBackward, false, columns(), kWarpColumnsSteps, kStages>;
    launch_blocks(plan, kernel, problem.outer * params.blocks, 32, shared, stream, params);
  };
  if (plan.columns * sizeof(T) == 8) launch_over(std::integral_constant<int, 8 / sizeof(T)>());
  else launch_over(std::integral_constant<int, 4 / sizeof(T)>());
}

template <typename T, bool kBackward>
void launch_split_columns(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  const SplitColumnsParams params{problem, ceil_div(problem.inner, kSplitBlockColumns), plan.in_turn};
  const auto kernel_of = [&](auto whole_block) {
    return problem.reverse ? split_columns_kernel<T, kBackward, true, whole_block()>
                           : split_columns_kernel<T, kBackward, false, whole_block()>;
  };
  const auto kernel = plan.warps <= kSplitWholeBlock<T> ? kernel_of(std::true_type()) : kernel_of(std::false_type());
  constexpr int kBytes = (kBackward ? 2 : 1) * static_cast<int>(sizeof(T));  // of an element's operands
  const int shared = split_shared_bytes(plan.warps * 4 / sizeof(T), kBytes);
  allow_shared(kernel, shared, plan.most_shared);
  launch_blocks(plan, kernel, problem.outer * params.blocks, 32 * plan.warps, shared, stream, params);
}

template <typename T, bool kStep, bool kBackward>
void launch_block_columns(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  const auto launch_over = [&](auto columns, auto lanes, auto count) {
    launch_blocks(plan, block_columns_kernel<T, kStep, kBackward, columns(), lanes(), count()>,
        ceil_div(problem.rows(), lanes() * columns()), lanes() * plan.warps, 0, stream, problem);
  };
  const auto launch = [&](auto columns, auto count) { launch_over(columns, std::integral_constant<int, 32>(), count); };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, kSteps<kStep>> usual;
  constexpr bool kLong = !kBackward;  // where longer segments are worth a kernel of their own
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
      if (plan.long_segments) launch(two, longer);
      else launch(two, usual);
      return;
    }
  }
  if (plan.long_segments) launch(one, longer);
  else launch(one, usual);
}

template <typename T>
void launch_thread_rows(const ScanProblem& problem, const AlignedPlan& plan, cudaStream_t stream) {
  const Gate<float> gate = split_gamma(problem.gamma_value);
  const int rows = static_cast<int>(problem.rows());
  const auto kernel =
      problem.gamma_kind == GammaKind::kStep ? thread_rows_kernel<T, true> : thread_rows_kernel<T, false>;
  launch_blocks(plan, kernel, ceil_div(rows, 32), 32, 0, stream, static_cast<const T*>(problem.input),
      static_cast<const T*>(problem.gamma), static_cast<T*>(problem.output), gate.value, gate.rest, rows,
      static_cast<int>(problem.length * sizeof(T) / 16), problem.reverse);
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
      if constexpr (!kStep) launch_packed_rows<T, kBackward>(problem, plan, stream);
      break;
    case AlignedKernel::kWarpRows:
      if constexpr (!kStep) launch_warp_rows<T, kBackward>(problem, plan, stream);
      break;
    case AlignedKernel::kTileRows: launch_tile_rows<T, kStep, kBackward>(problem, plan, stream); break;
    case AlignedKernel::kFewRows:
      if constexpr (!kBackward && kStep) launch_few_rows_gated<T>(problem, plan, stream);
      else if constexpr (!kBackward) launch_few_rows<T>(problem, plan, stream);
      break;
    case AlignedKernel::kResidentRows:
      if constexpr (kHalf && !kStep) launch_resident<T, kBackward>(problem, plan, workspace, stream);
      break;
    case AlignedKernel::kBulkStream: launch_bulk_stream<T, kStep, kBackward>(problem, plan, workspace, stream); break;
    case AlignedKernel::kWarpColumns:
      if constexpr (kHalf || !kStep || kBackward) launch_warp_columns<T, kStep, kBackward>(problem, plan, stream);
      break;
    case AlignedKernel::kSplitColumns:
      if constexpr (!kStep && (!kBackward || kHalf)) launch_split_columns<T, kBackward>(problem, plan, stream);
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
