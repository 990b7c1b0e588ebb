// What a thread reads of some of its slots of a tile: 256 slots apart, so that a warp reads neighboring memory whatever
// its alignment. All loads come before the first use.
#pragma once

#include "returns/chunks/places.cuh"

namespace dcs {

// What a tile is: rows that are one piece of memory, in all slots; such a piece otherwise; a span of columns, or rows
// with something between them, whose slots are equally far apart in each tensor, in all slots or not; or any of these.
enum class Tile { kRows, kPiece, kSpan, kSpanPart, kAny };

// What a next state's value counts: gamma where its step is cut from the next one, else `rest`; and whether it is left
// out all the same, as what counts for nothing is not read.
template <typename Acc>
struct Weights {
  Acc gamma, trace, rest;
  uint32_t drops_cut, drops;
  __device__ __forceinline__ Weights(const Rates<Acc>& rates, bool has_own_values)
      : gamma(rates.gamma), trace(rates.trace), rest(has_own_values ? rates.gamma : rates.rest) {
    drops_cut = !has_own_values && gamma == Acc(0);
    drops = !has_own_values && rest == Acc(0);
  }
};

template <typename T, bool kGates, Tile kTile>
struct ReturnsSteps {
  using Acc = typename Types<T>::Acc;
  using Places = ReturnsPlaces<Acc>;
  static constexpr Tile kIn = kTile;
  static constexpr int kSize = sizeof(T);
  static constexpr bool kAny = kTile == Tile::kAny, kGuarded = kTile != Tile::kRows && kTile != Tile::kSpan,
                        kPiece = kTile == Tile::kRows || kTile == Tile::kPiece;
  // All slots of a span are a multiple of its count.
  static constexpr int kCount = kTile == Tile::kSpan  ? column_unit(sizeof(T))
      : kGates || kAny || sizeof(T) > 4               ? 4
      : kTile == Tile::kRows || kTile == Tile::kPiece ? 8
                                                      : 5;

  const Places& places;
  const ReturnsChunksParams<Acc>& params = places.params;
  const ReturnsProblem& p = places.p;
  const int first;  // slot
  int64_t at = 0;   // of the first one, in a piece of memory or in tensors that lie alike
  int line[kAny ? kCount : 1], row[kAny ? kCount : 1], column[kAny ? kCount : 1];
  uint32_t there = 0, lasts = 0;  // bits
  T rewards[kCount], values[kCount], next[kCount], rhos[kCount];
  uint32_t ends[kCount], drops[kCount];  // not 0: nothing is carried into the step; v' of an ended one is not read
  Acc gammas[kCount], traces[kCount];

  // The thread's slots from its `number`-th one on.
  __device__ __forceinline__ ReturnsSteps(const Places& of, int number)
      : places(of), first(static_cast<int>(threadIdx.x) + number * kChunkThreads) {
    if constexpr (kAny) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const int slot = first + j * kChunkThreads;
        line[j] = places.first_line - places.line_of_slot(slot);
        row[j] = places.row_of_line(max(line[j], 0));
        column[j] = places.column_of_slot(slot);
        if (slot < places.there && column[j] < places.columns) there |= 1u << j;
        if (line[j] - row[j] * static_cast<int>(p.length) == static_cast<int>(p.length) - 1) lasts |= 1u << j;
      }
    } else {
      if constexpr (kPiece) {
        at = (int64_t{places.first_row} * p.length + places.first_line) * places.plan.sequences +
            (places.plan.sequences - 1 - first);
      } else {
        line[0] = places.first_line - (first >> params.column_bits);
        column[0] = places.column_of(first & (places.plan.sequences - 1));
        row[0] = places.row;
        if (params.alike) at = (place(params.rewards, line[0], row[0], column[0]) - params.rewards.data) / kSize;
      }
      if constexpr (kGuarded) {
        const int left = kPiece || column[0] < places.columns ? places.there - first : 0;
#pragma unroll
        for (int j = 0; j < kCount; ++j)
          if (j * kChunkThreads < left) there |= 1u << j;
      }
      if (places.has_lasts) find_lasts(number);
    }
  }
  __device__ __forceinline__ bool is_there(int j) const { return !kGuarded || (there >> j & 1); }
  __device__ __forceinline__ bool is_last(int j) const { return lasts >> j & 1; }

  __device__ __forceinline__ void find_lasts(int number) {
    int in_row = places.in_row;
#pragma unroll 1
    for (int j = 0; j < number; ++j) in_row = back(in_row);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (in_row >= params.row_places - params.line_places) lasts |= 1u << j;
      in_row = back(in_row);
    }
  }
  __device__ __forceinline__ int back(int in_row) const {
    in_row -= params.back;
    return in_row < 0 ? in_row + params.row_places : in_row;
  }

  // visit(j, the element of slot j of a tensor), or the one `later` lines after it, of those of `which`.
  template <typename U, typename Byte, typename Visit>
  __device__ __forceinline__ void each(
      const LinesOf<Byte>& lines, int later, uint32_t which, const Visit& visit) const {
    using Element = std::conditional_t<std::is_const_v<Byte>, const U, U>;
    if constexpr (kAny) {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (there & which & 1u << j)
          visit(j, *reinterpret_cast<Element*>(place(lines, line[j] + later, row[j], column[j])));
    } else if constexpr (kPiece) {
      Element* const from = reinterpret_cast<Element*>(lines.data) + (at + later * places.plan.sequences);
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (is_there(j) && (which >> j & 1)) visit(j, from[-j * kChunkThreads]);
    } else {
      Byte* from = params.alike
          ? lines.data + (at + later * static_cast<int64_t>(params.rewards.line / kSize)) * static_cast<int>(sizeof(U))
          : place(lines, line[0] + later, row[0], column[0]);
#pragma unroll
      for (int j = 0; j < kCount; ++j, from -= lines.apart)
        if (is_there(j) && (which >> j & 1)) visit(j, *reinterpret_cast<Element*>(from));
    }
  }
  template <typename Byte>
  __device__ __forceinline__ Byte* place(const LinesOf<Byte>& lines, int of_line, int of_row, int of_column) const {
    Byte* to = lines.data + static_cast<int64_t>(of_line) * lines.line +
        static_cast<int64_t>(places.first_column + of_column) * lines.column;
    if (params.padded) to += (places.first_row + of_row) * lines.row;
    return to;
  }
  template <typename U, typename To>
  __device__ __forceinline__ void read(
      const LinesOf<const char>& lines, To (&to)[kCount], uint32_t which = ~0u, int later = 0) const {
    each<U>(lines, later, which, [&](int j, const U& element) { to[j] = element; });
  }
  template <typename U>
  __device__ __forceinline__ void write(const LinesOf<char>& lines, const U (&from)[kCount]) const {
    each<U>(lines, 0, ~0u, [&](int j, U& element) { element = from[j]; });
  }
  __device__ __forceinline__ void read_flags(
      const LinesOf<const char>& lines, bool is_bool, uint32_t (&flags)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) flags[j] = 0;
    if (!lines.data) return;
    if (is_bool) {
      read<uint8_t>(lines, flags);
      return;
    }
    T numbers[kCount] = {};
    read<T>(lines, numbers);
#pragma unroll
    for (int j = 0; j < kCount; ++j) flags[j] = cast<Acc>(numbers[j]) != Acc(0);
  }
  __device__ __forceinline__ void read_next() {
    if (params.next_values.data) {
      read<T>(params.next_values, next);
      return;
    }
    if (params.values.data) read<T>(params.values, next, lasts ? ~lasts & ((1u << kCount) - 1) : ~0u, 1);
    if (!lasts || !p.bootstrap_value.data) return;
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (is_there(j) && is_last(j)) next[j] = bootstrap_of(first + j * kChunkThreads);
  }
  // Rare, so it is short instead of fast.
  __device__ __forceinline__ T bootstrap_of(int slot) const {
    const int of_line = places.first_line - places.line_of_slot(slot);
    return static_cast<const T*>(p.bootstrap_value
            .data)[places.at_row(places.row_of_line(of_line), places.column_of_slot(slot), p.bootstrap_value.strides)];
  }
  // The steps' own. Narrow ones become numbers here: their bits would take registers that there are not.
  __device__ __forceinline__ void read_step_rates(
      const LinesOf<const char>& lines, bool is_narrow, Acc (&to)[kCount]) const {
    if (!lines.data) return;
    if constexpr (sizeof(T) == 2) {
      if (is_narrow) {
        T narrow[kCount] = {};
        read<T>(lines, narrow);
#pragma unroll
        for (int j = 0; j < kCount; ++j) to[j] = cast<Acc>(narrow[j]);
        return;
      }
    }
    read<Acc>(lines, to);
  }
  // Of the steps' rows, where each has one.
  __device__ __forceinline__ void read_rates(const ReturnsDiscount& rate, Acc (&to)[kCount]) const {
    if (rate.kind != GammaKind::kRow) return;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int slot = first + j * kChunkThreads,
                of_row = places.row_of_line(places.first_line - places.line_of_slot(slot));
      if (is_there(j))
        to[j] = load_gamma<Acc>(rate.tensor.data, rate.dtype,
            places.at_row(of_row, places.column_of_slot(slot), rate.tensor.strides), false);
    }
  }
  __device__ __forceinline__ void read_values() { read<T>(params.values, values); }
  __device__ __forceinline__ void read_all() {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      rewards[j] = values[j] = next[j] = rhos[j] = cast<T>(Acc(0));
      gammas[j] = traces[j] = 1;
    }
    read<T>(params.rewards, rewards);
    if (places.has_own_values) read_values();
    read_next();
    uint32_t truncated[kCount];
    read_flags(params.terminated, p.terminated_is_bool, drops);
    read_flags(params.truncated, p.truncated_is_bool, truncated);
    if constexpr (kGates) {
      if (params.rhos.data) read<T>(params.rhos, rhos);
      read_step_rates(params.gamma, params.gamma_is_narrow, gammas);
      read_step_rates(params.trace, params.trace_is_narrow, traces);
      if (places.plan.row_gates) {
        read_rates(p.gamma, gammas);
        read_rates(p.trace, traces);
      }
    }
    const uint32_t also = params.next_values.data ? 0 : ~0u;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      ends[j] = drops[j] | truncated[j];
      drops[j] |= truncated[j] & also;
    }
    if (lasts == 0) return;
#pragma unroll
    for (int j = 0; j < kCount; ++j) ends[j] |= lasts & 1u << j;
  }

  __device__ __forceinline__ bool is_cut(int j) const { return ends[j] != 0; }
  __device__ __forceinline__ Acc ratio(int j, double most) const {
    return p.rhos.data ? clipped(cast<Acc>(rhos[j]), static_cast<Acc>(most)) : Acc(1);
  }
  // r + w v' - v, where w is gamma, or for targets without own values what the next target leaves of it.
  __device__ __forceinline__ Acc difference(int j, const Weights<Acc>& weights) const {
    Acc difference = cast<Acc>(rewards[j]);
    if constexpr (kGates) {
      Acc gamma = weights.gamma, rest = weights.rest;
      if (params.step_gamma || params.step_trace) {
        if (params.step_gamma) gamma = gammas[j];
        rest = places.has_own_values ? gamma : gamma - gamma * (params.step_trace ? traces[j] : weights.trace);
      }
      const Acc weight = is_cut(j) ? gamma : rest;
      if (!drops[j] && (places.has_own_values || weight != Acc(0))) difference += weight * cast<Acc>(next[j]);
    } else {
      const uint32_t drop = is_cut(j) ? drops[j] | weights.drops_cut : weights.drops;
      if (!drop) difference += (is_cut(j) ? weights.gamma : weights.rest) * cast<Acc>(next[j]);
    }
    return difference - cast<Acc>(values[j]);
  }
};

}  // namespace dcs
