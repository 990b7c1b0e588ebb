// What tells the pieces of one call from whatever memory held before (piece_words.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dcs {

// Another number for every call, none of which memory is likely to hold.
uint64_t new_tag();

// The tag of a call's pieces in `workspace`. A graph's replays all bring the same one: there the pieces are cleared
// before each launch, which takes a launch of its own.
inline uint64_t call_tag(void* workspace, int64_t bytes, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone)
    cudaMemsetAsync(workspace, 0, static_cast<size_t>(bytes), stream);
  return (new_tag() | 2) & ~uint64_t{1};
}

}  // namespace dcs
