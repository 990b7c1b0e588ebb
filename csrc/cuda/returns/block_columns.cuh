// The temporal difference scan along any dimension and with any strides: neighboring lanes take neighboring columns,
// the warps of a block share a column's time out among them. A round is kCount steps a warp: all are read at once, a
// warp's total from nothing goes to shared memory, lanes scan the totals of a column, and each warp goes through its
// steps again from its carry.
#pragma once

#include "returns/step.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

template <typename Acc>
struct ReturnsColumnsCall {
  ReturnsProblem problem;
  Rates<Acc> rates;  // of the kernels of known forms
};

// Where the warps of a block leave their segments: an entry a warp and column, padded against bank conflicts.
template <int kWarps>
struct ReturnsColumnSegments {
  double totals[kWarps][33], products[kWarps][33];
  bool closed[kWarps][33];
  double carries[32];  // into the block's next round
};

// A warp's steps of a round, kCount of each of a lane's columns. Arrays alone: beside one that a loop indexes the
// compiler keeps no scalar in a register.
template <typename T, bool kAny, int kCount>
struct ReturnsColumnWords {
  using Acc = typename Types<T>::Acc;
  T rewards[kCount], values[kCount], next[kCount], rhos[kCount];
  RateBits<T> gammas[kAny ? kCount : 1], traces[kAny ? kCount : 1];
  uint32_t terminates, truncates, cuts;  // bit i: step i
  Acc differences[kCount];
};

template <typename T, int kForm, int kCount, int kWarps>
struct ReturnsColumnsRound {
  using Acc = typename Types<T>::Acc;
  using Given = ReturnsGiven<kForm>;
  static constexpr bool kFull = Given::kFull, kGates = Given::kGates;
  using Words = ReturnsColumnWords<T, kFull, kCount>;
  using Segments = ReturnsColumnSegments<kWarps>;

  const ReturnsColumnsCall<Acc>& call;
  const ReturnsProblem& p;
  const Rates<Acc>& own_rates;
  const int64_t outer, inner;  // of the lane's column
  const bool inside, whole_block;
  const Given given;
  const bool step_gamma, step_trace;
  const bool gamma_is_narrow, trace_is_narrow;  // those of steps
  Acc clip_rho, clip_c, clip_pg;
  // Of the round. Steps are counted from the last one: first, first + 1, ...
  int64_t first = 0;
  int count = 0;
  bool even = false;  // the warp's steps and columns are all there; the same for all lanes

  __device__ __forceinline__ ReturnsColumnsRound(const ReturnsColumnsCall<Acc>& call, const Rates<Acc>& own_rates,
      int64_t outer, int64_t inner, bool inside, bool whole_block)
      : call(call),
        p(call.problem),
        own_rates(own_rates),
        outer(outer),
        inner(inner),
        inside(inside),
        whole_block(whole_block),
        given(p),
        step_gamma(kFull && p.gamma.kind == GammaKind::kStep),
        step_trace(kFull && p.trace.kind == GammaKind::kStep),
        gamma_is_narrow(kFull && p.gamma.is_narrow()),
        trace_is_narrow(kFull && p.trace.is_narrow()),
        clip_rho(given.rhos ? static_cast<Acc>(p.clip_rho) : Acc(1)),
        clip_c(given.rhos ? static_cast<Acc>(p.clip_c) : Acc(1)),
        clip_pg(given.rhos ? static_cast<Acc>(p.clip_pg) : Acc(1)) {}

  __device__ __forceinline__ const Rates<Acc>& rates() const {
    if constexpr (kFull) return own_rates;
    else return call.rates;
  }
  // An operand at the column's last step.
  template <typename U>
  __device__ __forceinline__ const U* at_last(const void* data, const Strides& strides) const {
    return static_cast<const U*>(data) + strides.at(outer, p.length - 1, inner);
  }

  __device__ __forceinline__ void begin(int64_t begin_of_round) {
    first = begin_of_round + threadIdx.x / 32 * kCount;
    count = inside ? static_cast<int>(max(int64_t{0}, min(p.length - first, static_cast<int64_t>(kCount)))) : 0;
    even = whole_block && first + kCount <= p.length;
  }

  template <typename U>
  __device__ __forceinline__ void load(U (&to)[kCount], const U* last, const Strides& strides) const {
    const U* from = last - first * strides.time;
    if (even) {
#pragma unroll
      for (int i = 0; i < kCount; ++i, from -= strides.time) to[i] = *from;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i, from -= strides.time) {
        to[i] = U{};
        if (i < count) to[i] = *from;
      }
    }
  }
  template <typename U>
  __device__ __forceinline__ void load_operand(U (&to)[kCount], const ReturnsInput& operand) const {
    load(to, at_last<U>(operand.data, operand.strides), operand.strides);
  }
  __device__ __forceinline__ void load_rates(
      RateBits<T> (&to)[kCount], const ReturnsInput& operand, bool is_narrow) const {
    read_rate_bits<T>(is_narrow, [&](auto bits) {
      decltype(bits) loaded[kCount];
      load_operand(loaded, operand);
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = loaded[i];
    });
  }
  __device__ __forceinline__ void load_flags(uint32_t& bits, const ReturnsInput& flags, bool is_bool) const {
    if (!flags.data) return;
    if (!kFull || is_bool) {
      uint8_t bytes[kCount];
      load_operand(bytes, flags);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (bytes[i]) bits |= 1u << i;
    } else {
      T words[kCount];
      load_operand(words, flags);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (cast<Acc>(words[i]) != Acc(0)) bits |= 1u << i;
    }
  }
  // All of the warp's steps, and the values of the states behind the first one.
  __device__ __forceinline__ T load(Words& words, T bootstrap) const {
    load_operand(words.rewards, p.rewards);
    T value_behind = first == 0 ? bootstrap : cast<T>(Acc(0));
    if (given.values) {
      load_operand(words.values, p.values);
      if (!given.next && first > 0 && count > 0)
        value_behind = *(at_last<T>(p.values.data, p.values.strides) - (first - 1) * p.values.strides.time);
    }
    if (given.next) load_operand(words.next, p.next_values);
    if (given.rhos) load_operand(words.rhos, p.rhos);
    if constexpr (kFull) {
      if (step_gamma) load_rates(words.gammas, p.gamma.tensor, gamma_is_narrow);
      if (step_trace) load_rates(words.traces, p.trace.tensor, trace_is_narrow);
    }
    words.terminates = words.truncates = 0;
    load_flags(words.terminates, p.terminated, p.terminated_is_bool);
    if constexpr (kFull || (kForm & kWithNext)) load_flags(words.truncates, p.truncated, p.truncated_is_bool);
    else load_flags(words.terminates, p.truncated, p.truncated_is_bool);  // without next values they do the same
    return value_behind;
  }

  __device__ __forceinline__ Acc ratio(const Words& words, int i, Acc most) const {
    return given.rhos ? clipped(cast<Acc>(words.rhos[i]), most) : Acc(1);
  }
  __device__ __forceinline__ Acc gamma_of(const Words& words, int i) const {
    return rate_of_bits<T>(words.gammas[i], gamma_is_narrow);
  }
  __device__ __forceinline__ Acc trace_of(const Words& words, int i) const {
    return rate_of_bits<T>(words.traces[i], trace_is_narrow);
  }
  // Of gamma * trace, what is one a step.
  __device__ __forceinline__ Acc steps_of(const Words& words, int i) const {
    Acc factor = 1;
    if constexpr (kFull) {
      if (step_gamma) factor = gamma_of(words, i);
      if (step_trace) factor *= trace_of(words, i);
    }
    return factor;
  }
  // What the next state's value counts.
  __device__ __forceinline__ Acc weight(const Words& words, int i, bool cut) const {
    Acc weight = rates().gamma;
    if constexpr (kFull) {
      if (step_gamma) weight = gamma_of(words, i);
    }
    if (given.own_values || cut) return weight;
    if constexpr (kFull) {
      if (step_gamma || step_trace) return weight - weight * (step_trace ? trace_of(words, i) : rates().trace);
    }
    return rates().rest;
  }

  // The warp's totals from a carry of nothing, to shared memory.
  __device__ __forceinline__ void scan_local(Words& words, T value_behind, double power, Segments& segments) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t lasts = first == 0 ? 1u : 0u, ends = words.terminates | words.truncates;
    words.cuts = ends | lasts;
    uint32_t drops = given.next ? words.terminates : ends;  // the next state's value
    if constexpr (!kFull) drops = left_out(given.own_values, rates(), drops, words.cuts);
    Acc y = 0, after = cast<Acc>(value_behind), product = 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool cut = words.cuts >> i & 1;
      const Acc reward = cast<Acc>(words.rewards[i]), own = given.values ? cast<Acc>(words.values[i]) : Acc(0);
      const Acc next = given.next ? cast<Acc>(words.next[i]) : after, weighted = weight(words, i, cut);
      const bool dropped = drops >> i & 1 || (kFull && !given.own_values && weighted == Acc(0));
      words.differences[i] = (dropped ? reward : reward + weighted * next) - (given.own_values ? own : Acc(0));
      const Acc delta = ratio(words, i, clip_rho) * words.differences[i],
                factor = steps_of(words, i) * ratio(words, i, clip_c);
      y = cut ? delta : rates().gate.step(delta, factor * y);
      if (kGates) product *= factor;
      after = own;
    }
    double gates = static_cast<double>(product);
    if (kGates && !in_range(product)) {
      gates = 1.0;
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        gates = clamped_mul(gates, static_cast<double>(steps_of(words, i) * ratio(words, i, clip_c)));
    }
    segments.totals[warp][lane] = y;
    if constexpr (kGates) segments.products[warp][lane] = clamped_mul(gates, power);
    segments.closed[warp][lane] = words.cuts != 0;
    __syncthreads();
  }

  // The warps' totals across time: `warps` lanes take a column and scan it, and each leaves its warp's carry where the
  // total was.
  static __device__ __forceinline__ void exchange_carries(Segments& segments) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int segment = lane % warps, of_column = warp * (32 / warps) + lane / warps;
    Segment<double> folded{segments.totals[segment][of_column], segments.products[segment][of_column],
        segments.closed[segment][of_column]};
    for (int d = 1; d < warps; d *= 2) {
      const double total = shuffle_up(folded.total, d, warps), gates = shuffle_up(folded.gates, d, warps);
      const bool stops = __shfl_up_sync(0xffffffffu, folded.closed, d, warps);
      if (segment >= d && !folded.closed)
        folded = {fold(folded.total, folded.gates, total), clamped_mul(folded.gates, gates), stops};
    }
    const Segment<double> before{shuffle_up(folded.total, 1, warps), shuffle_up(folded.gates, 1, warps),
        static_cast<bool>(__shfl_up_sync(0xffffffffu, folded.closed, 1, warps))};
    const double entering = segments.carries[of_column];
    segments.totals[segment][of_column] = segment == 0 ? entering : after(before, entering);
    __syncwarp();
    if (segment == warps - 1) segments.carries[of_column] = after(folded, entering);
    __syncthreads();
  }

  __device__ __forceinline__ T* results(const ReturnsOutput& output) const {
    return static_cast<T*>(output.data) + output.strides.at(outer, p.length - 1 - first, inner);
  }
  // The results, from the warp's carry.
  __device__ __forceinline__ void apply(const Words& words, const Segments& segments) {
    if constexpr (kGates) {
      // Made again from here on: to keep every clipped ratio across the barriers would take more registers than there
      // are.
      reload(clip_rho);
      reload(clip_c);
    }
    Acc y = static_cast<Acc>(segments.totals[threadIdx.x / 32][threadIdx.x % 32]);
    T* const advantages = results(p.advantages);
    T* const targets = results(p.targets);
    T* const pg_advantages = results(p.pg_advantages);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Acc pg = 0;
      const bool cut = words.cuts >> i & 1;
      const Acc difference = words.differences[i];
      const Acc delta = ratio(words, i, clip_rho) * difference, factor = steps_of(words, i);
      if (Given::kHasPg) pg = ratio(words, i, clip_pg) * (cut ? difference : rates().gate.step(difference, factor * y));
      y = cut ? delta : rates().gate.step(delta, factor * ratio(words, i, clip_c) * y);
      const Acc target = y + (given.own_values ? cast<Acc>(words.values[i]) : Acc(0));
      if (even || i < count) {
        if (p.advantages.data) advantages[-i * p.advantages.strides.time] = cast<T>(y);
        if (p.targets.data) targets[-i * p.targets.strides.time] = cast<T>(target);
        if constexpr (Given::kHasPg)
          if (p.pg_advantages.data) pg_advantages[-i * p.pg_advantages.strides.time] = cast<T>(pg);
      }
    }
  }
};

// In kAnyForm discounts may be one a step and flags need not be bool.
template <typename T, int kForm, int kCount, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 1)
    returns_columns_kernel(const __grid_constant__ ReturnsColumnsCall<typename Types<T>::Acc> params) {
  using Round = ReturnsColumnsRound<T, kForm, kCount, kWarps>;
  using Acc = typename Round::Acc;
  const ReturnsProblem& p = params.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t columns = p.outer * p.inner, column = (static_cast<int64_t>(blockIdx.x) * 32 + lane);
  const bool inside = column < columns, whole_block = (static_cast<int64_t>(blockIdx.x) + 1) * 32 <= columns;
  const int64_t outer = !inside ? 0 : p.inner == 1 ? column : p.outer == 1 ? 0 : column / p.inner;
  const int64_t inner = inside ? column - outer * p.inner : 0;
  const auto in_row = [&](const Strides& strides) { return strides.at(outer, inner); };

  __shared__ typename Round::Segments segments;
  Rates<Acc> own_rates;
  Round round(params, own_rates, outer, inner, inside, whole_block);
  if constexpr (Round::kFull)
    own_rates = rates_of<Acc>(p.gamma, p.trace, in_row(p.gamma.tensor.strides), in_row(p.trace.tensor.strides));
  const double power = power_of<kCount>(round.rates().carried);  // c over a warp's steps
  if constexpr (!Round::kGates) segments.products[warp][lane] = power;
  T bootstrap = cast<T>(Acc(0));
  if (p.bootstrap_value.data && inside && warp == 0)
    bootstrap = static_cast<const T*>(p.bootstrap_value.data)[in_row(p.bootstrap_value.strides)];
  if (warp == 0) segments.carries[lane] = 0.0;

  for (int64_t begin = 0; begin < p.length; begin += warps * kCount) {
    round.begin(begin);
    typename Round::Words words;
    const auto value_behind = round.load(words, bootstrap);
    round.scan_local(words, value_behind, power, segments);
    round.exchange_carries(segments);
    round.apply(words, segments);
  }
}

}  // namespace dcs
