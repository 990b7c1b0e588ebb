// Launches the kernels of long rows: those that blocks share or take alone (bulk_stream.cuh), or hold on the chip
// together (resident.cuh).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "common/device.h"
#include "common/call_tag.h"
#include "scan/long_rows/resident.cuh"
#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/traits.h"
#include "scan/long_rows/bulk_stream.cuh"

namespace dcs {

constexpr int kMaxDevices = 64;  // whose facts are kept; beyond, they are asked for at every call

// As many blocks as run at once on the current device.
template <typename Kernel>
unsigned resident_blocks(Kernel kernel, int threads, int shared) {
  int device = 0, multiprocessors = 0, each = 0;
  cudaGetDevice(&device);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared);
  return static_cast<unsigned>(multiprocessors * each);
}

template <typename T>
StreamParams stream_params(const ScanProblem& problem, const AlignedPlan& plan, void* workspace) {
  constexpr int kVec = 16 / sizeof(T);
  StreamParams params{};
  params.problem = problem;
  params.rows = static_cast<uint32_t>(problem.rows());
  params.tiles = static_cast<uint32_t>(plan.tiles);
  params.padded = ceil_div(problem.length, kVec) * kVec;
  params.one_gamma = has_one_gamma(problem);
  params.row_per_block = plan.row_per_block;
  params.statuses = workspace;
  return params;
}

// What tells this call's statuses from whatever memory held before.
inline void mark_statuses(StreamParams& params, cudaStream_t stream) {
  params.tag = new_tag();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  params.replayed = cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

// `window`: blocks whose totals a block can collect.
template <auto kKernel>
void launch_stream_with(int threads, int shared, int window, const StreamParams& params, cudaStream_t stream) {
  static std::atomic<unsigned> known[kMaxDevices];
  int device = 0;
  cudaGetDevice(&device);
  unsigned most = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (most == 0) {
    most = resident_blocks(kKernel, threads, shared);
    if (device < kMaxDevices) known[device].store(most, std::memory_order_relaxed);
  }
  const int64_t tiles = static_cast<int64_t>(params.rows) * params.tiles;
  int64_t blocks =
      params.row_per_block ? std::min<int64_t>(most, params.rows) : std::min<int64_t>({most, tiles, window});
  cudaLaunchAttribute cooperative = cooperating();
  const auto launch = [&] {
    const cudaLaunchConfig_t config =
        launch_config(blocks, threads, shared, stream, &cooperative, params.row_per_block ? 0 : 1);
    return cudaLaunchKernelEx(&config, kKernel, params);
  };
  // A green context has fewer multiprocessors than its device: any number of blocks will do.
  while (launch() == cudaErrorCooperativeLaunchTooLarge && blocks > 1) {
    cudaGetLastError();
    blocks = (blocks + 1) / 2;
  }
}

template <typename T, bool kStep, bool kBackward, bool kReverse, bool kWholeRows>
void launch_bulk_stream_in(const ScanProblem& problem, const AlignedPlan& plan, void* workspace, cudaStream_t stream) {
  constexpr int kTensors = 1 + (kStep ? 1 : 0) + (kBackward ? 1 : 0);
  constexpr BulkStreamSize kSize = bulk_stream_size(kTensors, sizeof(T), kStep, kWholeRows);
  using Shape = BulkStreamShape<kTensors, kSize.warps, kSize.vectors, kSize.stages, kSize.ahead>;
  static_assert(Shape::kSharedBytes == bulk_stream_shared_bytes(kTensors, sizeof(T), kStep, kWholeRows));
  StreamParams params = stream_params<T>(problem, plan, workspace);
  if (!plan.row_per_block) mark_statuses(params, stream);
  // Inputs make room in L2 for results, up to a size.
  params.load_once = 3 * problem.rows() * problem.length * static_cast<int64_t>(sizeof(T)) <= kFewStepBytes;
  const auto launch = [&](auto shifted) {
    launch_stream_with<bulk_stream_kernel<T, kStep, kBackward, kReverse, shifted(), Shape>>(
        Shape::kThreads, Shape::kSharedBytes, 32 * Shape::kWindow, params, stream);
  };
  if constexpr (kStep && !kBackward) {
    if (problem.shifted) {
      launch(std::true_type());
      return;
    }
  }
  launch(std::bool_constant<kBackward>());
}

template <typename T, bool kStep, bool kBackward>
void launch_bulk_stream(const ScanProblem& problem, const AlignedPlan& plan, void* workspace, cudaStream_t stream) {
  const auto launch = [&](auto whole_rows) {
    if (problem.reverse)
      launch_bulk_stream_in<T, kStep, kBackward, true, whole_rows()>(problem, plan, workspace, stream);
    else launch_bulk_stream_in<T, kStep, kBackward, false, whole_rows()>(problem, plan, workspace, stream);
  };
  if constexpr (kBackward && !kStep) {
    if (plan.row_per_block) {
      launch(std::true_type());
      return;
    }
  }
  launch(std::false_type());
}

template <typename T, bool kBackward>
void launch_resident(const ScanProblem& problem, const AlignedPlan& plan, void* workspace, cudaStream_t stream) {
  StreamParams params = stream_params<T>(problem, plan, workspace);
  mark_statuses(params, stream);
  const auto kernel =
      problem.reverse ? resident_rows_kernel<T, kBackward, true> : resident_rows_kernel<T, kBackward, false>;
  allow_shared(kernel, kResidentSharedBytes, plan.most_shared);
  const int64_t blocks = plan.tiles * ceil_div(problem.rows(), plan.resident_rounds);
  kernel<<<static_cast<unsigned>(blocks), ResidentShape::kThreads, kResidentSharedBytes, stream>>>(params);
}

}  // namespace dcs
