// The temporal difference scan along any dimension and with any strides: neighbouring lanes take neighbouring columns, the warps of a block share a column's
// time out among them. A round is kCount steps a warp: all are read at once, a warp's total from nothing goes to shared memory, lanes scan the totals of a
// column, and each warp goes through its steps again from its carry.
#pragma once

#include "returns/step.cuh"
#include "scan/carry/segment.cuh"
#include "common/vector.cuh"

namespace dcs {

template <typename Acc>
struct ReturnsColumnsCall {
  ReturnsProblem problem;
  Rates<Acc> rates;  // of the kernels of known forms
};

// kColumns: of a lane, read as one word. kAny: in kAnyForm, discounts that are one a step and flags that are not bool as well.
template <typename T, int kForm, bool kAny, int kColumns, int kCount, int kWarps, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps, kBlocks) returns_columns_kernel(const __grid_constant__ ReturnsColumnsCall<typename Types<T>::Acc> params) {
  const ReturnsProblem& p = params.problem;
  using Acc = typename Types<T>::Acc;
  using Given = ReturnsGiven<kForm>;
  constexpr bool kFull = Given::kFull, kGates = Given::kGates;
  using Word = Vector<T, kColumns>;
  using Bytes = Vector<uint8_t, kColumns>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t time = p.length, columns = p.outer * p.inner;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + lane) * kColumns;
  const bool inside = column < columns, whole_block = (static_cast<int64_t>(blockIdx.x) + 1) * 32 * kColumns <= columns;
  const int64_t outer = !inside ? 0 : p.inner == 1 ? column : p.outer == 1 ? 0 : column / p.inner;
  const int64_t inner = inside ? column - outer * p.inner : 0;
  const auto in_row = [&](const Strides& strides, int c) { return outer * strides.outer + (inner + c) * strides.inner; };
  // An operand at the column's last step. Steps are counted from there: q = 0, 1, ...
  const auto at_last = [&](const auto* data, const Strides& strides) { return data + in_row(strides, 0) + (time - 1) * strides.time; };

  const Given given(p);
  const bool has_values = given.values, has_next = given.next, has_rhos = given.rhos;
  const bool step_gamma = kAny && p.gamma.kind == GammaKind::kStep, step_trace = kAny && p.trace.kind == GammaKind::kStep;
  const T* const rewards = at_last(static_cast<const T*>(p.rewards.data), p.rewards.strides);
  const T* const values = at_last(static_cast<const T*>(p.values.data), p.values.strides);

  __shared__ double totals[kColumns][kWarps][33], products[kColumns][kWarps][33];  // an entry a warp and column, padded against bank conflicts
  __shared__ bool closed[kColumns][kWarps][33];
  __shared__ double carries[kColumns][32];  // into the block's next round
  Rates<Acc> own_rates[kColumns];
  const auto rates = [&](int c) -> const Rates<Acc>& { return kFull ? own_rates[c] : params.rates; };
  T bootstraps[kColumns];
  double powers[kColumns];  // c over a warp's steps
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if constexpr (kFull) own_rates[c] = rates_of<Acc>(p.gamma, p.trace, in_row(p.gamma.tensor.strides, c), in_row(p.trace.tensor.strides, c));
    const double power = power_of<kCount>(rates(c).carried);
    powers[c] = power;
    if constexpr (!kGates) products[c][warp][lane] = power;
    bootstraps[c] = cast<T>(Acc(0));
    if (p.bootstrap_value.data && inside && warp == 0)
      bootstraps[c] = static_cast<const T*>(p.bootstrap_value.data)[in_row(p.bootstrap_value.strides, c)];
    if (warp == 0) carries[c][lane] = 0.0;
  }
  Acc clip_rho = has_rhos ? static_cast<Acc>(p.clip_rho) : Acc(1), clip_c = has_rhos ? static_cast<Acc>(p.clip_c) : Acc(1);
  const Acc clip_pg = has_rhos ? static_cast<Acc>(p.clip_pg) : Acc(1);

  for (int64_t begin = 0; begin < time; begin += warps * kCount) {
    const int64_t first = begin + warp * kCount;
    const int count = inside ? static_cast<int>(max(int64_t{0}, min(time - first, static_cast<int64_t>(kCount)))) : 0;
    const bool even = whole_block && first + kCount <= time;  // the same for all lanes of a warp
    const auto load = [&](auto(&to)[kCount], const auto* last, const Strides& strides) {
      using Whole = std::remove_reference_t<decltype(to[0])>;
      const auto* from = last - first * strides.time;
      if (even) {
#pragma unroll
        for (int i = 0; i < kCount; ++i, from -= strides.time) to[i] = *reinterpret_cast<const Whole*>(from);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i, from -= strides.time) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) to[i].set(c, {});
          if (i < count) to[i] = *reinterpret_cast<const Whole*>(from);
        }
      }
    };
    const auto load_operand = [&](Word(&to)[kCount], const ReturnsInput& operand) {
      load(to, at_last(static_cast<const T*>(operand.data), operand.strides), operand.strides);
    };
    Word reward_words[kCount], value_words[kCount], next_words[kCount], rho_words[kCount], value_behind;
    load(reward_words, rewards, p.rewards.strides);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) value_behind.set(c, first == 0 ? bootstraps[c] : cast<T>(Acc(0)));
    if (has_values) {
      load(value_words, values, p.values.strides);
      if (!has_next && first > 0 && count > 0) value_behind = *reinterpret_cast<const Word*>(values - (first - 1) * p.values.strides.time);
    }
    if (has_next) load_operand(next_words, p.next_values);
    if (has_rhos) load_operand(rho_words, p.rhos);
    Vector<Acc, kColumns> gamma_words[kAny ? kCount : 1], trace_words[kAny ? kCount : 1];
    if constexpr (kAny) {
      const auto load_rate = [&](Vector<Acc, kColumns>(&to)[kCount], const ReturnsInput& operand) {
        load(to, at_last(static_cast<const Acc*>(operand.data), operand.strides), operand.strides);
      };
      if (step_gamma) load_rate(gamma_words, p.gamma.tensor);
      if (step_trace) load_rate(trace_words, p.trace.tensor);
    }
    // Bit i: step i.
    uint32_t terminates[kColumns] = {}, truncates[kColumns] = {};
    const auto load_flags = [&](uint32_t(&bits)[kColumns], const ReturnsInput& flags, bool is_bool) {
      if (!flags.data) return;
      if (!kAny || is_bool) {
        Bytes bytes[kCount];
        load(bytes, at_last(static_cast<const uint8_t*>(flags.data), flags.strides), flags.strides);
#pragma unroll
        for (int i = 0; i < kCount; ++i)
#pragma unroll
          for (int c = 0; c < kColumns; ++c)
            if (bytes[i].get(c)) bits[c] |= 1u << i;
      } else {
        Word words[kCount];
        load_operand(words, flags);
#pragma unroll
        for (int i = 0; i < kCount; ++i)
#pragma unroll
          for (int c = 0; c < kColumns; ++c)
            if (cast<Acc>(words[i].get(c)) != Acc(0)) bits[c] |= 1u << i;
      }
    };
    load_flags(terminates, p.terminated, p.terminated_is_bool);
    if constexpr (kFull || (kForm & kWithNext)) load_flags(truncates, p.truncated, p.truncated_is_bool);
    else load_flags(terminates, p.truncated, p.truncated_is_bool);  // without next values they do the same

    const auto ratio = [&](int i, int c, Acc most) {
      return has_rhos ? clipped(cast<Acc>(rho_words[i].get(c)), most) : Acc(1);
    };
    // Of gamma * trace, what is one a step.
    const auto steps_of = [&](int i, int c) {
      Acc factor = 1;
      if constexpr (kAny) {
        if (step_gamma) factor = gamma_words[i].get(c);
        if (step_trace) factor *= trace_words[i].get(c);
      }
      return factor;
    };
    uint32_t cuts[kColumns];
    Acc differences[kColumns][kCount];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const uint32_t lasts = first == 0 ? 1u : 0u;
      cuts[c] = terminates[c] | truncates[c] | lasts;
      uint32_t drops = has_next ? terminates[c] : terminates[c] | truncates[c];  // the next state's value
      if constexpr (!kFull) drops = left_out(has_values, rates(c), drops, cuts[c]);
      Acc y = 0, after = cast<Acc>(value_behind.get(c)), product = 1;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const bool cut = cuts[c] >> i & 1;
        const Acc reward = cast<Acc>(reward_words[i].get(c)), own = has_values ? cast<Acc>(value_words[i].get(c)) : Acc(0);
        const Acc next = has_next ? cast<Acc>(next_words[i].get(c)) : after;
        Acc weight = rates(c).gamma;
        if constexpr (kAny) {
          if (step_gamma) weight = gamma_words[i].get(c);
        }
        if (!has_values && !cut) {
          Acc rest = rates(c).rest;
          if constexpr (kAny) {
            if (step_gamma || step_trace) rest = weight - weight * (step_trace ? trace_words[i].get(c) : rates(c).trace);
          }
          weight = rest;
        }
        const bool dropped = drops >> i & 1 || (kFull && !has_values && weight == Acc(0));
        differences[c][i] = (dropped ? reward : reward + weight * next) - own;
        const Acc delta = ratio(i, c, clip_rho) * differences[c][i], factor = steps_of(i, c) * ratio(i, c, clip_c);
        y = cut ? delta : rates(c).gate.step(delta, factor * y);
        if (kGates) product *= factor;
        after = own;
      }
      double gates = static_cast<double>(product);
      if (kGates && !in_range(product)) {
        gates = 1.0;
#pragma unroll
        for (int i = 0; i < kCount; ++i) gates = clamped_mul(gates, static_cast<double>(steps_of(i, c) * ratio(i, c, clip_c)));
      }
      totals[c][warp][lane] = y;
      if constexpr (kGates) products[c][warp][lane] = clamped_mul(gates, powers[c]);
      closed[c][warp][lane] = cuts[c] != 0;
    }
    __syncthreads();
    // The warps' totals across time: `warps` lanes take a column and scan it, and each leaves its warp's carry where the total was.
    const int stretch = lane % warps, of_column = warp * (32 / warps) + lane / warps;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Piece<double> piece{totals[c][stretch][of_column], products[c][stretch][of_column], closed[c][stretch][of_column]};
      for (int d = 1; d < warps; d *= 2) {
        const double total = shuffle_up(piece.total, d, warps), gates = shuffle_up(piece.gates, d, warps);
        const bool stops = __shfl_up_sync(0xffffffffu, piece.closed, d, warps);
        if (stretch >= d && !piece.closed) piece = {fold(piece.total, piece.gates, total), clamped_mul(piece.gates, gates), stops};
      }
      const Piece<double> before{shuffle_up(piece.total, 1, warps), shuffle_up(piece.gates, 1, warps),
                                 static_cast<bool>(__shfl_up_sync(0xffffffffu, piece.closed, 1, warps))};
      const double entering = carries[c][of_column];
      totals[c][stretch][of_column] = stretch == 0 ? entering : after(before, entering);
      __syncwarp();
      if (stretch == warps - 1) carries[c][of_column] = after(piece, entering);
    }
    __syncthreads();

    if constexpr (kGates) {
      // Made again from here on: to keep every clipped ratio across the barriers would take more registers than there are.
      reload(clip_rho);
      reload(clip_c);
    }
    Acc y[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) y[c] = static_cast<Acc>(totals[c][warp][lane]);
    const auto results = [&](const ReturnsOutput& output) {
      return static_cast<T*>(output.data) + (in_row(output.strides, 0) + (time - 1 - first) * output.strides.time);
    };
    T* const advantages = results(p.advantages);
    T* const targets = results(p.targets);
    T* const pg_advantages = results(p.pg_advantages);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Acc target[kColumns], pg[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const bool cut = cuts[c] >> i & 1;
        const Acc difference = differences[c][i];
        const Acc delta = ratio(i, c, clip_rho) * difference, factor = steps_of(i, c);
        if (Given::kHasPg) pg[c] = ratio(i, c, clip_pg) * (cut ? difference : rates(c).gate.step(difference, factor * y[c]));
        y[c] = cut ? delta : rates(c).gate.step(delta, factor * ratio(i, c, clip_c) * y[c]);
        target[c] = y[c] + (has_values ? cast<Acc>(value_words[i].get(c)) : Acc(0));
      }
      if (even || i < count) {
        if (p.advantages.data) *reinterpret_cast<Word*>(advantages - i * p.advantages.strides.time) = pack<Acc, T, kColumns>(y);
        if (p.targets.data) *reinterpret_cast<Word*>(targets - i * p.targets.strides.time) = pack<Acc, T, kColumns>(target);
        if constexpr (Given::kHasPg)
          if (p.pg_advantages.data) *reinterpret_cast<Word*>(pg_advantages - i * p.pg_advantages.strides.time) = pack<Acc, T, kColumns>(pg);
      }
    }
  }
}

}  // namespace dcs
