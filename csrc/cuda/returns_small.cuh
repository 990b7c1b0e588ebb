// The temporal difference scan of little work: a launch and one trip to memory, so all loads are on their way at once, nothing is staged, and the parameters
// are few (a cache line of them is a trip to memory too). Short rows one behind the other: a vector a lane, so many lanes a row. Few columns with time
// outside: 4 columns a block, their time shared out among lanes and warps. Between lanes everything is in double, but where float holds every power of gamma *
// lambda: there it costs a few more roundings a row, and saves a fifth of the instructions.
#pragma once

#include "returns_known.cuh"
#include "vector.cuh"

namespace dcs {

template <typename Acc>
struct ReturnsSmallCall : ReturnsKnown<Acc> {
  const void *rewards, *values, *next_values, *rhos, *bootstrap;
  const uint8_t *terminated, *truncated;
  void *advantages, *targets, *pg_advantages;
  int64_t rows, bootstrap_stride;
  int length, lanes;  // steps and lanes of a row
  double powers[5], warp_power;  // c over the steps of 1, 2, 4, ... lanes, and of a warp
};
__device__ __forceinline__ float times(float a, float b) { return a * b; }
__device__ __forceinline__ double times(double a, double b) { return clamped_mul(a, b); }


constexpr int kShortRowThreads = 128;

// Rows of `lanes` vectors, a power of two up to 8; every operand one row behind the other, in whole vectors. Wide: of what goes between lanes.
template <typename T, int kForm, typename Wide = double>
__global__ void __launch_bounds__(kShortRowThreads) returns_short_rows_kernel(const __grid_constant__ ReturnsSmallCall<typename Types<T>::Acc> call) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  using Word = Vector<T, kVec>;
  using Bytes = Vector<uint8_t, kVec>;
  using Steps = KnownSteps<Acc, kForm, kVec>;
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
  steps.make_differences(call, behind, ends);
  Piece<Wide> piece = steps.template total<Wide>(call);
  for (int d = 1; d < call.lanes; d *= 2) {
    const Piece<Wide> before{shuffle_down(piece.total, d), shuffle_down(piece.gates, d),
                               static_cast<bool>(__shfl_down_sync(0xffffffffu, piece.closed, d))};
    if (place + d < call.lanes) join(piece, before);
  }
  const Wide carry = shuffle_down(piece.total, 1);  // the last lane's first step is cut

  Acc advantages[kVec], targets[kVec], pg_advantages[kVec];
  steps.results(call, ends ? Acc(0) : static_cast<Acc>(carry), [&](int i, Acc advantage, Acc target, Acc pg) {
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

// kFewColumns columns a block, kFewSteps steps a lane, so many lanes of a warp on a column; at most kFewWarps warps. More steps or fewer columns a warp were
// slower: a longer way through the steps, or reads of less than 16 bytes.
constexpr int kFewColumns = 4, kFewSteps = 2, kFewWarps = 16, kFewWarpSteps = 32 / kFewColumns * kFewSteps;

// Steps of `rows` columns, one step behind the other in memory, by kWarps warps a block.
template <typename T, int kForm, int kWarps, typename Wide, int kColumns = kFewColumns, int kSteps = kFewSteps>
__global__ void __launch_bounds__(32 * kWarps) returns_few_columns_kernel(const __grid_constant__ ReturnsSmallCall<typename Types<T>::Acc> call) {
  using Acc = typename Types<T>::Acc;
  using Steps = KnownSteps<Acc, kForm, kSteps>;
  constexpr int kWarpSteps = 32 / kColumns * kSteps;
  const int lane = threadIdx.x % 32, warp = kWarps == 1 ? 0 : threadIdx.x / 32, place = lane / kColumns;
  const int columns = static_cast<int>(call.rows), column = static_cast<int>(blockIdx.x) * kColumns + lane % kColumns;
  const int first = warp * kWarpSteps + place * kSteps;  // counted from the last step
  const int count = column < columns ? call.length - first : 0;
  const int at = (call.length - 1 - first) * columns + column;
  Steps steps;

  const auto load = [&](const void* data, Acc(&to)[kSteps]) {
    const T* from = static_cast<const T*>(data) + at;
#pragma unroll
    for (int i = 0; i < kSteps; ++i, from -= columns) to[i] = i < count ? cast<Acc>(*from) : Acc(0);
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
    uint8_t flags[kSteps] = {};
    if (data) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        if (i < count) flags[i] = data[at - i * columns];
    }
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (flags[i]) bits |= 1u << i;
    return bits;
  };
  steps.terminates = load_flags(call.terminated);
  steps.truncates = load_flags(call.truncated);

  steps.make_differences(call, cast<Acc>(behind), first == 0);
  const auto piece = steps.template total<Wide>(call);
  Wide total = piece.total, gates = piece.gates;
  // The nearest lane at or before this one in its column that a carry does not pass.
  constexpr uint32_t kColumn = kColumns == 8 ? 0x01010101u : kColumns == 4 ? 0x11111111u : kColumns == 2 ? 0x55555555u : 0xffffffffu;
  const uint32_t stops = __ballot_sync(0xffffffffu, steps.cuts != 0) & (kColumn << lane % kColumns) & (0xffffffffu >> (31 - lane));
  const int limit = max(31 - __clz(stops), 0);
#pragma unroll
  for (int d = kColumns, s = 0; d < 32; d *= 2, ++s) {
    const Wide before = shuffle_up(total, d);
    if constexpr (Steps::kHasRhos) {
      const Wide gates_before = shuffle_up(gates, d);
      if (lane - d >= limit) total = fold(total, gates, before), gates = times(gates, gates_before);
    } else {
      if (lane - d >= limit) total = fold(total, static_cast<Wide>(call.powers[s]), before);
    }
  }
  // Into this lane: what lies before it in the warp, and in the warps before.
  Wide entering = shuffle_up(total, kColumns), entering_gates = shuffle_up(gates, Steps::kHasRhos ? kColumns : 0);
  const bool stopped = (stops & ~(1u << lane)) != 0;
  if constexpr (!Steps::kHasRhos) {
    entering_gates = 1;
#pragma unroll
    for (int s = 0; (kColumns << s) < 32; ++s)
      if (place >> s & 1) entering_gates = times(entering_gates, static_cast<Wide>(call.powers[s]));
  }
  if (place == 0) entering = 0, entering_gates = 1;
  Wide carry = 0;
  if constexpr (kWarps > 1) {
    struct alignas(16) Left {
      Wide total, gates;
      int closed;
    };
    __shared__ Left left[kWarps][kColumns];
    if (lane >= 32 - kColumns) left[warp][lane % kColumns] = {total, Steps::kHasRhos ? gates : static_cast<Wide>(call.warp_power), stops != 0};
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps - 1; ++w) {
      const Left each = left[w][lane % kColumns];
      if (w < warp) carry = each.closed ? each.total : fold(each.total, each.gates, carry);
    }
  }
  carry = stopped ? entering : fold(entering, entering_gates, carry);

  T* const advantages = static_cast<T*>(call.advantages) + at;
  T* const targets = static_cast<T*>(call.targets) + at;
  T* const pg_advantages = static_cast<T*>(call.pg_advantages) + at;
  steps.results(call, static_cast<Acc>(carry), [&](int i, Acc advantage, Acc target, Acc pg) {
    if (i >= count) return;
    if (call.advantages) advantages[-i * columns] = cast<T>(advantage);
    if (call.targets) targets[-i * columns] = cast<T>(target);
    if (Steps::kHasRhos && call.pg_advantages) pg_advantages[-i * columns] = cast<T>(pg);
  });
}

}  // namespace dcs
