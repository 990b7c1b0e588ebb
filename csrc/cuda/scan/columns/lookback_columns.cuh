// Scans along a strided time by a number gamma of at most 1 in size, without resets, in float: a warp has some steps
// of a span of columns in registers, read once, a word of four bytes a lane (word_steps.cuh), so that half precision
// is read and scanned two columns at a time. Totals meet in shared memory, in a cluster's, and in global memory
// (lookback_exchange.cuh). Any alignment, number of columns and of steps.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "scan/columns/lookback_exchange.cuh"
#include "scan/columns/word_steps.cuh"

namespace dcs {

template <typename T, bool kApart>
__global__ void __launch_bounds__(32 * kLookbackWarps, kLookbackBlocks)
    lookback_columns_kernel(const __grid_constant__ LookbackParams params) {
  using Exchange = LookbackExchange<T>;
  using Steps = WordSteps<T, kApart, kLookbackSteps>;
  using Values = typename Exchange::Values;
  constexpr int kColumns = Exchange::kColumns, kSteps = kLookbackSteps;
  __shared__ typename Exchange::Shared shared;
  launch_dependents();
  const LookbackPlace at(params);
  const Exchange exchange{params, shared};
  exchange.begin(at);
  griddepcontrol_wait();

  const Steps steps{at.lane, at.columns, at.count};
  const int64_t column_bytes = int64_t{at.first_column} * static_cast<int>(sizeof(T));
  const char* const from =
      params.input + at.outer * params.input_outer + at.first_step * params.input_time + column_bytes;
  uint32_t words[kSteps];
  steps.load(from, params.input_time, at.first_step == 0, at.first_step + at.count == params.length, words);
  if (params.chunks > 1 && threadIdx.x == 0) shared.tag = tag_of_launch(params.tag);
  steps.align(from, params.input_time, words);
  const auto gate = gate_of<T>(params.powers.gate);
  // Steps that do not exist are zeros: behind them is nothing.
  Values y{};
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (k >= params.steps) break;
    Values x;
    Steps::values_at(words[k], x);
#pragma unroll
    for (int u = 0; u < kColumns; ++u) y[u] = gate.step(x[u], y[u]);
  }
  Values entering;
  exchange.enter(at, y, entering);
  // A first step of -0 stays one.
  if (at.first_step == 0 && !params.initial) {
#pragma unroll
    for (int u = 0; u < kColumns; ++u) entering[u] = copysignf(0.f, -gate.value);
  }
  __syncwarp();

  typename Steps::Output output(steps,
      params.output + at.outer * params.output_outer + at.first_step * params.output_time + column_bytes,
      params.output_time);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    Values x;
    Steps::values_at(words[k], x);
#pragma unroll
    for (int u = 0; u < kColumns; ++u) entering[u] = gate.step(x[u], entering[u]);
    output.store(k, entering);
  }
}

}  // namespace dcs
