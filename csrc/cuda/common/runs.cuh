// Elements that lie in runs, copied into one range: runs of so many elements at one distance from each other (padded or
// sliced rows, every second element, one row for all), or one run that begins inside a vector. Elements are numbered as
// in the result, which is written in whole vectors of 16 bytes, and a division finds an element's run.
#pragma once

#include "common/divisor.cuh"
#include "common/device.h"
#include "common/ptx/global_load.cuh"
#include "common/range.cuh"
#include "common/runs.h"

namespace dcs {

constexpr int kRunsThreads = 256, kRunsVectors = 4;  // of a block; of a thread

struct RunsParams {
  const void* input;
  void* output;
  int64_t elements, run, gap;
  bool is_small;  // 31 bits number the elements
  Divisor by_run;

  explicit RunsParams(const Runs& of)
      : input(of.input),
        output(of.output),
        elements(of.elements),
        run(of.run),
        gap(of.gap),
        is_small(of.elements < int64_t{1} << 31) {
    if (is_small) by_run = Divisor(static_cast<uint32_t>(of.run));
  }
  __device__ __forceinline__ int64_t run_of(int64_t element) const {
    return is_small ? static_cast<int64_t>(by_run.of(static_cast<uint32_t>(element))) : divided(element, run);
  }
};

// A vector of the result, of whose elements there are `count_`. It comes as one word where it lies in one run and is
// aligned; in smaller words where it lies in one run; element by element elsewhere, at the ends of runs.
template <typename E>
class RunVector {
 public:
  static constexpr int kVec = 16 / sizeof(E);
  static constexpr int kWords = sizeof(E) == 2 ? 5 : 4;  // of 32 bits, at most
  using Vec = Vector<E, kVec>;

  __device__ __forceinline__ void find(const RunsParams& params, int64_t number) {
    const int64_t first = number * kVec;
    count_ = static_cast<int>(max(int64_t{0}, min(params.elements - first, static_cast<int64_t>(kVec))));
    const int64_t run = count_ > 0 ? params.run_of(first) : 0;
    from_ = static_cast<const E*>(params.input) + first + run * params.gap;
    in_run_ = (run + 1) * params.run - first;
    is_word_ = is_in_run() && address() % sizeof(Vec) == 0;
    is_pieces_ = is_in_run() && !is_word_;
  }

  // Without a branch, behind which the loads would be waited for.
  __device__ __forceinline__ void ask(Vec& raw, uint32_t (&words)[kWords]) const {
    load_where(is_word_, reinterpret_cast<const Vec*>(from_), raw);
    if constexpr (sizeof(E) == 2) {
      const E* const pairs = from_ + (is_odd() ? 1 : 0);
      load_words_where(is_pieces_ && is_odd(), from_, words);
#pragma unroll
      for (int i = 0; i < kVec / 2 - 1; ++i)
        load_words_where(is_pieces_, reinterpret_cast<const uint32_t*>(pairs + 2 * i), words + 1 + i);
      load_words_where(is_pieces_ && !is_odd(), reinterpret_cast<const uint32_t*>(from_ + kVec - 2), words + kVec / 2);
      load_words_where(is_pieces_ && is_odd(), from_ + kVec - 1, words + kVec / 2);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) load_words_where(is_pieces_, from_ + i, words + i * (kWords / kVec));
    }
  }

  // What was asked for, or the elements.
  __device__ __forceinline__ void take(const RunsParams& params, const uint32_t (&words)[kWords], Vec& raw) const {
    if (is_word_) return;
    if (is_pieces_) return join(words, raw);
    const E* element = from_;
    int64_t end = in_run_;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (i == end) {
        element += params.gap;
        end += params.run;
      }
      if (i < count_) raw.set(i, element[i]);
    }
  }
  __device__ __forceinline__ void store(const RunsParams& params, int64_t number, const Vec& raw) const {
    store_in(static_cast<E*>(params.output) + number * kVec, 0, Range{0, count_}, raw);
  }

 private:
  __device__ __forceinline__ uintptr_t address() const { return reinterpret_cast<uintptr_t>(from_); }
  __device__ __forceinline__ bool is_odd() const { return address() % 4 != 0; }  // of elements of two bytes
  __device__ __forceinline__ bool is_in_run() const { return count_ == kVec && in_run_ >= kVec; }
  __device__ __forceinline__ void join(const uint32_t (&words)[kWords], Vec& raw) const {
    if constexpr (sizeof(E) == 2) {
#pragma unroll
      for (int w = 0; w < kVec / 2; ++w) {
        const uint32_t before = w == 0 ? words[0] << 16 : words[w];
        raw.words[w] = is_odd() ? __funnelshift_r(before, words[w + 1], 16) : words[w + 1];
      }
    } else {
      memcpy(&raw, words, sizeof raw);
    }
  }

  const E* from_;   // the first
  int64_t in_run_;  // from the first to its run's end
  int count_;
  bool is_word_, is_pieces_;
};

template <typename E>
__global__ void __launch_bounds__(kRunsThreads) copy_runs_kernel(const __grid_constant__ RunsParams params) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kRunsThreads * kRunsVectors) + threadIdx.x;
  RunVector<E> vectors[kRunsVectors];
  typename RunVector<E>::Vec raw[kRunsVectors]{};
  uint32_t words[kRunsVectors][RunVector<E>::kWords]{};
#pragma unroll
  for (int k = 0; k < kRunsVectors; ++k) {
    vectors[k].find(params, first + k * kRunsThreads);
    vectors[k].ask(raw[k], words[k]);
  }
  // All of them before the first is stored, as loads do not pass stores.
#pragma unroll
  for (int k = 0; k < kRunsVectors; ++k) vectors[k].take(params, words[k], raw[k]);
#pragma unroll
  for (int k = 0; k < kRunsVectors; ++k) vectors[k].store(params, first + k * kRunsThreads, raw[k]);
}

template <typename E>
cudaError_t launch_copy_runs(const Runs& runs, cudaStream_t stream) {
  const int64_t vectors = ceil_div(runs.elements, static_cast<int64_t>(16 / sizeof(E)));
  const cudaLaunchConfig_t config =
      launch_config(ceil_div(vectors, int64_t{kRunsThreads} * kRunsVectors), kRunsThreads, 0, stream, nullptr, 0);
  return cudaLaunchKernelEx(&config, copy_runs_kernel<E>, RunsParams(runs));
}

}  // namespace dcs
