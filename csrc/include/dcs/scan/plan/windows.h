// How windowed scans are composed (window.cuh). Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/traits.h"

namespace dcs {

inline std::optional<DirectWindowPlan> plan_direct_window(const ScanProblem& p, const DeviceLimits&) {
  return is_windowed(p) && p.window <= kDirectWindowLimit ? std::optional<DirectWindowPlan>(DirectWindowPlan{})
                                                          : std::nullopt;
}
inline std::optional<ComposedWindowPlan> plan_composed_window(const ScanProblem& p, const DeviceLimits&) {
  if (!is_windowed(p)) return std::nullopt;
  const int64_t positions = p.length + (p.initial ? 1 : 0),
                row_bytes = 4 * positions * (2 * wide_bytes_of(p.dtype) + 1);
  const int64_t rows = std::clamp<int64_t>(kWindowWorkspace / row_bytes, 1, p.rows());
  return ComposedWindowPlan{rows, rows * row_bytes + 64};
}

}  // namespace dcs
