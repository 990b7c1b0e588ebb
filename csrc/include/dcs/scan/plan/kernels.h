// Which kernel takes a scan, and with what tiles: an ordered list of candidates, of which the first one that takes the
// problem is launched. Host code without CUDA or torch types.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <variant>

#include "dcs/scan/plan/aligned.h"
#include "dcs/scan/plan/columns.h"
#include "dcs/scan/plan/lookback_columns.h"
#include "dcs/scan/plan/small_columns.h"
#include "dcs/scan/plan/rows.h"
#include "dcs/scan/plan/staged_columns.h"
#include "dcs/scan/plan/stream_columns.h"
#include "dcs/scan/plan/windows.h"

namespace dcs {

using KernelPlan = std::variant<DirectWindowPlan, ComposedWindowPlan, AlignedPlan, SmallRowsPlan, FlatRowsPlan,
    LongRowsPlan, FewStepsPlan, StagedColumnsPlan, SerialColumnsPlan, SmallColumnsPlan, LookbackColumnsPlan,
    StreamColumnsPlan, ResidentColumnsPlan>;

inline std::optional<AlignedPlan> plan_aligned(const ScanProblem& problem, const DeviceLimits& device) {
  return AlignedPlanner(problem, device).plan();
}

template <auto kPlan>
std::optional<KernelPlan> plan_by(const ScanProblem& problem, const DeviceLimits& device) {
  if (const auto plan = kPlan(problem, device)) return KernelPlan(*plan);
  return std::nullopt;
}

struct Candidate {
  const char* name;
  const char* takes;
  std::optional<KernelPlan> (*plan)(const ScanProblem&, const DeviceLimits&);
};
constexpr Candidate kCandidates[] = {
    {"direct_window", "windows of at most 64 steps", plan_by<plan_direct_window>},
    {"composed_window", "longer windows", plan_by<plan_composed_window>},
    {"few_steps", "columns of at most 4 steps, or rows of less than 16 bytes with numbers of their own or gaps",
        plan_by<plan_few_steps<kFewestSteps>>},
    {"staged_columns", "columns of few neighbors, of a few outer rows a multiprocessor", plan_by<plan_staged_parts>},
    {"staged_columns", "those that fill the GPU, of fewer steps", plan_by<plan_staged_columns>},
    {"lookback_columns", "many elements, a number gamma of at most 1 in size, no resets",
        plan_by<plan_lookback_columns>},
    {"small_columns", "those of few elements in all and a number gamma, by few blocks",
        plan_by<plan_few_small_columns>},
    {"aligned", "plain scans of at most four bytes an element: aligned rows, columns that blocks fill",
        plan_by<plan_aligned>},
    {"small_rows", "contiguous rows of few elements in all, that fit into a block or a cluster",
        plan_by<plan_small_rows>},
    {"flat_rows", "contiguous rows that fit into a block, few into a cluster", plan_by<plan_flat_rows>},
    {"long_rows", "longer contiguous rows, not of complex numbers", plan_by<plan_long_rows>},
    {"few_steps", "the same of at most 8 steps", plan_by<plan_few_steps<kFewSteps>>},
    {"serial_columns", "columns that fill the GPU, or few steps", plan_by<plan_serial_columns>},
    {"small_columns", "columns of few elements in all, whose time fits into a block or a cluster",
        plan_by<plan_small_columns>},
    {"small_columns", "up to 48 columns of few elements in all, whose time many blocks share",
        plan_by<plan_shared_columns>},
    {"stream_columns", "long scans of few columns, of a shared gamma and without resets", plan_by<plan_stream_columns>},
    {"resident_columns", "fewer columns", plan_by<plan_resident_columns>},
    {"serial_columns", "everything else", plan_by<plan_any_columns>},
};

// Of a row's part of gamma's gradient.
inline int64_t partials(const KernelPlan& plan) {
  if (const AlignedPlan* const aligned = std::get_if<AlignedPlan>(&plan)) return aligned->partials();
  if (const LongRowsPlan* const rows = std::get_if<LongRowsPlan>(&plan)) return rows->partials;
  if (const SmallColumnsPlan* const columns = std::get_if<SmallColumnsPlan>(&plan)) return columns->sharers;
  const ResidentColumnsPlan* const columns = std::get_if<ResidentColumnsPlan>(&plan);
  return columns ? columns->tiles : 1;
}

inline int64_t workspace_bytes(const KernelPlan& plan) {
  if (const ComposedWindowPlan* const window = std::get_if<ComposedWindowPlan>(&plan)) return window->workspace_bytes;
  if (const AlignedPlan* const aligned = std::get_if<AlignedPlan>(&plan)) return aligned->workspace_bytes;
  if (const LongRowsPlan* const rows = std::get_if<LongRowsPlan>(&plan)) return rows->workspace_bytes;
  if (const SmallColumnsPlan* const columns = std::get_if<SmallColumnsPlan>(&plan)) return columns->workspace_bytes;
  if (const LookbackColumnsPlan* const columns = std::get_if<LookbackColumnsPlan>(&plan))
    return columns->workspace_bytes;
  if (const StreamColumnsPlan* const columns = std::get_if<StreamColumnsPlan>(&plan)) return columns->workspace_bytes;
  const ResidentColumnsPlan* const columns = std::get_if<ResidentColumnsPlan>(&plan);
  return columns ? columns->workspace_bytes : 0;
}

// Its blocks wait for each other.
inline bool runs_together(const KernelPlan& plan) {
  if (const AlignedPlan* const aligned = std::get_if<AlignedPlan>(&plan)) return aligned->needs_coresident_blocks();
  if (const SmallRowsPlan* const rows = std::get_if<SmallRowsPlan>(&plan)) return rows->cluster > 1;
  if (const FlatRowsPlan* const rows = std::get_if<FlatRowsPlan>(&plan)) return rows->cluster > 1;
  if (const SmallColumnsPlan* const columns = std::get_if<SmallColumnsPlan>(&plan)) return columns->cluster > 1;
  if (const LookbackColumnsPlan* const columns = std::get_if<LookbackColumnsPlan>(&plan)) return columns->cluster > 1;
  if (const LongRowsPlan* const rows = std::get_if<LongRowsPlan>(&plan)) return !rows->dependent;
  return std::holds_alternative<StreamColumnsPlan>(plan);
}

struct ScanPlan {
  const Candidate* candidate;
  KernelPlan plan;
};

inline ScanPlan plan_scan(const ScanProblem& problem, const DeviceLimits& device) {
  // The partial sums of gamma's gradient are counted before it has an address.
  const bool counted = problem.backward && problem.grad_gamma && problem.gamma_kind != GammaKind::kStep;
  for (const Candidate& candidate : kCandidates) {
    const std::optional<KernelPlan> plan = candidate.plan(problem, device);
    if (plan && !(counted && partials(*plan) > problem.partials)) return {&candidate, *plan};
  }
  return {std::end(kCandidates) - 1, *plan_by<plan_any_columns>(problem, device)};
}

}  // namespace dcs
