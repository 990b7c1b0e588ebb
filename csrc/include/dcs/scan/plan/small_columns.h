// Which scans along a strided time have so few elements that all of their threads are on the GPU at once, and how
// blocks take them (columns/small_columns.cuh). Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/traits.h"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

// Blocks of a cluster of small scans, at most.
inline int64_t most_small_cluster(const DeviceLimits& device) {
  const bool has_room = device.multiprocessors >= kClusterMultiprocessors;
  return has_room ? std::clamp<int64_t>(device.cluster, 1, kMostRowCluster) : 1;
}

// Blocks that leave each other words, at most.
inline int64_t most_small_sharers(const DeviceLimits& device) {
  return std::min<int64_t>(kMostSmallSharers, device.multiprocessors);
}

// Blocks of clusters that are on the GPU at once, one a multiprocessor.
inline int64_t clustered_blocks(const DeviceLimits& device) {
  return device.multiprocessors / kClusterMultiprocessors * kMostRowCluster;
}

// Steps of a thread, at most.
inline int small_column_steps(const ScanProblem& p) {
  return small_column_steps(p.gamma_kind == GammaKind::kStep, p.backward);
}

// A span, a block's columns, of small scans: all of them where they are few, else sectors of every step, in half
// precision half ones where columns are few, twice as wide where there are blocks for all multiprocessors. False where
// nothing is small. At most `most_blocks` have time together.
inline bool plan_small_span(SmallColumnsPlan& plan, const ScanProblem& p, const DeviceLimits& device, int most_steps,
    int64_t most_warps, int64_t most_blocks) {
  const auto lies_near = [&](const void* pointer, const Strides& s, int64_t = 0) { return !pointer || is_near(p, s); };
  if (p.rows() >= int64_t{1} << 30 || !lies_near(p.initial, p.initial_strides) ||
      !lies_near(p.gamma, p.gamma_strides) || !lies_near(p.grad_gamma, p.grad_gamma_strides) ||
      !all_operands(p, lies_near))
    return false;
  const int64_t bytes = bytes_of(p.dtype);
  const bool wide = p.outer * ceil_div(p.inner, kSmallSpan) >= device.multiprocessors;
  const auto share = [&](int64_t most) {
    plan.spans = ceil_div(p.inner, most);
    plan.span = static_cast<int>(ceil_div(p.inner, plan.spans));
    for (plan.span_bits = 0; 1 << plan.span_bits < plan.span;) ++plan.span_bits;
  };
  share(wide ? kSmallSpan : std::min<int64_t>(kSmallSpan, kSector / bytes));
  if (bytes == 2) {
    // Half a sector where clusters of whole ones leave half of the multiprocessors without a block, and time is longer
    // than a warp a block. Narrower, too, where threads would not reach through time.
    constexpr int64_t kHalf = kSector / 4;
    const int64_t warp_steps = (32 >> plan.span_bits) * most_steps;
    if (plan.span > kHalf && p.outer * ceil_div(p.inner, kHalf) * most_blocks <= clustered_blocks(device) &&
        p.length > 2 * warp_steps * kMostRowCluster)
      share(kHalf);
    if (plan.span > 1 && p.length > (32 >> plan.span_bits) * most_steps * most_warps * most_blocks)
      share(1 << (plan.span_bits - 1));
  }
  plan.flat = plan.spans == 1 && plan.span * bytes % kSector != 0 && steps_are_dense(p, p.input_strides) &&
      steps_are_dense(p, p.output_strides) &&
      (p.gamma_kind != GammaKind::kStep || steps_are_dense(p, p.gamma_strides)) &&
      (!p.backward || steps_are_dense(p, p.saved_strides)) &&
      (!(p.backward && p.gamma_kind == GammaKind::kStep) || steps_are_dense(p, p.grad_gamma_strides));
  return true;
}

// Bytes of shared memory through which contiguous ranges of memory are turned into steps of threads, or in which these
// are while blocks that share time wait for others. False where the device has not as many.
inline bool fit_small_shared(SmallColumnsPlan& plan, const ScanProblem& p, const DeviceLimits& device) {
  const int64_t range = int64_t{4} * kSmallPitch * plan.warps * plan.steps;
  plan.shared_bytes = plan.sharers > 1 ? range * small_column_ranges(p.gamma_kind == GammaKind::kStep, p.backward)
                                       : (plan.flat ? range : 0);
  plan.most_shared = device.shared_bytes;
  return plan.shared_bytes == 0 || plan.shared_bytes + kSmallColumnsStatics <= device.shared_bytes;
}

// How many steps a thread has, so that a block of so many warps, or a cluster of such blocks, has all of time, and the
// GPU room for all of them. False where there are no such steps.
inline bool fit_small_blocks(
    SmallColumnsPlan& plan, const ScanProblem& p, const DeviceLimits& device, int most_steps, int64_t most_warps) {
  const int64_t groups = p.outer * plan.spans, slots = device.multiprocessors / kClusterMultiprocessors;
  const int64_t most = most_small_cluster(device);
  // Blocks for all multiprocessors that clusters can be on; but what a block has at once in a few steps a thread needs
  // no cluster.
  const int64_t wanted = std::clamp<int64_t>(clustered_blocks(device) / groups, 1, most);
  for (int steps = kSmallBatch; steps <= most_steps; steps += kSmallBatch) {
    const int64_t warps = ceil_div(ceil_div(p.length, steps), 32 >> plan.span_bits);
    const int64_t least = ceil_div(warps, most_warps);
    const bool alone = least == 1 && steps <= kMostLoneSteps;
    const int64_t cluster = alone ? 1 : std::max(least, std::min(wanted, ceil_div(warps, kFewestSmallColumnWarps)));
    plan.steps = steps;
    plan.sharers = 1;
    plan.cluster = static_cast<int>(std::min(cluster, most));
    plan.warps = static_cast<int>(ceil_div(warps, plan.cluster));
    plan.blocks = groups * plan.cluster;
    plan.dependent = plan.blocks <= device.dependent_blocks(p);
    const int64_t room = std::min(kSmallBlockWarps / std::max(plan.warps, 1), kMostSmallColumnBlocks);
    if (cluster <= most && fit_small_shared(plan, p, device) &&
        groups <= (cluster > 1 ? slots * (kMostRowCluster * room / cluster) : room * device.multiprocessors))
      return true;
  }
  return false;
}

// The same for blocks that leave each other words in global memory: one a multiprocessor, so that all are there at
// once. On a part of the device they are not, but wait for blocks alone that begin before them.
inline bool fit_sharing_blocks(
    SmallColumnsPlan& plan, const ScanProblem& p, const DeviceLimits& device, int64_t most_warps) {
  const int64_t groups = p.outer * plan.spans,
                most = std::min(most_small_sharers(device), device.multiprocessors / groups);
  for (int steps = kSmallBatch; steps <= small_column_steps(p); steps += kSmallBatch) {
    const int64_t warps = ceil_div(ceil_div(p.length, steps), 32 >> plan.span_bits),
                  sharers = std::min(most, ceil_div(warps, kFewestSmallColumnWarps));
    if (sharers < 2 || warps > sharers * most_warps) continue;
    plan.steps = steps;
    plan.cluster = 1;
    plan.warps = static_cast<int>(ceil_div(warps, sharers));
    plan.sharers = static_cast<int>(ceil_div(warps, plan.warps));
    plan.blocks = groups * plan.sharers;
    plan.dependent = plan.blocks <= device.dependent_blocks(p);
    plan.workspace_bytes = plan.blocks * plan.span * (p.gamma_kind == GammaKind::kStep ? 32 : 16);
    if (fit_small_shared(plan, p, device)) return true;
  }
  return false;
}

// What plans of small columns have in common: whether they may take the problem, and the span.
inline bool begin_small_columns(
    SmallColumnsPlan& plan, const ScanProblem& p, const DeviceLimits& device, int64_t most_blocks) {
  plan.in_float = scans_in_float(p);
  const bool contiguous = p.length == 1 || (p.output_strides.time == 1 && p.input_strides.time <= 1);
  return !contiguous && !is_windowed(p) && powers_fold(p) && bytes_of(p.dtype) <= 4 &&
      !(p.shifted && p.initial && !p.backward) &&
      plan_small_span(plan, p, device, small_column_steps(p), kSmallBlockWarps, most_blocks);
}

// So few elements that the GPU has room for all of their threads at once, along a strided time that fits into a block
// or a cluster.
inline std::optional<SmallColumnsPlan> plan_small_columns(const ScanProblem& p, const DeviceLimits& device) {
  SmallColumnsPlan plan{};
  if (p.length > kLongestSmallColumn || !begin_small_columns(plan, p, device, most_small_cluster(device)))
    return std::nullopt;
  const auto fits = [&](int64_t warps) { return fit_small_blocks(plan, p, device, small_column_steps(p), warps); };
  return fits(kUsualSmallColumnWarps) || fits(kSmallBlockWarps) ? std::optional<SmallColumnsPlan>(plan) : std::nullopt;
}

// The same in float, by so few blocks that those of the next launch get ready beside them.
inline std::optional<SmallColumnsPlan> plan_few_small_columns(const ScanProblem& p, const DeviceLimits& device) {
  const int64_t blocks = kMostFewColumnBlocks * device.multiprocessors,
                most = blocks * kUsualSmallColumnWarps * 32 * small_column_steps(p);  // elements, of full warps
  if (!scans_in_float(p) || p.length <= kFewColumnSteps || p.rows() * p.length > most) return std::nullopt;
  const std::optional<SmallColumnsPlan> plan = plan_small_columns(p, device);
  return plan && plan->blocks <= blocks && plan->warps <= kUsualSmallColumnWarps ? plan : std::nullopt;
}

// The same for time that as many blocks share as there is room for.
inline std::optional<SmallColumnsPlan> plan_shared_columns(const ScanProblem& p, const DeviceLimits& device) {
  SmallColumnsPlan plan{};
  if (p.inner > kMostSharedColumns || !begin_small_columns(plan, p, device, most_small_sharers(device)))
    return std::nullopt;
  const auto fits = [&](int64_t warps) { return fit_sharing_blocks(plan, p, device, warps); };
  // In float two blocks are on a multiprocessor, and the next launch's get ready there.
  plan.in_float = plan.in_float && fits(kUsualSmallColumnWarps);
  return plan.in_float || fits(kSmallBlockWarps) ? std::optional<SmallColumnsPlan>(plan) : std::nullopt;
}

}  // namespace dcs
