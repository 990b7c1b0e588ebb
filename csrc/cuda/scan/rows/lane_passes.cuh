// What a lane does with its elements of a slice (slice.cuh): one pass from nothing for its total, one from what enters
// it for the results. Between the two, totals go from lane to lane, as far back as the nearest cut: a row's start or a
// reset.
#pragma once

#include "common/vector.cuh"
#include "scan/rows/lane_recurrence.cuh"
#include "scan/rows/slice.cuh"

namespace dcs {

template <typename T, bool kStep, bool kBackward, Direction kDirection, bool kLong>
struct LanePasses : InDirection<kDirection> {
  using Work = Slice<T, kStep, kBackward, kDirection, kLong>;
  using Acc = LaneAcc<T>;
  using Wide = typename Types<T>::Wide;
  using State = LaneState<T>;
  using Edges = LaneEdges<T>;
  using Powers = LanePowers<Wide>;
  using Element = T;
  static constexpr Direction kIn = kDirection;
  static constexpr bool kHasGates = kStep, kHasGradients = kBackward;
  using Chunk = Vector<T, Work::kVec>;
  static constexpr int kVec = Work::kVec;
  static constexpr bool kComplex = kIsComplex<T>;

  using InDirection<kDirection>::reverse;
  const Work& work;
  const FlatParams& p = work.p;
  const int own = kVec * p.vectors;

  __device__ __forceinline__ Chunk& chunk(int tensor, int k) const {
    const int at = work.lane * p.vectors + k;
    return reinterpret_cast<Chunk*>(work.tensor(tensor))[reverse ? 32 * p.vectors - 1 - at : at];
  }
  // Visits the lane's vectors of the first kCount tensors in the order of the scan, each of them read before the one
  // ahead of it is worked on: shared memory answers late. visit(number, address in the first tensor, the vectors,
  // what replaces these with the next ones, if there are).
  template <int kCount>
  struct Chunks {
    Chunk of[kCount];
  };
  template <int kCount, int kVectors, typename Visit>
  __device__ __forceinline__ void each_vector(const Visit& visit) const {
    const int count = kVectors ? kVectors : p.vectors, apart = 32 * count;
    Chunks<kCount> chunks;
    Chunk* at = &chunk(0, 0);
    const auto read = [&] {
#pragma unroll
      for (int i = 0; i < kCount; ++i) chunks.of[i] = at[i * apart];
    };
    read();
#pragma unroll(kVectors ? kVectors : 1)
    for (int k = 0; k < count; ++k) {
      visit(k, at, chunks, [&] {
        at += reverse ? -1 : 1;
        if (k + 1 < count) read();
      });
    }
  }
  // Calls `visit` with the pass as a type, and of the vectors the number where the pass is made for it, else 0. Code is
  // what a launch waits for first: what is rare is made once.
  template <typename Visit>
  __device__ __forceinline__ auto choose(Pass pass, const Visit& visit) const {
    using Loop = std::integral_constant<int, 0>;
    using Unrolled = std::integral_constant<int, Work::kUnrolled>;
    if (pass == Pass::kGeneral) return visit(std::integral_constant<Pass, Pass::kGeneral>{}, Loop{});
    if constexpr (Work::kUnrolled > 0) {
      const bool usual = p.vectors == Work::kUnrolled;
      if (usual && pass == Pass::kPlain) return visit(std::integral_constant<Pass, Pass::kPlain>{}, Unrolled{});
      if constexpr (!kBackward)
        if (usual) return visit(std::integral_constant<Pass, Pass::kCut>{}, Unrolled{});
    }
    return visit(std::integral_constant<Pass, Pass::kCut>{}, Loop{});
  }
  // A vector's elements in the order of the scan, and the vector of such.
  __device__ __forceinline__ void in_order(const Chunk& raw, Acc (&to)[kVec]) const {
    if constexpr (kDirection == Direction::kEither) unpack_in_order(raw, to, reverse);
    else unpack_in_order<reverse>(raw, to);
  }
  __device__ __forceinline__ Chunk in_memory(const Acc (&from)[kVec]) const {
    if constexpr (kDirection == Direction::kEither) return pack_in_order<T>(from, reverse);
    else return pack_in_order<reverse, T>(from);
  }
  __device__ __forceinline__ T first_of(const Chunk& of) const { return reverse ? of.get(kVec - 1) : of.get(0); }
  // The element so many of the scan's after the lane's first one, in the slice.
  __device__ __forceinline__ T element(int tensor, int offset) const {
    const int at = work.lane * own + offset;
    return work.tensor(tensor)[reverse ? work.elements() - 1 - at : at];
  }
  // The gates of a vector's steps; `last`: the one before, then the vector's last.
  __device__ __forceinline__ void unpack_gates(const Chunk& raw, Acc& last, Acc (&to)[kVec]) const {
    Acc gates[kVec];
    in_order(raw, gates);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Acc own_gate = conj_if(p.problem.conjugate_gamma, gates[i]);
      to[i] = p.problem.shifted ? last : own_gate;
      last = own_gate;
    }
  }
  __device__ __forceinline__ Acc first_gate(const State& at) const {
    return conj_if(p.problem.conjugate_gamma, cast<Acc>(at.edges.gate_before));
  }

  // The lane's reset flags as bits in the order of the scan.
  __device__ __forceinline__ uint64_t read_resets() const {
    const bool* const here = work.flags() + (reverse ? (31 - work.lane) * own : work.lane * own);
    uint64_t bits = 0;
#pragma unroll 1
    for (int k = 0; k < p.vectors; ++k) {
      const Vector<uint8_t, kVec> raw = *reinterpret_cast<const Vector<uint8_t, kVec>*>(here + k * kVec);
      uint32_t some = 0;
      if constexpr (kVec >= 4) {
        uint32_t words[kVec / 4];
        memcpy(words, &raw, kVec);
#pragma unroll
        for (int w = 0; w < kVec / 4; ++w) some |= flag_bits(words[w]) << (4 * w);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) some |= (raw.get(i) ? 1u : 0u) << i;
      }
      bits |= static_cast<uint64_t>(some) << (k * kVec);
    }
    return reverse ? __brevll(bits) >> (64 - own) : bits;
  }

  // `find_before`, `find_after`: where the last element before the slice lies, and the first one behind it.
  template <typename Before, typename After>
  __device__ __forceinline__ Edges ask(const Before& find_before, const After& find_after) const {
    Edges edges{};
    const ScanProblem& problem = p.problem;
    if (problem.shifted && (kStep || problem.reset)) {
      const FlatPosition before = find_before();
      if constexpr (kStep) edges.gate_before = work.template beyond<T>(problem.gamma, problem.gamma_strides, before);
      if (problem.reset) edges.reset_before = work.template beyond<bool>(problem.reset, problem.reset_strides, before);
    }
    if constexpr (kBackward)
      edges.saved_after = work.template beyond<T>(problem.saved, problem.saved_strides, find_after());
    return edges;
  }

  // `position` is that of the lane's first element.
  __device__ __forceinline__ LaneCuts find_cuts(const FlatPosition& position, bool reset_before) const {
    LaneCuts at;
    at.row = position.row - (position.done == 0 ? 1 : 0);
    const int64_t next = position.done == 0 ? 0 : p.problem.length - position.done;
    at.starts = next < 64 ? p.starts << next : 0;
    at.resets = p.problem.reset ? read_resets() : 0;
    uint64_t resets = at.resets;
    if (p.problem.reset && p.problem.shifted) {
      const bool before = __shfl_up_sync(0xffffffffu, static_cast<int>(resets >> (own - 1) & 1), 1);
      resets = resets << 1 | ((work.lane == 0 ? reset_before : before) ? 1 : 0);
    }
    at.cuts = (at.starts | resets) & ((uint64_t{1} << own) - 1);
    return at;
  }

  // Whether a row starts in the slice, or behind it where that matters; `position` is that of the slice's first
  // element.
  __device__ __forceinline__ bool has_start(const FlatPosition& position) const {
    return position.done == 0 || position.done + work.elements() + (kBackward ? 1 : 0) > p.problem.length;
  }

  __device__ __forceinline__ Pass pass_of(const LaneCuts& at) const {
    const uint64_t own_and_next = (uint64_t{2} << own) - 1;
    const bool starts = (at.starts & own_and_next) != 0;
    if (!__any_sync(0xffffffffu, starts || at.cuts != 0 || at.resets != 0)) return Pass::kPlain;
    return rows_differ() && __any_sync(0xffffffffu, starts) ? Pass::kGeneral : Pass::kCut;
  }

  // Whether rows have numbers of their own: then, as where their sums are wanted, none is shorter than a vector.
  __device__ __forceinline__ bool rows_differ() const { return (!kStep && !p.one_gamma) || p.problem.initial; }
  // Asked for ahead of the lane's recurrence, whose first element follows one of `row`.
  __device__ __forceinline__ RowNumbers<T> ask_rows(int64_t row) const {
    RowNumbers<T> of{};
    if (!kStep && !p.one_gamma) of.next_gamma = gamma_of<kDirection, Wide>(p, row + 1);
    if (p.problem.initial) {
      of.initial = initial_of(RowIndex(p, memory_row<kDirection>(p, row)));
      of.next_initial = initial_of(RowIndex(p, memory_row<kDirection>(p, row + 1)));
    }
    return of;
  }

  __device__ __forceinline__ State prepare(const Edges& edges, Pass pass, Wide gamma) const {
    State at;
    at.pass = pass;
    at.gamma = gamma;
    at.edges = edges;
    if constexpr (kStep)
      if (p.problem.shifted && work.lane > 0) at.edges.gate_before = element(Work::kGatesAt, -1);
    return at;
  }

  __device__ __forceinline__ T initial_of(const RowIndex& row) const {
    return static_cast<const T*>(p.problem.initial)[row.offset(p.problem.initial_strides)];
  }

  // The lane's segment from nothing; of its gates the product where there is one a step.
  template <Pass kPass, int kVectors>
  __device__ __forceinline__ Segment<Wide> total_in(
      const State& at, const LaneCuts& lane_cuts, const RowNumbers<T>& rows) const {
    LaneRecurrence<LanePasses, kPass> recurrence(*this, lane_cuts, at.gamma, rows);
    recurrence.lane_cuts |= 1;  // nothing is carried into the first element
    Acc y = cast<Acc>(0.0), last = kStep ? first_gate(at) : cast<Acc>(0.0);
    Wide product = cast<Wide>(1.0);
    constexpr bool kTakesStarts = kPass == Pass::kGeneral && !(kBackward && kStep);  // `initial` alone is left out
    constexpr int kCount = kStep ? 2 : 1;
    each_vector<kCount, kVectors>([&](int k, Chunk*, const Chunks<kCount>& raw, const auto& read_next) {
      Acc values[kVec], factors[kVec] = {};
      in_order(raw.of[0], values);
      if constexpr (kStep) unpack_gates(raw.of[Work::kGatesAt], last, factors);
      read_next();  // `raw` is the vector ahead from here on
      recurrence.set_vector(k);
      recurrence.template with_starts<kTakesStarts>([&](auto starts) {
        if constexpr (starts() && !kBackward) recurrence.take_initial(values, factors);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const Acc next = recurrence.template step<starts()>(i, values[i], factors[i], y);
          y = kPass == Pass::kPlain && i == 0 && k == 0 ? values[i] : next;
        }
        if constexpr (starts())
          if (recurrence.has_start()) recurrence.next_row();
      });
      if constexpr (kStep) {
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          product = kComplex ? clamped_mul(product, cast<Wide>(factors[i])) : product * cast<Wide>(factors[i]);
      }
    });
    if constexpr (kStep && std::is_same_v<Wide, double>) {
      const bool in_range = fabs(product) > 0x1p-1000 && fabs(product) < 0x1p1000;
      // Behind the tile lies what memory held before, and nothing goes on from there.
      const bool in_tile = work.first + (work.lane + 1) * own <= work.high;
      if (in_tile && lane_cuts.cuts == 0 && !in_range && !(product == 0.0 && has_zero_gate(at)))
        product = careful_product(at);
    }
    return {cast<Wide>(y), product, kPass != Pass::kPlain && lane_cuts.cuts != 0};
  }
  // Calls `visit` with the gate of each of the lane's steps. Rare, so that it is a loop.
  template <typename Visit>
  __device__ __forceinline__ void each_gate(const State& at, const Visit& visit) const {
    Acc last = first_gate(at);
#pragma unroll 1
    for (int k = 0; k < p.vectors; ++k) {
      Acc factors[kVec];
      unpack_gates(chunk(Work::kGatesAt, k), last, factors);
#pragma unroll
      for (int i = 0; i < kVec; ++i) visit(factors[i]);
    }
  }
  // A product of 0 is then right.
  __device__ __forceinline__ bool has_zero_gate(const State& at) const {
    bool found = false;
    each_gate(at, [&](Acc factor) { found = found || factor == cast<Acc>(0.0); });
    return found;
  }
  // The product that neither leaves the range of double nor vanishes but for a gate of 0.
  __device__ __forceinline__ Wide careful_product(const State& at) const {
    Wide product = cast<Wide>(1.0);
    each_gate(at, [&](Acc factor) { product = power_mul(product, cast<Wide>(factor)); });
    return product;
  }

  __device__ __forceinline__ Powers powers_of(Wide gamma) const {
    Powers of{};
    if constexpr (!kStep) {
      if constexpr (std::is_same_v<Wide, double>) {
        if (p.problem.gamma_kind == GammaKind::kNumber) {
#pragma unroll
          for (int j = 0; j < 6; ++j) of.powers[j] = p.lane_powers[j];
          of.weight = p.lane_weights[work.lane];
          return of;
        }
      }
      of.powers[0] = whole_power(gamma, own);
#pragma unroll
      for (int j = 1; j < 6; ++j) of.powers[j] = power_mul(of.powers[j - 1], of.powers[j - 1]);
      of.weight = cast<Wide>(1.0);
#pragma unroll
      for (int j = 0; j < 5; ++j)
        if (work.lane >> j & 1) of.weight = power_mul(of.weight, of.powers[j]);
    }
    return of;
  }

  // The lane's segment, and from those of the lanes before what a carry into the warp becomes; the warp's segment in
  // lane 31. `gates` of it: what takes a carry over the whole warp where it is not closed.
  template <typename MakePowers>
  __device__ __forceinline__ Segment<Wide> total(
      State& at, const LaneCuts& lane_cuts, const RowNumbers<T>& rows, const MakePowers& make_powers) const {
    Segment<Wide> segment = choose(at.pass, [&](auto pass, auto vectors) {
      return total_in<decltype(pass)::value, decltype(vectors)::value>(at, lane_cuts, rows);
    });
    const int lane = work.lane;
    const uint32_t closed = __ballot_sync(0xffffffffu, segment.closed);
    Powers of{};
    if (closed != 0xffffffffu) {  // where all are, as of rows shorter than lanes, each takes what the one before has
      of = make_powers();
      const int reach = reach_of(closed & (0xffffffffu >> (31 - lane)), lane);
#pragma unroll
      for (int j = 0; j < 5; ++j) {
        const int d = 1 << j;
        const Wide other = shuffle_up(segment.total, d);
        if (reach >= d) segment.total = fold(segment.total, kStep ? segment.gates : of.powers[j], other);
        if constexpr (kStep) {
          const Wide gates = shuffle_up(segment.gates, d);
          if (reach >= d) segment.gates = clamped_mul(segment.gates, gates);
        }
      }
    }
    if constexpr (!kStep) segment.gates = of.powers[5];
    at.before = shuffle_up(segment.total, 1);
    at.weight = kStep ? shuffle_up(segment.gates, 1) : of.weight;
    if (lane == 0) {
      at.before = cast<Wide>(0.0);
      at.weight = cast<Wide>(1.0);
    }
    at.enters = (closed & ((1u << lane) - 1)) == 0;
    segment.closed = closed != 0;
    return segment;
  }

  // The results from the carry into the warp, in place of the input; backward the gradient of the gates in place of
  // them, or its sums of rows. `end_row` is called with every row that starts and ends in the lane, and its sum.
  template <typename EndRow>
  __device__ __forceinline__ LaneSums<Acc> finish(
      const State& at, const LaneCuts& lane_cuts, const RowNumbers<T>& rows, Wide carry, const EndRow& end_row) const {
    const Acc y = cast<Acc>(at.enters ? fold(at.before, at.weight, carry) : at.before);
    return choose(at.pass, [&](auto pass, auto vectors) {
      return finish_in<decltype(pass)::value, decltype(vectors)::value>(at, lane_cuts, rows, y, end_row);
    });
  }

  template <Pass kPass, int kVectors, typename EndRow>
  __device__ __forceinline__ LaneSums<Acc> finish_in(
      const State& at, const LaneCuts& lane_cuts, const RowNumbers<T>& rows, Acc y, const EndRow& end_row) const {
    LaneRecurrence<LanePasses, kPass> recurrence(*this, lane_cuts, at.gamma, rows);
    Acc last = kStep ? first_gate(at) : cast<Acc>(0.0);
    LaneSums<Acc> sums{cast<Acc>(0.0), cast<Acc>(0.0)};
    bool started = false;
    T behind{};  // of the saved output, the element behind the lane's
    if constexpr (kBackward) behind = work.lane == 31 ? at.edges.saved_after : element(Work::kSavedAt, own);
    constexpr bool kTakesStarts = kPass == Pass::kGeneral || (kPass == Pass::kCut && kBackward);
    using Raw = Chunks<Work::kTensors>;
    each_vector<Work::kTensors, kVectors>([&](int k, Chunk* to, const Raw& raw, const auto& read_next) {
      Acc values[kVec], factors[kVec] = {};
      in_order(raw.of[0], values);
      if constexpr (kStep) unpack_gates(raw.of[Work::kGatesAt], last, factors);
      [[maybe_unused]] Acc others[kVec];
      if constexpr (kBackward) in_order(raw.of[Work::kSavedAt], others);
      read_next();  // `raw` is the vector ahead from here on
      recurrence.set_vector(k);
      recurrence.template with_starts<kTakesStarts>([&](auto starts) {
        if constexpr (starts() && !kBackward) recurrence.take_initial(values, factors);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = y = recurrence.template step<starts()>(i, values[i], factors[i], y);
        const Chunk result = in_memory(values);
        to[0] = result;
        if constexpr (kBackward) {
          const T next = k + 1 < p.vectors ? first_of(raw.of[Work::kSavedAt]) : behind;
          recurrence.template follow<starts()>(others, cast<Acc>(next));
          Acc rounded[kVec], terms[kVec];
          in_order(result, rounded);
          Acc ended = cast<Acc>(0.0);
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            if (starts() && !kStep && (recurrence.starts >> i & 1)) {
              ended = sums.tail;
              sums.tail = cast<Acc>(0.0);
            }
            // grad_gamma[t] = output[t] * conj(saved[next(t)]).
            const Acc before = kStep ? cast<Acc>(0.0) : sums.tail,
                      sum = fold(before, conj_if(true, others[i]), rounded[i]);
            terms[i] = kPass != Pass::kPlain && (recurrence.resets >> i & 1) ? before : sum;
            if constexpr (!kStep) sums.tail = terms[i];
          }
          if constexpr (kStep) to[Work::kGatesAt * 32 * p.vectors] = in_memory(terms);
          if constexpr (starts() && !kStep) {
            if (recurrence.has_start()) {
              if (started) end_row(recurrence.row, ended);
              else sums.head = ended;
              started = true;
            }
          }
        }
        if constexpr (starts() && (kPass == Pass::kGeneral || !kStep))
          if (recurrence.has_start()) recurrence.next_row();
      });
    });
    return sums;
  }
};

}  // namespace dcs
