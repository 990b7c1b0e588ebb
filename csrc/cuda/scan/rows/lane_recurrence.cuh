// The recurrence over a lane (lane_passes.cuh).
#pragma once

#include "scan/rows/lane_state.cuh"

namespace dcs {

// `row`, its gamma and initial value are those of the element at hand. In a vector at most one row starts that has
// numbers of its own: those of the next one are there ahead, and what a start takes is done behind the vector, once in
// the code.
template <typename Passes, Pass kPass>
struct LaneRecurrence {
  using T = typename Passes::Element;
  using Acc = typename Passes::Acc;
  using Wide = typename Passes::Wide;
  static constexpr int kVec = Passes::kVec;
  static constexpr bool kStep = Passes::kHasGates, kBackward = Passes::kHasGradients;

  const Passes& passes;
  const LaneCuts& at;
  int64_t row;
  Acc gamma, next_gamma, initial, next_initial;
  uint32_t starts, alone, resets;  // a vector's bits: of `alone`, nothing is carried to it

  __device__ __forceinline__ LaneRecurrence(
      const Passes& of, const LaneCuts& lane_cuts, Wide first_gamma, const RowNumbers<T>& rows)
      : passes(of),
        at(lane_cuts),
        row(lane_cuts.row),
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
    const bool enters = kPass == Pass::kGeneral && !kBackward && passes.p.problem.initial;
    starts = static_cast<uint32_t>(at.starts >> (k * kVec));
    alone = static_cast<uint32_t>((enters ? at.resets : at.cuts) >> (k * kVec));
    resets = static_cast<uint32_t>(at.resets >> (k * kVec));
  }
  __device__ __forceinline__ bool has_start() const { return (starts & ((1u << kVec) - 1)) != 0; }

  __device__ __forceinline__ Acc step(int i, Acc value, Acc factor, Acc y) {
    if constexpr (kPass == Pass::kGeneral) {
      if (starts >> i & 1) {
        if constexpr (!kStep) gamma = next_gamma;
        if constexpr (!kBackward) y = next_initial;
        initial = next_initial;
      }
    }
    const Acc next = fold(value, kStep ? factor : gamma, y);
    return kPass != Pass::kPlain && (alone >> i & 1) ? value : next;
  }

  // Behind a vector in which a row starts.
  __device__ __forceinline__ void next_row() {
    ++row;
    if constexpr (kPass == Pass::kGeneral) {
      const RowNumbers<T> rows = passes.ask_rows(row);
      if (!kStep && !passes.p.one_gamma) next_gamma = make(rows.next_gamma);
      next_initial = cast<Acc>(rows.next_initial);
    }
  }
};

}  // namespace dcs
