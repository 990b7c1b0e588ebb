// Few columns whose steps have gaps between them, as a padded tensor's: their tiles are no ranges of memory, and are
// read element by element. The input is copied first, where one range is much faster.
#pragma once

#include <optional>
#include <variant>

#include "dcs/scan/plan/kernels.h"

namespace dcs {

// The scan of the input without its gaps, which begins where the output does until the copy has a place; `plan`: of the
// scan as it is.
inline std::optional<ScanProblem> without_gaps(
    const ScanProblem& p, const KernelPlan& plan, const DeviceLimits& device) {
  const int64_t bytes = bytes_of(p.dtype), row_bytes = p.inner * bytes;
  const Strides& s = p.input_strides;
  const bool has_gaps =
      (p.inner == 1 || s.inner == 1) && s.time > p.inner && (p.outer == 1 || s.outer == p.length * s.time);
  if (!has_gaps || p.backward || bytes > 8 || row_bytes > kMostGapRow || p.rows() * p.length < kLeastGapElements)
    return std::nullopt;
  const auto is_flat = [](const KernelPlan& of) {
    const ResidentColumnsPlan* const columns = std::get_if<ResidentColumnsPlan>(&of);
    return columns && columns->flat;
  };
  ScanProblem closed = p;
  closed.input = p.output;
  closed.input_strides = {p.inner * p.length, p.inner, 1};
  if (!std::holds_alternative<ResidentColumnsPlan>(plan) || is_flat(plan)) return std::nullopt;
  const KernelPlan then = plan_scan(closed, device).plan;
  // One column is a row.
  const bool is_faster = std::holds_alternative<StreamColumnsPlan>(then) ||
      (p.inner == 1 ? !std::holds_alternative<ResidentColumnsPlan>(then) : is_flat(then));
  return is_faster ? std::optional<ScanProblem>(closed) : std::nullopt;
}

}  // namespace dcs
