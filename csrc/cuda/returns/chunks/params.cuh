// What the kernels of the temporal difference scan of any shape are launched with (returns/chunks/chunk.cuh).
#pragma once

#include "common/divisor.cuh"
#include "dcs/returns/plan.h"
#include "returns/step.cuh"
#include "scan/carry/segment.cuh"

namespace dcs {

static_assert(sizeof(Piece<double>) == kPieceBytes);

// A tensor with a value for every step, null if it is not there. In bytes: from a line to the next one, from a column
// to the next one, and what a row is apart from the one before besides its lines.
template <typename Byte>
struct LinesOf {
  Byte* data = nullptr;
  int line = 0, column = 0;
  int64_t row = 0;
  int apart = 0;  // from a slot of a tile to the one 256 before it
};

template <typename Acc>
struct ReturnsChunksParams {
  ReturnsProblem problem;  // with_rows_together(...)
  ReturnsPlan plan;
  LinesOf<const char> rewards, values, next_values, rhos, terminated, truncated, gamma, trace;
  LinesOf<char> advantages, targets, pg_advantages;
  Rates<Acc> rates;  // where gamma and the trace are numbers
  Divisor length, sequences, parts;
  int column_bits;                        // of the sequences of tiles that are no pieces of memory
  bool own_rates;                         // gamma or the trace is one of a tile's column: then gates may differ
  bool step_gamma, step_trace;            // they are factors of steps
  bool gamma_is_narrow, trace_is_narrow;  // those of steps
  bool alike;                             // all tensors have the same strides
  bool padded;                            // a tensor's rows are more apart than their lines
  // In a tile that is one piece of memory places are elements, in others lines: of a line, of a row, and what 256 slots
  // are beyond whole rows.
  int line_places, row_places, back;
  Piece<double>* pieces;  // of chunks
};

// Whether gates may differ, or policy-gradient advantages are asked for.
inline bool has_gates(const ReturnsProblem& p) {
  return p.rhos.data || p.pg_advantages.data || p.gamma.kind != GammaKind::kNumber ||
      p.trace.kind != GammaKind::kNumber;
}

// `problem`: with_rows_together(...).
template <typename T>
ReturnsChunksParams<typename Types<T>::Acc> chunks_params(
    const ReturnsProblem& problem, const ReturnsPlan& plan, void* workspace) {
  using Acc = typename Types<T>::Acc;
  constexpr int64_t size = sizeof(T);
  ReturnsChunksParams<Acc> params{problem, plan};
  params.alike = true;
  const auto set = [&](auto& lines, auto* data, const Strides& strides, int64_t bytes) {
    using Byte = std::remove_pointer_t<decltype(lines.data)>;
    lines.data = static_cast<Byte*>(data);
    if (!data) return;
    lines.line = static_cast<int>((problem.length > 1 ? strides.time : 0) * bytes);
    lines.column = static_cast<int>((problem.inner > 1 ? strides.inner : 0) * bytes);
    if (problem.outer > 1) lines.row = strides.outer * bytes - (plan.rows_apart ? 0 : lines.line * problem.length);
    lines.apart = kChunkThreads / plan.sequences * lines.line;
    params.padded = params.padded || lines.row != 0;
    params.alike = params.alike && lines.line * size == params.rewards.line * bytes &&
        lines.column * size == params.rewards.column * bytes && lines.row * size == params.rewards.row * bytes;
  };
  const auto input = [&](auto& lines, const ReturnsInput& from, int64_t bytes) {
    set(lines, from.data, from.strides, bytes);
  };
  const auto flags = [&](auto& lines, const ReturnsInput& from, bool is_bool) {
    input(lines, from, is_bool ? 1 : int64_t{sizeof(T)});
  };
  const auto rate = [&](auto& lines, const ReturnsDiscount& from) {
    if (from.kind == GammaKind::kStep) input(lines, from.tensor, bytes_of(from.dtype));
  };
  const auto output = [&](auto& lines, const ReturnsOutput& to) { set(lines, to.data, to.strides, sizeof(T)); };
  input(params.rewards, problem.rewards, sizeof(T));
  input(params.values, problem.values, sizeof(T));
  input(params.next_values, problem.next_values, sizeof(T));
  input(params.rhos, problem.rhos, sizeof(T));
  flags(params.terminated, problem.terminated, problem.terminated_is_bool);
  flags(params.truncated, problem.truncated, problem.truncated_is_bool);
  rate(params.gamma, problem.gamma);
  rate(params.trace, problem.trace);
  output(params.advantages, problem.advantages);
  output(params.targets, problem.targets);
  output(params.pg_advantages, problem.pg_advantages);
  params.rates = number_rates<Acc>(plan.rate_of(problem.gamma), plan.rate_of(problem.trace));
  params.length = Divisor(static_cast<uint32_t>(problem.length));
  params.sequences = Divisor(static_cast<uint32_t>(plan.sequences));
  params.parts = Divisor(static_cast<uint32_t>(plan.parts));
  while (1 << params.column_bits < plan.sequences) ++params.column_bits;
  params.own_rates = has_row_rates(problem) && !plan.row_gates;
  params.step_gamma =
      problem.gamma.kind == GammaKind::kStep || (plan.row_gates && problem.gamma.kind == GammaKind::kRow);
  params.step_trace =
      problem.trace.kind == GammaKind::kStep || (plan.row_gates && problem.trace.kind == GammaKind::kRow);
  params.gamma_is_narrow = problem.gamma.is_narrow();
  params.trace_is_narrow = problem.trace.is_narrow();
  params.line_places = plan.linear ? plan.sequences : 1;
  params.row_places = static_cast<int>(problem.length) * params.line_places;
  params.back = (plan.linear ? kChunkThreads : kChunkThreads / plan.sequences) % params.row_places;
  params.pieces = static_cast<Piece<double>*>(workspace);
  return params;
}

}  // namespace dcs
