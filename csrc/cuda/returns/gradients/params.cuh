// What the kernels of gradients are called with.
#pragma once

#include <type_traits>

#include "common/divisor.cuh"
#include "dcs/returns/gradients_plan.h"
#include "returns/step.cuh"

namespace dcs {

// Of a call: all that is given is dense and no discount is of rows; or anything.
enum class GradientsForm { kDense, kAny };

// visit(form), a type whose `value` it is.
template <typename Visit>
auto by_form(GradientsForm form, const Visit& visit) {
  if (form == GradientsForm::kDense) return visit(std::integral_constant<GradientsForm, GradientsForm::kDense>());
  return visit(std::integral_constant<GradientsForm, GradientsForm::kAny>());
}

// A tensor, null if it is not there. `dense`: its elements are in the order of GradientsShape.
template <typename Element>
struct GradientsOperand {
  Element* data = nullptr;
  int64_t slow = 0, mid = 0, fast = 0, time = 0;
  bool dense = false;
};

template <typename T>
struct GradientsParams {
  using Acc = typename Types<T>::Acc;
  GradientsShape shape;
  uint32_t length, count;
  Divisor by_fast, by_mid;
  GradientsOperand<const T> of_advantages, of_targets, of_pg, rhos;
  GradientsOperand<const uint8_t> ends, lacks_after;
  ReturnsDiscount gamma, trace;
  GradientsOperand<const Acc> step_gamma, step_trace;
  Rates<Acc> rates;  // where both are shared
  bool row_rates, step_rates;
  double clip_rho, clip_c, clip_pg;
  bool has_own_values, has_next_values, is_n_step;
  GradientsOperand<T> rewards, values, next_values;
  T* bootstrap_value;
  Strides of_bootstrap, rows;
  GradientsForm form;
  // For the scan, and of it.
  GradientsOperand<Acc> source, gates;
  double* row_gates = nullptr;
  GradientsOperand<const Acc> scanned;

  explicit GradientsParams(const ReturnsGradientsProblem& p)
      : shape(p),
        length(static_cast<uint32_t>(p.length)),
        count(static_cast<uint32_t>(p.count())),
        by_fast(static_cast<uint32_t>(shape.fast)),
        by_mid(static_cast<uint32_t>(shape.mid)),
        of_advantages(operand<const T>(p.of_advantages)),
        of_targets(operand<const T>(p.of_targets)),
        of_pg(operand<const T>(p.of_pg)),
        rhos(operand<const T>(p.rhos)),
        ends(operand<const uint8_t>(p.ends)),
        lacks_after(operand<const uint8_t>(p.lacks_after)),
        gamma(p.gamma),
        trace(p.trace),
        row_rates(p.has_discount(GammaKind::kRow)),
        step_rates(p.has_discount(GammaKind::kStep)),
        clip_rho(p.clip_rho),
        clip_c(p.clip_c),
        clip_pg(p.clip_pg),
        has_own_values(p.has_own_values),
        has_next_values(p.has_next_values),
        is_n_step(p.steps != 0),
        rewards(operand<T>(p.rewards)),
        values(operand<T>(p.values)),
        next_values(operand<T>(p.next_values)),
        bootstrap_value(static_cast<T*>(p.bootstrap_value.data)),
        of_bootstrap(p.bootstrap_value.strides),
        rows(shape.row_strides()) {
    if (gamma.kind == GammaKind::kStep) step_gamma = operand<const Acc>(gamma.tensor);
    if (trace.kind == GammaKind::kStep) step_trace = operand<const Acc>(trace.tensor);
    const auto beside_steps = [](const ReturnsDiscount& rate) {
      return rate.kind == GammaKind::kStep ? 1.0 : rate.value;
    };
    rates = number_rates<Acc>(beside_steps(gamma), beside_steps(trace));
    const auto are_dense = [](const auto&... operands) { return (... && (!operands.data || operands.dense)); };
    const bool is_dense = !row_rates &&
        are_dense(of_advantages, of_targets, of_pg, rhos, ends, lacks_after, step_gamma, step_trace, rewards, values,
            next_values);
    form = is_dense ? GradientsForm::kDense : GradientsForm::kAny;
  }
  GradientsParams(const ReturnsGradientsProblem& p, const GradientsMemory& memory, char* workspace)
      : GradientsParams(p) {
    find(source, workspace, memory.source);
    find(gates, workspace, memory.gates);
    find(scanned, workspace, memory.scanned);
    if (memory.row_gates != GradientsMemory::kNone) row_gates = reinterpret_cast<double*>(workspace + memory.row_gates);
  }

 private:
  template <typename Element, typename Given>
  GradientsOperand<Element> operand(const Given& given) const {
    GradientsOperand<Element> made;
    if (!given.data) return made;
    const Strides &strides = given.strides, dense = shape.dense();
    const auto at = [&](const Strides& s) { return shape.time_is_fast ? s.inner : s.time; };
    made.data = static_cast<Element*>(given.data);
    made.slow = strides.outer, made.mid = at(strides);
    made.time = strides.time;
    made.fast = shape.time_is_fast ? strides.time : strides.inner;
    made.dense = (shape.slow == 1 || made.slow == dense.outer) && (shape.mid == 1 || made.mid == at(dense)) &&
        (shape.fast == 1 || made.fast == 1);
    return made;
  }
  template <typename Element>
  void find(GradientsOperand<Element>& made, char* workspace, int64_t offset) const {
    if (offset != GradientsMemory::kNone) made = operand<Element>(ReturnsOutput{workspace + offset, shape.dense()});
  }
};

template <typename Acc>
__device__ __forceinline__ Acc ratio_of(bool given, Acc rho, double most) {
  return given ? clipped(rho, static_cast<Acc>(most)) : Acc(1);
}

}  // namespace dcs
