// Small scans with a number gamma of at most 1 in size and no resets, whose time is latency: what counts is how few
// instructions a block runs once memory may be read. All is in float, with powers of gamma that come rounded from the
// host, and addresses, weights and what they are made of are ready before the wait (ptx/latency.cuh). Warps leave their
// totals in shared memory, and each folds those before it; what comes of the blocks before is in float_exchange.cuh.
#pragma once

#include "common/ptx/dependent_launch.cuh"
#include "scan/lines/float_exchange.cuh"

namespace dcs {

// By all threads of a block. `Line`: what a thread has of a line, steps side by side, and how it gets and leaves them,
// by way of `turned`.
template <typename T, typename Line, typename Exchange>
__device__ __forceinline__ void scan_float_line(const FloatLinesParams& p, unsigned char* turned) {
  constexpr int kSteps = Line::kSteps;
  __shared__ FloatTotals totals;
  __shared__ typename Exchange::Shared received;
  launch_dependents();
  const Line at(p);
  const FloatPowers& powers = p.powers;
  const bool is_alone = Exchange::kCluster && p.cluster.divisor == 1;
  Exchange exchange(at, received);
  totals.init(at.warps);
  if (!is_alone) exchange.init();
  __syncthreads();
  // A bit for each distance in slots from which one is before the thread's; the weights of what enters the warp, and
  // the block, in what enters the thread.
  int folds = (1 << (32 - __clz(at.slot))) - 1;
  const double slot_weight = at.weight_of(at.slot, at.slots, powers.of_slots);
  float before = rounded(slot_weight), block_before = 0.f;
  hold(folds);
  keep(before);
  if (!is_alone) {
    block_before = rounded(slot_weight * at.weight_of(at.warp, at.warps, powers.of_warps));
    keep(block_before);
    exchange.begin();
  }
  const auto gate = gate_of<T>(powers.gate);
  if (lines_are_zero<0, sizeof p>(p, p.length)) return;
  griddepcontrol_wait();

  float values[kSteps], initial;
  at.load(values, initial);
  if constexpr (!Exchange::kCluster) exchange.find_tag();
  if (p.initial.data) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      if (at.is_first(k)) values[k] = gate.step(values[k], initial);
  }
  const float doubled_steps[2] = {powers.steps[0], powers.steps[1]};
  float total = weighed<4>(values, doubled_steps);
#pragma unroll
  for (int k = 4; k < kSteps; k += 4) total = fmaf(powers.steps[3], total, weighed<4>(values + k, doubled_steps));
#pragma unroll
  for (int j = 0; j < kSmallLevels; ++j) {
    if (1 << j >= at.slots) break;
    const float other = __shfl_up_sync(0xffffffffu, total, 1 << (p.span_bits + j));
    if (folds >> j & 1) total = fmaf(powers.slots[j], other, total);
  }
  float y = __shfl_up_sync(0xffffffffu, total, 1 << p.span_bits);
  if (at.slot == 0) y = 0.f;
  if (at.slot + 1 == at.slots) totals.of_warps[at.warps - 1 - at.warp][at.span_column] = total;
  __syncthreads();
  if (!is_alone) exchange.send([&](int column) { return totals.before(at, -1, column); });
  // The block's values, as if nothing lay before it; and what comes of what does.
  y = fmaf(before, totals.before(at, at.warps - 1 - at.warp, at.span_column), y);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) values[k] = y = gate.step(values[k], y);
  if (!is_alone) {
    const float carry = exchange.entering() * block_before;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) values[k] = fmaf(powers.steps[k], carry, values[k]);
  }
  at.store(values, turned);
}

}  // namespace dcs
