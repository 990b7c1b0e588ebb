// Into what tiles a temporal difference scan of contiguous rows is cut (cuda/returns/flat_rows). Host code without
// CUDA or torch types.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>

#include "dcs/returns/plan.h"

namespace dcs {

// What a kernel is made for: values of their own steps, or of next steps alone, and discounts that are numbers; with
// ratios, too; the same with discounts of rows, either values; either values with a gamma of steps and a trace that is
// a number; or anything. Gradients, without ratios and those of policy-gradient advantages, by discounts that are
// numbers, by those of rows, by such a gamma and trace; or by anything.
enum class FlatForm {
  kOwn,
  kLambda,
  kRatios,
  kAll,
  kRows,
  kRowRatios,
  kSteps,
  kGradients,
  kRowGradients,
  kStepGradients,
  kAnyGradients
};

// Powers of larger numbers over many lanes would lose what sums that cancel are worth.
inline bool powers_are_small(const ReturnsProblem& p) { return std::fabs(p.gamma.value * p.trace.value) <= 1.0; }

inline FlatForm flat_form(const ReturnsProblem& p) {
  const bool has_steps_gamma = p.gamma.kind == GammaKind::kStep && p.trace.kind == GammaKind::kNumber;
  if (p.is_gradient) {
    if (p.rhos.data || p.next_values.data) return FlatForm::kAnyGradients;
    if (has_step_rates(p)) return has_steps_gamma ? FlatForm::kStepGradients : FlatForm::kAnyGradients;
    if (has_row_rates(p)) return FlatForm::kRowGradients;
    return powers_are_small(p) ? FlatForm::kGradients : FlatForm::kAnyGradients;
  }
  if (has_step_rates(p)) {
    const bool has_more = p.rhos.data || p.pg_advantages.data;
    return has_steps_gamma && !has_more ? FlatForm::kSteps : FlatForm::kAll;
  }
  if (!has_row_rates(p) && !powers_are_small(p)) return FlatForm::kAll;
  const bool has_own = p.values.data && !p.values_are_next;
  if (p.rhos.data && has_own) return has_row_rates(p) ? FlatForm::kRowRatios : FlatForm::kRatios;
  if (p.rhos.data || p.pg_advantages.data) return FlatForm::kAll;
  if (has_row_rates(p)) return FlatForm::kRows;
  return has_own ? FlatForm::kOwn : FlatForm::kLambda;
}

// Elements of 16 bytes; vectors of a lane, odd, so that the lanes' lie in different banks.
constexpr int flat_vector(int64_t element_bytes) { return static_cast<int>(16 / element_bytes); }
constexpr int flat_vectors(int64_t element_bytes) { return element_bytes == 2 ? 3 : 5; }
// Warps of a block, where there are rows enough; at most: a multiprocessor has registers for so many such blocks.
constexpr int kFlatReturnsTileWarps = 4, kFlatReturnsBlocks = 2;
constexpr int flat_returns_warps(FlatForm form) {
  const bool has_ratios = form == FlatForm::kRatios || form == FlatForm::kAll || form == FlatForm::kRowRatios ||
      form == FlatForm::kAnyGradients;
  return has_ratios ? 10 : 12;
}
// Every multiple of so many elements is an aligned address in every operand.
constexpr int kFlatReturnsGrain = 16;
// With fewer warps a multiprocessor, lanes have one vector, in forms that are worth a kernel more.
constexpr int kFewFlatWarps = 8;
constexpr bool has_one_vector(FlatForm form) { return form != FlatForm::kRowRatios; }

// Rows that no cluster holds: warps of a block, and of how many tiles a lane each reads the segments:
// 2^kFlatReturnsFan, a warp's lanes at most. Steps of a row are counted in 31 bits, with the row before it.
constexpr int kFlatReturnsLinkedWarps = 4, kFlatReturnsFan = 5;
constexpr int64_t kLongestFlatRow = (int64_t{1} << 30) - (1 << 15), kFlatSegmentBytes = 32;

struct FlatReturnsPlan {
  int vectors, warps;   // of a lane, of a block
  int cluster;          // blocks that share a row's shared memory, all of its tiles, or 1
  int64_t rows, tiles;  // of a tile; blocks
  int64_t shared_bytes;
  int64_t row_tiles = 1;  // of a row: 1 where a block takes whole rows
  // Where a row's tiles are no cluster: 2^fan_bits tiles are a group, as many groups one above.
  int fan_bits = 0;
  int64_t workspace_bytes = 0;

  bool is_linked() const { return row_tiles > 1 && cluster == 1; }
  int64_t groups() const { return ceil_div(row_tiles, int64_t{1} << fan_bits); }
  // Segments that a row's tiles leave each other: of tiles, of groups, of those above.
  int64_t row_segments() const { return row_tiles + groups() + ceil_div(groups(), int64_t{1} << fan_bits); }
};

struct FlatReturnsSizes {
  int64_t bytes, wide;  // of an element, of its accumulator
  int vectors;
  int64_t slice() const { return int64_t{32} * vectors * flat_vector(bytes); }  // elements of a warp

  // visit(bytes of an element, whether the values behind a slice are its, too) for all operands of steps.
  template <typename Visit>
  void each_operand(const ReturnsProblem& p, const Visit& visit) const {
    const bool shifted = !p.next_values.data && !p.is_gradient;
    if (p.rewards.data) visit(p.rewards, bytes, false);
    if (p.values.data) visit(p.values, bytes, shifted);
    if (p.next_values.data) visit(p.next_values, bytes, false);
    if (p.rhos.data) visit(p.rhos, bytes, false);
    if (p.terminated.data) visit(p.terminated, p.terminated_is_bool ? 1 : bytes, false);
    if (p.truncated.data) visit(p.truncated, p.truncated_is_bool ? 1 : bytes, false);
    if (p.gamma.kind == GammaKind::kStep) visit(p.gamma.tensor, bytes_of(p.gamma.dtype), false);
    if (p.trace.kind == GammaKind::kStep) visit(p.trace.tensor, bytes_of(p.trace.dtype), false);
  }
  // Results take the place of operands, where there are as many: policy-gradient advantages that of ratios; gradients
  // that of any that are no flags.
  static int64_t result_slots(const ReturnsProblem& p) {
    if (!p.is_gradient) return p.pg_advantages.data && !p.rhos.data ? 1 : 0;
    const int results = (p.advantages.data ? 1 : 0) + (p.targets.data ? 1 : 0) + (p.pg_advantages.data ? 1 : 0);
    int operands = 0;
    for (const ReturnsInput* input : {&p.rewards, &p.values, &p.next_values, &p.rhos}) operands += input->data ? 1 : 0;
    return std::max(0, results - operands);
  }
  int64_t warp_bytes(const ReturnsProblem& p) const {
    int64_t sum = result_slots(p) * slice() * bytes;
    each_operand(
        p, [&](const ReturnsInput&, int64_t size, bool is_shifted) { sum += slice() * size + (is_shifted ? 16 : 0); });
    return sum;
  }
  // Of what rows have of their own.
  int64_t row_bytes(const ReturnsProblem& p) const { return wide + (has_row_rates(p) ? 4 * wide : 0); }
  int64_t tile_bytes(const ReturnsProblem& p, int64_t warps, int64_t rows) const {
    return warps * warp_bytes(p) + (rows + warps) * row_bytes(p);
  }
};

// Blocks of a row's cluster: as many as every device puts into one. With up to 16, rows that need more than 8 take 1.02
// to 1.07 times as long as in tiles.
constexpr int kMostFlatReturnsCluster = 8;

// A row in a cluster.
inline std::optional<FlatReturnsPlan> plan_clustered_returns(
    const ReturnsProblem& p, const FlatReturnsSizes& sizes, int64_t shared_bytes, int64_t cluster) {
  const auto plan_of = [&](int64_t warps) {
    const int64_t blocks = ceil_div(p.length + kFlatReturnsGrain, warps * sizes.slice());
    return FlatReturnsPlan{sizes.vectors, static_cast<int>(warps), static_cast<int>(std::min<int64_t>(blocks, 1 << 20)),
        1, p.rows() * blocks, sizes.tile_bytes(p, warps, 1), blocks};
  };
  for (const int warps : {4, 6, 8, flat_returns_warps(flat_form(p))}) {
    const FlatReturnsPlan plan = plan_of(warps);
    if (plan.cluster <= std::min<int64_t>(kMostFlatReturnsCluster, cluster) && plan.shared_bytes <= shared_bytes &&
        plan.tiles < int64_t{1} << 31)
      return plan;
  }
  return std::nullopt;
}

// A row in tiles of one size, in blocks that leave each other their segments in global memory.
inline std::optional<FlatReturnsPlan> plan_linked_returns(
    const ReturnsProblem& p, const FlatReturnsSizes& sizes, int64_t shared_bytes, int64_t warps, int fan_bits) {
  if (p.length > kLongestFlatRow) return std::nullopt;
  const int64_t row_tiles = ceil_div(p.length + kFlatReturnsGrain, warps * sizes.slice());
  FlatReturnsPlan plan{
      sizes.vectors, static_cast<int>(warps), 1, 1, p.rows() * row_tiles, sizes.tile_bytes(p, warps, 1), row_tiles};
  plan.fan_bits = fan_bits;
  plan.workspace_bytes = p.rows() * plan.row_segments() * kFlatSegmentBytes;
  if (plan.shared_bytes > shared_bytes || plan.tiles >= int64_t{1} << 31) return std::nullopt;
  return plan;
}

// Rows of few elements that no block of lanes with one vector holds, and that are fewer than multiprocessors: all of a
// row's tiles are a cluster, or, where clusters would leave half of the multiprocessors without a block, blocks that
// are there at once look back for each other. Where neither can take them lanes have all vectors. Beside whole rows in
// blocks or clusters with all vectors a lane 300 random problems of up to 2e6 elements take 0.93 of the time, those of
// per-step discounts 0.82.
constexpr int64_t kFewLinkedBlocks = 4;  // of a multiprocessor, at once

inline std::optional<FlatReturnsPlan> share_few_rows(
    const ReturnsProblem& p, FlatReturnsSizes sizes, int64_t multiprocessors, int64_t shared_bytes, int64_t cluster) {
  sizes.vectors = 1;
  if (2 * p.rows() * kMostFlatReturnsCluster < multiprocessors) {
    const auto linked = plan_linked_returns(p, sizes, shared_bytes, kFlatReturnsLinkedWarps, kFlatReturnsFan);
    if (linked && linked->tiles <= kFewLinkedBlocks * multiprocessors) return linked;
  }
  return plan_clustered_returns(p, sizes, shared_bytes, cluster);
}

// Tiles of as many whole rows as leave the fewest lanes without steps. Fewer than fill the GPU are shared out.
inline std::optional<FlatReturnsPlan> plan_flat_returns(
    const ReturnsProblem& p, int64_t multiprocessors, int64_t shared_bytes, int64_t cluster) {
  if (p.steps || !is_contiguous(p) || takes_short_returns(p)) return std::nullopt;
  const int64_t bytes = bytes_of(p.dtype), count = p.rows() * p.length;
  FlatReturnsSizes sizes{bytes, std::max<int64_t>(bytes, 4), flat_vectors(bytes)};
  FlatReturnsPlan best{};
  const auto consider = [&](int vectors) {
    sizes.vectors = vectors;
    double least = 0.0;
    for (int warps = 1; warps <= flat_returns_warps(flat_form(p)); ++warps) {
      const int64_t room = warps * sizes.slice(), most = (room - kFlatReturnsGrain) / p.length;
      if (most < 1) continue;
      // No more than give every multiprocessor a block.
      int64_t rows = std::clamp<int64_t>(p.rows() / multiprocessors, 1, most);
      // Tiles that begin at whole vectors, where that takes few rows.
      const int64_t even = kFlatReturnsGrain / std::gcd(int64_t{kFlatReturnsGrain}, p.length);
      if (rows >= 4 * even) rows = rows / even * even;
      const int64_t shared = sizes.tile_bytes(p, warps, rows);
      if (shared > shared_bytes) break;
      const double lost = static_cast<double>(room) / static_cast<double>(rows * p.length) +
          0.03 * std::abs(warps - kFlatReturnsTileWarps);
      if (least == 0.0 || lost < least) {
        least = lost;
        best = {vectors, warps, 1, rows, ceil_div(p.rows(), rows), shared};
      }
    }
  };
  const bool are_few = has_one_vector(flat_form(p)) && count < kFewFlatWarps * multiprocessors * sizes.slice();
  if (are_few) consider(1);
  if (best.rows == 0 && are_few && p.rows() < multiprocessors) {
    if (const auto shared_out = share_few_rows(p, sizes, multiprocessors, shared_bytes, cluster)) return shared_out;
  }
  if (best.rows == 0) consider(flat_vectors(bytes));
  if (best.rows == 0) {
    sizes.vectors = flat_vectors(bytes);
    if (const auto clustered = plan_clustered_returns(p, sizes, shared_bytes, cluster)) return clustered;
    sizes.vectors = are_few ? 1 : flat_vectors(bytes);
    return plan_linked_returns(p, sizes, shared_bytes, kFlatReturnsLinkedWarps, kFlatReturnsFan);
  }
  if (best.tiles >= int64_t{1} << 31) return std::nullopt;
  return best;
}

}  // namespace dcs
