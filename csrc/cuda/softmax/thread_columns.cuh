// Softmax of columns in registers, one read and one write.
//
// Few steps: a thread takes all steps of a word of neighboring columns, or of several words, and meets no other. A word
// is as wide as all steps of all tensors allow, down to one element, so that views and steps of any length are read in
// place. Neighboring threads take neighboring words.
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

constexpr int kColumnThreads = 256;    // of a block, at most
constexpr int kFewStepsThreads = 128;  // of a block of few steps
constexpr int kMostJoined = 8;         // parts that each thread of a column joins alone

// Words of a step to a thread, a warp's words apart, whose loads of all steps have at least kBytesOnTheWay together. An
// instance of kSteps has columns of more than half as many steps.
constexpr int kBytesOnTheWay = 32;
constexpr int few_steps_words(int word_bytes, int steps, bool backward) {
  const int least_steps = steps == 2 ? 2 : steps / 2 + 1, bytes = least_steps * word_bytes * (backward ? 2 : 1);
  int words = 1;
  while (words * bytes < kBytesOnTheWay) words *= 2;
  return words;
}

template <typename T>
struct SoftmaxColumns {
  const T* input;
  const T* saved;
  T* output;
  int64_t length, inner;
  // Few steps: strips are neighboring columns, all of an outer or, of a view whose runs are parts of a step, a run's.
  // Words of a strip's step; strips of an outer, and of all; from a step of the input to the next one, in elements;
  // warps of a strip, where threads have several words.
  int64_t strip_words, outer_strips, strips, input_step;
  Divisor by_warps;
  // Small tensors: steps of a block; windows of columns in an outer, and columns of one; threads of a column; how many
  // of these join the others' parts before all join theirs, or 1; blocks of a window.
  int64_t steps;
  int windows, width, groups, joints, blocks;
  Divisor by_windows, by_width, by_groups;
  RunIndex runs;
};

// Of as few roundings one behind the other as there can be.
template <int kFirst, int kCount, typename Acc, int kSteps>
__device__ __forceinline__ Acc sum_in_pairs(const Acc (&x)[kSteps]) {
  if constexpr (kCount == 1) return x[kFirst];
  else return sum_in_pairs<kFirst, kCount / 2>(x) + sum_in_pairs<kFirst + kCount / 2, kCount - kCount / 2>(x);
}

// All steps of some columns.
template <bool kBackward, typename Acc, int kColumns, int kSteps>
__device__ __forceinline__ void finish_columns(Acc (&x)[kColumns][kSteps], const Acc (&saved)[kColumns][kSteps]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if constexpr (kBackward) {
      Acc total = 0;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) total += x[c][s] * saved[c][s];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) x[c][s] = (x[c][s] - total) * saved[c][s];
    } else {
      Acc largest = kLowest<Acc>;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) largest = larger(largest, x[c][s]);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) x[c][s] = shifted_power(x[c][s], largest);
      const Acc scale = inverse(sum_in_pairs<0, kSteps>(x[c]));
#pragma unroll
      for (int s = 0; s < kSteps; ++s) x[c][s] *= scale;
    }
  }
}

// A word in registers of 32 bits until its elements are used: two elements of half precision that share a register
// would wait for each other's loads.
template <typename T, int kVec>
struct WordRegisters {
  using Word = Vector<T, kVec>;
  uint32_t words[(sizeof(Word) + 3) / 4] = {};

  __device__ __forceinline__ void set(const Word& word) { memcpy(words, &word, sizeof word); }
  __device__ __forceinline__ Word get() const {
    Word word;
    memcpy(&word, words, sizeof word);
    return word;
  }
  __device__ __forceinline__ void load_where(bool wanted, const T* from) {
    load_words_where(wanted, reinterpret_cast<const Word*>(from), words);
  }
};

// All steps of a word of columns, in place.
template <bool kBackward, typename T, int kVec, int kSteps, int kSaved>
__device__ __forceinline__ void finish_words(
    WordRegisters<T, kVec> (&raw)[kSteps], const WordRegisters<T, kVec> (&saved)[kSaved]) {
  using Acc = typename Types<T>::Acc;
  constexpr int kColumns = kVec == 1 ? 1 : 2;  // at once
  Vector<T, kVec> words[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) words[s] = raw[s].get();
#pragma unroll
  for (int i = 0; i < kVec; i += kColumns) {
    Acc x[kColumns][kSteps], y[kColumns][kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        x[c][s] = cast<Acc>(words[s].get(i + c));
        if constexpr (kBackward) y[c][s] = cast<Acc>(saved[s].get().get(i + c));
      }
    }
    finish_columns<kBackward>(x, y);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) words[s].set(i + c, cast<T>(x[c][s]));
    }
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) raw[s].set(words[s]);
}

// A thread's words in the first step of their columns, which are a warp's words apart.
template <int kVec, int kWords>
struct StepWords {
  int64_t at, in_input;  // the first, in elements: of contiguous tensors, and of the input, which may be a view
  int left;              // words of the strip from the first one on, as far as they matter

  template <typename T>
  __device__ __forceinline__ explicit StepWords(const SoftmaxColumns<T>& params) {
    int64_t strip, word;  // which one of all, and which one of the strip's
    if constexpr (kWords == 1) {
      const int64_t thread = static_cast<int64_t>(blockIdx.x) * kFewStepsThreads + threadIdx.x;
      strip = divided(thread, params.strip_words);
      word = thread - strip * params.strip_words;
    } else {
      const uint32_t warp = blockIdx.x * (kFewStepsThreads / 32) + threadIdx.x / 32, number = params.by_warps.of(warp);
      strip = number;
      word = static_cast<int64_t>(warp - number * params.by_warps.divisor) * (32 * kWords) + threadIdx.x % 32;
    }
    const int64_t outer = params.outer_strips == 1 ? strip : divided(strip, params.outer_strips),
                  column = ((strip - outer * params.outer_strips) * params.strip_words + word) * kVec;
    at = outer * params.length * params.inner + column;
    in_input = at + (params.runs.span > 0 ? params.runs.beyond(at) : 0);
    left = static_cast<int>(
        strip < params.strips ? min(params.strip_words - word, static_cast<int64_t>(32 * kWords)) : int64_t{0});
  }
  __device__ __forceinline__ bool has(int number) const { return 32 * number < left; }
  // What `has` says is found again behind this: predicates of all loads, kept for the stores, are more than there are,
  // and the last loads would wait for the first.
  __device__ __forceinline__ void forget() { asm volatile("" : "+r"(left)); }
};

template <typename T, int kVec, int kSteps, bool kBackward>
__global__ void __launch_bounds__(kFewStepsThreads)
    softmax_few_steps_kernel(const __grid_constant__ SoftmaxColumns<T> params) {
  constexpr int kWords = few_steps_words(kVec * sizeof(T), kSteps, kBackward), kApart = 32 * kVec;
  using Registers = WordRegisters<T, kVec>;
  overlap_launches();
  StepWords<kVec, kWords> mine(params);
  if (!mine.has(0)) return;
  const int length = static_cast<int>(params.length);
  const T* const input = params.input + mine.in_input;
  const T* const outputs = kBackward ? params.saved + mine.at : nullptr;
  T* const output = params.output + mine.at;
  Registers raw[kWords][kSteps], saved[kWords][kBackward ? kSteps : 1];
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const bool is_there = s < length && mine.has(k);
      raw[k][s].set(neutral<T, kVec, kBackward>());
      raw[k][s].load_where(is_there, input + s * params.input_step + k * kApart);
      if constexpr (kBackward) saved[k][s].load_where(is_there, outputs + s * params.inner + k * kApart);
    }
  }
  mine.forget();
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    finish_words<kBackward>(raw[k], saved[k]);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      if (s < length && mine.has(k))
        *reinterpret_cast<Vector<T, kVec>*>(output + s * params.inner + k * kApart) = raw[k][s].get();
  }
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
