// Which kernel takes a temporal difference scan, and in what pieces: an ordered list of candidates, of which the first
// one that takes the problem is launched. Host code without CUDA or torch types.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "dcs/returns/flat_rows_plan.h"
#include "dcs/returns/tile_plan.h"

namespace dcs {

enum class ReturnsKernel {
  kNSteps,       // cuda/returns/n_step_launch.cuh
  kShortRows,    // cuda/returns/small.cuh
  kFewColumns,   // cuda/returns/small.cuh
  kFlatRows,     // cuda/returns/flat_rows
  kWalk,         // cuda/returns/walk
  kTileColumns,  // cuda/returns/tile_columns
  kChunks,       // cuda/returns/chunks
  kAnyColumns,   // cuda/returns/any_columns.cuh
};

// The pieces of the kernel, where it has a plan.
struct ReturnsKernelPlan {
  ReturnsKernel kernel = ReturnsKernel::kAnyColumns;
  FlatReturnsPlan rows{};
  HeldColumnsPlan tiles{};
  ReturnsPlan chunks{};

  int64_t workspace_bytes() const {
    return kernel == ReturnsKernel::kTileColumns ? tiles.workspace_bytes
        : kernel == ReturnsKernel::kChunks       ? chunks.workspace_bytes()
                                                 : 0;
  }
};

// Kernels for little work (cuda/returns/small.cuh). Few columns: kSmallColumns of them a block, kSmallSteps steps a
// lane, at most kSmallWarps warps. A block's loads ask for every row of memory that it has a step of, and for whole
// sectors of 32 bytes there: with fewer columns a block, for more blocks, or wider words of fewer lanes it was slower.
constexpr int kShortRowThreads = 128, kMostShortRowLanes = 8;
constexpr int kSmallColumns = 8, kSmallSteps = 4, kSmallWarps = 16, kSmallWarpSteps = 32 / kSmallColumns * kSmallSteps;

// Rows of `lanes` whole vectors, a power of two, one behind the other.
inline bool takes_short_rows(const ReturnsProblem& p) {
  const int64_t bytes = bytes_of(p.dtype), vector = 16 / bytes, lanes = p.length / vector;
  if (bytes > 4 || form_of(p) == kAnyForm || p.length % vector || lanes > kMostShortRowLanes || (lanes & (lanes - 1)) ||
      !has_even_bootstrap(p))
    return false;
  return all_step_operands(p, [&](const void* data, const Strides& s, int64_t size) {
    return s.time == 1 && (p.inner == 1 || s.inner == p.length) && (p.outer == 1 || s.outer == p.inner * p.length) &&
        reinterpret_cast<uintptr_t>(data) % (vector * size) == 0;
  });
}

// Columns one beside the other, two blocks of them a multiprocessor at most: with more the other kernels read longer
// pieces of memory.
inline bool takes_few_columns(const ReturnsProblem& p, int64_t multiprocessors) {
  if (bytes_of(p.dtype) > 4 || form_of(p) == kAnyForm || p.outer != 1 || p.length > kSmallWarps * kSmallWarpSteps ||
      p.rows() > 2 * kSmallColumns * multiprocessors)
    return false;
  return all_step_operands(p, [&](const void*, const Strides& s, int64_t) {
    return (p.inner == 1 || s.inner == 1) && (p.length == 1 || s.time == p.inner);
  });
}

// Columns that fill the GPU, so many for each multiprocessor, or few steps: a thread may walk along each. Neighboring
// ones that are a sector of memory at least, for all that a longer column reads is to be used. As long as there are
// fewer columns tiles are faster where these have enough steps.
constexpr int64_t kWalkedColumns = 64, kWalkedLongColumns = 160, kWalkedSector = 32;
constexpr int64_t kFewWalkedSteps = 16, kMostWalkedSteps = 32, kLeastTiledColumn = 64;

inline bool takes_walk(const ReturnsProblem& p, int64_t multiprocessors) {
  if (is_contiguous(p) || !counts_in_32_bits(p) || p.rows() >= int64_t{1} << 31) return false;
  if (p.length <= kFewWalkedSteps) return true;
  const int64_t least = p.length <= kMostWalkedSteps ? 1
      : p.length >= kLeastTiledColumn                ? kWalkedLongColumns
                                                     : kWalkedColumns;
  return p.rows() >= least * multiprocessors && p.inner * bytes_of(p.dtype) >= kWalkedSector;
}

// Short columns of which a sector has steps of several, one behind the other: tiles of one piece of memory (chunks).
inline bool takes_tiles(const ReturnsProblem& p) {
  return !is_contiguous(p) && (p.length >= kLeastTiledColumn || !lies_linear(p));
}

// plan(...): whether the kernel takes the problem; its pieces go into the plan.
struct ReturnsCandidate {
  ReturnsKernel kernel;
  bool (*plan)(const ReturnsProblem&, const DeviceLimits&, ReturnsKernelPlan&);
};

template <typename Plan>
bool has_plan(const std::optional<Plan>& found, Plan& plan) {
  if (found) plan = *found;
  return found.has_value();
}

constexpr ReturnsCandidate kReturnsCandidates[] = {
    {ReturnsKernel::kNSteps,
        [](const ReturnsProblem& p, const DeviceLimits&, ReturnsKernelPlan&) { return p.steps != 0; }},
    {ReturnsKernel::kShortRows,
        [](const ReturnsProblem& p, const DeviceLimits&, ReturnsKernelPlan&) { return takes_short_rows(p); }},
    {ReturnsKernel::kFewColumns,
        [](const ReturnsProblem& p, const DeviceLimits& device, ReturnsKernelPlan&) {
          return takes_few_columns(p, device.multiprocessors);
        }},
    // Contiguous rows that fit into a block or a cluster.
    {ReturnsKernel::kFlatRows,
        [](const ReturnsProblem& p, const DeviceLimits& device, ReturnsKernelPlan& plan) {
          return has_plan(
              plan_flat_returns(p, device.multiprocessors, device.shared_bytes - kStaticBytes, device.cluster),
              plan.rows);
        }},
    {ReturnsKernel::kWalk,
        [](const ReturnsProblem& p, const DeviceLimits& device, ReturnsKernelPlan&) {
          return takes_walk(p, device.multiprocessors);
        }},
    {ReturnsKernel::kTileColumns,
        [](const ReturnsProblem& p, const DeviceLimits& device, ReturnsKernelPlan& plan) {
          return takes_tiles(p) && has_plan(plan_tiles(p, device.multiprocessors, device.cluster > 1), plan.tiles);
        }},
    // Longer contiguous rows, short columns one behind the other, and what else is counted in 32 bits.
    {ReturnsKernel::kChunks,
        [](const ReturnsProblem& p, const DeviceLimits& device, ReturnsKernelPlan& plan) {
          return has_plan(plan_chunks(p, device.multiprocessors), plan.chunks);
        }},
    {ReturnsKernel::kAnyColumns, [](const ReturnsProblem&, const DeviceLimits&, ReturnsKernelPlan&) { return true; }},
};

// `p`: with_rows_together(...).
inline ReturnsKernelPlan plan_returns_kernel(const ReturnsProblem& p, const DeviceLimits& device) {
  ReturnsKernelPlan plan;
  for (const ReturnsCandidate& candidate : kReturnsCandidates) {
    if (!candidate.plan(p, device, plan)) continue;
    plan.kernel = candidate.kernel;
    break;
  }
  return plan;
}

// The same problem from so many rows, and columns, on.
inline ReturnsProblem moved_on(ReturnsProblem p, int64_t outer, int64_t inner) {
  const int64_t bytes = bytes_of(p.dtype), wide = p.dtype == ElementType::Double ? 8 : 4;
  const auto move = [&](auto& operand, int64_t size) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(operand.data)>>, const char, char>;
    const Strides& s = operand.strides;
    if (operand.data) operand.data = static_cast<Byte*>(operand.data) + (outer * s.outer + inner * s.inner) * size;
  };
  for (auto* input : {&p.rewards, &p.values, &p.next_values, &p.bootstrap_value, &p.rhos}) move(*input, bytes);
  move(p.terminated, p.terminated_is_bool ? 1 : bytes);
  move(p.truncated, p.truncated_is_bool ? 1 : bytes);
  for (ReturnsDiscount* rate : {&p.gamma, &p.trace})
    move(rate->tensor, rate->kind == GammaKind::kStep ? wide : bytes_of(rate->dtype));
  for (auto* output : {&p.advantages, &p.targets, &p.pg_advantages}) move(*output, bytes);
  return p;
}

// Visits parts of a problem, by rows or by columns, whose steps are counted in 32 bits, where there can be such.
template <typename Run>
void each_counted_part(const ReturnsProblem& p, const Run& run) {
  const bool many_rows = p.outer > 1 && p.outer * p.length > kMostCounted,
             many_columns = p.inner > 1 && p.length * p.inner > kMostCounted;
  if (!(many_rows || many_columns) || p.length > kMostCounted || !strides_are_near(p)) return run(p);
  const int64_t whole = many_rows ? p.outer : p.inner, grain = whole > 32 ? 16 : 1, first = whole / 2 / grain * grain;
  ReturnsProblem part = p;
  (many_rows ? part.outer : part.inner) = first;
  each_counted_part(part, run);
  part = moved_on(p, many_rows ? first : 0, many_rows ? 0 : first);
  (many_rows ? part.outer : part.inner) = whole - first;
  each_counted_part(part, run);
}

}  // namespace dcs
