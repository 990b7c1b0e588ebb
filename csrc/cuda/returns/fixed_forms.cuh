// The steps of the kernels of known forms: a lane's segment of a row, in registers.
#pragma once

#include "returns/step.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

// What those kernels know of every step of a call.
template <typename Acc>
struct ReturnsKnown {
  Acc clip_rho, clip_c, clip_pg;
  Rates<Acc> rates;
  double power;  // c over a lane's steps
};

template <typename Acc>
ReturnsKnown<Acc> known_of(const ReturnsProblem& p, int steps) {
  ReturnsKnown<Acc> known{static_cast<Acc>(p.clip_rho), static_cast<Acc>(p.clip_c), static_cast<Acc>(p.clip_pg),
      number_rates<Acc>(p.gamma.value, p.trace.value), 1.0};
  known.power = finite_power(known.rates.carried, steps);
  return known;
}

// What a lane's steps up to each one make of a carry: y = total + gates * carry, in float.
template <int kCount>
struct Prefixes {
  float totals[kCount], gates[kCount];
};

// A lane's steps, in the order of the scan: step 0 is the latest.
template <typename Acc, int kForm, int kCount>
struct KnownSteps {
  using Given = ReturnsGiven<kForm>;
  static constexpr bool kHasValues = kForm & kWithValues, kHasNext = kForm & kWithNext, kHasRhos = kForm & kWithRhos;
  static constexpr bool kHasOwn = has_own_values(kForm);

  Acc rewards[kCount], values[kCount], next[kCount], rhos[kCount];
  uint32_t terminates = 0, truncates = 0, cuts = 0;  // bit i: step i
  Acc differences[kCount];

  // `behind`: the value of the state after step 0; `ends`: step 0 is the row's last.
  __device__ __forceinline__ void make_differences(const ReturnsKnown<Acc>& call, Acc behind, bool ends) {
    cuts = terminates | truncates | (ends ? 1u : 0u);
    const uint32_t drops = left_out(kHasOwn, call.rates, kHasNext ? terminates : terminates | truncates, cuts);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Acc after = kHasNext ? next[i] : i == 0 ? behind : values[i == 0 ? 0 : i - 1];
      const Acc weight = kHasOwn || cuts >> i & 1 ? call.rates.gamma : call.rates.rest;
      const Acc rewarded = drops >> i & 1 ? rewards[i] : rewards[i] + weight * after;
      differences[i] = kHasOwn ? rewarded - values[i] : rewarded;
    }
  }

  // From a carry of nothing. In float the product of gates is what float can hold of it.
  template <typename Wide>
  __device__ __forceinline__ Segment<Wide> total(const ReturnsKnown<Acc>& call) const {
    Acc y = 0, product = 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Acc factor = kHasRhos ? clipped(rhos[i], call.clip_c) : Acc(1);
      const Acc delta = kHasRhos ? clipped(rhos[i], call.clip_rho) * differences[i] : differences[i];
      y = cuts >> i & 1 ? delta : call.rates.gate.step(delta, factor * y);
      product *= factor;
    }
    Wide gates = static_cast<Wide>(call.power);
    if constexpr (kHasRhos && sizeof(Wide) == 4) {
      gates *= product;
    } else if constexpr (kHasRhos) {
      gates = static_cast<double>(product);
      if (!in_range(product)) {
        gates = 1.0;
#pragma unroll
        for (int i = 0; i < kCount; ++i) gates = clamped_mul(gates, static_cast<double>(clipped(rhos[i], call.clip_c)));
      }
      gates = clamped_mul(gates, call.power);
    }
    return {static_cast<Wide>(y), gates, cuts != 0};
  }

  // The same in float, and all the way there.
  __device__ __forceinline__ Segment<float> total(const ReturnsKnown<Acc>& call, Prefixes<kCount>& prefixes) const {
    const float gate = call.rates.gate.value + call.rates.gate.rest;
    float y = 0, product = 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float own = kHasRhos ? clipped(rhos[i], call.clip_c) * gate : gate;
      const float delta = kHasRhos ? clipped(rhos[i], call.clip_rho) * differences[i] : differences[i];
      y = cuts >> i & 1 ? delta : fold(delta, own, y);
      product *= own;
      prefixes.totals[i] = y, prefixes.gates[i] = product;
    }
    return {y, product, cuts != 0};
  }

  // The results of all steps side by side, each from the carry itself.
  template <typename Store>
  __device__ __forceinline__ void results(
      const ReturnsKnown<Acc>& call, const Prefixes<kCount>& prefixes, float carry, const Store& store) const {
    const float gate = call.rates.gate.value;
    float before = carry;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float y = cuts & ((2u << i) - 1) ? prefixes.totals[i] : fold(prefixes.totals[i], prefixes.gates[i], carry);
      float pg = 0;
      if constexpr (kHasRhos)
        pg = clipped(rhos[i], call.clip_pg) * (cuts >> i & 1 ? differences[i] : fold(differences[i], gate, before));
      store(i, y, kHasOwn ? y + values[i] : y, pg);
      before = y;
    }
  }

  // `store(i, advantage, target, pg_advantage)` for every step; the carry after them.
  template <typename Store>
  __device__ __forceinline__ Acc results(const ReturnsKnown<Acc>& call, Acc carry, const Store& store) const {
    Acc y = carry;
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
      store(i, y, kHasOwn ? y + values[i] : y, pg);
    }
    return y;
  }
};

// Joins a segment with the one before it in the scan.
template <typename Wide>
__device__ __forceinline__ void join(Segment<Wide>& segment, const Segment<Wide>& before) {
  if (segment.closed) return;
  const Wide total = fold(segment.total, segment.gates, before.total);
  if constexpr (sizeof(Wide) == 8) segment = {total, clamped_mul(segment.gates, before.gates), before.closed};
  else segment = {total, segment.gates * before.gates, before.closed};
}

}  // namespace dcs
