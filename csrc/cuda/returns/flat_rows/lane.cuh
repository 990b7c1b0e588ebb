// What a lane does with its steps of a slice (slice.cuh): one pass back in time from nothing for its total, one from
// what enters it for the results. Between the two, totals go from lane to lane, as far as the nearest cut: a row's last
// step, or an episode's.
#pragma once

#include "returns/flat_rows/cuts.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

template <typename T, FlatForm kForm, int kVectors>
struct FlatLane : FlatLaneCuts<T, kForm, kVectors> {
  using Cuts = FlatLaneCuts<T, kForm, kVectors>;
  using Cuts::Cuts, Cuts::kAll, Cuts::kRows, Cuts::kSteps, Cuts::kRatios, Cuts::kFactors, Cuts::kKnownOwn, Cuts::kVec,
      Cuts::kOwn, Cuts::kVecBits;
  using Cuts::p, Cuts::here, Cuts::last_values, Cuts::own_rows, Cuts::lane, Cuts::behind_row, Cuts::ends, Cuts::cuts,
      Cuts::drops, Cuts::has_own, Cuts::clamped_row, Cuts::chunk, Cuts::keep, Cuts::read_factors, Cuts::factor;
  using typename Cuts::Acc;
  using typename Cuts::Factors;
  using typename Cuts::Slice;
  static constexpr bool kGoesBack = true;
  using Steps = Acc[kOwn];
  using typename Cuts::StepGate;
  // What floats lose between lanes is far below what half precision keeps, too.
  static constexpr bool kShort = sizeof(T) == 2;
  using Wide = std::conditional_t<kShort && !kFactors && !kRows, float, double>;

  __device__ __forceinline__ void find_cuts() {
    const uint32_t terminates = this->read_flags(p.slots.terminated, p.terminated_is_bool),
                   flags = terminates | this->read_flags(p.slots.truncated, p.truncated_is_bool);
    cuts = flags | ends;
    drops = p.is_shifted ? flags : terminates;
    // Without values there are those behind rows.
    if (!kKnownOwn && p.has_no_values) drops |= ~ends;
    if constexpr (!kKnownOwn && !kAll && !kSteps) {
      if (p.rest_is_nothing) drops |= ~cuts;
      if (p.gamma_is_nothing) drops |= cuts;
    }
  }

  // The discounts of the row at hand, from the lane's last step back.
  struct RowCursor : Cuts::RowRates {
    using Rates = typename Cuts::RowRates;
    using Rates::gamma, Rates::rest, Rates::trace, Rates::gate;
    const FlatLane& at;
    int row;
    __device__ __forceinline__ explicit RowCursor(const FlatLane& of) : at(of), row(of.behind_row) {
      if constexpr (kRows) {
        enter();
        return;
      }
      gamma = at.p.rates.gamma;
      rest = at.p.rates.rest;
      if constexpr (kShort) gate = {at.p.gate};
      else gate = at.p.rates.gate;
      if constexpr (!kSteps) at.keep(gamma);
      if constexpr (!kKnownOwn && !kSteps) at.keep(rest);
      at.keep(gate.value);
      if constexpr (std::is_same_v<StepGate, Gate<float>>) at.keep(gate.rest);
      if constexpr (kAll || kSteps) trace = at.p.rates.trace;
      if constexpr (kAll) {
        if (at.p.row_rates) enter();
      }
    }
    __device__ __forceinline__ void enter() { this->take(at, row); }
    __device__ __forceinline__ void move_to(int step) {
      if constexpr (kRows) {
        if (at.ends >> step & 1) --row, enter();
      } else if constexpr (kAll) {
        if (at.p.row_rates && at.ends >> step & 1) --row, enter();
      }
    }
  };

  // The lane's total from nothing; in `gates` what takes a carry over it where it has no cut and gates differ. In
  // `steps` what each step adds or, where gates do not differ, the sums from nothing.
  __device__ __forceinline__ Acc total(Steps& steps, double& gates) const {
    // Twice the code is worth it in few forms, and in double; four times where a step's weight is made of its own
    // gamma.
    const auto either = [&](auto owns) {
      return p.is_shifted ? total_in(steps, gates, std::true_type{}, owns)
                          : total_in(steps, gates, std::false_type{}, owns);
    };
    if constexpr (kRows || (kAll && sizeof(T) < 8)) return total_in(steps, gates, p.is_shifted, has_own());
    else if constexpr (kSteps) return has_own() ? either(std::true_type{}) : either(std::false_type{});
    else return either(has_own());
  }
  template <typename Shifted, typename Owns>
  __device__ __forceinline__ Acc total_in(Steps& steps, double& gates, Shifted is_shifted, Owns owns) const {
    RowCursor rows(*this);
    Acc y = 0, product = 1, after = 0;
    int row = behind_row;
    if (is_shifted) after = cast<Acc>(reinterpret_cast<const T*>(here + p.slots.values)[(lane + 1) * kOwn]);
#pragma unroll
    for (int k = kVectors - 1; k >= 0; --k) {
      Acc rewards[kVec], values[kVec] = {}, next[kVec];
      this->template read<T>(p.slots.rewards, k, rewards);
      if (is_shifted || owns) this->template read<T>(p.slots.values, k, values);
      if (is_shifted) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) next[j] = j + 1 < kVec ? values[(j + 1) % kVec] : after;
        after = values[0];
      } else {
        this->template read<T>(p.slots.next_values, k, next);
      }
      Factors factors;
      read_factors(k, factors);
      if (is_shifted && (ends >> (k * kVec) & kVecBits)) {
        // Rewards have the values behind rows added to them: else each step would choose what it adds.
        RowCursor there = rows;
#pragma unroll
        for (int j = kVec - 1; j >= 0; --j) {
          const int i = k * kVec + j;
          if (!(ends >> i & 1)) continue;
          if constexpr (kRows) {
            --row;
            if (!(drops >> i & 1)) rewards[j] += last_values[clamped_row(row)];
            continue;
          }
          there.move_to(i);
          const Acc value = last_values[clamped_row(--row)];
          if (!leaves_out(there, factors, i, drops, owns)) rewards[j] += weight_of(there, factors, i, owns) * value;
        }
      }
#pragma unroll
      for (int j = kVec - 1; j >= 0; --j) {
        const int i = k * kVec + j;
        const bool is_cut = i == kOwn - 1 || cuts >> i & 1;
        rows.move_to(i);
        Acc difference = rewards[j];
        if (!leaves_out(rows, factors, i, is_shifted ? drops | ends : drops, owns))
          difference += weight_of(rows, factors, i, owns) * next[j];
        if (owns) difference -= values[j];
        if constexpr (kFactors) {
          steps[i] = difference;
          const Acc own_factor = factor(factors, j), delta = weighed(difference, factors, j);
          product *= own_factor;
          const Acc next = rows.gate.step(delta, own_factor * y);
          y = is_cut ? delta : next;
        } else {
          if (!is_cut) difference = rows.gate.step(difference, y);
          steps[i] = y = difference;
        }
      }
    }
    if constexpr (kFactors) {
      double power = p.powers[0];
      if constexpr (kAll) {
        if (p.row_rates) power = row_power();
      }
      if constexpr (kRows) power = row_power();
      gates = power_mul(cuts == 0 && !in_range(product) ? careful_product() : static_cast<double>(product), power);
    }
    return y;
  }
  // Over the lane's steps, where they are one row's.
  __device__ __forceinline__ double row_power() const {
    return whole_power(carried_by(own_rows[clamped_row(behind_row)].gate), static_cast<unsigned>(kOwn));
  }
  // A step's difference in what is carried.
  __device__ __forceinline__ Acc weighed(Acc difference, const Factors& factors, int j) const {
    if constexpr (kRatios) return difference * clipped(factors.ratios[j], p.clip_rho);
    return difference;
  }
  // Of the next state's value.
  template <typename Owns>
  __device__ __forceinline__ Acc weight_of(const RowCursor& rows, const Factors& factors, int i, Owns owns) const {
    const bool takes_all = (!kRows && owns) || (cuts >> i & 1);
    Acc gamma = rows.gamma, rest = rows.rest;
    if constexpr (kSteps) {
      gamma = factors.gammas[i % kVec];
      rest = gamma - gamma * rows.trace;
    }
    if constexpr (kAll) {
      // Discounts that are no step's are 1 in `factors`, those of steps in `rows`.
      gamma *= factors.gammas[i % kVec];
      const Acc of_step = gamma - gamma * (rows.trace * factors.traces[i % kVec]);
      if (p.slots.gamma >= 0 || p.slots.trace >= 0) rest = of_step;
    }
    return takes_all ? gamma : rest;
  }
  template <typename Owns>
  __device__ __forceinline__ bool leaves_out(
      const RowCursor& rows, const Factors& factors, int i, uint32_t out, Owns owns) const {
    if constexpr (!kKnownOwn && (kAll || kRows || kSteps)) {
      if (!owns && weight_of(rows, factors, i, owns) == Acc(0)) return true;
    }
    return out >> i & 1;
  }
  // The product of the lane's factors, of which one in Acc has left its range.
  __device__ __forceinline__ double careful_product() const {
    double product = 1.0;
#pragma unroll 1
    for (int k = 0; k < kVectors; ++k) {
      Factors factors;
      read_factors(k, factors);
      Acc of_steps[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) of_steps[j] = factor(factors, j);
      product = Cuts::careful_product(product, of_steps, kVec);
    }
    return product;
  }

  // The warp's segment, in its first lane, and what is known of the carry into each lane.
  __device__ __forceinline__ Segment<Wide> exchange(Wide total, Wide gates, FlatCarry<Wide>& carry) const {
    const uint32_t closed = __ballot_sync(0xffffffffu, cuts != 0), ahead = closed >> lane;
    const int reach = ahead ? __ffs(static_cast<int>(ahead)) - 1 : 31 - lane;
    if constexpr (kRows && !kFactors) gates = row_power();
    this->template fold_lanes<kGoesBack>(reach, total, gates, carry);
    carry.enters = (ahead >> 1) == 0;
    return {total, gates, closed != 0};
  }

  // The results from the carry into the lane, in the place of operands.
  __device__ __forceinline__ void finish(Steps& steps, Acc y) const {
    if constexpr (!kFactors) {
      // Behind the last cut the carry comes in; a power of a number below 1 is no larger than its steps' products.
      const uint32_t open = cuts ? ~((2u << (31 - __clz(static_cast<int>(cuts)))) - 1) : ~0u;
      if constexpr (kRows) {
        const Gate<Acc> gate = own_rows[clamped_row(behind_row)].gate;
#pragma unroll
        for (int i = kOwn - 1; i >= 0; --i) {
          y = kShort ? gate.value * y : gate.step(0, y);
          if (open >> i & 1) steps[i] += y;
        }
      }
#pragma unroll
      for (int i = kOwn - 1; !kRows && i >= 0; --i) {
        const Acc power = p.step_powers[kShort ? kVec - 1 - i % kVec : kOwn - 1 - i];
        if (open >> i & 1) steps[i] = fold(steps[i], power, y);
        if (kShort && i % kVec == 0) y *= power;
      }
    }
    RowCursor rows(*this);
#pragma unroll
    for (int k = kVectors - 1; k >= 0; --k) {
      Acc advantages[kVec], pg[kVec];
      if constexpr (kFactors) {
        Factors factors;
        read_factors(k, factors);
#pragma unroll
        for (int j = kVec - 1; j >= 0; --j) {
          const int i = k * kVec + j;
          const bool is_cut = cuts >> i & 1;
          rows.move_to(i);
          const Acc difference = steps[i];
          Acc of_row = 1;
          if constexpr (kAll) of_row = factors.gammas[j] * factors.traces[j];
          const Acc delta = weighed(difference, factors, j);
          // Both are formed in any case: a branch a step would take longer.
          const Acc with_carry = rows.gate.step(difference, of_row * y),
                    next = rows.gate.step(delta, factor(factors, j) * y);
          if constexpr (kRatios) pg[j] = clipped(factors.ratios[j], p.clip_pg) * (is_cut ? difference : with_carry);
          y = is_cut ? delta : next;
          advantages[j] = y;
        }
      } else {
#pragma unroll
        for (int j = 0; j < kVec; ++j) advantages[j] = steps[k * kVec + j];
      }
      if constexpr (kRatios) {
        if (p.slots.pg_advantages >= 0) chunk(p.slots.pg_advantages, k) = pack<Acc, T, kVec>(pg);
      }
      if (p.slots.advantages >= 0) chunk(p.slots.advantages, k) = pack<Acc, T, kVec>(advantages);
      if (p.slots.targets >= 0) {
        if (has_own()) {
          Acc own[kVec];
          this->template read<T>(p.slots.values, k, own);
#pragma unroll
          for (int j = 0; j < kVec; ++j) advantages[j] += own[j];
        }
        chunk(p.slots.targets, k) = pack<Acc, T, kVec>(advantages);
      }
    }
  }
};

}  // namespace dcs
