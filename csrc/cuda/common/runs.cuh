// Elements that lie in runs, copied into one range: runs of so many elements at one distance from each other (padded or
// sliced rows, every second element, one row for all), or one run that begins inside a vector. Elements are numbered as
// in the result, which is written in whole vectors of 16 bytes, and a division finds an element's run.
#pragma once

#include "common/any_vector.cuh"
#include "common/device.h"
#include "common/ptx/dependent_launch.cuh"
#include "common/range.cuh"

namespace dcs {

constexpr int kRunsThreads = 256, kRunsVectors = 4;  // of a block; of a thread

struct RunsParams {
  const void* input;
  void* output;
  int64_t elements;
  RunIndex index;

  explicit RunsParams(const Runs& of)
      : input(of.input), output(of.output), elements(of.elements), index(of.elements, of.run, of.gap) {}
};

// A vector of the result, of whose elements there are `count_`. It comes as one word where it lies in one run and is
// aligned; in smaller words where it lies in one run; element by element elsewhere, at the ends of runs.
template <typename E>
class RunVector {
 public:
  static constexpr int kVec = 16 / sizeof(E);
  using Vec = Vector<E, kVec>;

  __device__ __forceinline__ void find(const RunsParams& params, int64_t number) {
    const int64_t first = number * kVec;
    count_ = static_cast<int>(max(int64_t{0}, min(params.elements - first, static_cast<int64_t>(kVec))));
    const int64_t run = count_ > 0 ? params.index.run_of(first) : 0;
    from_ = static_cast<const E*>(params.input) + first + run * params.index.gap;
    in_run_ = (run + 1) * params.index.run - first;
    const bool is_in_run = count_ == kVec && in_run_ >= kVec;
    is_word_ = is_in_run && reinterpret_cast<uintptr_t>(from_) % sizeof(Vec) == 0;
    // Beside it lie others of its run.
    constexpr int kMargin = AnyVector<E>::kMargin;
    is_pieces_ = is_in_run && !is_word_ &&
        (!AnyVector<E>::is_odd(from_) || (in_run_ >= kVec + kMargin && in_run_ + kMargin <= params.index.run));
  }

  // Without a branch, behind which the loads would be waited for.
  __device__ __forceinline__ void ask(Vec& raw, AnyVector<E>& pieces) const {
    load_where(is_word_, reinterpret_cast<const Vec*>(from_), raw);
    pieces.ask(is_pieces_, from_);
  }

  // What was asked for, or the elements.
  __device__ __forceinline__ void take(const RunsParams& params, const AnyVector<E>& pieces, Vec& raw) const {
    if (is_word_) return;
    if (is_pieces_) {
      raw = pieces.get(from_);
      return;
    }
    const E* element = from_;
    int64_t end = in_run_;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (i == end) {
        element += params.index.gap;
        end += params.index.run;
      }
      if (i < count_) raw.set(i, element[i]);
    }
  }
  __device__ __forceinline__ void store(const RunsParams& params, int64_t number, const Vec& raw) const {
    store_in(static_cast<E*>(params.output) + number * kVec, 0, Range{0, count_}, raw);
  }

 private:
  const E* from_;   // the first
  int64_t in_run_;  // from the first to its run's end
  int count_;
  bool is_word_, is_pieces_;
};

template <typename E>
__global__ void __launch_bounds__(kRunsThreads) copy_runs_kernel(const __grid_constant__ RunsParams params) {
  launch_dependents();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kRunsThreads * kRunsVectors) + threadIdx.x;
  RunVector<E> vectors[kRunsVectors];
  typename RunVector<E>::Vec raw[kRunsVectors]{};
  AnyVector<E> pieces[kRunsVectors];
#pragma unroll
  for (int k = 0; k < kRunsVectors; ++k) {
    vectors[k].find(params, first + k * kRunsThreads);
    vectors[k].ask(raw[k], pieces[k]);
  }
  // All of them before the first is stored, as loads do not pass stores.
#pragma unroll
  for (int k = 0; k < kRunsVectors; ++k) vectors[k].take(params, pieces[k], raw[k]);
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
