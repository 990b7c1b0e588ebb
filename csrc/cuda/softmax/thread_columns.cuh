// Softmax of columns in registers, one read and one write.
//
// Few steps: a thread takes all steps of a vector of columns that are whole vectors, and meets no other.
//
// Small tensors: a thread takes some steps of one column, `groups` apart, at any alignment and of any view. Neighboring
// threads take neighboring columns, so that a warp's loads and stores are of neighboring elements. These are many
// instructions, but a thread leaves one part to join, where one of vectors leaves a part for each element. Forward a
// power is made once, relative to the largest of its thread, whose factor makes up for it. A column's threads meet in
// shared memory, the blocks of a cluster by stores into each other's.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "softmax/lines.cuh"

namespace dcs {

constexpr int kColumnThreads = 256;      // of a block, at most
constexpr int kWholeStepsThreads = 128;  // of a block of few steps
constexpr int kMostJoined = 8;           // parts that each thread of a column joins alone

template <typename T>
struct SoftmaxColumns {
  const T* input;
  const T* saved;
  T* output;
  int64_t length, inner;
  // Few steps: vectors of columns of all outers, and of one.
  int64_t vectors, inner_vectors;
  // Small tensors: steps of a block; windows of columns in an outer, and columns of one; threads of a column; how many
  // of these join the others' parts before all join theirs, or 1; blocks of a window.
  int64_t steps;
  int windows, width, groups, joints, blocks;
  Divisor by_windows, by_width, by_groups;
  RunIndex runs;
};

// All steps of two neighboring columns.
template <bool kBackward, typename Acc, int kSteps>
__device__ __forceinline__ void finish_columns(Acc (&x)[2][kSteps], const Acc (&saved)[2][kSteps]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    Acc total = 0;
    if constexpr (kBackward) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) total += x[c][s] * saved[c][s];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) x[c][s] = (x[c][s] - total) * saved[c][s];
    } else {
      Acc largest = kLowest<Acc>;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) largest = larger(largest, x[c][s]);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) total += x[c][s] = shifted_power(x[c][s], largest);
      const Acc scale = inverse(total);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) x[c][s] *= scale;
    }
  }
}

template <typename T, int kSteps, bool kBackward>
__global__ void __launch_bounds__(kWholeStepsThreads)
    softmax_whole_steps_kernel(const __grid_constant__ SoftmaxColumns<T> params) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T), kColumns = 2;
  using Vec = Vector<T, kVec>;
  overlap_launches();
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (vector >= params.vectors) return;
  const int64_t outer = divided(vector, params.inner_vectors),
                at = outer * params.length * params.inner + (vector - outer * params.inner_vectors) * kVec;
  const int length = static_cast<int>(params.length);
  Vec raw[kSteps], saved[kBackward ? kSteps : 1];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    raw[s] = neutral<T, kVec, kBackward>();
    load_where(s < length, reinterpret_cast<const Vec*>(params.input + at + s * params.inner), raw[s]);
    if constexpr (kBackward) {
      saved[s] = raw[s];
      load_where(s < length, reinterpret_cast<const Vec*>(params.saved + at + s * params.inner), saved[s]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVec; i += kColumns) {
    Acc x[kColumns][kSteps], y[kColumns][kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        x[c][s] = cast<Acc>(raw[s].get(i + c));
        if constexpr (kBackward) y[c][s] = cast<Acc>(saved[s].get(i + c));
      }
    }
    finish_columns<kBackward>(x, y);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) raw[s].set(i + c, cast<T>(x[c][s]));
    }
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    if (s < length) *reinterpret_cast<Vec*>(params.output + at + s * params.inner) = raw[s];
}

// A thread's column of a window, and its steps.
template <typename T>
struct ThreadColumn {
  using Acc = typename Types<T>::Acc;
  static constexpr int kAtOnce = sizeof(T) == 8 ? 2 : 4;  // parts
  const SoftmaxColumns<T>& params;
  int column, columns;   // of the window: which one, how many
  int group;             // which of the column's threads
  int count;             // steps
  int64_t first, apart;  // in elements

  __device__ __forceinline__ ThreadColumn(const SoftmaxColumns<T>& of, uint32_t window, uint32_t rank) : params(of) {
    const uint32_t outer = of.by_windows.of(window);
    const int64_t begin = (window - outer * of.windows) * static_cast<int64_t>(of.width), step = rank * of.steps;
    columns = static_cast<int>(min(static_cast<int64_t>(of.width), of.inner - begin));
    group = static_cast<int>(of.by_width.of(threadIdx.x));
    column = threadIdx.x - group * of.width;
    const int steps = static_cast<int>(max(int64_t{0}, min(of.steps, of.length - step)));
    count = is_there() ? static_cast<int>(of.by_groups.of(steps - group + of.groups - 1)) : 0;
    first = (outer * of.length + step + group) * of.inner + begin + column;
    apart = of.groups * of.inner;
  }
  __device__ __forceinline__ bool is_there() const { return group < params.groups && column < columns; }

  template <int kSteps>
  __device__ __forceinline__ void load(const T* tensor, T nothing, T (&raw)[kSteps]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      raw[i] = nothing;
      if (i < count) raw[i] = tensor[first + i * apart];
    }
  }
  template <int kSteps>
  __device__ __forceinline__ void load_view(T nothing, T (&raw)[kSteps]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      raw[i] = nothing;
      const int64_t at = first + i * apart;
      if (i < count) raw[i] = params.input[at + params.runs.beyond(at)];
    }
  }

  // The parts of the column's threads, joined; all of them get it. In shared memory at `shared`, which has room for
  // twice as many parts as the block has threads. Threads that have no column join what another one's have left there.
  template <bool kBackward>
  __device__ __forceinline__ Part<Acc> join(const Part<Acc>& part, Part<Acc>* shared) const {
    const int width = params.width, groups = params.groups, joints = params.joints;
    if (groups == 1) return part;
    const auto load = [&](int other) { return shared[other * width + column]; };
    shared[threadIdx.x] = part;
    __syncthreads();
    if (joints == 1) return join_every<kBackward, kAtOnce, Acc>(0, groups, 1, load);
    Part<Acc>* const joined = shared + blockDim.x;
    if (group < joints) joined[threadIdx.x] = join_every<kBackward, kAtOnce, Acc>(group, groups, joints, load);
    __syncthreads();
    return join_every<kBackward, kAtOnce, Acc>(0, joints, 1, [&](int joint) { return joined[joint * width + column]; });
  }

  // The parts of a cluster's blocks, which have met in `meet_cluster`; at `exchange`, of which each has a row.
  template <bool kBackward>
  __device__ __forceinline__ Part<Acc> join_cluster(
      const Part<Acc>& part, Part<Acc>* exchange, uint64_t& arrivals) const {
    __syncwarp();
    wait_for_cluster();
    const int blocks = params.blocks, width = params.width;
    Part<Acc>* const mine = exchange + cluster_rank() * width + column;
    if (is_there()) {
      for (int rank = group; rank < blocks; rank += params.groups) {
        if constexpr (!kBackward) store_async_in_cluster(&mine->largest, &arrivals, rank, part.largest);
        store_async_in_cluster(&mine->total, &arrivals, rank, part.total);
      }
    }
    mbarrier_wait(&arrivals, 0);
    return join_every<kBackward, kAtOnce, Acc>(
        0, blocks, 1, [&](int block) { return exchange[block * width + column]; });
  }
};

// kSteps: of a thread, at most.
template <typename T, int kSteps, bool kBackward>
__global__ void __launch_bounds__(kColumnThreads)
    softmax_thread_columns_kernel(const __grid_constant__ SoftmaxColumns<T> params) {
  using Acc = typename Types<T>::Acc;
  extern __shared__ __align__(16) unsigned char softmax_shared[];
  __shared__ uint64_t arrivals;
  launch_dependents();
  const int blocks = params.blocks;
  const ThreadColumn<T> mine(params, blocks > 1 ? cluster_index() : blockIdx.x, blocks > 1 ? cluster_rank() : 0);
  griddepcontrol_wait();
  const T nothing = cast<T>(kBackward ? Acc(0) : Acc(-INFINITY));
  T raw[kSteps], saved[kBackward ? kSteps : 1];
  if (params.runs.span > 0) mine.load_view(nothing, raw);
  else mine.load(params.input, nothing, raw);
  if constexpr (kBackward) mine.load(params.saved, nothing, saved);
  if (blocks > 1)
    meet_cluster(arrivals, blocks * mine.columns * static_cast<int>(kBackward ? sizeof(Acc) : sizeof(Part<Acc>)));

  Acc x[kSteps], y[kSteps];
  Part<Acc> part;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    x[i] = cast<Acc>(raw[i]);
    if constexpr (kBackward) part.total += x[i] * (y[i] = cast<Acc>(saved[i]));
    else part.largest = larger(part.largest, x[i]);
  }
  if constexpr (!kBackward) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) part.total += x[i] = shifted_power(x[i], part.largest);
  }

  Part<Acc>* const shared = reinterpret_cast<Part<Acc>*>(softmax_shared);
  Part<Acc> joined = mine.template join<kBackward>(part, shared);
  if (blocks > 1) joined = mine.template join_cluster<kBackward>(joined, shared + 2 * blockDim.x, arrivals);
  const Acc factor = kBackward ? Acc(1) : shifted_power(part.largest, joined.largest) * inverse(joined.total);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const Acc value = kBackward ? (x[i] - joined.total) * y[i] : x[i] * factor;
    if (i < mine.count) params.output[mine.first + i * mine.apart] = cast<T>(value);
  }
}

}  // namespace dcs
