// Gradients of contiguous rows on the way of the temporal difference scan (returns/flat_rows), from a row's first step
// on. The carry is the scan's result at the step before.
#pragma once

#include "returns/flat_rows/kernel.cuh"
#include "returns/gradients/weights.cuh"

namespace dcs {

template <typename T>
struct FlatGradientsParams : FlatReturnsParams<T> {
  // What `terminated`, `truncated`, ratios and next values stand for (`as_scan`).
  ReturnsInput ends, lacks, rhos, of_pg;
  bool has_both, of_targets, ends_lack, of_next_values;
  T* bootstrap_gradient;
  Strides of_bootstrap;
};

template <typename T>
FlatGradientsParams<T> flat_gradients_params(
    const ReturnsProblem& p, const FlatReturnsPlan& plan, void* workspace = nullptr, const CallTag& tag = {}) {
  return {flat_returns_params<T>(p, plan, workspace, tag), p.terminated, p.truncated, p.rhos, p.next_values,
      p.values.data != nullptr, p.of_targets, p.ends_lack, p.of_next_values, static_cast<T*>(p.bootstrap_gradient.data),
      p.bootstrap_gradient.strides};
}

// What a lane does with its steps, one pass for its total from nothing and one from what enters it (symbols:
// torch_dcs_ops/ops/returns/gradients.py).
template <typename T, FlatForm kForm, int kVectors>
struct FlatGradientsLane : FlatLaneCuts<T, kForm, kVectors> {
  using Cuts = FlatLaneCuts<T, kForm, kVectors>;
  using Cuts::kAll, Cuts::kRows, Cuts::kSteps, Cuts::kFactors, Cuts::kVec, Cuts::kOwn, Cuts::kOwnBits;
  using Cuts::last_values, Cuts::lane, Cuts::cuts, Cuts::behind_row, Cuts::ends, Cuts::slice, Cuts::chunk, Cuts::here;
  using typename Cuts::Acc;
  using typename Cuts::Factors;
  static constexpr bool kGoesBack = false, kShort = sizeof(T) == 2;
  using Wide = std::conditional_t<kShort && !kFactors && !kRows, float, double>;
  // The sums from nothing; where gates differ, what each step adds, or nothing.
  using Steps = Acc[kAll ? 1 : kOwn];

  const FlatGradientsParams<T>& p;
  // Bits: the next state's value is not read; it counts gamma, not what the next target leaves of it.
  uint32_t lacks, heavy;

  // Of the step before the lane's first one, in lane 0 another warp's. Flags: bit 0, it ends; bit 1, it lacks v'; once
  // cuts are found bit 0 alone, that v' of it counts for nothing here.
  struct Before {
    uint32_t flags = 0;
    Acc ratio = 1, of_pg = 0, gamma = 1, trace = 1;
  };
  Before before;

  __device__ __forceinline__ FlatGradientsLane(
      const FlatGradientsParams<T>& given, const typename Cuts::Slice& of, unsigned char* rows)
      : Cuts(given, of, rows), p(given) {}

  __device__ __forceinline__ void find_rows() {
    Cuts::find_rows();
    const auto position = this->position_of(0);
    if (lane != 0 || position.done == 0 || position.row < 0 || position.row >= slice.tile.rows) return;
    const RowIndex row(p.of_rows, slice.tile.row + position.row);
    const auto read = [&](const ReturnsInput& from, auto otherwise) {
      if (!from.data) return otherwise;
      return static_cast<const decltype(otherwise)*>(
          from.data)[row.offset(from.strides) + (position.done - 1) * from.strides.time];
    };
    const auto of_step = [&](const ReturnsDiscount& rate) {
      return rate.kind == GammaKind::kStep ? read(rate.tensor, Acc(1)) : Acc(1);
    };
    const uint8_t is_end = read(p.ends, uint8_t{}), is_lacking = p.ends_lack ? is_end : read(p.lacks, uint8_t{});
    if constexpr (kAll)
      before = {0, cast<Acc>(read(p.rhos, cast<T>(Acc(1)))), cast<Acc>(read(p.of_pg, T{})), of_step(p.gamma),
          of_step(p.trace)};
    if constexpr (kSteps) before.gamma = of_step(p.gamma);
    before.flags = (is_end ? 1u : 0u) | (is_lacking ? 2u : 0u);
  }
  // The same of other lanes, from the slice.
  __device__ __forceinline__ void find_factors_before() {
    if (lane == 0) return;
    const auto read = [&](int slot, auto otherwise) {
      if (slot < 0) return cast<Acc>(otherwise);
      return cast<Acc>(reinterpret_cast<const decltype(otherwise)*>(here + slot)[lane * kOwn - 1]);
    };
    if constexpr (kSteps) {
      before.gamma = read(p.slots.gamma, Acc(1));
      return;
    }
    before = {before.flags, read(p.slots.rhos, cast<T>(Acc(1))), read(p.slots.next_values, T{}),
        read(p.slots.gamma, Acc(1)), read(p.slots.trace, Acc(1))};
  }

  __device__ __forceinline__ void find_cuts() {
    constexpr int kLast = kOwn - 1;
    const uint32_t of_steps = this->read_flags(p.slots.terminated, true);
    lacks = p.ends_lack ? of_steps : this->read_flags(p.slots.truncated, true);
    const uint32_t flags = __shfl_up_sync(0xffffffffu, (of_steps >> kLast & 1) | (lacks >> kLast & 1) << 1, 1);
    if (lane != 0) before.flags = flags;
    if constexpr (kFactors) find_factors_before();
    const uint32_t starts = ends << 1 | (this->position_of(lane * kOwn).done == 0 ? 1 : 0);
    cuts = (of_steps << 1 | (before.flags & 1) | starts) & kOwnBits;
    // Nothing of a row is another's.
    before.flags = (before.flags >> 1 | starts) & 1;
    heavy = p.has_own_values ? ~0u : of_steps | ends;
  }

  // The discounts of the row at hand, from the lane's first step on.
  struct RowCursor : Cuts::RowRates {
    using Rates = typename Cuts::RowRates;
    using Rates::gamma, Rates::rest, Rates::trace, Rates::gate;
    const FlatGradientsLane& at;
    int row;
    __device__ __forceinline__ explicit RowCursor(const FlatGradientsLane& of)
        : at(of), row(of.behind_row - __popc(of.ends)) {
      gamma = at.p.rates.gamma;
      rest = at.p.rates.rest;
      trace = at.p.rates.trace;
      if constexpr (kShort) gate = {at.p.gate};
      else gate = at.p.rates.gate;
      if constexpr (kRows) this->take(at, row);
      if constexpr (kAll) {
        if (at.p.row_rates) this->take(at, row);
      }
    }
    // From the lane's step before.
    __device__ __forceinline__ void move_to(int step) {
      if constexpr (kAll || kRows) {
        if ((kRows || at.p.row_rates) && step > 0 && at.ends >> (step - 1) & 1) ++row, this->take(at, row);
      }
    }
    // Those of a vector's steps. Few vectors have steps of two rows: a question a step would take longer.
    __device__ __forceinline__ void of_vector(int k, Rates (&to)[kVec]) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) to[j] = *this;
      if constexpr (kRows) {
        if (!(at.ends << 1 >> (k * kVec) & Cuts::kVecBits)) return;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          move_to(k * kVec + j);
          to[j] = *this;
        }
      }
    }
  };

  using Weights = std::conditional_t<kSteps, GammaWeights<Acc>, GradientWeights<Acc>>;
  __device__ __forceinline__ Weights weights_of(Acc rho, Acc of_pg, Acc gamma, Acc trace) const {
    if constexpr (kSteps) return {gamma};
    else return all_weights_of(rho, of_pg, gamma, trace);
  }
  __device__ __forceinline__ GradientWeights<Acc> all_weights_of(Acc rho, Acc of_pg, Acc gamma, Acc trace) const {
    const Acc policy = p.slots.next_values >= 0 ? clipped(rho, p.clip_pg) * of_pg : Acc(0);
    return gradient_weights(clipped(rho, p.clip_rho), clipped(rho, p.clip_c), policy, gamma * trace);
  }
  __device__ __forceinline__ Weights weights_before() const {
    return weights_of(before.ratio, before.of_pg, before.gamma, before.trace);
  }
  __device__ __forceinline__ Acc of_next(bool is_lacking, bool is_heavy, const typename Cuts::RowRates& rows,
      Acc step_gamma, Acc step_trace, Acc base) const {
    Acc gamma = rows.gamma, rest = rows.rest;
    if constexpr (kSteps) {
      gamma = step_gamma;
      rest = gamma - gamma * rows.trace;
    }
    if constexpr (kAll) {
      gamma *= step_gamma;
      const Acc of_step = gamma - gamma * (rows.trace * step_trace);
      if (p.slots.gamma >= 0 || p.slots.trace >= 0) rest = of_step;
    }
    return is_lacking ? Acc(0) : (is_heavy ? gamma : rest) * base;
  }

  // The gradients of a vector's sums.
  __device__ __forceinline__ void read_given(int k, Acc (&first)[kVec], Acc (&sum)[kVec]) const {
    if (kAll && p.slots.rewards < 0) this->fill(first, 0);
    else this->template read<T>(p.slots.rewards, k, first);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum[j] = first[j];
    if (!p.has_both) return;
    Acc other[kVec];
    this->template read<T>(p.slots.values, k, other);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum[j] += other[j];
  }
  __device__ __forceinline__ void read_all_factors(int k, Factors& factors, Acc (&of_pg)[kVec]) const {
    this->read_factors(k, factors);
    this->fill(of_pg, 0);
    if (kAll && p.slots.next_values >= 0) this->template read<T>(p.slots.next_values, k, of_pg);
  }

  // The lane's total from nothing, in `steps` the sums; in `gates` what takes a carry over it where gates differ.
  __device__ __forceinline__ Acc total(Steps& steps, double& gates) const {
    if constexpr (kFactors) return total_of_factors(steps, gates);
    RowCursor rows(*this);
    Acc y = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Acc first[kVec], given[kVec];
      read_given(k, first, given);
      typename Cuts::RowRates rates[kVec];
      rows.of_vector(k, rates);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const int i = k * kVec + j;
        if (i > 0 && !(cuts >> i & 1)) given[j] = rates[j].gate.step(given[j], y);
        steps[kAll ? 0 : i] = y = given[j];
      }
    }
    return y;
  }
  __device__ __forceinline__ Acc total_of_factors(Steps& steps, double& gates) const {
    RowCursor rows(*this);
    Weights last = weights_before();
    Acc y = 0, product = 1;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Acc first[kVec], given[kVec], of_pg[kVec];
      read_given(k, first, given);
      Factors factors;
      read_all_factors(k, factors, of_pg);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const int i = k * kVec + j;
        rows.move_to(i);
        if constexpr (kSteps) steps[i] = given[j];
        const Acc carried = i == 0 ? last.carried : last.carry(y), next = rows.gate.step(given[j], carried);
        y = cuts >> i & 1 ? given[j] : next;
        product *= last.factor;
        last = weights_of(factors.ratios[j], of_pg[j], factors.gammas[j], factors.traces[j]);
      }
    }
    const double wide = cuts == 0 && !in_range(product) ? careful_product() : static_cast<double>(product);
    gates = power_mul(wide, row_power());
    return y;
  }
  // Over the lane's steps, where they are one row's.
  __device__ __forceinline__ double row_power() const {
    if (kSteps || (kAll && !p.row_rates)) return p.powers[0];
    const int row = this->clamped_row(behind_row - __popc(ends));
    return whole_power(carried_by(this->own_rows[row].gate), static_cast<unsigned>(kOwn));
  }
  // The product of the factors into the lane's steps, of which one in Acc has left its range.
  __device__ __forceinline__ double careful_product() const {
    double product = static_cast<double>(weights_before().factor);
#pragma unroll 1
    for (int k = 0; k < kVectors; ++k) {
      Factors factors;
      this->read_factors(k, factors);
      Acc of_steps[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) of_steps[j] = this->factor(factors, j);
      product = Cuts::careful_product(product, of_steps, min(kVec, kOwn - 1 - k * kVec));
    }
    return product;
  }

  // The warp's segment, in its last lane, and what is known of the carry into each lane.
  __device__ __forceinline__ Segment<Wide> exchange(Wide total, Wide gates, FlatCarry<Wide>& carry) const {
    const uint32_t closed = __ballot_sync(0xffffffffu, cuts != 0), ahead = closed & ((1u << lane) - 1);
    const int reach = closed >> lane & 1 ? 0 : ahead ? lane - 31 + __clz(static_cast<int>(ahead)) : lane;
    if constexpr (kRows && !kFactors) gates = row_power();
    this->template fold_lanes<kGoesBack>(reach, total, gates, carry);
    carry.enters = ahead == 0;
    return {total, gates, closed != 0};
  }

  // The gradients from the carry into the lane, in the place of operands.
  __device__ __forceinline__ void finish(Steps& steps, Acc carry) const {
    if constexpr (!kFactors) add_carry(steps, carry);
    // Twice the code where a step's weight is made of what it has of its own.
    if constexpr (!kRows && !kSteps) finish_in(steps, carry, p.has_own_values);
    else if (p.has_own_values) finish_in(steps, carry, std::true_type{});
    else finish_in(steps, carry, std::false_type{});
  }
  template <typename Owns>
  __device__ __forceinline__ void finish_in(Steps& steps, Acc carry, Owns owns) const {
    constexpr bool kOwns = std::is_same_v<Owns, std::true_type>;
    RowCursor rows(*this);
    Weights last{};
    Acc base = carry, y = carry;
    if constexpr (kFactors) last = weights_before(), base = last.base(y);
    Acc after = of_next(before.flags, owns || (cuts & 1), rows, before.gamma, before.trace, base);
    int row = behind_row - __popc(ends);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Acc given[kVec], of_values[kVec], of_rewards[kVec], of_nexts[kVec], of_pg[kVec];
      Factors factors;
      if constexpr (kAll) {
        read_given(k, of_values, given);
        read_all_factors(k, factors, of_pg);
        if (!owns || !p.of_targets) this->fill(of_values, 0);
      } else {
        if constexpr (kSteps) read_all_factors(k, factors, of_pg);
        this->fill(of_values, 0);
        if (owns && p.of_targets) this->template read<T>(p.slots.rewards, k, of_values);
      }
      typename Cuts::RowRates rates[kVec];
      if constexpr (!kAll) rows.of_vector(k, rates);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const int i = k * kVec + j;
        if constexpr (kAll) {
          rows.move_to(i);
          rates[j] = rows;
        }
        if constexpr (kFactors) {
          const Acc adds = kAll ? given[j] : steps[kAll ? 0 : i], next = rates[j].gate.step(adds, last.carry(y));
          y = cuts >> i & 1 ? adds : next;
          last = weights_of(factors.ratios[j], of_pg[j], factors.gammas[j], factors.traces[j]);
          base = last.base(y);
        } else {
          base = steps[i];
        }
        of_rewards[j] = base;
        if (owns) of_values[j] -= base;
        if (!p.of_next_values) of_values[j] += after;
        Acc gamma = 1, trace = 1;
        if constexpr (kFactors) gamma = factors.gammas[j];
        if constexpr (kAll) trace = factors.traces[j];
        of_nexts[j] = of_next(lacks >> i & 1, kOwns || (heavy >> i & 1), rates[j], gamma, trace, base);
        after = ends >> i & 1 ? Acc(0) : of_nexts[j];
      }
      if (p.bootstrap_gradient && ends >> (k * kVec) & Cuts::kVecBits) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          if (!(ends >> (k * kVec + j) & 1)) continue;
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
  // Up to the first cut the carry comes in; a power of a number below 1 is no larger than its steps' products.
  __device__ __forceinline__ void add_carry(Steps& steps, Acc y) const {
    const uint32_t open = cuts ? (cuts & (0u - cuts)) - 1 : ~0u;
    if constexpr (kRows) {
      const Gate<Acc> gate = this->own_rows[this->clamped_row(behind_row - __popc(ends))].gate;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        y = kShort ? gate.value * y : gate.step(0, y);
        if (open >> i & 1) steps[i] += y;
      }
    }
#pragma unroll
    for (int i = 0; !kRows && i < kOwn; ++i) {
      const Acc power = p.step_powers[kShort ? i % kVec : i];
      if (open >> i & 1) steps[kAll ? 0 : i] = fold(steps[kAll ? 0 : i], power, y);
      if (kShort && i % kVec == kVec - 1) y *= power;
    }
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

template <typename T, FlatForm kForm, int kVectors>
__global__ void __launch_bounds__(32 * flat_returns_warps(kForm), kFlatReturnsBlocks)
    flat_gradients_kernel(const __grid_constant__ FlatGradientsParams<T> p) {
  run_flat_rows<FlatGradientsLane<T, kForm, kVectors>, flat_returns_warps(kForm)>(p);
}

}  // namespace dcs
