// What a lane reads of a slice (slice.cuh), and what it knows of its steps before it looks at their values: where rows
// and episodes end, and what rows have of their own.
#pragma once

#include "returns/flat_rows/row_rates.cuh"
#include "returns/flat_rows/slice.cuh"

namespace dcs {

// What of the carry into a warp reaches a lane: what the lanes behind it carry into it, and what takes a carry over
// them, where no cut lies in them.
template <typename Wide>
struct FlatCarry {
  Wide before, weight;
  bool enters;
  __device__ __forceinline__ Wide from(Wide warp) const { return enters ? fold(before, weight, warp) : before; }
};

template <typename T, FlatForm kForm, int kVectors>
struct FlatLaneCuts {
  using Slice = FlatSlice<T, kVectors>;
  using Acc = typename Types<T>::Acc;
  static constexpr int kVec = Slice::kVec, kOwn = Slice::kOwn;
  static constexpr uint32_t kOwnBits = (uint32_t{1} << kOwn) - 1, kVecBits = (uint32_t{1} << kVec) - 1;
  static constexpr bool kAll = kForm == FlatForm::kAll || kForm == FlatForm::kAnyGradients;
  static constexpr bool kRows =
      kForm == FlatForm::kRows || kForm == FlatForm::kRowRatios || kForm == FlatForm::kRowGradients;
  static constexpr bool kSteps = kForm == FlatForm::kSteps || kForm == FlatForm::kStepGradients;
  static constexpr bool kRatios = kForm == FlatForm::kRatios || kForm == FlatForm::kRowRatios || kAll;
  static constexpr bool kFactors = kRatios || kSteps;  // gates of a row's steps may differ
  static constexpr bool kKnownOwn = kForm == FlatForm::kOwn || (kRatios && !kAll);
  static_assert(kOwn < 32);
  const FlatReturnsParams<T>& p;
  const Slice& slice;
  unsigned char* const here;
  // Of the tile's rows, what is behind them and what they have of their own. A warp's lie one on from those of the warp
  // before: both read the row that they share.
  Acc* const last_values;
  FlatRow<Acc>* const own_rows;
  const int lane;
  int behind_row;        // of the step behind the lane's last one, in the tile
  uint32_t ends;         // bits: a row's last step
  uint32_t cuts, drops;  // nothing is carried into the step; it leaves the next state's value out

  // `rows`: what those of the tile have of their own.
  __device__ __forceinline__ FlatLaneCuts(const FlatReturnsParams<T>& given, const Slice& of, unsigned char* rows)
      : p(given),
        slice(of),
        here(of.here),
        last_values(reinterpret_cast<Acc*>(rows + p.values_at) + of.warp),
        own_rows(reinterpret_cast<FlatRow<Acc>*>(rows) + of.warp),
        lane(of.lane) {}

  __device__ __forceinline__ bool has_own() const {
    if constexpr (kAll || kSteps || kForm == FlatForm::kRows) return p.has_own_values;
    return kKnownOwn;
  }

  // Memory.

  using Chunk = Vector<T, kVec>;
  // Of a parameter the compiler knows that it can be read again, and does so in every step that uses it.
  __device__ __forceinline__ void keep(float& value) const {
    value = __uint_as_float(__float_as_uint(value) ^ p.nothing);
  }
  __device__ __forceinline__ void keep(double&) const {}

  __device__ __forceinline__ Chunk& chunk(int slot, int k) const {
    return reinterpret_cast<Chunk*>(here + slot)[lane * kVectors + k];
  }
  template <typename E>
  __device__ __forceinline__ void read(int slot, int k, Acc (&to)[kVec]) const {
    if constexpr (std::is_same_v<E, T>) {
      const uint4 words = *reinterpret_cast<const uint4*>(&chunk(slot, k));
      Chunk raw;
      memcpy(&raw, &words, sizeof raw);
      unpack(raw, to);
    } else {
      // In whole words of 16 bytes: lanes' single elements would lie in few banks.
      constexpr int kOf = 16 / sizeof(E), kWords = kVec / kOf;
      const uint4* const from = reinterpret_cast<const uint4*>(here + slot) + (lane * kVectors + k) * kWords;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint4 words = from[w];
        E elements[kOf];
        memcpy(elements, &words, sizeof words);
#pragma unroll
        for (int i = 0; i < kOf; ++i) to[w * kOf + i] = cast<Acc>(elements[i]);
      }
    }
  }

  // Factors.

  static __device__ __forceinline__ void fill(Acc (&numbers)[kVec], Acc with) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) numbers[j] = with;
  }

  // What a vector's steps have beside rewards and values.
  struct Factors {
    Acc ratios[kVec], gammas[kVec], traces[kVec];
  };
  __device__ __forceinline__ void read_factors(int k, Factors& to) const {
    if constexpr (kRatios) {
      if constexpr (kAll) fill(to.ratios, 1);
      if (!kAll || p.slots.rhos >= 0) read<T>(p.slots.rhos, k, to.ratios);
    }
    if constexpr (kSteps) fill(to.ratios, 1), fill(to.traces, 1);
    // Those of gradients come converted.
    if constexpr (kForm == FlatForm::kStepGradients) read<Acc>(p.slots.gamma, k, to.gammas);
    if constexpr (kForm == FlatForm::kSteps) {
      if (sizeof(T) == 2 && p.gamma_is_narrow) read<T>(p.slots.gamma, k, to.gammas);
      else read<Acc>(p.slots.gamma, k, to.gammas);
    }
    if constexpr (kAll) {
      const auto read_rates = [&](int slot, bool is_narrow, Acc(&rates)[kVec]) {
        fill(rates, 1);
        if (slot < 0) return;
        if (sizeof(T) == 2 && is_narrow) read<T>(slot, k, rates);
        else read<Acc>(slot, k, rates);
      };
      read_rates(p.slots.gamma, p.gamma_is_narrow, to.gammas);
      read_rates(p.slots.trace, p.trace_is_narrow, to.traces);
    }
  }
  // What a step's gate has beside its row's.
  __device__ __forceinline__ Acc factor(const Factors& of, int j) const {
    if constexpr (kSteps) return of.gammas[j];
    const Acc of_ratio = clipped(of.ratios[j], p.clip_c);
    if constexpr (kAll) return of.gammas[j] * of.traces[j] * of_ratio;
    return of_ratio;
  }

  // A number times those of a vector, one after the other in a loop that is not unrolled: they move on from place to
  // place.
  static __device__ __forceinline__ double careful_product(double product, Acc (&of)[kVec], int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      product = power_mul(product, static_cast<double>(of[0]));
#pragma unroll
      for (int j = 0; j + 1 < kVec; ++j) of[j] = of[j + 1];
    }
    return product;
  }

  // A power over lanes of a number of at most 1, `of` over one lane: it does not vanish.
  static __device__ __forceinline__ double bounded_weight(double weight, double of) {
    return bounded_product(weight, of);
  }
  static __device__ __forceinline__ float bounded_weight(float weight, float of) {
    return of != 0.f && fabsf(weight) < FLT_MIN ? copysignf(FLT_MIN, weight) : weight;
  }

  // Folds a lane's total with those of the lanes before it in the scan, as far as `reach`. In `gates` what takes a
  // carry over the lane, where gates are no number of all lanes', and then over the warp.
  template <bool kGoesBack, typename Wide>
  __device__ __forceinline__ void fold_lanes(int reach, Wide& total, Wide& gates, FlatCarry<Wide>& carry) const {
    const auto moved_on = [](Wide value, int d) { return kGoesBack ? shuffle_down(value, d) : shuffle_up(value, d); };
    const int before = kGoesBack ? 31 - lane : lane;
    carry.weight = 1;
    if constexpr (kFactors || kRows) {
      // Their products are long: the loop is not unrolled. Gates of a row's lanes are the same.
      [[maybe_unused]] const Wide over_lane = gates;
#pragma unroll 1
      for (int d = 1; d < 32; d *= 2) {
        const Wide other = moved_on(total, d);
        if (reach >= d) total = fold(total, gates, other);
        if constexpr (kFactors) {
          const Wide others = moved_on(gates, d);
          if (reach >= d) gates = power_mul(gates, others);
        } else {
          if (before & d) carry.weight *= gates;
          gates = power_mul(gates, gates);
        }
      }
      if constexpr (kFactors) carry.weight = moved_on(gates, 1);
      else carry.weight = bounded_weight(carry.weight, over_lane);
    } else {
      const auto power = [&](int j) {
        if constexpr (std::is_same_v<Wide, float>) return p.short_powers[j];
        else return p.powers[j];
      };
#pragma unroll
      for (int j = 0; j < 5; ++j) {
        const int d = 1 << j;
        const Wide other = moved_on(total, d);
        if (reach >= d) total = fold(total, power(j), other);
        if (before & d) carry.weight *= power(j);
      }
      carry.weight = bounded_weight(carry.weight, power(0));
      gates = power(5);
    }
    carry.before = moved_on(total, 1);
    if (before == 0) carry.before = 0, carry.weight = 1;
  }

  // Rows.

  // A row of the tile, and how many of its steps come before, of a step of the slice.
  struct Position {
    int row, done;
  };
  __device__ __forceinline__ Position position_of(int step) const {
    const uint32_t up = slice.up_of(step), row = p.length.of(up);
    return {static_cast<int>(row) - p.lift, static_cast<int>(up - row * p.length.divisor)};
  }
  __device__ __forceinline__ int clamped_row(int row) const { return max(0, min(row, p.tile_rows - 1)); }
  // The numbers of rows that end in the slice are there for its lanes; discounts of all that it has a part of.
  __device__ __forceinline__ void find_rows() {
    const Position position = position_of(lane * kOwn);
    const int until = static_cast<int>(p.length.divisor) - 1 - position.done;
    ends = (until < 32 ? p.row_ends << until : 0) & kOwnBits;
    behind_row = position.row + __popc(ends);
    const bool has_rates = kRows || (kAll && p.row_rates);
    if (!has_rates && !p.is_shifted) return;
    const int begin = max(position_of(0).row, 0);
    const int end = min(position_of(Slice::kSteps).row + (has_rates ? 1 : 0), slice.tile.rows);
    if (has_rates) {
      read_flat_rows<T>(p, own_rows, last_values, slice.tile.row, begin, end, kRows);
    } else if constexpr (!kRows) {
#pragma unroll 1
      for (int row = begin + lane; row < end; row += 32) {
        Acc value = 0;
        if (p.bootstrap) value = cast<Acc>(p.bootstrap_of(slice.tile.row + row));
        last_values[row] = value;
      }
    }
  }

  // Within the few steps of a lane the digits that a gate lacks in float are far below what half precision keeps.
  using StepGate = Gate<Acc, sizeof(T) == 2>;
  // The discounts of a step's row.
  struct RowRates {
    Acc gamma, rest, trace = 1;  // the trace beside discounts of steps
    StepGate gate;
    __device__ __forceinline__ void take(const FlatLaneCuts& at, int row) {
      const FlatRow<Acc> own = at.own_rows[at.clamped_row(row)];
      gamma = own.gamma;
      rest = own.rest;
      if constexpr (sizeof(T) == 2) gate = {own.gate.value};
      else gate = own.gate;
      // Gamma has no part in the gate where it is the steps'.
      if constexpr (kAll) trace = at.p.slots.trace >= 0 ? Acc(1) : number_of(own.gate);
    }
  };

  // Flags.

  __device__ __forceinline__ uint32_t read_flags(int slot, bool is_bool) const {
    if (slot < 0) return 0;
    constexpr int kWords = kVec > 4 ? kVec / 4 : 1;
    uint32_t bits = 0, bytes = 0;
    if (is_bool) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        // In whole words: bytes would be taken apart.
        using Word = std::conditional_t<kVec == 2, uint16_t, uint32_t>;
        uint32_t words[kWords];
#pragma unroll
        for (int w = 0; w < kWords; ++w)
          words[w] = reinterpret_cast<const Vector<Word, kWords>*>(here + slot)[lane * kVectors + k].elements[w];
        uint32_t some = __dp4a(words[0], 0x08040201u, 0u);
        if constexpr (kWords > 1) some = __dp4a(words[1], 0x80402010u, some);
        bits |= some << (k * kVec);
#pragma unroll
        for (int w = 0; w < kWords; ++w) bytes |= words[w];
      }
    }
    if (!is_bool || (bytes & 0xfefefefeu)) {
      // Any byte, and any number, but 0 is set.
      bits = 0;
#pragma unroll 1
      for (int i = 0; i < kOwn; ++i) {
        const int at = lane * kOwn + i;
        const bool is_set =
            is_bool ? here[slot + at] != 0 : cast<Acc>(reinterpret_cast<const T*>(here + slot)[at]) != Acc(0);
        bits |= (is_set ? 1u : 0u) << i;
      }
    }
    return bits;
  }
};

}  // namespace dcs
