// Into what chunks of time scans of a number gamma along a strided time are cut (columns/lookback_columns.cuh). Host
// code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "dcs/scan/plan/aligned.h"
#include "dcs/scan/plan/columns.h"
#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/small_columns.h"
#include "dcs/scan/plan/traits.h"

namespace dcs {

// Whether all steps begin where words of four bytes do, and are whole words.
inline bool steps_are_words(const ScanProblem& p) {
  const int64_t bytes = bytes_of(p.dtype);
  const auto are = [&](const void* pointer, const Strides& s) {
    return reinterpret_cast<uintptr_t>(pointer) % 4 == 0 && s.time * bytes % 4 == 0 &&
        (p.outer == 1 || s.outer * bytes % 4 == 0);
  };
  return p.inner * bytes % 4 == 0 && are(p.input, p.input_strides) && are(p.output, p.output_strides);
}

// Columns of half precision that a warp's 32 words have at most: where steps begin anywhere, the first element of some
// is in the midst of the first word.
constexpr int64_t word_columns(int64_t bytes, bool apart) { return bytes > 2 ? 32 : apart ? 63 : 64; }

// Blocks of a cluster and spans of a block: as few as have all of time, or keep chunks that wait for each other few.
inline void share_lookback(LookbackColumnsPlan& plan, const ScanProblem& p, const DeviceLimits& device) {
  const int64_t lines = p.outer * plan.spans;
  while (1 << plan.across_bits < kMostLookbackAcross && 1 << plan.across_bits < plan.spans &&
      lines >> plan.across_bits >= kSharedLookbackSpans * device.multiprocessors)
    ++plan.across_bits;
  plan.warps = kLookbackWarps;
  plan.parts = kLookbackWarps >> plan.across_bits;
  plan.group = 2 * plan.parts;
  const int64_t across = p.outer * ceil_div(plan.spans, int64_t{1} << plan.across_bits),
                room = int64_t{kLookbackBlocks} * device.multiprocessors,
                time_blocks = ceil_div(p.length, int64_t{plan.parts} * kLookbackSteps);
  // All of time without a word in global memory, or so large that few chunks wait for each other.
  plan.cluster = static_cast<int>(std::min<int64_t>(time_blocks, kMostLookbackCluster));
  while (plan.cluster < time_blocks && plan.cluster > 1 && room <= kMostLookbackChunks * across * plan.cluster / 2)
    plan.cluster /= 2;
  const auto chunks_of = [&](int64_t steps) { return ceil_div(p.length, steps * plan.parts * plan.cluster); };
  plan.steps = static_cast<int>(ceil_div(p.length, chunks_of(kLookbackSteps) * plan.parts * plan.cluster));
  plan.chunks = chunks_of(plan.steps);
  plan.chunk_words = (across << plan.across_bits) * 32;
  plan.blocks = across * plan.cluster * plan.chunks;
  plan.dependent = plan.blocks <= device.dependent_blocks(p);
  if (plan.chunks > 1) plan.workspace_bytes = (plan.chunks + plan.chunks / plan.group) * plan.chunk_words * 16;
}

// One gamma and steps of neighboring columns, one behind the other.
inline std::optional<LookbackColumnsPlan> fit_lookback_columns(const ScanProblem& p, const DeviceLimits& device) {
  const auto lies_apart = [&](const Strides& s) { return (p.inner == 1 || s.inner == 1) && s.time >= p.inner; };
  if (!scans_in_float(p) || is_windowed(p) || (p.shifted && p.initial) || device.cluster < kMostLookbackCluster ||
      !lies_apart(p.input_strides) || !lies_apart(p.output_strides) || p.rows() >= int64_t{1} << 26)
    return std::nullopt;
  LookbackColumnsPlan plan{};
  plan.apart = bytes_of(p.dtype) == 2 && !steps_are_words(p);
  plan.span = static_cast<int>(word_columns(bytes_of(p.dtype), plan.apart));
  plan.spans = ceil_div(p.inner, plan.span);
  share_lookback(plan, p, device);
  return plan.blocks < int64_t{1} << 31 ? std::optional<LookbackColumnsPlan>(plan) : std::nullopt;
}

// Where they are faster than others: not below so many elements, of so few steps, of spans that leave lanes without
// columns, or of few steps in whole vectors, which others take as well.
inline std::optional<LookbackColumnsPlan> plan_lookback_columns(const ScanProblem& p, const DeviceLimits& device) {
  const int64_t bytes = bytes_of(p.dtype), words = ceil_div(p.inner * bytes, 4), elements = p.rows() * p.length;
  // What most scans that come here fail by takes no plan.
  if (words < kFewestLookbackWords || elements < kLeastLookback || p.length < kFewLookbackSteps) return std::nullopt;
  const std::optional<LookbackColumnsPlan> plan = fit_lookback_columns(p, device);
  if (!plan || words < kFewestLookbackWords * plan->spans || (plan->apart && elements < kLeastApartLookback))
    return std::nullopt;
  const bool in_vectors = columns_make_words(p, 16 / bytes);
  if (in_vectors && p.length <= few_vector_steps(bytes) &&
      (AlignedPlanner(p, device).plan() || (bytes == 4 && plan_few_small_columns(p, device))))
    return std::nullopt;
  // Threads with whole columns fill the GPU.
  if (serial_columns_fill(p, device) && (in_vectors || p.length < (plan->apart ? 2 : 1) * kFewestLookbackSteps))
    return std::nullopt;
  return plan;
}

}  // namespace dcs
