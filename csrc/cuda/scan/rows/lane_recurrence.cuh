// The recurrence over a lane (lane_passes.cuh).
#pragma once

#include "scan/rows/flat.cuh"
#include "scan/rows/lane_state.cuh"

namespace dcs {

// `row` and `initial` are those of the vector's first element, `gamma` is that of the element at hand. In a vector at
// most one row starts that has numbers of its own: they are there ahead, and those of the row behind it are read behind
// the vector, once in the code. `kStarts`, of a vector: whether a row may start in it, or right behind it.
template <typename Passes, Pass kPass>
struct LaneRecurrence {
  using T = typename Passes::Element;
  using Acc = typename Passes::Acc;
  using Wide = typename Passes::Wide;
  static constexpr int kVec = Passes::kVec;
  static constexpr bool kStep = Passes::kHasGates, kBackward = Passes::kHasGradients;
  // Of a lane's elements and the one behind them.
  using Bits = std::conditional_t<(kFlatVectors * kVec < 32), uint32_t, uint64_t>;

  const Passes& passes;
  Bits lane_starts, lane_cuts, lane_resets;
  int64_t row;
  Acc gamma, next_gamma, initial, next_initial;
  uint32_t starts, alone, resets;  // a vector's bits: of `alone`, nothing is carried to it

  __device__ __forceinline__ LaneRecurrence(
      const Passes& of, const LaneCuts& at, Wide first_gamma, const RowNumbers<T>& rows)
      : passes(of),
        lane_starts(static_cast<Bits>(at.starts)),
        lane_cuts(static_cast<Bits>(at.cuts)),
        lane_resets(static_cast<Bits>(at.resets)),
        row(at.row),
        gamma(make(first_gamma)),
        next_gamma(of.p.one_gamma ? gamma : make(rows.next_gamma)),
        initial(cast<Acc>(rows.initial)),
        next_initial(cast<Acc>(rows.next_initial)) {}
  static __device__ __forceinline__ Acc make(Wide gamma) {
    if constexpr (std::is_same_v<Acc, float>) return make_gate<float, true>(gamma).value;
    else return cast<Acc>(gamma);
  }

  __device__ __forceinline__ void set_vector(int k) {
    if constexpr (kPass == Pass::kPlain) return;
    starts = static_cast<uint32_t>(lane_starts >> (k * kVec));
    alone = static_cast<uint32_t>(lane_cuts >> (k * kVec));
    resets = static_cast<uint32_t>(lane_resets >> (k * kVec));
  }
  __device__ __forceinline__ bool has_start() const { return (starts & ((1u << kVec) - 1)) != 0; }
  // visit(kStarts). In longer rows most vectors are without a start in all of the warp's lanes, which are here
  // together.
  template <bool kTaken, typename Visit>
  __device__ __forceinline__ void with_starts(const Visit& visit) const {
    if constexpr (kTaken) {
      const bool starts_here = (starts & ((kBackward ? 2u : 1u) << kVec) - 1) != 0;
      if (__any_sync(0xffffffffu, starts_here)) return visit(std::true_type());
    }
    visit(std::false_type());
  }

  // Forward a row's initial value enters with the value of its first element, unless that is reset.
  __device__ __forceinline__ void take_initial(Acc (&values)[kVec], const Acc (&factors)[kVec]) const {
    if (!passes.p.problem.initial) return;
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if ((starts & ~resets) >> i & 1) values[i] = fold(values[i], kStep ? factors[i] : next_gamma, next_initial);
  }
  // Backward a vector's elements of the saved output become those that follow them, behind a row's last one `initial`.
  template <bool kStarts>
  __device__ __forceinline__ void follow(Acc (&saved)[kVec], Acc next) const {
    [[maybe_unused]] Acc behind_row = cast<Acc>(0.0);
    if constexpr (kStarts && kPass == Pass::kGeneral) behind_row = starts & 1 ? next_initial : initial;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      saved[i] = i + 1 < kVec ? saved[(i + 1) % kVec] : next;
      if (kStarts && (starts >> (i + 1) & 1)) saved[i] = behind_row;
    }
  }

  template <bool kStarts>
  __device__ __forceinline__ Acc step(int i, Acc value, Acc factor, Acc y) {
    if constexpr (kPass == Pass::kGeneral && kStarts && !kStep)
      if (starts >> i & 1) gamma = next_gamma;
    const Acc next = fold(value, kStep ? factor : gamma, y);
    return kPass != Pass::kPlain && (alone >> i & 1) ? value : next;
  }

  // Behind a vector in which a row starts.
  __device__ __forceinline__ void next_row() {
    ++row;
    if constexpr (kPass == Pass::kGeneral) {
      initial = next_initial;
      const FlatParams& p = passes.p;
      const int64_t next = row + 1;
      if (next < 0 || next >= p.rows) return;
      const RowIndex index(p, passes.reverse ? p.rows - 1 - next : next);
      if (!kStep && !p.one_gamma)
        next_gamma = make(load_gamma<Wide>(
            p.problem.gamma, p.problem.gamma_dtype, index.offset(p.problem.gamma_strides), p.problem.conjugate_gamma));
      if (p.problem.initial) next_initial = cast<Acc>(passes.initial_of(index));
    }
  }
};

}  // namespace dcs
