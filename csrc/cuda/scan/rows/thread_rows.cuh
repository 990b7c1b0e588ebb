// A few short rows with a number gamma, or one a step: a thread a row, and as few instructions as the recurrence
// allows. What such a call costs is one launch and one trip to memory.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "common/element_types.cuh"
#include "common/vector.cuh"

namespace dcs {

constexpr int kTinyVectors = 8;  // of 16 bytes in a row at most (plan/aligned.h, is_tiny)

template <typename T, bool kStep>
__global__ void thread_rows_kernel(const T* __restrict__ input, const T* __restrict__ gates, T* __restrict__ output,
    float gamma, float gamma_rest, int rows, int vectors, bool reverse) {
  constexpr int kVec = 16 / sizeof(T);
  using Word = Vector<T, kVec>;
  overlap_launches();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const int64_t start = static_cast<int64_t>(row) * vectors;
  const Word* from = reinterpret_cast<const Word*>(input) + start;
  Word* to = reinterpret_cast<Word*>(output) + start;
  const auto index = [&](int v) { return reverse ? vectors - 1 - v : v; };
  Word x[kTinyVectors], g[kStep ? kTinyVectors : 1];
#pragma unroll
  for (int v = 0; v < kTinyVectors; ++v) {
    if (v >= vectors) break;
    x[v] = from[index(v)];
    if constexpr (kStep) g[v] = reinterpret_cast<const Word*>(gates)[start + index(v)];
  }
  const Gate<float> gate{gamma, gamma_rest};
  float y = 0.f;
#pragma unroll
  for (int v = 0; v < kTinyVectors; ++v) {
    if (v >= vectors) break;
    float values[kVec], factors[kVec] = {};
    unpack(x[v], values);
    if constexpr (kStep) unpack(g[v], factors);
    const auto step = [&](int i, bool first) {
      if (!first) values[i] = kStep ? plain_step(values[i], factors[i], y) : gate.step(values[i], y);
      y = values[i];
    };
    if (reverse) {
#pragma unroll
      for (int i = kVec - 1; i >= 0; --i) step(i, v == 0 && i == kVec - 1);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) step(i, v == 0 && i == 0);
    }
    to[index(v)] = pack<float, T, kVec>(values);
  }
}

}  // namespace dcs
