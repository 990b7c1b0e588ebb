// What tells the words that the blocks of one call publish (word.cuh) from whatever memory held before.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/word.cuh"

namespace dcs {

// Another number for every call, none of which memory is likely to hold.
uint64_t new_tag();

// For a captured launch a counter of its replays that no other has, of the current device; else, or if there is none
// left, null.
uint32_t* new_launch_counter(bool captured);

inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

// The tag of a call's segments in `workspace`. A graph's replays all have the same one: there the segments are cleared
// before each launch, which takes a launch of its own.
inline uint64_t call_tag(void* workspace, int64_t bytes, cudaStream_t stream, bool clears) {
  if (clears) cudaMemsetAsync(workspace, 0, static_cast<size_t>(bytes), stream);
  return (new_tag() | 2) & ~uint64_t{1};
}
inline uint64_t call_tag(void* workspace, int64_t bytes, cudaStream_t stream) {
  return call_tag(workspace, bytes, stream, is_captured(stream));
}

// The same for a kernel that counts its launches (`tag_of_launch`), of so many blocks: nothing is cleared.
inline CallTag counted_tag(void* workspace, int64_t bytes, int64_t blocks, cudaStream_t stream) {
  const bool captured = is_captured(stream);
  uint32_t* const counter = blocks < int64_t{1} << kMostCountedBits ? new_launch_counter(captured) : nullptr;
  return {call_tag(workspace, bytes, stream, captured && !counter), counter};
}

}  // namespace dcs
