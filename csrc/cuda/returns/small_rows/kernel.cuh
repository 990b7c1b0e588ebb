// Small temporal difference scans of contiguous time, whose time is latency: one trip to memory, one exchange, one trip
// back, as in the scans' small rows (scan/rows/small_rows.cuh). A thread has some neighboring steps in registers, and
// asks for all that they need at once, in words where memory has them, else element by element. A block takes some
// whole rows, a cluster of blocks a longer one. The scan's first step is a row's last: the value of the next state is
// the one of the step before it in the scan, of the neighboring lane's where it is the thread's first.
#pragma once

#include <cstddef>

#include "common/ptx/dependent_launch.cuh"
#include "common/ptx/latency.cuh"
#include "returns/small_rows/params.cuh"
#include "returns/tile_columns/steps.cuh"
#include "scan/carry/warp_segments.cuh"
#include "scan/rows/small_lanes.cuh"

namespace dcs {

// What a thread asks memory for, all at once.
template <typename T, int kCount>
struct SmallReturnsAsked {
  Asked<T, kCount> rewards, values, rhos;
  Asked<T, kCount> next;  // next states' values; or what is behind the rows that end here
  Asked<uint8_t, kCount> terminated, truncated;
  Asked<T, 1> behind;  // the value of the step behind the warp's first one
};

// What a thread makes of its steps.
template <typename T, ColumnForm kForm, int kCount>
struct SmallReturns : TileSteps<T, kForm, kCount, SmallReturnsParams<typename Types<T>::Acc>> {
  using Params = SmallReturnsParams<typename Types<T>::Acc>;
  using Steps = TileSteps<T, kForm, kCount, Params>;
  using Steps::kGates;
  using Steps::rates, Steps::results, Steps::cuts, Steps::drops, Steps::values, Steps::rhos;
  using typename Steps::Acc;
  using Elements = SmallElements<kCount, Params>;

  const Params& p;
  const Elements& mine;
  const int lane = threadIdx.x % 32;
  uint32_t lasts = 0;  // bits: a row's last step

  __device__ __forceinline__ SmallReturns(const Params& params, const Elements& at)
      : Steps(params), p(params), mine(at) {
    rates = p.rates;
    mine.each([&](int i, int, int done) { lasts |= (done == 0 ? 1u : 0u) << i; });
  }

  // Flags last, and looked at first (get): one by one they have a register each.
  __device__ __forceinline__ void ask(const T* first, SmallReturnsAsked<T, kCount>& asked) const {
    mine.ask(p.rewards, first, asked.rewards);
    if (p.values.data) mine.ask(p.values, mine.template first_of<T>(p.values), asked.values);
    if (p.next_values.data) mine.ask(p.next_values, mine.template first_of<T>(p.next_values), asked.next);
    else ask_behind(asked);
    if constexpr (kGates) mine.ask(p.rhos, mine.template first_of<T>(p.rhos), asked.rhos);
    if (p.terminated.data) ask_flags(p.terminated, asked.terminated);
    if (p.truncated.data) ask_flags(p.truncated, asked.truncated);
  }
  __device__ __forceinline__ void ask_behind(SmallReturnsAsked<T, kCount>& asked) const {
    if (p.values.data)
      asked.behind.load(lane == 0 && mine.has(0) && mine.done > 0, mine.template first_of<T>(p.values, 1), 0);
    if (!p.bootstrap.data) return;
    mine.each([&](int i, int row, int) {
      if (lasts >> i & 1)
        asked.next.load(mine.has(i), static_cast<const T*>(p.bootstrap.data) + mine.offset(p.bootstrap, row), i);
    });
  }
  __device__ __forceinline__ void ask_flags(const SmallOperand& flags, Asked<uint8_t, kCount>& asked) const {
    mine.ask(flags, mine.template first_of<uint8_t>(flags), asked);
  }

  // Bits, in the order of the scan.
  __device__ __forceinline__ uint32_t bits_of(const SmallOperand& flags, const Asked<uint8_t, kCount>& asked) const {
    uint32_t bits = 0;
    if (flags.in_words && mine.is_word) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) bits |= flag_bits(asked.words[i / 4]) << i;
      return __brev(bits) >> (32 - kCount);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits |= (asked.words[i] != 0 ? 1u : 0u) << i;
    return bits;
  }
  // Waits for memory; then the steps' differences are there.
  __device__ __forceinline__ void get(const SmallReturnsAsked<T, kCount>& asked) {
    drops = bits_of(p.terminated, asked.terminated);
    this->set_flags(bits_of(p.truncated, asked.truncated), lasts);
    Acc rewards[kCount], own[kCount], next[kCount];
    mine.get(p.rewards, asked.rewards, rewards);
    mine.get(p.values, asked.values, own);
    mine.get(p.next_values, asked.next, next);
    if constexpr (kGates) {
      Acc ratios[kCount];
      mine.get(p.rhos, asked.rhos, ratios);
#pragma unroll
      for (int i = 0; i < kCount; ++i) rhos.set(i, cast<T>(ratios[i]));
    }
    const bool has_next = p.next_values.data;
    // A value that is not there is 0, also beside a gamma that is infinite in Acc.
    if (!has_next && !p.values.data) drops |= ~lasts;
    if (!has_next && !p.bootstrap.data) drops |= lasts;
    Acc behind = shuffle_up(own[kCount - 1], 1);
    if (lane == 0) behind = cast<Acc>(asked.behind[0]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Acc following = has_next || lasts >> i & 1 ? next[i] : behind;
      this->set_step(i, rewards[i], p.has_own_values, own[i], following, Acc(1), Acc(1));
      values.set(i, cast<T>(own[i]));
      behind = own[i];
    }
  }

  // The thread's segment from nothing.
  __device__ __forceinline__ Segment<double> segment() const {
    Acc y = 0, factors[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto step = this->step_of(i);
      y = i == 0 || step.is_cut ? step.delta : this->gated(step.delta, step.factor * y);
      factors[i] = step.factor;
    }
    Segment<double> segment{static_cast<double>(y), 1.0, false};
    if constexpr (kGates) segment.gates = power_mul(product_of(factors), p.powers[0]);
    return segment;
  }

  // From what enters the thread.
  __device__ __forceinline__ void finish(Acc y, unsigned char* shared) {
    Acc of_policy[kCount], targets[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      of_policy[i] = this->finish_step(i, y);
      targets[i] = this->target_of(i);
    }
    store(p.advantages, results, shared);
    store(p.targets, targets, shared);
    if constexpr (kGates) store(p.pg_advantages, of_policy, shared);
  }
  __device__ __forceinline__ void store(
      const SmallOperand& to, const Acc (&numbers)[kCount], unsigned char* shared) const {
    if (!to.data) return;
    mine.template store<T>(to, numbers, shared);
    __syncwarp();
  }
};

template <typename T, ColumnForm kForm, int kCount>
__global__ void __launch_bounds__(32 * kSmallReturnsWarps, 1)
    small_returns_rows_kernel(const __grid_constant__ SmallReturnsParams<typename Types<T>::Acc> p) {
  using Returns = SmallReturns<T, kForm, kCount>;
  extern __shared__ __align__(128) unsigned char small_returns_shared[];
  __shared__ WarpSegments<1, kSmallReturnsWarps, kMostRowCluster> segments;
  launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = static_cast<int>(p.cluster.divisor);
  const typename Returns::Elements mine(p);
  if (blocks > 1) segments.init(1, mine.rank);
  Returns returns(p, mine);
  const T* first = mine.template first_of<T>(p.rewards);
  constexpr size_t kAsked = offsetof(SmallReturnsParams<typename Returns::Acc>, rates);
  if (lines_are_zero<0, kAsked>(p, p.rows | static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first)))) return;
  griddepcontrol_wait();

  SmallReturnsAsked<T, kCount> asked;
  returns.ask(first, asked);
  if (lines_are_zero<kAsked, sizeof p>(p, p.rows)) return;
  if (blocks > 1) segments.wait_for_others();
  returns.get(asked);
  Segment<double> segment = returns.segment();
  const uint32_t closed = __ballot_sync(0xffffffffu, returns.cuts != 0);
  const auto times = [](double a, double b) { return power_mul(a, b); };
  double weight = 1.0;  // of what enters the warp in what enters the lane
  if constexpr (!Returns::kGates) weight = weight_of_lane(p.powers, p.rates.carried);
  const double before = fold_small_lanes<Returns::kGates>(p, closed, times, segment, weight);
  double carry = 0.0;
  if (p.crosses_warps) {
    if (lane == 31) segments.of_warps[warp][0] = segment;
    if (!Returns::kGates && threadIdx.x == 31) segments.over_warp[0] = segment.gates;
    carry = segments.template carry<!Returns::kGates>(0, 1, mine.rank, blocks, times);
  }
  const double entering = closed & ((1u << lane) - 1) ? before : fold(before, weight, carry);
  returns.finish(static_cast<typename Returns::Acc>(entering), small_returns_shared);
}

}  // namespace dcs
