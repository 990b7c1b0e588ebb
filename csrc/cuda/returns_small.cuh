// The temporal difference scan of little work: a launch and one trip to memory, so all loads are on their way at once, nothing is staged, and the parameters
// are few (a cache line of them is a trip to memory too). Short rows one behind the other: a vector a lane, so many lanes a row. Few columns with time
// outside: a sector of 8 columns a block, its time shared out among lanes and warps. Between lanes everything is in double.
#pragma once

#include "lookback.cuh"
#include "returns_step.cuh"
#include "vector.cuh"

namespace dcs {

template <typename Acc>
struct ReturnsSmallCall {
  const void *rewards, *values, *next_values, *rhos, *bootstrap;
  const uint8_t *terminated, *truncated;
  void *advantages, *targets, *pg_advantages;
  int64_t rows, bootstrap_stride;
  int length, lanes;  // steps and lanes of a row
  Acc clip_rho, clip_c, clip_pg;
  Rates<Acc> rates;
  double power;  // c over a lane's steps
};

// A lane's steps, in the order of the scan: step 0 is the latest.
template <typename Acc, int kForm, int kCount>
struct SmallSteps {
  using Given = ReturnsGiven<kForm>;
  static constexpr bool kHasValues = kForm & kWithValues, kHasNext = kForm & kWithNext, kHasRhos = kForm & kWithRhos;

  Acc rewards[kCount], values[kCount], next[kCount], rhos[kCount];
  uint32_t terminates = 0, truncates = 0, cuts = 0;  // bit i: step i
  Acc differences[kCount];

  // From a carry of nothing. `behind`: the value of the state after step 0; `ends`: step 0 is the row's last.
  __device__ __forceinline__ Piece<double> total(const ReturnsSmallCall<Acc>& call, Acc behind, bool ends) {
    cuts = terminates | truncates | (ends ? 1u : 0u);
    const uint32_t drops = left_out(kHasValues, call.rates, kHasNext ? terminates : terminates | truncates, cuts);
    Acc y = 0, product = 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool cut = cuts >> i & 1;
      const Acc after = kHasNext ? next[i] : i == 0 ? behind : values[i == 0 ? 0 : i - 1];
      const Acc weight = kHasValues || cut ? call.rates.gamma : call.rates.rest;
      const Acc rewarded = drops >> i & 1 ? rewards[i] : rewards[i] + weight * after;
      differences[i] = kHasValues ? rewarded - values[i] : rewarded;
      const Acc factor = kHasRhos ? clipped(rhos[i], call.clip_c) : Acc(1);
      const Acc delta = kHasRhos ? clipped(rhos[i], call.clip_rho) * differences[i] : differences[i];
      y = cut ? delta : call.rates.gate.step(delta, factor * y);
      product *= factor;
    }
    double gates = call.power;
    if constexpr (kHasRhos) {
      gates = static_cast<double>(product);
      if (!in_range(product)) {
        gates = 1.0;
#pragma unroll
        for (int i = 0; i < kCount; ++i) gates = clamped_mul(gates, static_cast<double>(clipped(rhos[i], call.clip_c)));
      }
      gates = clamped_mul(gates, call.power);
    }
    return {y, gates, cuts != 0};
  }

  // `store(i, advantage, target, pg_advantage)` for every step.
  template <typename Store>
  __device__ __forceinline__ void results(const ReturnsSmallCall<Acc>& call, double carry, const Store& store) const {
    Acc y = static_cast<Acc>(carry);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool cut = cuts >> i & 1;
      Acc pg = 0;
      if constexpr (kHasRhos) {
        const Acc delta = clipped(rhos[i], call.clip_rho) * differences[i];
        pg = clipped(rhos[i], call.clip_pg) * (cut ? differences[i] : call.rates.gate.step(differences[i], y));
        y = cut ? delta : call.rates.gate.step(delta, clipped(rhos[i], call.clip_c) * y);
      } else {
        y = cut ? differences[i] : call.rates.gate.step(differences[i], y);
      }
      store(i, y, kHasValues ? y + values[i] : y, pg);
    }
  }
};

// Joins a piece with the one before it in the scan.
__device__ __forceinline__ void join(Piece<double>& piece, const Piece<double>& before) {
  if (piece.closed) return;
  piece = {fold(piece.total, piece.gates, before.total), clamped_mul(piece.gates, before.gates), before.closed};
}

constexpr int kShortRowThreads = 128;

// Rows of `lanes` vectors, a power of two up to 8; every operand one row behind the other, in whole vectors.
template <typename T, int kForm>
__global__ void __launch_bounds__(kShortRowThreads) returns_short_rows_kernel(const __grid_constant__ ReturnsSmallCall<typename Types<T>::Acc> call) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  using Word = Vector<T, kVec>;
  using Bytes = Vector<uint8_t, kVec>;
  using Steps = SmallSteps<Acc, kForm, kVec>;
  Steps steps;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kShortRowThreads + threadIdx.x;  // of the vector
  const int place = static_cast<int>(threadIdx.x) & (call.lanes - 1);                    // in its row
  const int64_t row = at >> (31 - __clz(call.lanes));
  const bool inside = row < call.rows, ends = place == call.lanes - 1;

  const auto load = [&](const void* data) { return inside ? static_cast<const Word*>(data)[at] : Word{}; };
  const auto load_bytes = [&](const uint8_t* data) {
    uint32_t words[kVec / 4] = {};
    if (data && inside) *reinterpret_cast<Bytes*>(words) = reinterpret_cast<const Bytes*>(data)[at];
    uint32_t bits = 0;
#pragma unroll
    for (int w = 0; w < kVec / 4; ++w) bits |= flag_bits(words[w]) << 4 * w;
    return __brev(bits) >> (32 - kVec);
  };
  const Word rewards = load(call.rewards);
  Word values{}, next{}, rhos{};
  if (Steps::kHasValues) values = load(call.values);
  if (Steps::kHasNext) next = load(call.next_values);
  if (Steps::kHasRhos) rhos = load(call.rhos);
  T bootstrap = cast<T>(Acc(0));
  if (!Steps::kHasNext && call.bootstrap && inside && ends) bootstrap = static_cast<const T*>(call.bootstrap)[row * call.bootstrap_stride];
  steps.terminates = load_bytes(call.terminated);
  steps.truncates = load_bytes(call.truncated);
  unpack_in_order<true>(rewards, steps.rewards);
  unpack_in_order<true>(values, steps.values);
  unpack_in_order<true>(next, steps.next);
  unpack_in_order<true>(rhos, steps.rhos);

  Acc behind = shuffle_down(steps.values[kVec - 1], 1);
  if (ends) behind = cast<Acc>(bootstrap);
  Piece<double> piece = steps.total(call, behind, ends);
  for (int d = 1; d < call.lanes; d *= 2) {
    const Piece<double> before{shuffle_down(piece.total, d), shuffle_down(piece.gates, d),
                               static_cast<bool>(__shfl_down_sync(0xffffffffu, piece.closed, d))};
    if (place + d < call.lanes) join(piece, before);
  }
  const double carry = shuffle_down(piece.total, 1);  // the last lane's first step is cut

  Acc advantages[kVec], targets[kVec], pg_advantages[kVec];
  steps.results(call, ends ? 0.0 : carry, [&](int i, Acc advantage, Acc target, Acc pg) {
    advantages[kVec - 1 - i] = advantage;
    targets[kVec - 1 - i] = target;
    pg_advantages[kVec - 1 - i] = pg;
  });
  if (!inside) return;
  if (call.advantages) static_cast<Word*>(call.advantages)[at] = pack<Acc, T, kVec>(advantages);
  if (call.targets) static_cast<Word*>(call.targets)[at] = pack<Acc, T, kVec>(targets);
  if constexpr (Steps::kHasRhos)
    if (call.pg_advantages) static_cast<Word*>(call.pg_advantages)[at] = pack<Acc, T, kVec>(pg_advantages);
}

// kFewColumns columns a block, kFewSteps steps a lane, so many lanes of a warp on a column; at most kFewWarps warps.
constexpr int kFewColumns = 8, kFewSteps = 4, kFewWarps = 16, kFewWarpSteps = 32 / kFewColumns * kFewSteps;

// Steps of `rows` columns, one step behind the other in memory.
template <typename T, int kForm>
__global__ void __launch_bounds__(32 * kFewWarps) returns_few_columns_kernel(const __grid_constant__ ReturnsSmallCall<typename Types<T>::Acc> call) {
  using Acc = typename Types<T>::Acc;
  using Steps = SmallSteps<Acc, kForm, kFewSteps>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = lane / kFewColumns;
  const int columns = static_cast<int>(call.rows), column = static_cast<int>(blockIdx.x) * kFewColumns + lane % kFewColumns;
  const int first = warp * kFewWarpSteps + place * kFewSteps;  // counted from the last step
  const int count = column < columns ? call.length - first : 0;
  const int at = (call.length - 1 - first) * columns + column;
  Steps steps;

  const auto load = [&](const void* data, Acc(&to)[kFewSteps]) {
    const T* from = static_cast<const T*>(data) + at;
#pragma unroll
    for (int i = 0; i < kFewSteps; ++i, from -= columns) to[i] = i < count ? cast<Acc>(*from) : Acc(0);
  };
  load(call.rewards, steps.rewards);
  if (Steps::kHasValues) load(call.values, steps.values);
  if (Steps::kHasNext) load(call.next_values, steps.next);
  if (Steps::kHasRhos) load(call.rhos, steps.rhos);
  T behind = cast<T>(Acc(0));
  if constexpr (!Steps::kHasNext) {
    if (count > 0) {
      if (first > 0) behind = static_cast<const T*>(call.values)[at + columns];
      else if (call.bootstrap) behind = static_cast<const T*>(call.bootstrap)[column * call.bootstrap_stride];
    }
  }
  const auto load_flags = [&](const uint8_t* data) {
    uint8_t flags[kFewSteps] = {};
    if (data) {
#pragma unroll
      for (int i = 0; i < kFewSteps; ++i)
        if (i < count) flags[i] = data[at - i * columns];
    }
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kFewSteps; ++i)
      if (flags[i]) bits |= 1u << i;
    return bits;
  };
  steps.terminates = load_flags(call.terminated);
  steps.truncates = load_flags(call.truncated);

  Piece<double> piece = steps.total(call, cast<Acc>(behind), first == 0);
  const auto from_before = [&](int d) {
    return Piece<double>{shuffle_up(piece.total, d), shuffle_up(piece.gates, d), static_cast<bool>(__shfl_up_sync(0xffffffffu, piece.closed, d))};
  };
#pragma unroll
  for (int d = kFewColumns; d < 32; d *= 2) {
    const Piece<double> before = from_before(d);
    if (lane >= d) join(piece, before);
  }
  __shared__ Piece<double> pieces[kFewWarps][kFewColumns];
  if (lane >= 32 - kFewColumns) pieces[warp][lane % kFewColumns] = piece;
  const Piece<double> before = from_before(kFewColumns);
  __syncthreads();
  double carry = 0.0;
#pragma unroll 4
  for (int w = 0; w < warp; ++w) carry = after(pieces[w][lane % kFewColumns], carry);
  if (place > 0) carry = after(before, carry);

  T* const advantages = static_cast<T*>(call.advantages) + at;
  T* const targets = static_cast<T*>(call.targets) + at;
  T* const pg_advantages = static_cast<T*>(call.pg_advantages) + at;
  steps.results(call, carry, [&](int i, Acc advantage, Acc target, Acc pg) {
    if (i >= count) return;
    if (call.advantages) advantages[-i * columns] = cast<T>(advantage);
    if (call.targets) targets[-i * columns] = cast<T>(target);
    if (Steps::kHasRhos && call.pg_advantages) pg_advantages[-i * columns] = cast<T>(pg);
  });
}

}  // namespace dcs
