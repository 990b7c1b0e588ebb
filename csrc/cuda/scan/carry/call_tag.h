// What tells the pieces of one call from whatever memory held before (piece_words.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <random>

namespace dcs {

// Another number for every call, none of which memory is likely to hold: a counter from a random start, mixed (Steele,
// Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
inline uint64_t new_tag() {
  static std::atomic<uint64_t> calls{(uint64_t{std::random_device()()} << 32) ^ std::random_device()()};
  uint64_t tag = calls.fetch_add(0x9e3779b97f4a7c15u, std::memory_order_relaxed);
  tag = (tag ^ tag >> 30) * 0xbf58476d1ce4e5b9u;
  tag = (tag ^ tag >> 27) * 0x94d049bb133111ebu;
  return tag ^ tag >> 31;
}

// The tag of a call's pieces in `workspace`. A graph's replays all bring the same one: there the pieces are cleared
// before each launch, which takes a launch of its own.
inline uint64_t call_tag(void* workspace, int64_t bytes, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone)
    cudaMemsetAsync(workspace, 0, static_cast<size_t>(bytes), stream);
  return (new_tag() | 2) & ~uint64_t{1};
}

}  // namespace dcs
