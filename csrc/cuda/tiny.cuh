// A few short rows with one number gamma: a thread a row, and as few instructions as the recurrence allows. What such a call costs is one launch and
// one trip to memory.
#pragma once

#include "types.cuh"
#include "vector.cuh"

namespace dcs {

constexpr int kTinyVectors = 8;  // of 16 bytes in a row at most (plan.h, is_tiny)

template <typename T>
__global__ void tiny_kernel(const T* __restrict__ input, T* __restrict__ output, float gamma, float gamma_rest, int rows, int vectors, bool reverse) {
  constexpr int kVec = 16 / sizeof(T);
  using Word = Vector<T, kVec>;
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const Word* from = reinterpret_cast<const Word*>(input) + static_cast<int64_t>(row) * vectors;
  Word* to = reinterpret_cast<Word*>(output) + static_cast<int64_t>(row) * vectors;
  Word x[kTinyVectors];
#pragma unroll
  for (int v = 0; v < kTinyVectors; ++v)
    if (v < vectors) x[v] = from[reverse ? vectors - 1 - v : v];
  const Gate<float> gate{gamma, gamma_rest};
  float y = 0.f;
#pragma unroll
  for (int v = 0; v < kTinyVectors; ++v) {
    if (v >= vectors) break;
    float values[kVec];
    unpack(x[v], values);
    if (reverse) {
#pragma unroll
      for (int i = kVec - 1; i >= 0; --i) values[i] = y = v == 0 && i == kVec - 1 ? values[i] : gate.step(values[i], y);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = y = v == 0 && i == 0 ? values[i] : gate.step(values[i], y);
    }
    to[reverse ? vectors - 1 - v : v] = pack<float, T, kVec>(values);
  }
}

}  // namespace dcs
