// Returns over n steps along contiguous time: all rows are one sequence, of which a block takes a tile. Each step is a
// map of what comes behind it. All threads compose these over 1, 2, 4 ... steps at once (Hillis and Steele, "Data
// parallel algorithms", 1986); a window of n steps is made of those that n - 1 has bits for, and of its last step. A
// gate of 0 reads nothing of what is behind it: a row's last step has one.
#pragma once

#include "common/divisor.cuh"
#include "common/ptx/dependent_launch.cuh"
#include "dcs/returns/n_step_plan.h"
#include "returns/n_step.cuh"
#include "returns/n_step_gradients.cuh"

namespace dcs {

// A tensor from the scan's first step on; strides in bytes, in its direction.
template <typename Byte>
struct NStepTensor {
  Byte* data = nullptr;  // null where there is none
  int64_t outer = 0;
  int cell = 0, time = 0;
};

template <typename Acc>
struct NStepWindowsParams {
  NStepTensor<const char> rewards, values, terminated, truncated, bootstrap;
  NStepTensor<char> targets, advantages, pg_advantages, bootstrap_gradient;  // all but the first of gradients
  ReturnsDiscount gamma, trace;
  NStepRates<Acc> rates;  // where both are numbers
  bool has_row_rates;     // of double alone
  bool has_next_values;   // of gradients: whether steps had their own next values
  // Of gradients: whether steps had their own values, the incoming one is of targets, and an end lacks a next value.
  bool has_own_values, of_targets, ends_lack;
  bool is_turned;  // time runs against memory
  bool is_packed;  // each tensor's rows lie one behind the other
  int n, length;
  uint32_t count, outputs;  // steps of all rows, in the order of the scan; of a block
  Divisor by_length, by_inner;
};

// `values`: those of the next states, or of the states, of which a step has the next one's.
template <typename T>
NStepWindowsParams<typename Types<T>::Acc> n_step_windows_params(const ReturnsProblem& p) {
  using Acc = typename Types<T>::Acc;
  NStepWindowsParams<Acc> params{};
  params.is_turned = p.rewards.strides.time < 0;
  params.is_packed = windows_are_packed(p);
  const auto set = [&](auto& tensor, auto* data, const Strides& strides, int64_t size) {
    using Byte = std::remove_pointer_t<decltype(tensor.data)>;
    if (!data) return;
    tensor.data = static_cast<Byte*>(data);
    tensor.outer = strides.outer * size;
    tensor.cell = static_cast<int>(strides.inner * size);
    tensor.time = static_cast<int>(strides.time * size);
  };
  const auto set_steps = [&](auto& tensor, auto* data, const Strides& strides, int64_t size) {
    set(tensor, data, strides, size);
    if (data && params.is_packed && params.is_turned)
      tensor.data += (p.outer - 1) * tensor.outer + (p.inner - 1) * int64_t{tensor.cell};
  };
  const ReturnsInput& values = p.next_values.data ? p.next_values : p.values;
  set_steps(params.rewards, p.rewards.data, p.rewards.strides, sizeof(T));
  if (!p.is_gradient) set_steps(params.values, values.data, values.strides, sizeof(T));
  set_steps(params.terminated, p.terminated.data, p.terminated.strides, 1);
  set_steps(params.truncated, p.truncated.data, p.truncated.strides, 1);
  set_steps(params.targets, p.targets.data, p.targets.strides, sizeof(T));
  set_steps(params.advantages, p.advantages.data, p.advantages.strides, sizeof(T));
  set_steps(params.pg_advantages, p.pg_advantages.data, p.pg_advantages.strides, sizeof(T));
  set(params.bootstrap, p.bootstrap_value.data, p.bootstrap_value.strides, sizeof(T));
  set(params.bootstrap_gradient, p.bootstrap_gradient.data, p.bootstrap_gradient.strides, sizeof(T));
  params.gamma = p.gamma, params.trace = p.trace;
  params.rates = n_step_rates<Acc>(p);
  params.has_row_rates = has_row_rates(p);
  params.has_next_values = p.is_gradient ? p.of_next_values : p.next_values.data != nullptr;
  params.has_own_values = p.of_own_values, params.of_targets = p.of_targets, params.ends_lack = p.ends_lack;
  params.n = static_cast<int>(p.steps), params.length = static_cast<int>(p.length);
  params.count = static_cast<uint32_t>(p.rows() * p.length);
  params.outputs = static_cast<uint32_t>(window_outputs(p, sizeof(Acc)));
  params.by_length = Divisor(static_cast<uint32_t>(p.length));
  params.by_inner = Divisor(static_cast<uint32_t>(p.inner));
  return params;
}

// kGradients: a step is cut, and discounted, as the next one is, and has no values (dcs/returns/gradients_plan.h); time
// runs the other way.
template <typename T, bool kGradients>
struct NStepWindows {
  using Acc = typename Types<T>::Acc;
  static constexpr int kEach = window_elements(sizeof(Acc)), kTile = kEach * kNStepWindowThreads;
  // What comes of what is behind: total + gate * that, or total.
  struct alignas(2 * sizeof(Acc)) Map {
    Acc total, gate;
    __device__ __forceinline__ Acc of(Acc behind) const { return gate == Acc(0) ? total : fold(total, gate, behind); }
    __device__ __forceinline__ Map of(const Map& behind) const {
      const bool closed = gate == Acc(0) || behind.gate == Acc(0);
      if constexpr (std::is_same_v<Acc, double>) return {of(behind.total), closed ? 0 : power_mul(gate, behind.gate)};
      else return {of(behind.total), closed ? 0 : gate * behind.gate};
    }
  };

  const NStepWindowsParams<Acc>& params;
  Map* const maps;  // of the tile's elements
  Acc* const ends;  // of windows that end with an element; later results
  Acc reward[kEach];
  Map own[kEach], window[kEach];
  NStepRates<Acc> rates;
  bool has_one_rate = true;  // else rows of the tile have their own
  // Bits: an element's step terminates, is truncated, is its row's last one.
  uint32_t terminal = 0, truncation = 0, last = 0;

  __device__ __forceinline__ NStepWindows(const NStepWindowsParams<Acc>& of, unsigned char* shared)
      : params(of),
        maps(reinterpret_cast<Map*>(shared)),
        ends(reinterpret_cast<Acc*>(shared + kTile * sizeof(Map))),
        rates(of.rates) {
    if (sizeof(Acc) < 8 || !params.has_row_rates) return;
    const uint32_t first = blockIdx.x * params.outputs;
    const Place begin = place(first), end = place(min(first + kTile, params.count) - 1);
    has_one_rate = begin.outer == end.outer && begin.cell == end.cell;
    if (has_one_rate) rates = rates_of_row(params, begin);
  }

  __device__ __forceinline__ void run() {
    if (params.is_packed) load<true>();
    else load<false>();
    __syncthreads();
    compose();
    if constexpr (kGradients) share_results();
    if (params.is_packed) write<true>();
    else write<false>();
  }

 private:
  static __device__ __forceinline__ int element(int i) {
    return static_cast<int>(threadIdx.x) + i * kNStepWindowThreads;
  }
  __device__ __forceinline__ uint32_t index(int i) const { return blockIdx.x * params.outputs + element(i); }

  // Where an element is.
  struct Place {
    int t;
    uint32_t outer, cell;
  };
  __device__ __forceinline__ Place place(uint32_t index) const {
    const uint32_t by_memory = params.is_turned ? params.count - 1 - index : index,
                   row = params.by_length.of(by_memory);
    const int time = static_cast<int>(by_memory - row * params.by_length.divisor);
    const uint32_t outer = params.by_inner.divisor > 1 ? params.by_inner.of(row) : row;
    return {params.is_turned ? params.length - 1 - time : time, outer, row - outer * params.by_inner.divisor};
  }
  template <typename Byte>
  static __device__ __forceinline__ Byte* of_row(const NStepTensor<Byte>& tensor, const Place& of) {
    return tensor.data + of.outer * tensor.outer + static_cast<int64_t>(static_cast<int>(of.cell)) * tensor.cell;
  }
  // Where a tensor has an element's step, or one `ahead` of it.
  template <bool kPacked, typename Byte>
  __device__ __forceinline__ Byte* at(const NStepTensor<Byte>& tensor, int i, const Place& of, int ahead = 0) const {
    if constexpr (kPacked) return tensor.data + static_cast<int64_t>(static_cast<int>(index(i)) + ahead) * tensor.time;
    else return of_row(tensor, of) + static_cast<int64_t>(of.t + ahead) * tensor.time;
  }
  __device__ __forceinline__ NStepRates<Acc> rates_at(int i) const {
    if (sizeof(Acc) < 8 || has_one_rate) return rates;
    return rates_of_row(params, place(index(i)));
  }
  // Not inlined: a copy of it for each element, which most calls do not need.
  static __device__ __noinline__ NStepRates<Acc> rates_of_row(const NStepWindowsParams<Acc>& params, Place of) {
    const auto row = [&](const ReturnsDiscount& rate) { return rate.tensor.strides.at(of.outer, of.cell); };
    const Rates<double> rates = rates_of<double>(params.gamma, params.trace, row(params.gamma), row(params.trace));
    return {static_cast<Acc>(rates.gamma), static_cast<Acc>(rates.rest), static_cast<Acc>(rates.carried)};
  }

  template <bool kPacked>
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int begin = 0; begin < kEach; begin += kNStepWindowBatch) {
      T next[kNStepWindowBatch];
      load_batch<kPacked>(begin, next);
      map_batch(begin, next);
    }
  }
  template <bool kPacked>
  __device__ __forceinline__ void load_batch(int begin, T (&next)[kNStepWindowBatch]) {
    constexpr int kLater = kGradients ? 1 : 0;
    T rewards[kNStepWindowBatch];
    uint8_t flags[2][kNStepWindowBatch];
#pragma unroll
    for (int j = 0; j < kNStepWindowBatch; ++j) {
      const int i = begin + j;
      rewards[j] = next[j] = cast<T>(Acc(0));
      flags[0][j] = flags[1][j] = 0;
      if (index(i) >= params.count) continue;
      const Place here = place(index(i));
      const bool is_last = here.t + 1 == params.length;
      rewards[j] = *reinterpret_cast<const T*>(at<kPacked>(params.rewards, i, here));
      if constexpr (!kGradients) {
        if (!params.has_next_values && is_last) {
          if (params.bootstrap.data) next[j] = *reinterpret_cast<const T*>(of_row(params.bootstrap, here));
        } else if (params.values.data) {
          next[j] = *reinterpret_cast<const T*>(at<kPacked>(params.values, i, here, params.has_next_values ? 0 : 1));
        }
      }
      last |= (is_last ? 1u : 0u) << i;
      if (kGradients && is_last) continue;
      if (params.terminated.data) flags[0][j] = *at<kPacked>(params.terminated, i, here, kLater);
      if (params.truncated.data) flags[1][j] = *at<kPacked>(params.truncated, i, here, kLater);
    }
#pragma unroll
    for (int j = 0; j < kNStepWindowBatch; ++j) {
      reward[begin + j] = cast<Acc>(rewards[j]);
      terminal |= (flags[0][j] ? 1u : 0u) << (begin + j);
      truncation |= (flags[1][j] ? 1u : 0u) << (begin + j);
    }
  }
  __device__ __forceinline__ void map_batch(int begin, const T (&next)[kNStepWindowBatch]) {
    const uint32_t cut = kGradients ? terminal | last : terminal | truncation | last,
                   lacks = params.has_next_values ? terminal : terminal | truncation;
#pragma unroll
    for (int j = 0; j < kNStepWindowBatch; ++j) {
      const int i = begin + j;
      // What is behind all elements is nothing.
      NStep<Acc> step{reward[i], reward[i], 0};
      if (index(i) < params.count) {
        const NStepRates<Acc> own_rates = rates_at(i);
        if constexpr (kGradients) step.gate = cut >> i & 1 ? Acc(0) : own_rates.gate;
        else step = own_rates.step(reward[i], cast<Acc>(next[j]), lacks >> i & 1, cut >> i & 1);
      }
      own[i] = {step.mixed, step.gate};
      maps[element(i)] = own[i];
      ends[element(i)] = step.own;
    }
  }

  // Of elements behind the tile, which no output is made of, anything is read. Leaves results in the windows' totals.
  __device__ __forceinline__ void compose() {
    const int joined = params.n - 1;
    int reach = 0;  // steps of `window`
#pragma unroll 1
    for (int span = 1; span <= joined; span *= 2) {
      if (span > 1) {
        const Map* const behind = maps + (threadIdx.x + span / 2);
#pragma unroll
        for (int i = 0; i < kEach; ++i) own[i] = own[i].of(behind[i * kNStepWindowThreads]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kEach; ++i) maps[element(i)] = own[i];
        __syncthreads();
      }
      if (!(joined & span)) continue;
      const Map* const behind = maps + (threadIdx.x + reach);
#pragma unroll
      for (int i = 0; i < kEach; ++i) window[i] = reach ? window[i].of(behind[i * kNStepWindowThreads]) : own[i];
      reach += span;
    }
    const Acc* const end = ends + (threadIdx.x + joined);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Acc last_step = end[i * kNStepWindowThreads];
      window[i].total = joined ? window[i].of(last_step) : last_step;
    }
  }

  __device__ __forceinline__ void share_results() {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) ends[element(i)] = window[i].total;
    __syncthreads();
  }
  template <bool kPacked>
  __device__ __forceinline__ void write() const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (element(i) >= static_cast<int>(params.outputs) || index(i) >= params.count) continue;
      Place here{};
      if constexpr (kGradients || !kPacked) here = place(index(i));
      if constexpr (kGradients) write_gradients<kPacked>(i, here);
      else put<kPacked>(params.targets, i, here, 0, window[i].total);
    }
  }
  template <bool kPacked>
  __device__ __forceinline__ void put(
      const NStepTensor<char>& tensor, int i, const Place& of, int ahead, Acc result) const {
    if (!kGradients || tensor.data) *reinterpret_cast<T*>(at<kPacked>(tensor, i, of, ahead)) = cast<T>(result);
  }
  // All gradients of an element's step.
  template <bool kPacked>
  __device__ __forceinline__ void write_gradients(int i, const Place& here) const {
    const Acc gamma = rates_at(i).gamma, y = window[i].total, before = ends[element(i) + 1];
    const bool has_before = !(last >> i & 1);
    const auto gradients =
        gradients_of_step(params, reward[i], y, before, gamma, has_before, terminal >> i & 1, truncation >> i & 1);
    if (has_before) put<kPacked>(params.pg_advantages, i, here, 1, gradients.of_next);
    put<kPacked>(params.advantages, i, here, 0, y);
    put<kPacked>(params.targets, i, here, 0, gradients.of_value);
    if (here.t == 0) write_behind<kPacked>(i, here, gamma, y);
  }
  // The gradients behind a row, whose last step in time has the result y.
  template <bool kPacked>
  __device__ __forceinline__ void write_behind(int i, const Place& of, Acc gamma, Acc y) const {
    const auto is_set = [&](const NStepTensor<const char>& tensor) {
      return tensor.data && *at<kPacked>(tensor, i, of);
    };
    const bool lacks = is_set(params.truncated) || (params.ends_lack && is_set(params.terminated));
    const Acc behind = lacks ? Acc(0) : gamma * y;
    put<kPacked>(params.pg_advantages, i, of, 0, behind);
    if (params.bootstrap_gradient.data) *reinterpret_cast<T*>(of_row(params.bootstrap_gradient, of)) = cast<T>(behind);
  }
};

// Of shared memory, of a block.
template <typename T>
constexpr int n_step_windows_bytes() {
  using Windows = NStepWindows<T, false>;
  constexpr int kTile = Windows::kTile;
  // A window more than the tile.
  return kTile * static_cast<int>(sizeof(typename Windows::Map)) +
      (kTile + static_cast<int>(kFloatSteps)) * static_cast<int>(sizeof(typename Windows::Acc));
}

template <typename T, bool kGradients>
__global__ void __launch_bounds__(kNStepWindowThreads, 4)
    n_step_windows_kernel(const __grid_constant__ NStepWindowsParams<typename Types<T>::Acc> params) {
  extern __shared__ __align__(16) unsigned char n_step_shared[];
  overlap_launches();
  NStepWindows<T, kGradients>(params, n_step_shared).run();
}

}  // namespace dcs
