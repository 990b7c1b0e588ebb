// Into what pieces a scan along a strided time is cut. Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/device.h"
#include "dcs/scan/problem.h"
#include "scan/plan/planner.h"
#include "scan/plan/powers.h"

namespace dcs {

constexpr int kColumnThreads = 256;           // of a block
constexpr int kWalkCells = 192;               // a multiprocessor, from which on threads walk alone
constexpr int64_t kFewSteps = 16;             // that a thread walks in any case
constexpr int kHeldWords = 32;                // of four bytes that a thread holds
constexpr int kSpan = 32;                     // columns of a block that holds its tile, at most
constexpr int kFan = kColumnThreads / kSpan;  // tiles of a group: a word for each part
constexpr int kMostFlatBytes = 64 << 10;      // of a tile in shared memory

// Steps of a cell of so many bytes that a thread holds, of all operands; blocks that a multiprocessor has room for.
constexpr int held_steps(int64_t cell_bytes, bool step, bool backward) {
  const int tensors = (step ? 2 : 1) + (backward ? 1 : 0),
            words = cell_bytes < 4 ? 1 : static_cast<int>(cell_bytes / 4);
  return kHeldWords / (words * (tensors == 3 ? 4 : tensors));
}
constexpr int held_blocks(int64_t element_bytes) { return element_bytes > 8 ? 2 : 3; }

enum class ColumnsForm { kWalk, kHeld };

struct ColumnsPlan {
  ColumnsForm form = ColumnsForm::kWalk;
  bool pairs = false;       // halves are read in pairs
  bool flat = false;        // a tile is one piece of memory
  int unit = 1;             // columns of a cell
  int span = 1, spans = 1;  // cells of a block, of which there are so many side by side
  int64_t walks = 1;        // outer * spans
  int parts = 1;            // threads of a column in a block
  int part_steps = 1;
  int64_t tiles = 1, groups = 0;  // of a walk
  int64_t blocks = 1;
  int64_t flat_bytes = 0, shared_bytes = 0, workspace_bytes = 0;
  double part_power = 1.0;  // of a number gamma
};

class ColumnsPlanner {
 public:
  ColumnsPlanner(const ScanProblem& problem, int multiprocessors) : p_(problem), multiprocessors_(multiprocessors) {}

  ColumnsPlan plan() const {
    ColumnsPlan plan;
    plan.pairs = can_pair();
    plan.unit = plan.pairs ? 2 : 1;
    const int64_t cells = p_.inner / plan.unit, all = p_.outer * cells;
    if (!powers_fold(p_) || p_.length <= kFewSteps || all >= int64_t{kWalkCells} * multiprocessors_)
      return walked(plan, all);
    plan.form = ColumnsForm::kHeld;
    plan.pairs = false, plan.unit = 1;
    return plan_held(plan);
  }

 private:
  ColumnsPlan plan_held(ColumnsPlan plan) const {
    const int64_t row_bytes = p_.inner * bytes();
    plan.span = static_cast<int>(std::min<int64_t>(p_.inner, kSpan));
    plan.spans = static_cast<int>(ceil_div(p_.inner, plan.span));
    plan.walks = p_.outer * plan.spans;
    plan.parts = kColumnThreads / plan.span;
    const int steps = held_steps(bytes(), step(), p_.backward);
    plan.flat = p_.inner < kSpan && lies_flat();
    // Whole batches, and whole vectors to a tile that is one piece; as even as can be.
    int64_t unit = std::min(4, steps);
    while (plan.flat && unit * plan.parts * row_bytes % 16) ++unit;
    if (unit > steps) plan.flat = false, unit = std::min(4, steps);
    const int64_t tiles = ceil_div(p_.length, plan.parts * (steps / unit * unit));
    plan.part_steps = static_cast<int>(ceil_div(p_.length, tiles * plan.parts * unit) * unit);
    plan.part_power = bounded_power(p_.gamma_value, plan.part_steps);
    plan.tiles = ceil_div(p_.length, int64_t{plan.part_steps} * plan.parts);
    plan.groups = ceil_div(plan.tiles, kFan);
    plan.blocks = plan.walks * plan.tiles;
    plan.flat_bytes = plan.flat ? (plan.parts * plan.part_steps * row_bytes + 15) / 16 * 16 : 0;
    plan.shared_bytes = plan.flat_bytes * (step() && !p_.shifted ? 2 : 1);
    if (plan.shared_bytes > kMostFlatBytes) plan.flat = false, plan.shared_bytes = 0;
    if (!counted(plan.tiles) || plan.blocks >= int64_t{1} << 31) return walked(plan, p_.rows());
    if (plan.tiles > 1)
      plan.workspace_bytes = (plan.tiles + 2 * plan.groups) * plan.walks * plan.span * 16 *
          (wide_bytes_of(p_.dtype) / 8) * (step() ? 2 : 1);
    return plan;
  }

  static ColumnsPlan walked(ColumnsPlan plan, int64_t cells) {
    plan.form = ColumnsForm::kWalk;
    plan.tiles = 1;
    plan.blocks = ceil_div(cells, kColumnThreads);
    return plan;
  }
  int64_t bytes() const { return bytes_of(p_.dtype); }
  bool step() const { return p_.gamma_kind == GammaKind::kStep; }
  // The partial sums of gamma's gradient were counted before it had an address.
  bool counted(int64_t peers) const { return step() || !p_.backward || !p_.grad_gamma || peers <= p_.partials; }

  // All that goes through shared memory is one piece from an aligned address on.
  bool lies_flat() const {
    bool flat = true;
    const auto test = [&](const void* pointer, const Strides& s) {
      flat = flat && s.inner == 1 && s.time == p_.inner && (p_.outer == 1 || s.outer == p_.inner * p_.length) &&
          reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && (p_.outer == 1 || p_.inner * p_.length * bytes() % 16 == 0);
    };
    test(p_.input, p_.input_strides);
    test(p_.output, p_.output_strides);
    if (step() && !p_.shifted) test(p_.gamma, p_.gamma_strides);
    return flat && (!p_.reverse || p_.inner * p_.length * bytes() % 16 == 0);
  }
  // Two neighboring halves make a word in all operands.
  bool can_pair() const {
    bool pairs = bytes() == 2 && p_.inner % 2 == 0;
    const auto test = [&](const void* pointer, const Strides& s) {
      pairs =
          pairs && s.inner == 1 && reinterpret_cast<uintptr_t>(pointer) % 4 == 0 && s.time % 2 == 0 && s.outer % 2 == 0;
    };
    test(p_.input, p_.input_strides);
    test(p_.output, p_.output_strides);
    if (step()) test(p_.gamma, p_.gamma_strides);
    if (p_.backward) test(p_.saved, p_.saved_strides);
    if (p_.backward && step()) test(p_.grad_gamma, p_.grad_gamma_strides);
    return pairs;
  }

  const ScanProblem& p_;
  int multiprocessors_;
};

}  // namespace dcs
