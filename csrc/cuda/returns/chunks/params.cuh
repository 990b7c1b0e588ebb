// What the kernels of the temporal difference scan of any shape are launched with (returns/chunks/chunk.cuh).
#pragma once

#include "common/divisor.cuh"
#include "dcs/returns/plan.h"
#include "returns/step.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

static_assert(sizeof(Piece<double>) == kPieceBytes);

template <typename Acc>
struct ReturnsChunksParams {
  ReturnsProblem problem;
  ReturnsPlan plan;
  Rates<Acc> rates;  // where gamma and the trace are numbers
  Divisor inner, sequences;
  bool own_rates;  // gamma or the trace is one a row
  // All inputs with a value for every step lie as the rewards do, all outputs as these, and neighboring slots are
  // neighbors in memory; linear: also those of different steps, so that a tile is one piece of memory.
  bool quads, linear;
  Strides results;
  Piece<double>* pieces;  // of chunks
};

// Whether `test` holds for the strides of all inputs with a value for every step; of all outputs.
template <typename Test>
bool all_inputs(const ReturnsProblem& p, const Test& test) {
  for (const ReturnsInput* input : {&p.rewards, &p.values, &p.next_values, &p.rhos, &p.terminated, &p.truncated})
    if (input->data && !test(input->strides)) return false;
  for (const ReturnsDiscount* rate : {&p.gamma, &p.trace})
    if (rate->kind == GammaKind::kStep && !test(rate->tensor.strides)) return false;
  return true;
}
template <typename Test>
bool all_outputs(const ReturnsProblem& p, const Test& test) {
  for (const ReturnsOutput* output : {&p.advantages, &p.targets, &p.pg_advantages})
    if (output->data && !test(output->strides)) return false;
  return true;
}

// Whether gates of steps may differ.
inline bool has_gates(const ReturnsProblem& p) {
  return p.rhos.data || p.pg_advantages.data || p.gamma.kind == GammaKind::kStep || p.trace.kind == GammaKind::kStep;
}

template <typename T>
ReturnsChunksParams<typename Types<T>::Acc> chunks_params(
    const ReturnsProblem& problem, const ReturnsPlan& plan, void* workspace) {
  ReturnsChunksParams<typename Types<T>::Acc> params{problem, plan};
  params.rates = number_rates<typename Types<T>::Acc>(number_of(problem.gamma), number_of(problem.trace));
  params.inner = Divisor(static_cast<uint32_t>(problem.inner));
  params.sequences = Divisor(static_cast<uint32_t>(plan.sequences));
  params.own_rates = problem.gamma.kind == GammaKind::kRow || problem.trace.kind == GammaKind::kRow;
  for (const ReturnsOutput* output : {&problem.advantages, &problem.targets, &problem.pg_advantages})
    if (output->data) params.results = output->strides;
  const auto lie_as = [&](const Strides& like) {
    return [&](const Strides& s) {
      return (problem.length == 1 || s.time == like.time) && (problem.outer == 1 || s.outer == like.outer) &&
          (problem.inner == 1 || s.inner == like.inner) &&
          (plan.columns ? problem.inner == 1 || s.inner == 1 : s.time == 1);
    };
  };
  const auto is_linear = [&](const Strides& s) {
    return !plan.columns || (problem.outer == 1 && plan.sequences == problem.inner && s.time == problem.inner);
  };
  params.quads = all_inputs(problem, lie_as(problem.rewards.strides)) && all_outputs(problem, lie_as(params.results));
  params.linear = params.quads && is_linear(problem.rewards.strides) && is_linear(params.results);
  params.pieces = static_cast<Piece<double>*>(workspace);
  return params;
}

}  // namespace dcs
