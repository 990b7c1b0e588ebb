// The temporal difference scan of little work: a launch and one trip to memory, so all loads are on their way at once,
// nothing is staged, and the parameters are few (a cache line of them is a trip to memory too). Short rows one behind
// the other: a vector a lane, so many lanes a row. Few columns with time outside: 8 columns a block, their time shared
// out among lanes and warps. Between lanes everything is in double, but where float holds every power of gamma *
// lambda, and every product of ratios: there it costs a few more roundings a row, and saves a fifth of the
// instructions.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "dcs/returns/tile_plan.h"
#include "returns/fixed_forms.cuh"
#include "common/vector.cuh"

namespace dcs {

template <typename Acc>
struct ReturnsSmallCall : ReturnsKnown<Acc> {
  const void *rewards, *values, *next_values, *rhos, *bootstrap;
  const uint8_t *terminated, *truncated;
  void *advantages, *targets, *pg_advantages;
  int64_t rows, bootstrap_stride;
  int length, lanes;  // steps and lanes of a row
};

inline int64_t small_bootstrap_stride(const ReturnsProblem& p) {
  return p.inner > 1 ? p.bootstrap_value.strides.inner : p.bootstrap_value.strides.outer;
}

template <typename T>
ReturnsSmallCall<typename Types<T>::Acc> short_rows_call(const ReturnsProblem& p) {
  ReturnsSmallCall<typename Types<T>::Acc> call{known_of<typename Types<T>::Acc>(p, 16 / sizeof(T))};
  call.rewards = p.rewards.data;
  call.values = p.values.data;
  call.next_values = p.next_values.data;
  call.rhos = p.rhos.data;
  call.bootstrap = p.bootstrap_value.data;
  call.terminated = static_cast<const uint8_t*>(p.terminated.data);
  call.truncated = static_cast<const uint8_t*>(p.truncated.data);
  call.advantages = p.advantages.data;
  call.targets = p.targets.data;
  call.pg_advantages = p.pg_advantages.data;
  call.rows = p.rows();
  call.bootstrap_stride = small_bootstrap_stride(p);
  call.length = static_cast<int>(p.length);
  call.lanes = call.length * static_cast<int>(sizeof(T)) / 16;
  return call;
}

// Whether float holds gamma * lambda's powers, over 32 steps at most, as well as double. With ratios no gate may exceed
// 1: a product that has left float's range does not come back then.
inline bool float_holds_gates(const ReturnsProblem& p, int form) {
  const double carried = std::fabs(p.gamma.value * p.trace.value);
  return carried <= 1 && (carried == 0 || finite_power(carried, 32) >= FLT_MIN) &&
      (!(form & kWithRhos) || p.clip_c <= 1);
}

__device__ __forceinline__ float times(float a, float b) { return a * b; }
__device__ __forceinline__ double times(double a, double b) { return clamped_mul(a, b); }

constexpr int kShortRowThreads = 128;

// Rows of `lanes` vectors, a power of two up to 8; every operand one row behind the other, in whole vectors. Wide: of
// what goes between lanes.
template <typename T, int kForm, typename Wide = double>
__global__ void __launch_bounds__(kShortRowThreads)
    returns_short_rows_kernel(const __grid_constant__ ReturnsSmallCall<typename Types<T>::Acc> call) {
  using Acc = typename Types<T>::Acc;
  constexpr int kVec = 16 / sizeof(T);
  using Word = Vector<T, kVec>;
  using Bytes = Vector<uint8_t, kVec>;
  using Steps = KnownSteps<Acc, kForm, kVec>;
  Steps steps;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kShortRowThreads + threadIdx.x;  // of the vector
  const int index = static_cast<int>(threadIdx.x) & (call.lanes - 1);                    // in its row
  const int64_t row = at >> (31 - __clz(call.lanes));
  const bool inside = row < call.rows, ends = index == call.lanes - 1;
  griddepcontrol_wait();

  const auto load = [&](const void* data) { return inside ? static_cast<const Word*>(data)[at] : Word{}; };
  const auto load_bytes = [&](const uint8_t* data) {
    alignas(Bytes) uint32_t words[kVec / 4] = {};
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
  if (!Steps::kHasNext && call.bootstrap && inside && ends)
    bootstrap = static_cast<const T*>(call.bootstrap)[row * call.bootstrap_stride];
  steps.terminates = load_bytes(call.terminated);
  steps.truncates = load_bytes(call.truncated);
  unpack_in_order<true>(rewards, steps.rewards);
  unpack_in_order<true>(values, steps.values);
  unpack_in_order<true>(next, steps.next);
  unpack_in_order<true>(rhos, steps.rhos);

  Acc behind = shuffle_down(steps.values[kVec - 1], 1);
  if (ends) behind = cast<Acc>(bootstrap);
  steps.make_differences(call, behind, ends);
  Segment<Wide> segment = steps.template total<Wide>(call);
  for (int d = 1; d < call.lanes; d *= 2) {
    const Segment<Wide> before{shuffle_down(segment.total, d), shuffle_down(segment.gates, d),
        static_cast<bool>(__shfl_down_sync(0xffffffffu, segment.closed, d))};
    if (index + d < call.lanes) join(segment, before);
  }
  const Wide carry = shuffle_down(segment.total, 1);  // the last lane's first step is cut

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

// What the first loads need comes first: a line of 64 bytes of these is read from memory too.
template <typename Acc>
struct ReturnsFewCall {
  const void *rewards, *values;
  const uint8_t* terminated;
  void *advantages, *targets;
  const void* next_values;  // or bootstrap
  int columns, length;
  int64_t bootstrap_stride;
  Acc gamma, rest;
  Gate<Acc> gate;
  const void* rhos;
  void* pg_advantages;
  Acc clip_rho, clip_c, clip_pg;
  const uint8_t* truncated;
  double carried;  // gamma * lambda
};

// False. To find out, a thread reads the call's lines of parameters, and makes the addresses: put before a wait, it has
// them by then, which a compiler that moves instructions behind the wait cannot undo (0.04 us).
template <typename Acc>
__device__ __forceinline__ bool all_of_call_is_zero(const ReturnsFewCall<Acc>& call, int at) {
  uint32_t bits = at | call.columns;
  const auto look = [&](const void* pointer) { bits |= static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointer)); };
  look(call.rewards), look(call.values), look(call.terminated), look(call.targets), look(call.next_values),
      look(call.rhos), look(call.pg_advantages);
  for (const Acc number : {call.gamma, call.gate.value, call.clip_c, call.clip_pg}) bits |= __float_as_uint(number);
  return bits == 0;
}

// base^kExponent for a power of two.
template <int kExponent, typename Wide>
__device__ __forceinline__ Wide static_power(Wide base) {
  if constexpr (kExponent == 1) return base;
  else return times(static_power<kExponent / 2>(base), static_power<kExponent / 2>(base));
}

// What a warp stores for the later ones. kGates: the gates of steps differ. In float a gate is not 0 there
// (few_columns_carry), so that 0 says closed.
template <typename Wide, bool kGates>
struct FewLeft {
  Wide total;
  int is_closed;
  __device__ __forceinline__ FewLeft() {}
  __device__ __forceinline__ FewLeft(Wide total, Wide, bool closed) : total(total), is_closed(closed) {}
  __device__ __forceinline__ bool closed() const { return is_closed != 0; }
  __device__ __forceinline__ Wide gate(Wide power) const { return power; }
};
template <>
struct alignas(8) FewLeft<float, true> {
  float total, gates;
  __device__ __forceinline__ FewLeft() {}
  __device__ __forceinline__ FewLeft(float total, float gates, bool closed)
      : total(total), gates(closed ? 0.f : gates) {}
  __device__ __forceinline__ bool closed() const { return gates == 0.f; }
  __device__ __forceinline__ float gate(float) const { return gates; }
};
template <>
struct FewLeft<double, true> {
  double total, gates;
  int is_closed;
  __device__ __forceinline__ FewLeft() {}
  __device__ __forceinline__ FewLeft(double total, double gates, bool closed)
      : total(total), gates(gates), is_closed(closed) {}
  __device__ __forceinline__ bool closed() const { return is_closed != 0; }
  __device__ __forceinline__ double gate(double) const { return gates; }
};

// The carry into a lane's steps, whose total is `segment`; all threads of a block call it. False, in `carry` nothing: a
// product of gates has left float's range.
template <typename Wide, int kWarps, typename Steps, typename Acc, typename Left>
__device__ __forceinline__ bool few_columns_carry(const Steps& steps, const Segment<Wide>& segment, Wide lane_power,
    Left (&left)[kWarps][kSmallColumns], Acc& carry) {
  constexpr bool kGates = Steps::kHasRhos;
  constexpr int kColumns = kSmallColumns;
  constexpr uint32_t kColumn = 0x01010101u;  // a column's lanes
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane % kColumns, index = lane / kColumns;
  Wide total = segment.total, gates = segment.gates;
  // The nearest lane at or before this one in its column that a carry does not pass.
  const uint32_t stops =
      __ballot_sync(0xffffffffu, steps.cuts != 0) & (kColumn << group) & (0xffffffffu >> (31 - lane));
  const int limit = max(31 - __clz(stops), 0);
  Wide power = lane_power, entering_gates = 1;
#pragma unroll
  for (int d = kColumns; d < 32; d *= 2) {
    const Wide before = shuffle_up(total, d);
    if constexpr (kGates) {
      const Wide gates_before = shuffle_up(gates, d);
      if (lane - d >= limit) total = fold(total, gates, before), gates = times(gates, gates_before);
    } else {
      if (lane - d >= limit) total = fold(total, power, before);
      if (lane & d) entering_gates = times(entering_gates, power);
      power = times(power, power);
    }
  }
  if (lane >= 32 - kColumns) left[warp][group] = Left(total, gates, stops != 0);
  // Into this lane: what lies before it in the warp, and in the warps before.
  Wide entering = shuffle_up(total, kColumns);
  if constexpr (kGates) entering_gates = shuffle_up(gates, kColumns);
  if (index == 0) entering = 0, entering_gates = 1;
  const bool stopped = (stops & ~(1u << lane)) != 0;
  if constexpr (kGates && sizeof(Wide) == 4) {
    if (__syncthreads_or(stops == 0 && !in_range(gates))) return false;
  } else {
    __syncthreads();
  }
  // All are read before the first is used, those of no warp as well.
  Left each[kWarps - 1];
#pragma unroll
  for (int w = 0; w < kWarps - 1; ++w) each[w] = left[w][group];
#pragma unroll
  for (int w = 0; w < kWarps - 1; ++w) reload(each[w].total);
  Wide carried = 0;
#pragma unroll
  for (int w = 0; w < kWarps - 1; ++w) {
    const Wide next = each[w].closed() ? each[w].total : fold(each[w].total, each[w].gate(power), carried);
    carried = w < warp ? next : carried;
  }
  carry = static_cast<Acc>(stopped ? entering : fold(entering, entering_gates, carried));
  return true;
}

// Steps of columns, one step behind the other in memory. kEven: the common call, with fewer instructions, which are
// read from memory as well: warps and lanes of whole steps, whole blocks, an end of episodes, a bootstrap value, the
// outputs that gae, td_lambda_returns and vtrace ask for. Wide float, with ratios: double where float does not hold
// their products.
template <typename T, int kForm, int kWarps, typename Wide, bool kEven>
__global__ void __launch_bounds__(32 * kWarps)
    returns_few_columns_kernel(const __grid_constant__ ReturnsFewCall<typename Types<T>::Acc> call) {
  using Acc = typename Types<T>::Acc;
  constexpr int kColumns = kSmallColumns, kSteps = kSmallSteps;
  using Steps = KnownSteps<Acc, kForm, kSteps>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = lane / kColumns;
  const int columns = call.columns, column = static_cast<int>(blockIdx.x) * kColumns + lane % kColumns;
  const int first = warp * kSmallWarpSteps + index * kSteps;  // counted from the last step
  const int at = (call.length - 1 - first) * columns + column;
  const int count = kEven ? kSteps : column < columns ? call.length - first : 0;
  launch_dependents();
  if (all_of_call_is_zero(call, at + 1)) return;
  griddepcontrol_wait();
  Steps steps;

  // A base that is the same for all, and 32 bits.
  const auto step_of = [&](auto* data, int i) { return data + static_cast<uint32_t>(at - i * columns); };
  const auto load = [&](const void* data, Acc(&to)[kSteps]) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      T value = cast<T>(Acc(0));
      if (kEven || i < count) value = *step_of(static_cast<const T*>(data), i);
      to[i] = cast<Acc>(value);
    }
  };
  load(call.rewards, steps.rewards);
  if (Steps::kHasValues) load(call.values, steps.values);
  if (Steps::kHasNext) load(call.next_values, steps.next);
  if (Steps::kHasRhos) load(call.rhos, steps.rhos);
  T bootstrap = cast<T>(Acc(0));  // or the value after the warp's last step
  if constexpr (!Steps::kHasNext) {
    const T* from = static_cast<const T*>(call.values) + (at + columns);
    if (first == 0) from = static_cast<const T*>(call.next_values) + column * call.bootstrap_stride;
    // Where the common call reads it for every lane: a shuffle's time is saved, and the line is there.
    if ((kEven || index == 0) && (kEven || (count > 0 && (first > 0 || call.next_values)))) bootstrap = *from;
  }
  uint8_t terminated[kSteps] = {}, truncated[kSteps] = {};
  const auto load_flags = [&](const uint8_t* data, uint8_t (&to)[kSteps]) {
    const int flags = kEven || data ? count : 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (kEven || i < flags) to[i] = *step_of(data, i);
  };
  load_flags(call.terminated, terminated);
  if constexpr (!kEven) load_flags(call.truncated, truncated);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (terminated[i]) steps.terminates |= 1u << i;
    if (truncated[i]) steps.truncates |= 1u << i;
  }

  ReturnsKnown<Acc> known{call.clip_rho, call.clip_c, call.clip_pg};
  known.rates.gamma = call.gamma, known.rates.rest = call.rest, known.rates.gate = call.gate;
  Acc behind = 0;
  if constexpr (!Steps::kHasNext) {
    if constexpr (!kEven) behind = shuffle_up(steps.values[kSteps - 1], kColumns);
    if (kEven || index == 0) behind = cast<Acc>(bootstrap);
  }
  steps.make_differences(known, behind, first == 0);
  const auto store = [&](int i, Acc advantage, Acc target, Acc pg) {
    if (!kEven && i >= count) return;
    if (kEven ? Steps::kHasOwn && !Steps::kHasRhos : call.advantages != nullptr)
      *step_of(static_cast<T*>(call.advantages), i) = cast<T>(advantage);
    if (kEven || call.targets) *step_of(static_cast<T*>(call.targets), i) = cast<T>(target);
    if (Steps::kHasRhos && (kEven || call.pg_advantages))
      *step_of(static_cast<T*>(call.pg_advantages), i) = cast<T>(pg);
  };
  const auto in_double = [&](auto& left) {
    const double power = static_power<kSteps>(call.carried);
    known.power = power;
    Acc carry;
    few_columns_carry<double>(steps, steps.template total<double>(known), power, left, carry);
    steps.results(known, carry, store);
  };
  __shared__ FewLeft<Wide, Steps::kHasRhos> left[kWarps][kColumns];
  if constexpr (sizeof(Wide) == 8) {
    in_double(left);
  } else {
    Prefixes<kSteps> prefixes;
    const auto segment = steps.total(known, prefixes);
    float carry;
    const bool in_range =
        few_columns_carry<float>(steps, segment, static_power<kSteps>(call.gate.value + call.gate.rest), left, carry);
    if constexpr (Steps::kHasRhos) {
      if (__builtin_expect(!in_range, 0)) {
        // To its own end: the common way's instructions stay together.
        __shared__ FewLeft<double, true> wide_left[kWarps][kColumns];
        in_double(wide_left);
        return;
      }
    }
    steps.results(known, prefixes, carry, store);
  }
}

}  // namespace dcs
