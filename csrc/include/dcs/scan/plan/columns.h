// Into what pieces a scan along a strided time is cut. Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "dcs/scan/plan/traits.h"
#include "dcs/scan/plan/powers.h"

namespace dcs {

// A thread takes all steps of its columns (columns/walk_columns.cuh).
struct WalkColumnsPlan {
  bool pairs;  // halves are read in pairs
  int64_t blocks;
};
// A block holds a tile, some steps of a span of columns (columns/held_columns.cuh).
struct HeldColumnsPlan {
  bool flat;           // a tile is one piece of memory
  int span, spans;     // columns of a block, of which there are so many side by side
  int64_t walks;       // outer * spans
  int parts;           // threads of a column in a block
  int part_steps;      // of a thread
  int64_t tiles;       // of a walk
  int64_t groups;      // of tiles
  int64_t flat_bytes;  // of a tile in shared memory
  int64_t shared_bytes, workspace_bytes;
  double part_power;  // of a number gamma, over a part
};

// Halves are read in pairs.
inline bool halves_pair(const ScanProblem& p) { return bytes_of(p.dtype) == 2 && columns_pair(p); }

// Any strides, sizes and gammas.
inline std::optional<WalkColumnsPlan> plan_any_columns(const ScanProblem& p, const DeviceLimits&) {
  if (is_windowed(p)) return std::nullopt;
  const bool pairs = halves_pair(p);
  return WalkColumnsPlan{pairs, ceil_div(p.rows() / (pairs ? 2 : 1), kColumnThreads)};
}

// Enough columns to fill the GPU, or few steps.
inline std::optional<WalkColumnsPlan> plan_walk_columns(const ScanProblem& p, const DeviceLimits& device) {
  const int64_t cells = p.rows() / (halves_pair(p) ? 2 : 1);
  if (p.length > kFewSteps && cells < int64_t{kWalkCells} * device.multiprocessors) return std::nullopt;
  return plan_any_columns(p, device);
}

// All that goes through shared memory is one piece from an aligned address on.
inline bool columns_lie_flat(const ScanProblem& p) {
  const bool whole = p.inner * p.length * bytes_of(p.dtype) % 16 == 0;
  const auto lies = [&](const void* pointer, const Strides& s) {
    return s.inner == 1 && s.time == p.inner && (p.outer == 1 || s.outer == p.inner * p.length) &&
        reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  return (whole || (p.outer == 1 && !p.reverse)) && lies(p.input, p.input_strides) &&
      lies(p.output, p.output_strides) &&
      (p.gamma_kind != GammaKind::kStep || p.shifted || lies(p.gamma, p.gamma_strides));
}

inline std::optional<HeldColumnsPlan> plan_held_columns(const ScanProblem& p, const DeviceLimits&) {
  if (is_windowed(p) || !powers_fold(p)) return std::nullopt;
  const bool step = p.gamma_kind == GammaKind::kStep;
  const int64_t bytes = bytes_of(p.dtype), row_bytes = p.inner * bytes;
  const int steps = held_steps(bytes, step, p.backward);
  HeldColumnsPlan plan{};
  plan.span = static_cast<int>(std::min<int64_t>(p.inner, kSpan));
  plan.spans = static_cast<int>(ceil_div(p.inner, plan.span));
  plan.walks = p.outer * plan.spans;
  plan.parts = kColumnThreads / plan.span;
  plan.flat = p.inner < kSpan && columns_lie_flat(p);
  // Whole batches, and whole vectors to a tile that is one piece; as even as can be.
  int64_t unit = std::min(kHeldBatch, steps);
  while (plan.flat && unit <= steps && unit * plan.parts * row_bytes % 16) ++unit;
  if (unit > steps) plan.flat = false, unit = std::min(kHeldBatch, steps);
  const int64_t tiles = ceil_div(p.length, plan.parts * (steps / unit * unit));
  plan.part_steps = static_cast<int>(ceil_div(p.length, tiles * plan.parts * unit) * unit);
  plan.part_power = bounded_power(p.gamma_value, plan.part_steps);
  plan.tiles = ceil_div(p.length, int64_t{plan.part_steps} * plan.parts);
  plan.groups = ceil_div(plan.tiles, kFan);
  plan.flat_bytes = plan.flat ? ceil_div(plan.parts * plan.part_steps * row_bytes, 16) * 16 : 0;
  plan.shared_bytes = plan.flat_bytes * (step && !p.shifted ? 2 : 1);
  if (plan.tiles > 1)
    plan.workspace_bytes =
        (plan.tiles + 2 * plan.groups) * plan.walks * plan.span * 16 * (wide_bytes_of(p.dtype) / 8) * (step ? 2 : 1);
  return plan.walks * plan.tiles < int64_t{1} << 31 ? std::optional<HeldColumnsPlan>(plan) : std::nullopt;
}

}  // namespace dcs
