// Returns over n steps (`_n_step_returns`), one pass. Every result is a recurrence of its own, from the last step of
// its window back: what it reads again of its neighbors' steps comes from registers or from caches. Up to kMostSteps of
// them are known to the compiler, for calls whose discounts are numbers or one a row and whose flags are bool; the
// kernel for all cases shares what several windows have in common. Most others are shared windows: of tiles
// (n_step_windows.cuh) or of blocks of n steps (n_step_blocks.cuh).
#pragma once

#include "common/divisor.cuh"
#include "common/vector.cuh"
#include "dcs/returns/n_step_plan.h"
#include "returns/step.cuh"

namespace dcs {

// A step: its own return, where a window or an episode ends with it; else what it adds to gate * (the next step's). A
// gate of 0 reads nothing of that.
template <typename Acc>
struct NStep {
  Acc own, mixed, gate;
  __device__ __forceinline__ Acc before(Acc after) const { return gate == Acc(0) ? mixed : fold(mixed, gate, after); }
};

// The discounts of a row, in the type of the arithmetic.
template <typename Acc>
struct NStepRates {
  Acc gamma, rest, gate;

  __device__ __forceinline__ NStep<Acc> step(Acc reward, Acc next, bool lacks_next, bool ends) const {
    const Acc own = lacks_next || gamma == Acc(0) ? reward : fold(reward, gamma, next);
    const bool closed = ends || gate == Acc(0);
    return {own, closed ? own : rest == Acc(0) ? reward : fold(reward, rest, next), closed ? Acc(0) : gate};
  }
};

// Of a call where both are numbers.
template <typename Acc>
NStepRates<Acc> n_step_rates(const ReturnsProblem& p) {
  const double gamma = p.gamma.value, gate = gamma * p.trace.value;
  return {static_cast<Acc>(gamma), static_cast<Acc>(gamma - gate), static_cast<Acc>(gate)};
}

template <typename Acc>
struct NStepCall {
  ReturnsProblem problem;
  NStepRates<Acc> rates;  // where both discounts are numbers
  int64_t chunk;          // steps of a thread, of columns
};

template <typename Acc>
__device__ __forceinline__ NStepRates<Acc> n_step_rates(const NStepCall<Acc>& call, int64_t outer, int64_t inner) {
  const ReturnsProblem& p = call.problem;
  if (p.gamma.kind == GammaKind::kNumber && p.trace.kind == GammaKind::kNumber) return call.rates;
  const auto at = [&](const ReturnsDiscount& rate) { return rate.tensor.strides.at(outer, inner); };
  const Rates<double> rates = rates_of<double>(p.gamma, p.trace, at(p.gamma), at(p.trace));
  return {static_cast<Acc>(rates.gamma), static_cast<Acc>(rates.rest), static_cast<Acc>(rates.carried)};
}

constexpr int kMostSteps = 8, kNStepBatch = 8, kNStepColumns = 2;

// A thread's part of contiguous time: kVec results and the steps of their windows. kAligned: rows are whole vectors;
// else they are read by the element, and windows are of kN steps at most.
template <typename T, int kN, bool kNext, int kVec, bool kAligned>
struct NStepRowPart {
  using Acc = typename Types<T>::Acc;
  static constexpr int kSteps = kVec + kN - 1, kVectors = (kSteps + kVec - 1) / kVec, kRead = kVectors * kVec;
  using Word = Vector<T, kVec>;
  using Bytes = Vector<uint8_t, kVec>;

  const NStepCall<Acc>& call;
  const ReturnsProblem& p;
  const int n, steps_read;
  const int64_t first, outer, inner;
  const int left;  // up to the row's end, or more

  __device__ __forceinline__ NStepRowPart(const NStepCall<Acc>& of_call, int64_t row, int64_t of_first)
      : call(of_call),
        p(of_call.problem),
        n(kAligned ? kN : static_cast<int>(p.steps)),
        steps_read(kVec + n - 1),
        first(of_first),
        outer(p.inner == 1 ? row : divided(row, p.inner)),
        inner(p.inner == 1 ? 0 : row - outer * p.inner),
        left(static_cast<int>(min(p.length - first, int64_t{kRead + 1}))) {}

  __device__ __forceinline__ int64_t at(const Strides& strides) const { return strides.at(outer, inner) + first; }

  __device__ __forceinline__ void load(
      const void* data, const Strides& strides, int steps, Word (&to)[kVectors]) const {
    const T* from = static_cast<const T*>(data) + at(strides);
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      to[m] = Word{};
      if constexpr (kAligned) {
        if (m == 0 || m * kVec < left) to[m] = *reinterpret_cast<const Word*>(from + m * kVec);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          if (m * kVec + i < steps && m * kVec + i < left) to[m].set(i, from[m * kVec + i]);
      }
    }
  }
  // The values after the steps, or those before them and the one after the last: `beyond`.
  __device__ __forceinline__ void load_values(Word (&to)[kVectors], T& beyond) const {
    if constexpr (kNext) {
      load(p.next_values.data, p.next_values.strides, steps_read, to);
    } else {
      load(p.values.data, p.values.strides, steps_read + 1, to);
      if (kSteps == kRead && kRead < left)
        beyond = (static_cast<const T*>(p.values.data) + at(p.values.strides))[kRead];
    }
  }
  // Bit i: step i.
  __device__ __forceinline__ uint32_t load_flags(const ReturnsInput& flags) const {
    uint32_t bits = 0;
    if (!flags.data) return bits;
    const uint8_t* from = static_cast<const uint8_t*>(flags.data) + at(flags.strides);
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      if constexpr (kAligned) {
        if (m > 0 && m * kVec >= left) continue;
        uint32_t words[kVec / 4];
        *reinterpret_cast<Bytes*>(words) = *reinterpret_cast<const Bytes*>(from + m * kVec);
#pragma unroll
        for (int w = 0; w < kVec / 4; ++w) bits |= flag_bits(words[w]) << (m * kVec + 4 * w);
      } else {
#pragma unroll
        for (int i = m * kVec; i < m * kVec + kVec; ++i)
          if (i < steps_read && i < left) bits |= (from[i] ? 1u : 0u) << i;
      }
    }
    return bits;
  }

  // Puts the bootstrap value where the row ends among the values.
  __device__ __forceinline__ void end_with_bootstrap(Acc (&values)[kRead + 1]) const {
    Acc bootstrap = 0;
    if (left <= kRead && p.bootstrap_value.data)
      bootstrap = cast<Acc>(static_cast<const T*>(p.bootstrap_value.data)[p.bootstrap_value.strides.at(outer, inner)]);
#pragma unroll
    for (int i = 1; i <= kRead; ++i)
      if ((i % kVec == 0 || !kAligned) && i == left) values[i] = bootstrap;
  }

  // Every result is composed from the last step of its window back.
  __device__ __forceinline__ void compose(const NStep<Acc> (&steps)[kSteps], Acc (&targets)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      Acc y = steps[i + kN - 1].own;
#pragma unroll
      for (int k = kN - 2; k >= 0; --k) y = !kAligned && k == n - 1 ? steps[i + k].own : steps[i + k].before(y);
      targets[i] = y;
    }
  }

  __device__ __forceinline__ void store(const Acc (&targets)[kVec]) const {
    T* const to = static_cast<T*>(p.targets.data) + at(p.targets.strides);
    if constexpr (kAligned) {
      *reinterpret_cast<Word*>(to) = pack<Acc, T, kVec>(targets);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (i < left) to[i] = cast<T>(targets[i]);
    }
  }
};

template <typename T, int kN, bool kNext, int kVec, bool kAligned>
__global__ void __launch_bounds__(kNStepThreads, 6)
    n_step_rows_kernel(const __grid_constant__ NStepCall<typename Types<T>::Acc> call) {
  using Acc = typename Types<T>::Acc;
  using Part = NStepRowPart<T, kN, kNext, kVec, kAligned>;
  constexpr int kSteps = Part::kSteps, kVectors = Part::kVectors, kRead = Part::kRead;
  const ReturnsProblem& p = call.problem;
  const int64_t vectors = (p.length + kVec - 1) / kVec,
                index = static_cast<int64_t>(blockIdx.x) * kNStepThreads + threadIdx.x;
  const int64_t row = divided(index, vectors);
  if (row >= p.outer * p.inner) return;
  const Part part(call, row, (index - row * vectors) * kVec);

  typename Part::Word rewards[kVectors], values[kVectors];
  part.load(p.rewards.data, p.rewards.strides, part.steps_read, rewards);
  T beyond = cast<T>(Acc(0));
  part.load_values(values, beyond);
  const uint32_t terminated = part.load_flags(p.terminated), truncated = part.load_flags(p.truncated),
                 lacks_next = kNext ? terminated : terminated | truncated;
  uint32_t ended = terminated | truncated;
  const NStepRates<Acc> rates = n_step_rates(call, part.outer, part.inner);
  if (part.left <= kRead) ended |= 1u << (part.left - 1);

  Acc reward[kRead], next[kRead + 1];
#pragma unroll
  for (int m = 0; m < kVectors; ++m) {
    Acc some[kVec], others[kVec];
    unpack(rewards[m], some);
    unpack(values[m], others);
#pragma unroll
    for (int i = 0; i < kVec; ++i) reward[m * kVec + i] = some[i], next[m * kVec + i] = others[i];
  }
  next[kRead] = cast<Acc>(beyond);
  if constexpr (!kNext) part.end_with_bootstrap(next);

  NStep<Acc> steps[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    steps[i] = rates.step(reward[i], next[kNext ? i : i + 1], lacks_next >> i & 1, ended >> i & 1);
  Acc targets[kVec];
  part.compose(steps, targets);
  part.store(targets);
}

template <typename Whole, size_t kCount>
__device__ __forceinline__ void load_nothing(Whole (&to)[kCount]) {
#pragma unroll
  for (Whole& each : to) each = Whole{};
}

// Contiguous columns: a thread takes kColumns of them and call.chunk steps, last to first, with the kN results that a
// step is part of. kExact: windows are of kN steps; else of kN at most.
template <typename T, int kN, bool kNext, int kColumns = kNStepColumns, bool kExact = true>
__global__ void __launch_bounds__(kNStepThreads, 4)
    n_step_columns_kernel(const __grid_constant__ NStepCall<typename Types<T>::Acc> call) {
  using Acc = typename Types<T>::Acc;
  constexpr int kBatch = kNStepBatch;
  using Word = Vector<T, kColumns>;
  using Bytes = Vector<uint8_t, kColumns>;
  const ReturnsProblem& p = call.problem;
  const int64_t words = p.outer * p.inner / kColumns,
                index = static_cast<int64_t>(blockIdx.x) * kNStepThreads + threadIdx.x;
  const int64_t segment = divided(index, words), word = index - segment * words;
  if (segment * call.chunk >= p.length) return;
  const int64_t outer = p.outer == 1 ? 0 : word * kColumns / p.inner, inner = word * kColumns - outer * p.inner;
  const int64_t begin = segment * call.chunk, end = min(begin + call.chunk, p.length);
  const auto at = [&](const Strides& strides) { return strides.at(outer, inner); };
  const T* const rewards = static_cast<const T*>(p.rewards.data) + at(p.rewards.strides);
  const T* const values = static_cast<const T*>(kNext ? p.next_values.data : p.values.data) +
      at(kNext ? p.next_values.strides : p.values.strides);
  const int64_t value_time = kNext ? p.next_values.strides.time : p.values.strides.time;
  const uint8_t* const terminated = static_cast<const uint8_t*>(p.terminated.data) + at(p.terminated.strides);
  const uint8_t* const truncated = static_cast<const uint8_t*>(p.truncated.data) + at(p.truncated.strides);
  T* const targets = static_cast<T*>(p.targets.data) + at(p.targets.strides);
  NStepRates<Acc> rates[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) rates[c] = n_step_rates(call, outer, inner + c);

  Acc after[kColumns] = {},
      y[kColumns][kN];  // the value of the next state; of the results that end with the last step, the one before ...
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
#pragma unroll
    for (int j = 0; j < kN; ++j) y[c][j] = 0;
  // Steps first, first - 1 .. of `count`, those from `low` on; `stores`: their results.
  const auto step_back = [&](auto count, int64_t first, int64_t low, bool stores) {
    constexpr int kCount = decltype(count)::value;
    Word reward_words[kCount], value_words[kCount];
    Bytes terminates[kCount], truncates[kCount];
    const int given = static_cast<int>(min(first - low + 1, static_cast<int64_t>(kCount)));
    const int beyond = static_cast<int>(max(first - p.length + 1, int64_t{0}));  // steps that there are none of
    const auto load = [&](auto& to, const auto* data, int64_t stride) {
      using Whole = std::remove_reference_t<decltype(to[0])>;
      const auto* from = data + first * stride;
#pragma unroll
      for (int i = 0; i < kCount; ++i, from -= stride) {
        to[i] = Whole{};
        if (i < given && i >= beyond) to[i] = *reinterpret_cast<const Whole*>(from);
      }
    };
    load(reward_words, rewards, p.rewards.strides.time);
    load(value_words, values, value_time);
    if (p.terminated.data) load(terminates, terminated, p.terminated.strides.time);
    else load_nothing(terminates);
    if (p.truncated.data) load(truncates, truncated, p.truncated.strides.time);
    else load_nothing(truncates);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool is_last = first - i >= p.length - 1;
      Acc results[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const bool terminal = terminates[i].get(c), truncation = truncates[i].get(c);
        const Acc value = cast<Acc>(value_words[i].get(c)), next = kNext ? value : after[c];
        const NStep<Acc> step = rates[c].step(cast<Acc>(reward_words[i].get(c)), next,
            terminal || (!kNext && truncation), terminal || truncation || is_last);
#pragma unroll
        for (int j = 0; j + 1 < kN; ++j) y[c][j] = step.before(y[c][j + 1]);
        y[c][kN - 1] = step.own;
        results[c] = y[c][0];
        if constexpr (!kExact) {
          const int shorter = kN - static_cast<int>(p.steps);
#pragma unroll
          for (int j = 1; j < kN; ++j)
            if (j == shorter) results[c] = y[c][j];
        }
        if (i >= beyond) after[c] = value;
      }
      if (stores && i < given)
        *reinterpret_cast<Word*>(targets + (first - i) * p.targets.strides.time) = pack<Acc, T, kColumns>(results);
    }
  };
  if constexpr (!kNext) {
    // Of the state after the first step that is taken.
    const int64_t beyond = end + kN - 1;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (beyond < p.length) after[c] = cast<Acc>(values[beyond * value_time + c]);
      else if (p.bootstrap_value.data)
        after[c] = cast<Acc>(static_cast<const T*>(
            p.bootstrap_value.data)[at(p.bootstrap_value.strides) + c * p.bootstrap_value.strides.inner]);
    }
  }
  if constexpr (kN > 1) step_back(std::integral_constant<int, kN - 1>{}, end + kN - 2, end, false);
  for (int64_t t = end - 1; t >= begin; t -= kBatch) step_back(std::integral_constant<int, kBatch>{}, t, begin, true);
}

// Any operands and any n >= kOut: a thread takes kOut successive results. Their windows have n - kOut steps in common,
// which are composed once. For windows and sizes that n_step_blocks.cuh has no room for.
template <typename T, int kOut>
__global__ void __launch_bounds__(kNStepThreads) n_step_kernel(const __grid_constant__ NStepCall<double> call) {
  using Acc = typename Types<T>::Acc;
  const ReturnsProblem& p = call.problem;
  const int64_t segments = (p.length + kOut - 1) / kOut,
                index = static_cast<int64_t>(blockIdx.x) * kNStepThreads + threadIdx.x;
  if (index >= p.outer * p.inner * segments) return;
  // Neighboring threads lie where neighboring results do.
  const int64_t outside = p.inner == 1 ? index : divided(index, p.inner),
                inner = p.inner == 1 ? 0 : index - outside * p.inner;
  const int64_t outer = divided(outside, segments), first = (outside - outer * segments) * kOut;
  const auto at = [&](const Strides& strides, int64_t t) { return strides.at(outer, t, inner); };
  const auto load = [&](const ReturnsInput& input, int64_t t) {
    return input.data ? static_cast<double>(cast<Acc>(static_cast<const T*>(input.data)[at(input.strides, t)])) : 0.0;
  };
  const auto flag = [&](const ReturnsInput& input, bool is_bool, int64_t t) {
    if (!input.data) return false;
    return is_bool ? static_cast<const uint8_t*>(input.data)[at(input.strides, t)] != 0 : load(input, t) != 0.0;
  };
  const NStepRates<double> row_rates = n_step_rates(call, outer, inner);
  const auto rate = [&](const ReturnsDiscount& discount, int64_t t) {
    if (discount.kind == GammaKind::kNumber) return discount.value;
    if (discount.kind == GammaKind::kRow)
      return load_gamma<double>(discount.tensor.data, discount.dtype, at(discount.tensor.strides, 0), false);
    return static_cast<double>(static_cast<const Acc*>(discount.tensor.data)[at(discount.tensor.strides, t)]);
  };
  const auto step = [&](int64_t t) -> NStep<double> {
    if (t >= p.length) return {0.0, 0.0, 0.0};
    NStepRates<double> rates = row_rates;
    if (p.gamma.kind == GammaKind::kStep || p.trace.kind == GammaKind::kStep) {
      const double gamma = rate(p.gamma, t), gate = gamma * rate(p.trace, t);
      rates = {gamma, gamma - gate, gate};
    }
    const bool terminal = flag(p.terminated, p.terminated_is_bool, t),
               truncation = flag(p.truncated, p.truncated_is_bool, t);
    const bool is_last = t == p.length - 1, shifts = !p.next_values.data;
    const double next = !shifts ? load(p.next_values, t) : is_last ? load(p.bootstrap_value, 0) : load(p.values, t + 1);
    return rates.step(load(p.rewards, t), next, terminal || (shifts && truncation), terminal || truncation || is_last);
  };
  // From step first + n - 1 on: what windows have beyond their common part. `total` and `gate`: of its steps so far. In
  // loops that are not unrolled results move on from place to place: a step's code is long.
  double y[kOut] = {}, total = 0, gate = 1;
#pragma unroll 1
  for (int i = 0; i < kOut; ++i) {
    const NStep<double> s = step(first + p.steps - 1 + i);
    const bool closed = gate == 0.0;
#pragma unroll
    for (int j = 0; j + 1 < kOut; ++j) y[j] = y[j + 1];
    y[kOut - 1] = closed ? total : fold(total, gate, s.own);
    if (!closed) total = fold(total, gate, s.mixed), gate = clamped_mul(gate, s.gate);
  }
  // The common part, from its last step back.
  total = 0, gate = 1;
#pragma unroll 1
  for (int64_t t = min(first + p.steps - 2, p.length - 1); t >= first + kOut - 1; --t) {
    const NStep<double> s = step(t);
    total = s.before(total);
    gate = s.gate == 0.0 ? 0.0 : clamped_mul(s.gate, gate);
  }
#pragma unroll
  for (int i = 0; i < kOut; ++i) y[i] = gate == 0.0 ? total : fold(total, gate, y[i]);
#pragma unroll 1
  for (int k = kOut - 2; k >= 0; --k) {
    const NStep<double> s = step(first + k);
#pragma unroll
    for (int i = 0; i + 1 < kOut; ++i)
      if (i <= k) y[i] = s.before(y[i]);
  }
#pragma unroll
  for (int i = 0; i < kOut; ++i)
    if (first + i < p.length)
      static_cast<T*>(p.targets.data)[at(p.targets.strides, first + i)] = cast<T>(static_cast<Acc>(y[i]));
}

}  // namespace dcs
