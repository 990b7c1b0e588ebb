// Gradients of contiguous rows by discounts that are numbers, on the way of the temporal difference scan
// (returns/flat_rows), from a row's first step on. The carry is the scan's result at the step before.
#pragma once

#include "returns/flat_rows/kernel.cuh"

namespace dcs {

template <typename T>
struct FlatGradientsParams : FlatReturnsParams<T> {
  ReturnsInput ends, lacks;  // of what `terminated` and `truncated` stand for (`as_scan`)
  bool has_both, of_targets, ends_lack, of_next_values;
  T* bootstrap_gradient;
  Strides of_bootstrap;
};

template <typename T>
FlatGradientsParams<T> flat_gradients_params(
    const ReturnsProblem& p, const FlatReturnsPlan& plan, void* workspace = nullptr, const CallTag& tag = {}) {
  return {flat_returns_params<T>(p, plan, workspace, tag), p.terminated, p.truncated, p.values.data != nullptr,
      p.of_targets, p.ends_lack, p.of_next_values, static_cast<T*>(p.bootstrap_gradient.data),
      p.bootstrap_gradient.strides};
}

// What a lane does with its steps, one pass for its total from nothing and one from what enters it (symbols:
// torch_dcs_ops/ops/returns/gradients.py).
template <typename T, int kVectors>
struct FlatGradientsLane : FlatLaneCuts<T, FlatForm::kGradients, kVectors> {
  using Cuts = FlatLaneCuts<T, FlatForm::kGradients, kVectors>;
  using Cuts::kVec, Cuts::kOwn, Cuts::kOwnBits;
  using Cuts::last_values, Cuts::lane, Cuts::cuts, Cuts::drops, Cuts::behind_row, Cuts::ends, Cuts::slice, Cuts::chunk;
  using typename Cuts::Acc;
  using Steps = Acc[kOwn];
  static constexpr bool kGoesBack = false, kShort = sizeof(T) == 2;
  using Wide = std::conditional_t<kShort, float, double>;

  const FlatGradientsParams<T>& p;
  // Bits, as `drops` of the step before each: its next value is not read, and it counts gamma, not what the next target
  // leaves of it; and the same of the steps themselves.
  uint32_t heavy;
  uint32_t lacks, weights;

  __device__ __forceinline__ FlatGradientsLane(
      const FlatGradientsParams<T>& given, const typename Cuts::Slice& of, unsigned char* rows)
      : Cuts(given, of, rows), p(given) {}

  // Flags of the step before the slice's first one, which is another warp's: bit 0, it ends; bit 1, it lacks v'.
  __device__ __forceinline__ uint32_t flags_before() const {
    const auto position = this->position_of(0);
    if (lane != 0 || position.done == 0 || position.row < 0 || position.row >= slice.tile.rows) return 0;
    const auto is_set = [&](const ReturnsInput& flags) {
      if (!flags.data) return 0u;
      const int64_t at = RowIndex(p.of_rows, slice.tile.row + position.row).offset(flags.strides) +
          (position.done - 1) * flags.strides.time;
      return static_cast<const uint8_t*>(flags.data)[at] ? 1u : 0u;
    };
    const uint32_t ends = is_set(p.ends);
    return ends | (p.ends_lack ? ends : is_set(p.lacks)) << 1;
  }
  __device__ __forceinline__ void find_cuts() {
    constexpr int kLast = kOwn - 1;
    const uint32_t first = flags_before(), of_steps = this->read_flags(p.slots.terminated, true);
    lacks = p.ends_lack ? of_steps : this->read_flags(p.slots.truncated, true);
    uint32_t before = __shfl_up_sync(0xffffffffu, (of_steps >> kLast & 1) | (lacks >> kLast & 1) << 1, 1);
    if (lane == 0) before = first;
    const uint32_t starts = ends << 1 | (this->position_of(lane * kOwn).done == 0 ? 1 : 0),
                   ended = of_steps << 1 | (before & 1);
    cuts = (ended | starts) & kOwnBits;
    // A row's last step is where the next one starts.
    drops = lacks << 1 | before >> 1 | (starts & kOwnBits);
    heavy = p.has_own_values ? ~0u : ended | starts;
    weights = p.has_own_values ? ~0u : of_steps | ends;
  }

  __device__ __forceinline__ Gate<Acc, kShort> gate() const {
    Gate<Acc, kShort> gate;
    if constexpr (kShort) gate = {p.gate};
    else gate = p.rates.gate;
    return gate;
  }
  // The lane's total from nothing, and in `steps` the sums.
  __device__ __forceinline__ Acc total(Steps& steps, double&) const {
    const Gate<Acc, kShort> of_step = gate();
    Acc y = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Acc given[kVec], other[kVec];
      this->template read<T>(p.slots.rewards, k, given);
      if (p.has_both) {
        this->template read<T>(p.slots.values, k, other);
#pragma unroll
        for (int j = 0; j < kVec; ++j) given[j] += other[j];
      }
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const int i = k * kVec + j;
        if (i > 0 && !(cuts >> i & 1)) given[j] = of_step.step(given[j], y);
        steps[i] = y = given[j];
      }
    }
    return y;
  }

  // The warp's segment, in its last lane, and what is known of the carry into each lane.
  __device__ __forceinline__ Segment<Wide> exchange(Wide total, Wide, FlatCarry<Wide>& carry) const {
    const uint32_t closed = __ballot_sync(0xffffffffu, cuts != 0), before = closed & ((1u << lane) - 1);
    const int reach = closed >> lane & 1 ? 0 : before ? lane - 31 + __clz(static_cast<int>(before)) : lane;
    const auto power = [&](int j) {
      if constexpr (kShort) return p.short_powers[j];
      else return p.powers[j];
    };
    carry.weight = 1;
#pragma unroll
    for (int j = 0; j < 5; ++j) {
      const int d = 1 << j;
      const Wide other = shuffle_up(total, d);
      if (reach >= d) total = fold(total, power(j), other);
      if (lane & d) carry.weight *= power(j);
    }
    carry.weight = this->bounded_weight(carry.weight, power(0));
    carry.before = shuffle_up(total, 1);
    if (lane == 0) carry.before = 0;
    carry.enters = before == 0;
    return {total, power(5), closed != 0};
  }

  // The gradient of v', by bits of its step.
  __device__ __forceinline__ Acc of_next(uint32_t dropped, uint32_t is_heavy, int i, Acc base) const {
    return dropped >> i & 1 ? Acc(0) : (is_heavy >> i & 1 ? p.rates.gamma : p.rates.rest) * base;
  }
  // The gradients from the carry into the lane, in the place of operands.
  __device__ __forceinline__ void finish(Steps& steps, Acc carry) const {
    Acc y = carry;
    // Up to the first cut the carry comes in; a power of a number below 1 is no larger than its steps' products.
    const uint32_t open = cuts ? (cuts & (0u - cuts)) - 1 : ~0u;
    Acc powers[kVec];
    if constexpr (kShort) {
      powers[0] = p.gate;
#pragma unroll
      for (int j = 1; j < kVec; ++j) powers[j] = powers[0] * powers[j - 1];
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const Acc power = kShort ? powers[i % kVec] : p.step_powers[i];
      if (open >> i & 1) steps[i] = fold(steps[i], power, y);
      if (kShort && i % kVec == kVec - 1) y *= power;
    }
    Acc before = carry;
    int row = behind_row - __popc(ends);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Acc of_values[kVec], of_rewards[kVec], of_nexts[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) of_values[j] = 0;
      if (p.has_own_values && p.of_targets) this->template read<T>(p.slots.rewards, k, of_values);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const int i = k * kVec + j;
        of_rewards[j] = steps[i];
        if (p.has_own_values) of_values[j] -= steps[i];
        if (!p.of_next_values) of_values[j] += of_next(drops, heavy, i, before);
        before = steps[i];
        of_nexts[j] = of_next(lacks, weights, i, steps[i]);
        if (p.bootstrap_gradient && ends >> i & 1) {
          if (row >= 0 && row < slice.tile.rows) last_values[row] = of_nexts[j];
          ++row;
        }
      }
      if (p.slots.advantages >= 0) chunk(p.slots.advantages, k) = pack<Acc, T, kVec>(of_rewards);
      if (p.slots.targets >= 0) chunk(p.slots.targets, k) = pack<Acc, T, kVec>(of_values);
      if (p.slots.pg_advantages >= 0) chunk(p.slots.pg_advantages, k) = pack<Acc, T, kVec>(of_nexts);
    }
    if (p.bootstrap_gradient) store_bootstrap_gradients();
  }
  // Of the rows that end in the slice, from shared memory.
  __device__ __forceinline__ void store_bootstrap_gradients() const {
    __syncwarp();
    const int begin = max(this->position_of(0).row, 0),
              end = min(this->position_of(Cuts::Slice::kSteps).row, slice.tile.rows);
#pragma unroll 1
    for (int row = begin + lane; row < end; row += 32)
      p.bootstrap_gradient[RowIndex(p.of_rows, slice.tile.row + row).offset(p.of_bootstrap)] =
          cast<T>(last_values[row]);
  }
};

template <typename T, int kVectors>
__global__ void __launch_bounds__(32 * flat_returns_warps(FlatForm::kGradients), kFlatReturnsBlocks)
    flat_gradients_kernel(const __grid_constant__ FlatGradientsParams<T> p) {
  run_flat_rows<FlatGradientsLane<T, kVectors>, flat_returns_warps(FlatForm::kGradients)>(p);
}

}  // namespace dcs
