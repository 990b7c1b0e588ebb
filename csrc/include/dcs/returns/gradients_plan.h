// What the kernels of `_returns_gradients` are asked to do, and by which of them: one of a temporal difference scan, in
// which gradients are such a scan that begins with a row's first step, or of returns over n steps; or a scan of
// csrc/cuda/scan and a kernel behind it. Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>

#include "dcs/limits.h"
#include "dcs/returns/flat_rows_plan.h"
#include "dcs/returns/n_step_plan.h"
#include "dcs/returns/tile_plan.h"
#include "dcs/scan/plan/tuning.h"
#include "dcs/scan/problem.h"

namespace dcs {

// The gradients of what a call is linear in, from those of its results (torch_dcs_ops/ops/returns/gradients.py has the
// formulas). The sizes and discounts are the call's.
struct ReturnsGradientsProblem {
  ElementType dtype;  // of all but flags, gamma and trace
  int64_t outer = 1;
  int64_t length = 1;
  int64_t inner = 1;

  ReturnsInput of_advantages, of_targets, of_pg;
  ReturnsInput ends, lacks_after;  // bool: nothing is carried to a step; the value of the next state is not read
  ReturnsInput rhos;               // null: 1
  ReturnsDiscount gamma, trace;
  double clip_rho = 1.0, clip_c = 1.0, clip_pg = 1.0;
  int64_t steps = 0;             // of `_n_step_returns`; 0: the scan
  bool has_own_values = false;   // a step's value is taken from its difference and added to its target
  bool has_next_values = false;  // else that of the next state is `values` at the next step, or the bootstrap value

  ReturnsOutput rewards, values, next_values;
  ReturnsOutput bootstrap_value;  // of rows

  int64_t rows() const { return outer * inner; }
  int64_t count() const { return rows() * length; }
  bool has_discount(GammaKind kind) const { return gamma.kind == kind || trace.kind == kind; }
};

// As many elements as the kernels count.
constexpr int64_t kMostGradientElements = (int64_t{1} << 31) - (1 << 10);

// Elements seen as (slow, mid, fast), in the order in which they lie in memory; time is `mid` or `fast`.
struct GradientsShape {
  int64_t slow, mid, fast;
  bool time_is_fast;

  explicit GradientsShape(const ReturnsGradientsProblem& p) {
    const Strides* like = &(p.of_targets.data ? p.of_targets : p.of_advantages).strides;
    for (const auto* output : {&p.next_values, &p.values, &p.rewards})
      if (output->data) like = &output->strides;
    time_is_fast = p.length > 1 && (p.inner == 1 || like->time < like->inner);
    slow = p.outer;
    mid = time_is_fast ? p.inner : p.length;
    fast = time_is_fast ? p.length : p.inner;
  }
  // Of a tensor of these elements without anything between them.
  Strides dense() const {
    const auto unless_one = [](int64_t size, int64_t stride) { return size == 1 ? 0 : stride; };
    const int64_t within = unless_one(mid, fast), last = unless_one(fast, 1);
    return {unless_one(slow, mid * fast), time_is_fast ? last : within, time_is_fast ? within : last};
  }
  Strides row_strides() const {
    const int64_t inner = time_is_fast ? mid : fast;
    return {slow == 1 ? 0 : inner, 0, inner == 1 ? 0 : 1};
  }
};

// The scan is in this type.
inline ElementType arithmetic_type(ElementType dtype) {
  return dtype == ElementType::Double ? dtype : ElementType::Float;
}
// The gradient of one result is what is scanned.
inline const ReturnsInput* scanned_gradient(const ReturnsGradientsProblem& p) {
  if (p.dtype != arithmetic_type(p.dtype) || p.of_pg.data || (p.of_advantages.data && p.of_targets.data))
    return nullptr;
  return p.of_targets.data ? &p.of_targets : &p.of_advantages;
}

// What the kernels and the scan hand each other, at offsets in a workspace; no offset: it is not made.
struct GradientsMemory {
  static constexpr int64_t kNone = -1;
  int64_t source = kNone;     // what is scanned
  int64_t gates = kNone;      // of steps
  int64_t row_gates = kNone;  // of rows, in double
  int64_t scanned = kNone;
  int64_t bytes = 0;

  explicit GradientsMemory(const ReturnsGradientsProblem& p) {
    const int64_t tensor = p.count() * (p.dtype == ElementType::Double ? 8 : 4);
    if (!scanned_gradient(p)) add(source, tensor);
    // Else the scan takes gamma as it is given.
    if (p.rhos.data || p.trace.kind != GammaKind::kNumber || p.trace.value != 1.0) {
      if (p.rhos.data || p.has_discount(GammaKind::kStep)) add(gates, tensor);
      else if (p.has_discount(GammaKind::kRow)) add(row_gates, p.rows() * 8);
    }
    add(scanned, tensor);
  }
  // Whether there is a kernel before the scan.
  bool has_sources() const { return source != kNone || gates != kNone || row_gates != kNone; }

 private:
  void add(int64_t& offset, int64_t size) {
    offset = bytes;
    bytes += (size + 255) / 256 * 256;
  }
};

inline ScanProblem scan_of(const ReturnsGradientsProblem& p, const GradientsMemory& memory, char* workspace) {
  const GradientsShape shape(p);
  ScanProblem scan;
  scan.dtype = arithmetic_type(p.dtype);
  scan.outer = p.outer, scan.length = p.length, scan.inner = p.inner;
  scan.shifted = true;
  scan.window = p.steps;
  if (const ReturnsInput* const gradient = scanned_gradient(p)) {
    scan.input = gradient->data;
    scan.input_strides = gradient->strides;
  } else {
    scan.input = workspace + memory.source;
    scan.input_strides = shape.dense();
  }
  scan.output = workspace + memory.scanned;
  scan.output_strides = shape.dense();
  scan.reset = static_cast<const bool*>(p.ends.data);
  scan.reset_strides = p.ends.strides;
  const auto take = [&](GammaKind kind, const void* data, ElementType dtype, const Strides& strides) {
    scan.gamma_kind = kind;
    scan.gamma = data;
    scan.gamma_dtype = dtype;
    scan.gamma_strides = strides;
  };
  const ReturnsDiscount& gamma = p.gamma;
  if (memory.gates != GradientsMemory::kNone)
    take(GammaKind::kStep, workspace + memory.gates, scan.dtype, shape.dense());
  else if (memory.row_gates != GradientsMemory::kNone)
    take(GammaKind::kRow, workspace + memory.row_gates, ElementType::Double, shape.row_strides());
  else if (gamma.kind == GammaKind::kNumber) scan.gamma_value = gamma.value * p.trace.value;
  else if (gamma.kind == GammaKind::kRow || gamma.tensor.strides.time == 0)
    take(GammaKind::kRow, gamma.tensor.data, gamma.kind == GammaKind::kRow ? gamma.dtype : scan.dtype,
        gamma.tensor.strides);
  else take(GammaKind::kStep, gamma.tensor.data, scan.dtype, gamma.tensor.strides);
  return scan;
}

// Gradients as a temporal difference scan from a row's first step on: gradients of targets and advantages, the first of
// them that is given and the other, in place of rewards and values, those of policy-gradient advantages of next values;
// ends and steps without a next value in place of steps that terminate and are truncated; and gradients of rewards,
// values and next values of advantages, targets and policy-gradient advantages.
inline ReturnsProblem as_scan(const ReturnsGradientsProblem& p) {
  ReturnsProblem scan;
  scan.dtype = p.dtype;
  scan.outer = p.outer, scan.length = p.length, scan.inner = p.inner;
  scan.clip_rho = p.clip_rho, scan.clip_c = p.clip_c, scan.clip_pg = p.clip_pg;
  scan.is_gradient = true;
  scan.of_own_values = p.has_own_values, scan.of_next_values = p.has_next_values;
  scan.of_targets = p.of_targets.data;
  scan.rewards = scan.of_targets ? p.of_targets : p.of_advantages;
  if (scan.of_targets) scan.values = p.of_advantages;
  scan.next_values = p.of_pg;
  scan.rhos = p.rhos;
  scan.terminated = p.ends;
  const Strides &ends = p.ends.strides, &lacks = p.lacks_after.strides;
  scan.ends_lack = p.ends.data && p.ends.data == p.lacks_after.data && ends.outer == lacks.outer &&
      ends.time == lacks.time && ends.inner == lacks.inner;
  if (!scan.ends_lack) scan.truncated = p.lacks_after;
  scan.gamma = p.gamma;
  scan.trace = p.trace;
  scan.advantages = p.rewards;
  scan.targets = p.values;
  scan.pg_advantages = p.next_values;
  scan.bootstrap_gradient = p.bootstrap_value;
  return scan;
}

// The same for kernels of columns, which begin with the last step: their first one is where these look for it.
inline ReturnsProblem mirrored(const ReturnsProblem& scan) {
  ReturnsProblem mirror = scan;
  const auto turn = [&](auto& tensor, int64_t bytes) {
    if (!tensor.data) return;
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(tensor.data)>>, const char, char>;
    tensor.data = static_cast<Byte*>(tensor.data) + (scan.length - 1) * tensor.strides.time * bytes;
    tensor.strides.time = -tensor.strides.time;
  };
  const int64_t bytes = bytes_of(scan.dtype);
  for (auto* input : {&mirror.rewards, &mirror.values, &mirror.next_values, &mirror.rhos}) turn(*input, bytes);
  for (auto* flags : {&mirror.terminated, &mirror.truncated}) turn(*flags, 1);
  for (auto* rate : {&mirror.gamma, &mirror.trace})
    if (rate->kind == GammaKind::kStep) turn(rate->tensor, bytes_of(rate->dtype));
  for (auto* output : {&mirror.advantages, &mirror.targets, &mirror.pg_advantages}) turn(*output, bytes);
  return mirror;
}

// As many columns for each multiprocessor as fill the GPU, wherever they lie: a thread takes each serially.
constexpr int64_t kSerialGradientsColumns = 128;

inline bool takes_serial_gradients(const ReturnsProblem& mirror, int64_t multiprocessors) {
  return takes_serial_columns(mirror, multiprocessors) ||
      (counts_in_32_bits(mirror) && mirror.rows() < int64_t{1} << 31 &&
          mirror.rows() >= kSerialGradientsColumns * multiprocessors);
}

// Whether what is scanned over a window is the gradient of one result as it is given.
inline bool scans_one_gradient(const ReturnsGradientsProblem& p) {
  return p.steps && !p.of_pg.data && !p.rhos.data && !(p.of_advantages.data && p.of_targets.data);
}

// Gradients in one kernel that also makes results: flat rows; flat tiles of columns; or, of a mirrored scan, threads
// that take columns, tiles of these, or windows of n steps.
struct GradientScanPlan {
  ReturnsProblem scan;
  std::optional<FlatReturnsPlan> rows;
  std::optional<TilesPlan> tiles;

  int64_t workspace_bytes() const { return rows ? rows->workspace_bytes : tiles ? tiles->workspace_bytes() : 0; }
};

inline std::optional<GradientScanPlan> plan_gradient_scan(
    const ReturnsGradientsProblem& p, const DeviceLimits& device, int64_t static_bytes) {
  const ReturnsProblem scan = as_scan(p);
  const int multiprocessors = device.multiprocessors;
  if (p.steps) {
    ReturnsProblem windows = mirrored(scan);
    windows.steps = p.steps;
    const bool fits = scans_one_gradient(p) && takes_n_step_blocks(windows, device.shared_bytes);
    return fits ? std::optional(GradientScanPlan{windows, std::nullopt, std::nullopt}) : std::nullopt;
  }
  if (GradientsShape(p).time_is_fast) {
    const ReturnsProblem together = with_rows_together(scan);
    const auto rows =
        plan_flat_returns(together, multiprocessors, device.shared_bytes - static_bytes, std::max(device.cluster, 1));
    return rows ? std::optional(GradientScanPlan{together, rows, std::nullopt}) : std::nullopt;
  }
  const ReturnsProblem mirror = mirrored(scan);
  if (takes_serial_gradients(mirror, multiprocessors)) return GradientScanPlan{mirror, std::nullopt, std::nullopt};
  const auto tiles_of = [&](const ReturnsProblem& of, bool may_be_flat) {
    return plan_tiles(of, multiprocessors, device.cluster > 1, device.shared_bytes, may_be_flat);
  };
  if (flat_tiles_are_faster(scan, multiprocessors)) {
    const auto flat = tiles_of(scan, true);
    if (flat && flat->flat) return GradientScanPlan{scan, std::nullopt, TilesPlan{std::nullopt, flat}};
  }
  if (const auto small = plan_small_tiles(mirror, device))
    return GradientScanPlan{mirror, std::nullopt, TilesPlan{small, std::nullopt}};
  const auto tiles = tiles_of(mirror, false);
  if (!tiles) return std::nullopt;
  return GradientScanPlan{mirror, std::nullopt, TilesPlan{std::nullopt, tiles}};
}

}  // namespace dcs
