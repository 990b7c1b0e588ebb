// Into what tiles long scans of few columns are cut (columns/stream_columns.cuh). Host code without CUDA or torch
// types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/traits.h"

namespace dcs {

// Tiles of at least two rounds of blocks, by which they are nearly filled.
inline bool fit_stream_tiles(StreamColumnsPlan& plan, const ScanProblem& p, const DeviceLimits& device) {
  const int64_t steps = int64_t{plan.parts} * plan.part_steps,
                blocks = std::min(device.multiprocessors, kMostStreamSharers);
  plan.tiles = ceil_div(p.length, steps);
  plan.sharers = static_cast<int>(std::min(plan.tiles, std::max<int64_t>(1, blocks / p.outer)));
  plan.strips_apart = std::min(p.outer, blocks / plan.sharers);
  plan.blocks = plan.strips_apart * plan.sharers;
  const int lone = p.inner <= kFewStreamColumns ? kMostStreamSharers : kGroupedStreamWords;
  plan.group = plan.sharers > lone ? kStreamGroup : 1;
  plan.groups = static_cast<int>(ceil_div(plan.sharers, plan.group));
  const int64_t strip_rounds = ceil_div(plan.tiles, plan.sharers);
  plan.strip_words = plan.tiles + strip_rounds * plan.groups;
  plan.workspace_bytes = plan.sharers > 1 ? p.outer * p.inner * plan.strip_words * 16 : 0;
  const int64_t rounds = ceil_div(p.outer, plan.strips_apart) * strip_rounds;
  if (!has_one_gamma(p) && plan.strips_apart < p.outer) return false;
  return rounds >= kFewestStreamRounds && p.outer * p.length * 100 >= rounds * blocks * steps * kStreamPercent;
}

// One gamma, few columns, and steps that lie one behind the other, of the input with or without gaps.
inline std::optional<StreamColumnsPlan> fit_stream_columns(const ScanProblem& p, const DeviceLimits& device) {
  const int64_t bytes = bytes_of(p.dtype), pitch = p.input_strides.time;
  const auto modulo = [&](int64_t elements) { return elements * bytes % 16; };
  if (is_windowed(p) || !powers_fold(p) || !is_floating(p.dtype) || p.gamma_kind == GammaKind::kStep || p.backward ||
      p.reset || (p.shifted && p.initial) || device.cluster == 0 || p.inner * bytes > kMostGapRow ||
      p.output_strides.time != p.inner || p.length == 1 || pitch < p.inner ||
      (p.inner > 1 && (p.input_strides.inner != 1 || p.output_strides.inner != 1)) ||
      (p.outer > 1 && (p.input_strides.outer < p.length * pitch || p.output_strides.outer < p.length * p.inner)))
    return std::nullopt;
  const bool in_place = pitch == p.inner &&
      (reinterpret_cast<uintptr_t>(p.input) - reinterpret_cast<uintptr_t>(p.output)) % 16 == 0 &&
      (p.outer == 1 || modulo(p.input_strides.outer) == modulo(p.output_strides.outer));
  StreamColumnsPlan plan{};
  plan.parts = static_cast<int>(32 * kStreamWarps / p.inner);
  plan.most_shared = device.shared_bytes;
  // Parts begin in other banks than those before: a word behind a multiple of all.
  for (int64_t banks = 128; banks >= 64; banks /= 2) {
    plan.part_steps = static_cast<int>(banks / bytes + 1);
    const auto room = [&](int64_t elements) {
      return ceil_div(int64_t{plan.parts} * plan.part_steps * elements * bytes + 32, 128) * 128;
    };
    const int64_t stage = room(pitch), output = in_place ? 0 : room(p.inner),
                  left = device.shared_bytes - kStreamSharedBytes - 2 * output;
    if (pitch >= device.shared_bytes || left < (kFewestStreamStages + (in_place ? 1 : 0)) * stage) continue;
    plan.stage_bytes = static_cast<int>(stage);
    plan.output_bytes = static_cast<int>(output);
    plan.stages = static_cast<int>(std::min<int64_t>(left / stage, kMostStreamStages));
    plan.shared_bytes = kStreamSharedBytes + int64_t{plan.stages} * plan.stage_bytes + 2 * plan.output_bytes;
    return fit_stream_tiles(plan, p, device) ? std::optional<StreamColumnsPlan>(plan) : std::nullopt;
  }
  return std::nullopt;
}

// Where they outrun blocks that hold a tile (columns.h): of an input with gaps, which those would have copied first,
// and of two and three columns of very many steps.
inline std::optional<StreamColumnsPlan> plan_stream_columns(const ScanProblem& p, const DeviceLimits& device) {
  const bool has_gaps = p.input_strides.time > p.inner;
  if (!has_gaps && (p.inner > kMostDenseStreamColumns || p.rows() * p.length < kLeastDenseStreamElements))
    return std::nullopt;
  return fit_stream_columns(p, device);
}

}  // namespace dcs
