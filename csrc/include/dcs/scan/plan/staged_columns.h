// How few neighboring columns of many outer rows are staged in shared memory (columns/staged_columns.cuh,
// columns/staged_parts.cuh). Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>

#include "dcs/scan/plan/small_columns.h"
#include "dcs/scan/plan/stream_columns.h"

namespace dcs {

// Of a shared gamma or one a column: threads that read a column each would fetch a sector for a few bytes.
inline bool columns_are_staged(const ScanProblem& p) {
  const int64_t row_bytes = p.inner * bytes_of(p.dtype);
  return !is_windowed(p) && is_floating(p.dtype) && p.gamma_kind != GammaKind::kStep && !p.backward &&
      !(p.shifted && p.initial) && p.inner >= 2 && p.outer >= 2 && row_bytes < kMostStagedRow &&
      row_bytes % kSector != 0 && steps_are_dense(p, p.input_strides) && steps_are_dense(p, p.output_strides) &&
      (!p.reset || steps_are_dense(p, p.reset_strides));
}

// Shared memory of so many elements of so many bytes, as far behind a whole word of so many as in memory.
inline int64_t staged_room(int64_t elements, int64_t size, int64_t word) {
  return ceil_div(elements * size + (size < word ? word - size : 0), word) * word;
}

// Slabs begin `apart` bytes behind a multiple of all banks.
inline void lay_out_slab(StagedColumnsPlan& plan, const ScanProblem& p, int64_t word, int64_t apart) {
  const int64_t count = plan.steps * p.inner, elements = staged_room(count, bytes_of(p.dtype), word);
  int64_t bytes = elements + (p.reset ? staged_room(count, 1, word) : 0);
  while (bytes % 128 != ceil_div(apart, word) * word % 128) bytes += word;
  plan.operand_bytes = static_cast<int>(elements);
  plan.slab_bytes = static_cast<int>(bytes);
}

// All outer rows lie one behind the other.
inline bool outers_are_dense(const ScanProblem& p) {
  const auto dense = [&p](const Strides& s) { return s.outer == p.length * p.inner; };
  return dense(p.input_strides) && dense(p.output_strides) && (!p.reset || dense(p.reset_strides));
}

constexpr int64_t kStagedStatics = 128;  // bytes of shared memory that the kernels have beside it, at most

inline std::optional<StagedColumnsPlan> finished_staged(
    StagedColumnsPlan& plan, const ScanProblem& p, const DeviceLimits& device) {
  plan.most_shared = device.shared_bytes;
  plan.blocks = ceil_div(p.outer, plan.slabs);
  plan.dependent = plan.blocks <= device.dependent_blocks(p);
  const bool fits = plan.shared_bytes + kStagedStatics <= device.shared_bytes;
  return fits ? std::optional<StagedColumnsPlan>(plan) : std::nullopt;
}

// So many columns that a thread takes each.
inline std::optional<StagedColumnsPlan> plan_staged_columns(const ScanProblem& p, const DeviceLimits& device) {
  if (!columns_are_staged(p) || p.length < kFewestStagedSteps || p.rows() < kStagedColumns * device.multiprocessors)
    return std::nullopt;
  const int64_t bytes = bytes_of(p.dtype);
  StagedColumnsPlan plan{};
  plan.threads = kStagedThreads;
  plan.steps = static_cast<int>(std::min(p.length, kStagedBytes / bytes));
  lay_out_slab(plan, p, 4, p.inner * bytes);
  plan.slabs = static_cast<int>(std::min(p.outer, kStagedThreads / p.inner));
  plan.shared_bytes = int64_t{kStagedBuffers} * plan.slabs * plan.slab_bytes;
  return finished_staged(plan, p, device);
}

// The largest power of two up to `most`; 1 at least.
inline int64_t power_up_to(int64_t most) {
  int64_t power = 1;
  while (2 * power <= most) power *= 2;
  return power;
}
// Lanes that have parts of a column, at most: elements that they read at once, an odd number of steps apart, and those
// of the warp's other columns lie in different banks.
inline int64_t most_fan(int64_t row_bytes) {
  const int64_t words = row_bytes % 4 ? 1 : row_bytes / 4;
  return 32 / (words & -words);
}

// Parts of a column, at most: of its lanes and as many warps as a block has of each group of columns.
inline int64_t most_parts(const ScanProblem& p) {
  const int64_t fan = most_fan(p.inner * bytes_of(p.dtype)), groups = ceil_div(p.inner * fan, 32);
  return std::min(power_up_to(p.length / kFewestPartSteps), fan * power_up_to(kMostPartedThreads / 32 / groups));
}

inline int64_t odd_from(int64_t least) { return least | 1; }

// Bytes of shared memory that each of the threads which are on the GPU at once has for its steps.
inline int64_t parted_bytes(const DeviceLimits& device) {
  return std::min<int64_t>(kPartedBytes, device.shared_bytes / kPartedThreads);
}
inline int64_t staged_bytes_of(const ScanProblem& p) { return bytes_of(p.dtype) + (p.reset ? 1 : 0); }

inline int64_t whole_part(const ScanProblem& p, int64_t parts) { return odd_from(ceil_div(p.length, parts)); }

// Parts of a column. As many as threads are on the GPU at once, so that all blocks are, if their parts of all steps fit
// into shared memory; else as many as make a few rounds of blocks, if these parts do; else the steps come in pieces.
inline int64_t parts_of(const ScanProblem& p, const DeviceLimits& device) {
  const int64_t threads = int64_t{kPartedThreads} * device.multiprocessors, most = most_parts(p),
                at_once = std::min(power_up_to(threads / p.rows()), most),
                in_rounds = std::min(kPartedRounds * at_once, most);
  const auto fit = [&](int64_t parts) { return whole_part(p, parts) * staged_bytes_of(p) <= parted_bytes(device); };
  return fit(at_once) || !fit(in_rounds) ? at_once : in_rounds;
}

// Outer rows of a block: for the usual number of threads, in whole warps' columns if that takes not twice as many.
inline int64_t parted_slabs(const ScanProblem& p, int64_t parts, int64_t columns) {
  const int64_t threads = p.inner * parts, unit = columns / std::gcd(columns, p.inner);
  const int64_t usual = std::max<int64_t>(1, kUsualPartedThreads / threads), whole = ceil_div(usual, unit) * unit;
  return std::min(p.outer, whole * threads <= 2 * kUsualPartedThreads ? whole : usual);
}

inline std::optional<StagedColumnsPlan> fit_staged_parts(const ScanProblem& p, const DeviceLimits& device) {
  const int64_t row_bytes = p.inner * bytes_of(p.dtype), room = parted_bytes(device);
  const int64_t parts = parts_of(p, device), fan = std::min(parts, most_fan(row_bytes)), columns = 32 / fan;
  StagedColumnsPlan plan{};
  while (1 << plan.fan_bits < fan) ++plan.fan_bits;
  while (fan << plan.team_bits < parts) ++plan.team_bits;
  plan.slabs = static_cast<int>(parted_slabs(p, parts, columns));
  plan.threads = static_cast<int>((ceil_div(plan.slabs * p.inner, columns) << plan.team_bits) * 32);
  const bool in_pieces = whole_part(p, parts) * staged_bytes_of(p) > room;
  const int64_t most = odd_from(std::max<int64_t>(room / kStagedBuffers / staged_bytes_of(p), 2) - 1),
                pieces = in_pieces ? ceil_div(p.length, parts * most) : 1;
  plan.part_steps = static_cast<int>(whole_part(p, parts * pieces));
  plan.steps = static_cast<int>(parts * plan.part_steps);
  plan.flat = !in_pieces && outers_are_dense(p);
  if (plan.flat) {
    const int64_t count = plan.slabs * p.length * p.inner;
    plan.operand_bytes = static_cast<int>(staged_room(count, bytes_of(p.dtype), 16));
    plan.teams_at = plan.operand_bytes + static_cast<int>(p.reset ? staged_room(count, 1, 16) : 0);
  } else {
    lay_out_slab(plan, p, 16, plan.steps * row_bytes);
    plan.teams_at = (in_pieces ? kStagedBuffers : 1) * plan.slabs * plan.slab_bytes;
  }
  const int warps = plan.threads / 32;
  while (warps % (2 << plan.slab_warp_bits) == 0 && warps >= plan.slabs * (2 << plan.slab_warp_bits))
    ++plan.slab_warp_bits;
  plan.shared_bytes = plan.teams_at + (plan.team_bits > 0 ? int64_t{16} * warps * columns : 0);
  return finished_staged(plan, p, device);
}

// Of outer rows for all multiprocessors: threads take parts of a column's steps.
inline std::optional<StagedColumnsPlan> plan_staged_parts(const ScanProblem& p, const DeviceLimits& device) {
  if (!columns_are_staged(p) || !powers_fold(p) || device.cluster == 0 || p.length < kFewestPartedSteps ||
      p.outer < kPartedRows * device.multiprocessors || plan_small_columns(p, device) ||
      plan_stream_columns(p, device) || parts_of(p, device) == 1)
    return std::nullopt;
  return fit_staged_parts(p, device);
}

}  // namespace dcs
