// Into what tiles a temporal difference scan along a strided time is cut (cuda/returns/tile_columns). Host code without
// CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "dcs/returns/plan.h"
#include "dcs/returns/tile_tensors.h"
#include "dcs/scan/plan/columns.h"
#include "dcs/scan/plan/small_columns.h"

namespace dcs {

// Next states' values beside its own are in every form.
inline ColumnForm tile_form(const ReturnsProblem& p) {
  if (p.is_gradient) return column_form(p);
  if (has_step_rates(p)) return ColumnForm::kAll;
  return p.rhos.data || p.pg_advantages.data ? ColumnForm::kRatios : ColumnForm::kPlain;
}

// Steps of a column that a thread holds: as many as leave room for so many blocks a multiprocessor. Pairs of
// half-precision columns, for half as many threads, take 1.06 to 1.15 times the time.
constexpr int tile_column_steps(int64_t bytes, ColumnForm form) {
  if (bytes > 4) return has_factors(form) ? 4 : 8;
  return !has_factors(form) ? 16 : form == ColumnForm::kRatios && bytes == 2 ? 12 : 8;
}
constexpr int tile_column_blocks(int64_t bytes) { return bytes > 4 ? 2 : 3; }

// So many neighboring columns make a word, in every operand.
inline bool columns_make_words(const ReturnsProblem& p, int unit) {
  return p.inner % unit == 0 && all_step_operands(p, [&](const void* data, const Strides& s, int64_t bytes) {
    return s.inner == 1 && reinterpret_cast<uintptr_t>(data) % (unit * bytes) == 0 && s.time % unit == 0 &&
        s.outer % unit == 0;
  });
}
inline bool columns_pair(const ReturnsProblem& p) { return columns_make_words(p, 2); }

// Every operand's rows of columns are whole words of 16 bytes, and there is a column for every lane of a warp.
inline bool columns_take_words(const ReturnsProblem& p) {
  return p.length > 1 && p.inner >= 32 && all_step_operands(p, [&](const void* data, const Strides& s, int64_t bytes) {
    const auto whole = [&](int64_t elements) { return elements * bytes % 16 == 0; };
    return s.inner == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && whole(p.inner) && whole(s.time) &&
        (p.outer == 1 || whole(s.outer));
  });
}

// What carries between tiles are multiplied by, as the scan of differences has it.
inline ScanProblem carried_scan(const ReturnsProblem& p) {
  ScanProblem scan{};
  scan.dtype = p.dtype;
  scan.outer = p.outer, scan.length = p.length, scan.inner = p.inner;
  scan.reverse = true;
  const auto number = [](const ReturnsDiscount& rate) { return rate.kind == GammaKind::kNumber ? rate.value : 1.0; };
  scan.gamma_kind = has_factors(tile_form(p)) ? GammaKind::kStep
      : has_row_rates(p)                      ? GammaKind::kRow
                                              : GammaKind::kNumber;
  scan.gamma_value = number(p.gamma) * number(p.trace);
  return scan;
}

// A thread's fewest steps in a tile, a batch of them: of 1306 random problems of up to 2e6 elements those of less than
// 1e5 take 0.98 of the time of twice as many, others as long.
constexpr int kFewestTileSteps = 4, kTileBatch = 4;

// Where columns are few and steps lie one behind the other, a tile is one range of memory
// (cuda/returns/tile_columns/flat.cuh). A thread's steps are in shared memory: one more than whole batches, odd, so
// that the lanes' lie in different banks. More of them are less of an exchange for each; but what comes before and
// behind it waits longer. Fewer columns than these, of enough elements for every multiprocessor, are faster so: the
// fewer columns, the more lines of memory a warp's reads by the element take. Of 4900 random problems two columns with
// twice as many elements take 0.6 of the time, seven columns of float 0.9; with half as many 1.05 and 1.2 times as
// long. More columns of float take 1.03 to 1.1 times as long.
constexpr int64_t kMostFlatHalfColumns = 63, kMostFlatColumns = 7, kFewestFlatElements = 1 << 10,  // a column
    kMostCountedColumns = 16;
constexpr int flat_tile_batch(ColumnForm form) { return has_all(form) ? 4 : 8; }
constexpr int kFewestFlatTileSteps = 9, kMostFlatTileSteps = 33;
// 2^these tiles are a group at least, where lanes can read as many.
constexpr int kFewestGroupBits = 3;
// Columns of a block.
constexpr int flat_tile_columns(int64_t bytes) { return bytes == 2 ? 2 * kSpan : kSpan; }
// Rows of fewer tiles than this are one behind the other in time, and cut where they end.
constexpr int64_t kFewestFlatRowTiles = 8;

inline bool columns_lie_flat(const ReturnsProblem& p) {
  return lies_linear(p) && p.inner <= (bytes_of(p.dtype) == 2 ? kMostFlatHalfColumns : kMostFlatColumns);
}
inline bool flat_tiles_are_faster(const ReturnsProblem& p, int64_t multiprocessors) {
  return columns_lie_flat(p) &&
      p.rows() * p.length >= kFewestFlatElements * std::min(p.inner, kMostCountedColumns) * multiprocessors;
}
// As many steps of a thread as shared memory has room for.
inline int64_t most_flat_steps(const ReturnsProblem& p, const ResidentColumnsPlan& plan) {
  const int64_t blocks = tile_column_blocks(bytes_of(p.dtype)), reserved = 1 << 10;  // of every block
  const int64_t room = (plan.most_shared + reserved) / blocks - reserved - plan.exchange_bytes;
  int64_t most = kMostFlatTileSteps;
  while (most >= kFewestFlatTileSteps && tile_tensors(p, most * plan.parts).bytes > room)
    most -= flat_tile_batch(tile_form(p));
  return most;
}
// Whether the plan's tiles are to be flat; then what there is of its own to them.
inline bool plan_flat_tiles(ResidentColumnsPlan& plan, const ReturnsProblem& p, bool step, int64_t& most) {
  if (!columns_lie_flat(p) || p.length < kFewestFlatTileSteps) return false;
  const int64_t bytes = bytes_of(p.dtype);
  ResidentColumnsPlan flat = plan;
  flat.flat = true;
  flat.exchange_bytes = resident_exchange_bytes(std::max<int64_t>(bytes, 8), step, flat_tile_columns(bytes));
  share_columns(flat, p.outer, p.inner, flat_tile_columns(bytes));
  const int64_t fits = most_flat_steps(p, flat);
  if (flat.spans > 1 || fits < kFewestFlatTileSteps) return false;
  plan = flat;
  most = fits;
  if (!has_row_rates(p) && p.length < kFewestFlatRowTiles * most * plan.parts) plan.strips = 1;
  return true;
}

// Few elements, whose tiles are all on the GPU at once (cuda/returns/tile_columns/small.cuh): steps of a thread, and
// warps of a block, of which there is room for two a multiprocessor.
constexpr int kSmallTileSteps = 8, kSmallTileWarps = 16, kSmallTileBlocks = 2;

// Tiles of columns, by either kernel: one of these.
struct TilesPlan {
  std::optional<SmallColumnsPlan> small;
  std::optional<ResidentColumnsPlan> resident;

  int64_t workspace_bytes() const { return resident ? resident->workspace_bytes : 0; }
};

// A block or a cluster has all of time, so that nothing is left in global memory. Discounts that are numbers, without
// ratios, with which it gains less than a tenth.
inline std::optional<SmallColumnsPlan> plan_small_tiles(const ReturnsProblem& p, const DeviceLimits& device) {
  const ScanProblem scan = carried_scan(p);
  SmallColumnsPlan plan{};
  if (p.steps || has_factors(tile_form(p)) || has_row_rates(p) || bytes_of(p.dtype) > 4 ||
      p.length > kLongestSmallColumn || !counts_in_32_bits(p) || !powers_fold(scan) ||
      !plan_small_span(plan, scan, device, kSmallTileSteps, kSmallTileWarps, most_small_cluster(device)) ||
      !fit_small_blocks(plan, scan, device, kSmallTileSteps, kSmallTileWarps))
    return std::nullopt;
  return plan;
}

// Any strides and options. `shared_bytes`: that one block can have; `may_be_flat`: where memory allows it.
inline std::optional<ResidentColumnsPlan> plan_tiles(
    const ReturnsProblem& p, int64_t multiprocessors, bool has_clusters, int64_t shared_bytes, bool may_be_flat) {
  const ScanProblem scan = carried_scan(p);
  if (p.steps || !counts_in_32_bits(p) || !powers_fold(scan) || p.rows() >= int64_t{1} << 31) return std::nullopt;
  const ColumnForm form = tile_form(p);
  const bool step = has_factors(form);
  const int64_t bytes = bytes_of(p.dtype);
  ResidentColumnsPlan plan{};
  plan.most_shared = static_cast<int>(shared_bytes);
  int64_t most = tile_column_steps(bytes, form);
  if (!may_be_flat || !plan_flat_tiles(plan, p, step, most)) share_columns(plan, p.outer, p.inner);
  const int64_t least = std::min<int64_t>(most, plan.flat ? kFewestFlatTileSteps : kFewestTileSteps),
                length = plan.flat ? p.outer * p.length / plan.strips : p.length;
  // As many blocks for every multiprocessor; lanes read some tiles at most at once.
  const int64_t whole = ceil_div(length, plan.parts * most);
  const int64_t at_once_read = int64_t{1} << (plan.fan_bits + most_read_bits(step));
  const int64_t spread =
      whole == 1 ? 1 : ceil_div(plan.strips * whole, multiprocessors) * multiprocessors / plan.strips;
  const int64_t tiles = std::max(whole, whole <= at_once_read ? std::min(spread, at_once_read) : spread);
  const int64_t odd = plan.flat ? 1 : 0, batch = plan.flat ? flat_tile_batch(form) : kTileBatch;
  const auto even_steps = [&](int64_t of) {
    return ceil_div(ceil_div(length, of * plan.parts) - odd, batch) * batch + odd;
  };
  plan.part_steps = static_cast<int>(std::max(least, even_steps(tiles)));
  plan.tiles = ceil_div(length, int64_t{plan.part_steps} * plan.parts);
  if (plan.flat) plan.shared_bytes = tile_tensors(p, int64_t{plan.part_steps} * plan.parts).bytes;
  share_words(plan, tile_column_blocks(bytes) * multiprocessors, step);
  // The lanes of more columns are fewer for each: they read more, as groups of groups wait for one another.
  while (plan.groups > 1 && plan.fan_bits + plan.read_bits < kFewestGroupBits && plan.read_bits < most_read_bits(step))
    plan.groups = ceil_div(plan.tiles, int64_t{1} << (plan.fan_bits + ++plan.read_bits));
  fill_resident_powers(plan, scan.gamma_value);
  const int64_t blocks = plan.strips * plan.tiles;
  plan.dependent =
      has_clusters && p.rows() * p.length <= kMostDependentElements && blocks <= kDependentBlocks * multiprocessors;
  if (plan.tiles > 1)
    plan.workspace_bytes = (plan.tiles + 2 * plan.groups) * plan.strips * plan.span * 16 * (step ? 2 : 1);
  // Blocks and words are counted in 32 bits.
  return blocks * plan.span < int64_t{1} << 30 ? std::optional<ResidentColumnsPlan>(plan) : std::nullopt;
}

// Whole words of enough columns for most multiprocessors (returns/warp_columns.cuh).
inline bool takes_warp_columns(const ReturnsProblem& p, int64_t multiprocessors) {
  const int64_t columns = bytes_of(p.dtype) == 2 ? 64 : 32;
  return form_of(p) != kAnyForm && bytes_of(p.dtype) <= 4 && columns_take_words(p) &&
      p.outer * ceil_div(p.inner, columns) * 4 >= multiprocessors * 3;
}

// Few columns one beside the other with time outside, all of it in registers (returns/small.cuh): kSmallColumns of them
// a block, kSmallSteps steps a lane, at most kSmallWarps warps. A block's loads ask for every row of memory that it has
// a step of, and for whole sectors of 32 bytes there. Two blocks a multiprocessor at most: with more the other kernels
// have enough of them, and read longer ranges of memory.
constexpr int kSmallColumns = 8, kSmallSteps = 4, kSmallWarps = 16, kSmallWarpSteps = 32 / kSmallColumns * kSmallSteps;

inline bool takes_few_columns(const ReturnsProblem& p, int64_t multiprocessors) {
  if (bytes_of(p.dtype) > 4 || form_of(p) == kAnyForm || p.outer != 1 || p.length > kSmallWarps * kSmallWarpSteps ||
      p.rows() > 2 * kSmallColumns * multiprocessors)
    return false;
  return all_step_operands(p, [&](const void*, const Strides& s, int64_t) {
    return (p.inner == 1 || s.inner == 1) && (p.length == 1 || s.time == p.inner);
  });
}

// Fewer steps than kLeastTiledColumn of the common forms, or of fewer elements than a tile's phases take the time of,
// are a round of blocks that share a column's time (returns/block_columns.cuh), but where rows of few columns are many
// and one behind the other.
constexpr int64_t kFewestShortElements = 1 << 18;

inline std::optional<TilesPlan> plan_tile_columns(const ReturnsProblem& p, const DeviceLimits& device) {
  const int multiprocessors = device.multiprocessors;
  const bool is_short = p.length < kLeastTiledColumn;
  if (is_contiguous(p) || (is_short && p.rows() * p.length < kFewestShortElements) ||
      takes_serial_columns(p, multiprocessors) || takes_few_columns(p, multiprocessors) ||
      takes_warp_columns(p, multiprocessors))
    return std::nullopt;
  const bool may_be_flat = flat_tiles_are_faster(p, multiprocessors);
  if (!is_short && !may_be_flat)
    if (const auto small = plan_small_tiles(p, device)) return TilesPlan{small, std::nullopt};
  const auto plan = plan_tiles(p, multiprocessors, device.cluster > 1, device.shared_bytes, may_be_flat);
  if (!plan || (is_short && form_of(p) != kAnyForm && plan->strips >= p.outer)) return std::nullopt;
  return TilesPlan{std::nullopt, plan};
}

}  // namespace dcs
