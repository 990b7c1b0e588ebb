// Returns over n steps of any n, shape, alignment and options. Time is cut into blocks of n steps: a
// window is the end of one and the beginning of the next, two affine maps of what comes behind them, so that each costs
// a step more and nothing is subtracted. A thread takes some blocks of a column: it goes forward through the beginnings
// of the block behind, which it leaves in shared memory, then back through the ends of its own.
#pragma once

#include <algorithm>

#include "common/ptx/dependent_launch.cuh"
#include "returns/n_step.cuh"
#include "returns/n_step_gradients.cuh"
#include "returns/serial_columns/params.cuh"

namespace dcs {

// A block of threads takes `width` columns, in as many segments of time as there is room for; where time is contiguous,
// neighboring threads take neighboring shares of a row.
template <typename Acc, typename Number>
struct NStepBlocksParams {
  ReturnsColumnParams<Acc> call;
  NStepRates<Number> rates;  // where both discounts are numbers
  int n, share;              // steps of a block, and of a thread: some blocks
  bool rows;
  uint32_t width, segments;  // segments of a group of columns, in blocks of threads; of a row, in threads
  Divisor by_width, by_segments;

  int64_t blocks() const {
    return rows ? ceil_div(int64_t{call.cells} * segments, kNStepThreads) : ceil_div(call.cells, width) * segments;
  }
  int64_t shared_bytes() const { return int64_t{n} * kNStepThreads * static_cast<int64_t>(sizeof(Number)); }
};

template <typename T, typename Number>
NStepBlocksParams<typename Types<T>::Acc, Number> n_step_blocks_params(
    const ReturnsProblem& problem, const NStepRates<Number>& rates) {
  ReturnsProblem p = problem;
  p.values_are_next = true;
  NStepBlocksParams<typename Types<T>::Acc, Number> params{returns_column_params<T>(p, 1), rates};
  params.n = static_cast<int>(p.steps);
  params.share = static_cast<int>(share_of(p.steps));
  params.rows = p.length > 1 && std::abs(p.rewards.strides.time) == 1;
  params.width = std::min<uint32_t>(params.call.cells, kNStepThreads);
  params.segments = static_cast<uint32_t>(
      ceil_div(p.length, int64_t{params.share} * (params.rows ? 1 : kNStepThreads / params.width)));
  params.by_width = Divisor(params.width);
  params.by_segments = Divisor(params.segments);
  return params;
}

// kGradients: a step is cut, and discounted, as the next one is, and has no values (dcs/returns/gradients_plan.h); time
// runs the other way.
template <typename T, typename Number, bool kPlain, bool kGradients>
struct NStepBlocks {
  using Acc = typename Types<T>::Acc;
  static constexpr int kBatch = sizeof(Number) > 4 ? 4 : 8;

  const NStepBlocksParams<Acc, Number>& params;
  const ReturnsColumnParams<Acc>& call;
  Number* const beginnings;  // of the block behind: what comes of its first 1, 2 ... steps, from 1 on
  const char *rewards, *values, *gammas, *traces, *terminated, *truncated;
  uint32_t outer, cell;
  NStepRates<Number> rates;
  double row_gamma = 1.0, row_trace = 1.0;
  Number bootstrap = 0;
  Number before = 0;  // of gradients: the result of the next step, which is the one before in time

  // A batch.
  Number reward[kBatch], next[kBatch];
  double gamma[kPlain ? 1 : kBatch], trace[kPlain ? 1 : kBatch];
  uint32_t terminates, truncates;  // bits

  __device__ __forceinline__ NStepBlocks(
      const NStepBlocksParams<Acc, Number>& given, uint32_t outer, uint32_t cell, Number* beginnings)
      : params(given), call(given.call), beginnings(beginnings), outer(outer), cell(cell), rates(given.rates) {
    rewards = last_of_cell(call.rewards, outer, cell);
    values = last_of_cell(call.values, outer, cell);
    terminated = last_of_cell(call.terminated, outer, cell);
    truncated = last_of_cell(call.truncated, outer, cell);
    if constexpr (!kPlain)
      gammas = last_of_cell(call.gamma, outer, cell), traces = last_of_cell(call.trace, outer, cell);
    if (call.bootstrap.last)
      bootstrap = cast<Acc>(*reinterpret_cast<const T*>(last_of_cell(call.bootstrap, outer, cell)));
    if (!kPlain || call.row_rates) {
      const auto at = [&](const Strides& strides) { return strides.at(outer, cell); };
      const Rates<double> row = rates_of<double>(
          call.row_gamma, call.row_trace, at(call.row_gamma.tensor.strides), at(call.row_trace.tensor.strides));
      row_gamma = row.gamma, row_trace = row.trace;
      rates = {static_cast<Number>(row.gamma), static_cast<Number>(row.rest), static_cast<Number>(row.carried)};
    }
  }

  // Steps from `first` on, of which there are some.
  __device__ __forceinline__ void run(int first) {
    int block = first + params.share;
#pragma unroll 1
    do {
      if (block < call.length) go_forward(block, kGradients && block == first + params.share);
      block -= params.n;
      if (block < call.length) go_back(block);
    } while (block > first);
  }

 private:
  // Where a tensor has step t.
  template <typename Byte>
  __device__ __forceinline__ Byte* address(const ColumnTensor<Byte>& tensor, Byte* last, int t) const {
    return last + static_cast<int64_t>(call.length - 1 - t) * tensor.back;
  }
  // visit(i, element) of step t + i for the first `count` steps of a batch.
  template <typename Element, typename Visit>
  __device__ __forceinline__ void each(
      const ColumnTensor<const char>& tensor, const char* last, int t, int count, const Visit& visit) const {
    if (!tensor.last) return;
    const char* at = address(tensor, last, t);
#pragma unroll
    for (int i = 0; i < kBatch; ++i, at -= tensor.back)
      if (i < count) visit(i, *reinterpret_cast<const Element*>(at));
  }
  __device__ __forceinline__ uint32_t read_flags(
      const ColumnTensor<const char>& tensor, const char* last, bool is_bool, int t, int count) const {
    uint32_t bits = 0;
    if (kPlain || is_bool)
      each<uint8_t>(tensor, last, t, count, [&](int i, uint8_t flag) { bits |= (flag ? 1u : 0u) << i; });
    else each<T>(tensor, last, t, count, [&](int i, T flag) { bits |= (cast<Acc>(flag) != Acc(0) ? 1u : 0u) << i; });
    return bits;
  }
  __device__ __forceinline__ void load(int t, int count) {
    const int shift = call.has_next_values ? 0 : 1, left = call.length - shift - t;
    constexpr int kLater = kGradients ? 1 : 0;
    const int own = kGradients ? min(count, call.length - kLater - t) : count;
    T reward_read[kBatch], next_read[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) next_read[i] = cast<T>(Acc(0));
    each<T>(call.rewards, rewards, t, count, [&](int i, T element) { reward_read[i] = element; });
    each<T>(call.values, values, t + shift, min(count, left), [&](int i, T element) { next_read[i] = element; });
    if constexpr (!kPlain) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) gamma[i] = trace[i] = 1.0;
      each<Acc>(call.gamma, gammas, t + kLater, own, [&](int i, Acc element) { gamma[i] = element; });
      each<Acc>(call.trace, traces, t + kLater, own, [&](int i, Acc element) { trace[i] = element; });
    }
    terminates = read_flags(call.terminated, terminated, call.terminated_is_bool, t + kLater, own);
    truncates = read_flags(call.truncated, truncated, call.truncated_is_bool, t + kLater, own);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      reward[i] = cast<Acc>(reward_read[i]);
      next[i] = shift && i >= left ? bootstrap : static_cast<Number>(cast<Acc>(next_read[i]));
    }
  }
  // Step t + i of the batch from t on.
  __device__ __forceinline__ NStep<Number> step(int t, int i) const {
    const bool terminal = terminates >> i & 1, truncation = truncates >> i & 1;
    NStepRates<Number> own = rates;
    if constexpr (!kPlain) {
      if (call.gamma.last || call.trace.last) {
        // A discount is a step's or a row's, and 1 as the other.
        const double rate = gamma[i] * row_gamma, gate = rate * (trace[i] * row_trace);
        own = {static_cast<Number>(rate), static_cast<Number>(rate - gate), static_cast<Number>(gate)};
      }
    }
    if constexpr (kGradients) {
      // What there is no value to be multiplied with counts for nothing, where it is not finite, too.
      const bool closed = terminal || t + i == call.length - 1 || own.gate == Number(0);
      return {reward[i], reward[i], closed ? Number(0) : own.gate};
    }
    return own.step(reward[i], next[i], terminal || (truncation && !call.has_next_values),
        terminal || truncation || t + i == call.length - 1);
  }
  static __device__ __forceinline__ Number product(Number a, Number b) {
    if constexpr (std::is_same_v<Number, double>) return clamped_mul(a, b);
    else return a * b;
  }

  // Through a block's beginnings; to the end of its first window where that is `before`.
  __device__ __forceinline__ void go_forward(int block, bool is_before) {
    const int count = params.n - (is_before ? 0 : 1), there = min(count, call.length - block);
    Number total = 0, gate = 1;  // of the steps so far
#pragma unroll 1
    for (int k = 0; k < there; k += kBatch) {
      load(block + k, there - k);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (k + i >= there) break;
        const NStep<Number> s = step(block + k, i);
        const bool closed = gate == Number(0);
        set_beginning(k + i + 1, closed ? total : fold(total, gate, s.own));
        if (!closed) total = fold(total, gate, s.mixed), gate = product(gate, s.gate);
      }
    }
    // Behind the row's last step nothing is added.
    for (int k = there; k < count; ++k) set_beginning(k + 1, total);
  }
  __device__ __forceinline__ void set_beginning(int steps, Number total) {
    if (kGradients && steps == params.n) before = total;
    else beginnings[steps * kNStepThreads] = total;
  }

  // Where results of a batch go.
  struct Outputs {
    char *advantages = nullptr, *targets, *pg_advantages = nullptr;
    __device__ __forceinline__ Outputs(const NStepBlocks& of, int t) : targets(of.result_at(of.call.targets, t)) {
      if constexpr (kGradients)
        advantages = of.result_at(of.call.advantages, t), pg_advantages = of.result_at(of.call.pg_advantages, t);
    }
    // That of step i, if there is such a tensor.
    static __device__ __forceinline__ void write(const ColumnTensor<char>& tensor, char* to, int i, Number result) {
      if (!kGradients || tensor.last)
        *reinterpret_cast<T*>(to - static_cast<int64_t>(i) * tensor.back) = cast<T>(static_cast<Acc>(result));
    }
  };
  __device__ __forceinline__ char* result_at(const ColumnTensor<char>& tensor, int t) const {
    return address(tensor, last_of_cell(tensor, outer, cell), t);
  }
  // All gradients of step t + i, of which the scan's result is y.
  __device__ __forceinline__ void write_gradients(const Outputs& to, int t, int i, Number y) {
    const bool has_before = t + i + 1 < call.length;
    const Number own_gamma = kPlain ? rates.gamma : static_cast<Number>(gamma[kPlain ? 0 : i] * row_gamma);
    const auto gradients =
        gradients_of_step(call, reward[i], y, before, own_gamma, has_before, terminates >> i & 1, truncates >> i & 1);
    if (has_before) to.write(call.pg_advantages, to.pg_advantages, i + 1, gradients.of_next);
    to.write(call.advantages, to.advantages, i, y);
    to.write(call.targets, to.targets, i, gradients.of_value);
    before = y;
    if (t + i == 0) write_behind(y);
  }
  // The gradients behind a row, whose last step in time has the result y.
  __device__ __forceinline__ void write_behind(Number y) const {
    const auto is_set = [&](const ColumnTensor<const char>& tensor, const char* last) {
      return tensor.last && *reinterpret_cast<const uint8_t*>(address(tensor, last, 0));
    };
    const bool lacks = is_set(call.truncated, truncated) || (call.ends_lack && is_set(call.terminated, terminated));
    Number own_gamma = rates.gamma;
    if constexpr (!kPlain) {
      double of_step = 1.0;
      if (call.gamma.last) of_step = *reinterpret_cast<const Acc*>(address(call.gamma, gammas, 0));
      own_gamma = of_step * row_gamma;
    }
    const Number behind = lacks ? Number(0) : own_gamma * y;
    if (call.pg_advantages.last)
      *reinterpret_cast<T*>(result_at(call.pg_advantages, 0)) = cast<T>(static_cast<Acc>(behind));
    if (call.bootstrap_gradient.last)
      *reinterpret_cast<T*>(last_of_cell(call.bootstrap_gradient, outer, cell)) = cast<T>(static_cast<Acc>(behind));
  }

  // Back through its ends, each of which goes on with a beginning of the block behind.
  __device__ __forceinline__ void go_back(int block) {
    const int there = min(params.n, call.length - block), batches = (there + kBatch - 1) / kBatch;
    Number total = 0, gate = 1, whole = 0;  // of the steps so far; and if the first of them is the window's last
    bool starts = true;
#pragma unroll 1
    for (int k = (batches - 1) * kBatch; k >= 0; k -= kBatch) {
      load(block + k, there - k);
      const Outputs to(*this, block + k);
#pragma unroll
      for (int i = kBatch - 1; i >= 0; --i) {
        if (k + i >= there) continue;
        const NStep<Number> s = step(block + k, i);
        whole = starts ? s.own : s.before(whole);
        total = s.before(total);
        gate = s.gate == Number(0) ? Number(0) : product(s.gate, gate);
        starts = false;
        Number y = whole;
        if (k + i > 0) y = gate == Number(0) ? total : fold(total, gate, beginnings[(k + i) * kNStepThreads]);
        if constexpr (kGradients) write_gradients(to, block + k, i, y);
        else to.write(call.targets, to.targets, i, y);
      }
    }
  }
};

template <typename T, typename Number, bool kPlain, bool kGradients>
__global__ void __launch_bounds__(kNStepThreads, 5)
    n_step_blocks_kernel(const __grid_constant__ NStepBlocksParams<typename Types<T>::Acc, Number> params) {
  extern __shared__ __align__(16) unsigned char n_step_shared[];
  overlap_launches();
  const ReturnsColumnParams<typename Types<T>::Acc>& call = params.call;
  const uint32_t of_segment = params.by_width.of(kNStepThreads);
  uint32_t column, share;
  bool is_there = true;
  if (params.rows) {
    const uint32_t index = blockIdx.x * kNStepThreads + threadIdx.x;
    column = params.by_segments.of(index);
    share = index - column * params.segments;
  } else {
    const uint32_t group = params.by_segments.of(blockIdx.x), of_block = params.by_width.of(threadIdx.x);
    column = group * params.width + threadIdx.x - of_block * params.width;
    share = (blockIdx.x - group * params.segments) * of_segment + of_block;
    is_there = of_block < of_segment;
  }
  const int64_t first = static_cast<int64_t>(share) * params.share;
  if (!is_there || column >= call.cells || first >= call.length) return;
  const uint32_t outer = call.cells == call.in_line.divisor ? 0 : call.in_line.of(column);
  NStepBlocks<T, Number, kPlain, kGradients>(
      params, outer, column - outer * call.in_line.divisor, reinterpret_cast<Number*>(n_step_shared) + threadIdx.x)
      .run(static_cast<int>(first));
}

}  // namespace dcs
