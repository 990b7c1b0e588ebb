// Where a block finds the steps of its walk, in memory and in its tile.
#pragma once

#include "returns/chunks/params.cuh"

namespace dcs {

// kGates: gates of steps may differ.
template <typename T, bool kGates>
struct ReturnsPlaces {
  using Acc = typename Types<T>::Acc;

  // Of a slot: `row` of the walk, `step` in time.
  struct Place {
    int row, step;
    bool is_there;
  };

  const ReturnsChunksParams<Acc>& params;
  const ReturnsProblem& p = params.problem;
  const ReturnsPlan& plan = params.plan;
  const int length = static_cast<int>(params.problem.length);
  int64_t index;                       // of the walk
  int chunk, begin, end;               // of the chunk's steps, in the order of the scan
  int rows, first_outer, first_inner;  // of the walk
  int first = 0, slots = 0;            // of the tile: steps before it, slots that are there if it is linear
  const bool has_own_values = p.values.data && !p.values_are_next;
  const bool step_gamma = kGates && p.gamma.kind == GammaKind::kStep,
             step_trace = kGates && p.trace.kind == GammaKind::kStep;
  // Where the first slot of a linear tile is, in the inputs and the outputs.
  int64_t input_at = 0, output_at = 0;

  // A walk has so many chunks in this launch.
  __device__ __forceinline__ ReturnsPlaces(const ReturnsChunksParams<Acc>& given, uint32_t chunks) : params(given) {
    index = blockIdx.x / chunks;
    chunk = static_cast<int>(blockIdx.x - index * chunks);
    const int64_t first_row = index * plan.sequences;
    rows = static_cast<int>(min(int64_t{plan.sequences}, p.outer * p.inner - first_row));
    if (p.inner == 1) first_outer = static_cast<int>(first_row), first_inner = 0;
    else if (p.outer == 1) first_outer = 0, first_inner = static_cast<int>(first_row);
    else {
      first_outer = static_cast<int>(first_row / p.inner);
      first_inner = static_cast<int>(first_row - first_outer * p.inner);
    }
    begin = chunk * static_cast<int>(plan.chunk_steps);
    end = static_cast<int>(min((chunk + 1) * plan.chunk_steps, p.length));
  }

  __device__ __forceinline__ void begin_tile(int first_of_tile) {
    first = first_of_tile;
    if (!params.linear) return;
    slots = min(plan.slots, (end - first) * plan.sequences);
    const Place at = place_of(0);
    input_at = offset(at, p.rewards.strides);
    output_at = offset(at, params.results);
  }
  // Slots go through memory from its end.
  __device__ __forceinline__ int row_of(int sequence) const { return plan.sequences - 1 - sequence; }
  __device__ __forceinline__ Place place_of(int slot) const {
    const int line = static_cast<int>(params.sequences.of(static_cast<uint32_t>(slot))),
              row = row_of(slot - line * plan.sequences), later = first + line;
    return {row, length - 1 - later, row < rows && later < end && slot < plan.slots};
  }
  // Whether four slots from this one on are there, and neighbors in memory, of a tile that is not linear.
  __device__ __forceinline__ bool is_quad(const Place& at) const {
    if (!params.quads || params.linear || !at.is_there) return false;
    const uint32_t inner = static_cast<uint32_t>(first_inner + at.row);
    return at.row >= 3 && inner - params.inner.of(inner) * params.inner.divisor >= 3;
  }
  __device__ __forceinline__ int64_t offset(const Place& at, const Strides& strides) const {
    const uint32_t row = static_cast<uint32_t>(first_inner + at.row), outer = params.inner.of(row),
                   inner = row - outer * params.inner.divisor;
    return int64_t{first_outer + static_cast<int>(outer)} * static_cast<int>(strides.outer) +
        int64_t{static_cast<int>(inner)} * static_cast<int>(strides.inner) +
        int64_t{at.step} * static_cast<int>(strides.time);
  }
  __device__ __forceinline__ int64_t row_at(int row, const Strides& strides) const {
    return offset({row, 0, true}, strides);
  }
  __device__ __forceinline__ bool is_last(const Place& at) const { return at.step == length - 1; }
};

}  // namespace dcs
