// Into what tiles a scan along a strided time is cut. Host code without CUDA or torch types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "dcs/scan/plan/kernel_plans.h"
#include "dcs/scan/plan/traits.h"
#include "dcs/scan/plan/powers.h"

namespace dcs {

// Half-precision columns are read in pairs.
inline bool half_precision_pairs(const ScanProblem& p) { return bytes_of(p.dtype) == 2 && columns_pair(p); }

constexpr int kResidentThreads = 2048;  // of a multiprocessor

// So few steps that a thread holds those of its columns: any strides and gammas, but neighbors in memory are columns,
// or rows so short that their threads read the same vectors.
template <int kMostSteps>
std::optional<FewStepsPlan> plan_few_steps(const ScanProblem& p, const DeviceLimits& device) {
  const bool neighbors = p.inner >= 2 && p.output_strides.inner == 1;
  if (is_windowed(p) || p.length > kMostSteps || !(neighbors || has_tiny_rows(p))) return std::nullopt;
  // The widest words that leave threads enough to fill a part of the GPU.
  const int64_t bytes = bytes_of(p.dtype), threads = int64_t{kResidentThreads} * device.multiprocessors;
  const auto fits = [&](int unit) {
    return p.length <= few_steps_of(bytes, unit) && columns_make_words(p, unit) &&
        (bytes * unit <= 4 || p.rows() / unit >= threads / kFewStepsShare);
  };
  int unit = 1;
  for (int wide = static_cast<int>(16 / bytes); wide > 1 && unit == 1; wide /= 2)
    if (bytes <= 4 && fits(wide)) unit = wide;
  const int64_t columns = p.rows() / unit,
                most = p.reset ? 1 : few_steps_cells(bytes * unit, p.gamma_kind == GammaKind::kStep, p.backward);
  if (columns >= int64_t{1} << 31) return std::nullopt;  // threads count in 31 bits
  // Several where there are as many threads as a multiprocessor holds all the same.
  const int64_t cells = std::clamp<int64_t>(columns / threads, 1, most);
  const int64_t blocks = ceil_div(columns, cells * kColumnThreads);
  return FewStepsPlan{unit, static_cast<int>(cells), blocks, blocks <= device.dependent_blocks(p)};
}

// Any strides, sizes and gammas.
inline std::optional<SerialColumnsPlan> plan_any_columns(const ScanProblem& p, const DeviceLimits& device) {
  if (is_windowed(p)) return std::nullopt;
  const bool pairs = half_precision_pairs(p);
  const int64_t blocks = ceil_div(p.rows() / (pairs ? 2 : 1), kColumnThreads);
  return SerialColumnsPlan{pairs, blocks, blocks <= device.dependent_blocks(p)};
}

// Enough columns to fill the GPU with bytes on their way.
inline bool serial_columns_fill(const ScanProblem& p, const DeviceLimits& device) {
  const int64_t columns = half_precision_pairs(p) ? 2 : 1, bytes = std::min<int64_t>(bytes_of(p.dtype) * columns, 4);
  return p.rows() / columns * bytes >= int64_t{kSerialBytes} * device.multiprocessors;
}

// So many that threads with whole columns are faster than blocks which share the columns' time
// (columns/block_columns.cuh): those hide little of their latency, but read as much as fits at once.
constexpr int64_t kSerialCells = 320, kFewSerialCells = 96;  // of a multiprocessor; of a few steps

inline bool serial_columns_outrun_blocks(const ScanProblem& p, const DeviceLimits& device) {
  // Blocks of pairs of floats have enough on their way where each has a gate.
  const bool gated_floats = bytes_of(p.dtype) == 4 && p.gamma_kind == GammaKind::kStep && !p.backward;
  if (gated_floats && p.length >= 2 * kFewSerialSteps && columns_pair(p)) return false;
  const bool pairs = half_precision_pairs(p);
  const int64_t least = p.length <= kFewSerialSteps && !pairs ? kFewSerialCells : kSerialCells;
  return p.rows() / (pairs ? 2 : 1) >= least * device.multiprocessors;
}

// Columns of few steps, too.
inline std::optional<SerialColumnsPlan> plan_serial_columns(const ScanProblem& p, const DeviceLimits& device) {
  if (p.length > kFewSerialSteps && !serial_columns_fill(p, device)) return std::nullopt;
  return plan_any_columns(p, device);
}

// All that goes through shared memory is one contiguous range from an aligned address on. Tiles begin at others: there
// may be steps before the first one, over which no initial value is carried.
inline bool columns_lie_flat(const ScanProblem& p) {
  const bool whole = p.inner * p.length * bytes_of(p.dtype) % 16 == 0, carries_in = p.initial && !p.backward;
  const auto lies = [&](const void* pointer, const Strides& s) {
    return steps_are_dense(p, s) && (p.outer == 1 || s.outer == p.inner * p.length) &&
        reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  return (whole || (p.outer == 1 && !p.reverse) || !carries_in) && lies(p.input, p.input_strides) &&
      lies(p.output, p.output_strides) &&
      (p.gamma_kind != GammaKind::kStep || p.shifted || lies(p.gamma, p.gamma_strides));
}

// From one step to the next it is less than 2^31 bytes: threads count in them.
inline bool steps_are_near(const ScanProblem& p) {
  return all_operands(
      p, [](const void*, const Strides& s, int64_t bytes) { return std::abs(s.time) < (int64_t{1} << 31) / bytes; });
}

// Powers of gamma over 1, 2, 4, ... of the plan's parts, tiles and groups of tiles.
inline void fill_resident_powers(ResidentColumnsPlan& plan, double gamma) {
  const auto fill = [](double* powers, int count, double first) {
    powers[0] = first;
    for (int d = 1; d < count; ++d) powers[d] = bounded_power(powers[d - 1], 2);
  };
  double *const tiles = plan.powers + kPartPowers, *const groups = tiles + kTilePowers;
  fill(plan.powers, kPartPowers, bounded_power(gamma, plan.part_steps));
  fill(tiles, kTilePowers, bounded_power(plan.powers[0], plan.parts));
  fill(groups, kMostFanBits, bounded_power(tiles[plan.fan_bits + plan.read_bits - 1], 2));
}

// Vectors from a part of a tile that is one contiguous range to the next: parts begin in other banks than those before.
inline int64_t flat_pitch(int64_t part_steps, int64_t row_bytes) {
  const int64_t vectors = part_steps * row_bytes / 16, apart = ceil_div(row_bytes, 16);
  return vectors + ((apart - vectors) % 8 + 8) % 8;
}

inline void lay_out_flat(ResidentColumnsPlan& plan, int64_t row_bytes) {
  plan.part_vectors = static_cast<int>(plan.part_steps * row_bytes / 16);
  plan.part_pitch = static_cast<int>(flat_pitch(plan.part_steps, row_bytes));
  plan.vectors_inverse = static_cast<uint32_t>(((int64_t{1} << 32) + plan.part_vectors - 1) / plan.part_vectors);
  plan.flat_bytes = int64_t{16} * plan.parts * plan.part_pitch;
}

constexpr int64_t kLeastEarlyRow = 32;  // bytes of a step

// Steps of a part that can be in shared memory, beside `resident` ones in registers, so that it has room for the usual
// number of blocks.
inline int64_t most_early_steps(const ScanProblem& p, const ResidentColumnsPlan& plan, int64_t resident, int64_t unit) {
  const bool step = p.gamma_kind == GammaKind::kStep;
  const int64_t bytes = bytes_of(p.dtype), row_bytes = p.inner * bytes;
  if (!is_floating(p.dtype) || resident_steps(bytes, step, p.backward) < kEarlyBatch) return 0;
  if (plan.flat && (p.backward || (step && p.shifted))) return 0;  // not all of them are in a tile
  // What a warp reads beside a step that is no sector or two is left in L1, which shared memory would take room from.
  if (!plan.flat && plan.span * bytes < kLeastEarlyRow) return 0;
  const int64_t whole = std::max<int64_t>(unit, kEarlyBatch);
  int64_t most = 4 * kEarlyWords / (bytes * tensors_of(p)) / whole * whole;
  if (plan.flat) {
    const int64_t room = kResidentShared / resident_blocks(bytes) - plan.exchange_bytes - (p.reset ? kMostCutBytes : 0);
    while (most > 0 && 16 * plan.parts * flat_pitch(resident + most, row_bytes) * tensors_of(p) > room) most -= whole;
  }
  return most;
}

// What is in shared memory: tiles that are one contiguous range, or early steps; then the flags of these.
inline void lay_out_shared(ResidentColumnsPlan& plan, const ScanProblem& p, int64_t row_bytes) {
  const bool step = p.gamma_kind == GammaKind::kStep;
  if (plan.flat) lay_out_flat(plan, row_bytes);
  plan.cuts_at = plan.flat ? plan.flat_bytes * (step && !p.shifted ? 2 : 1)
                           : plan.early_steps * kColumnThreads * bytes_of(p.dtype) * tensors_of(p);
  plan.shared_bytes = plan.cuts_at + (p.reset ? plan.early_steps / kEarlyBatch * kColumnThreads * kCutBytes : 0);
}

// Lanes that fold each of a span's columns, at most so many of a block.
inline int fan_bits_of(int64_t columns, int64_t threads) {
  int bits = 1;
  while (bits < kMostFanBits && columns << (bits + 1) <= threads) ++bits;
  return bits;
}
// Who reads the words of tiles before. Where these are one group all threads do, for the shortest wait; else half of
// them, as the others read groups' words.
inline void share_words(ResidentColumnsPlan& plan, int64_t room, bool step) {
  const bool at_once = plan.strips * plan.tiles <= room;
  const int64_t group = int64_t{1} << plan.fan_bits, most = group << (at_once ? most_read_bits(step) : 1);
  if (plan.tiles > most) plan.fan_bits = fan_bits_of(plan.span, kColumnThreads / 2);
  const int64_t tiles = plan.tiles > most ? group : plan.tiles;
  while (tiles > int64_t{1} << (plan.fan_bits + plan.read_bits)) ++plan.read_bits;
  while (plan.parts > 1 << (plan.fan_bits + plan.lane_bits)) ++plan.lane_bits;
  plan.groups = ceil_div(plan.tiles, int64_t{1} << (plan.fan_bits + plan.read_bits));
}

// Spans of a tensor's columns, `most` at most, and a block's parts of one.
inline void share_columns(ResidentColumnsPlan& plan, int64_t outer, int64_t columns, int64_t most = kSpan) {
  plan.spans = static_cast<int>(ceil_div(columns, most));
  plan.span = static_cast<int>(ceil_div(columns, plan.spans));
  plan.span_inverse = static_cast<uint32_t>(ceil_div(1 << 16, plan.span));
  plan.strips = outer * plan.spans;
  plan.parts = kColumnThreads / plan.span;
  plan.fan_bits = fan_bits_of(plan.span, kColumnThreads);
}

inline std::optional<ResidentColumnsPlan> plan_resident_columns(const ScanProblem& p, const DeviceLimits& device) {
  if (is_windowed(p) || !powers_fold(p) || !steps_are_near(p) || p.rows() >= int64_t{1} << 31) return std::nullopt;
  const bool step = p.gamma_kind == GammaKind::kStep;
  ResidentColumnsPlan plan{};
  plan.most_shared = device.shared_bytes;
  const int64_t bytes = bytes_of(p.dtype), row_bytes = p.inner * bytes;
  const int steps = resident_steps(bytes, step, p.backward);
  share_columns(plan, p.outer, p.inner);
  plan.flat = plan.spans == 1 && p.inner < kSpan && columns_lie_flat(p);
  // Whole batches, and two whole vectors at least to a part of a tile that is one contiguous range; as even as can be,
  // in tiles for all multiprocessors.
  const int batch = std::min(kResidentBatch, steps);
  int64_t unit = batch;
  while (plan.flat && unit <= steps && (unit * row_bytes % 16 || unit * row_bytes < 32)) unit *= 2;
  if (unit > steps) plan.flat = false, unit = batch;
  while (plan.flat && (int64_t{plan.lead_mask} + 1) * row_bytes % 16) plan.lead_mask = 2 * plan.lead_mask + 1;
  const int64_t wide_bytes = wide_bytes_of(p.dtype);
  const int most_span = resident_span(wide_bytes, plan.flat);
  plan.exchange_bytes = resident_exchange_bytes(wide_bytes, step, most_span);
  // With the steps that tiles may have before the first one.
  const int64_t length = p.length + plan.lead_mask;
  // Single half-precision elements in memory are loaded one by one: more of them a thread take longer than more
  // threads.
  const int64_t at_once = plan.flat || bytes > 2 ? steps : std::min<int64_t>(steps, kResidentWords);
  const int64_t most = at_once / unit * unit, least = std::min(most, ceil_div(kFewestResidentSteps, unit) * unit);
  // More blocks than there is room for at once hold longer parts, in as few rounds as can be, all of them full: what
  // comes once a block is then a smaller part of its work.
  const int64_t room = int64_t{resident_blocks(bytes)} * device.multiprocessors;
  const bool in_rounds = plan.strips * ceil_div(length, plan.parts * most) > room;
  const int64_t early = in_rounds ? most_early_steps(p, plan, most, unit) : 0;
  const auto tiles_of = [&](const ResidentColumnsPlan& by) { return ceil_div(length, by.parts * (most + early)); };
  if (p.inner > most_span) {
    ResidentColumnsPlan wide = plan;
    share_columns(wide, p.outer, p.inner, most_span);
    if (wide.strips * tiles_of(wide) >= kApartRounds * room) plan = wide;
  }
  const int64_t whole = tiles_of(plan);
  // As many blocks as there is room for, or a multiple of them, as else some multiprocessors would work longer than
  // others; but a second tile waits for the first.
  const int64_t tiles = whole == 1 ? 1 : ceil_div(plan.strips * whole, room) * room / plan.strips;
  const auto even_steps = [&](int64_t of) { return ceil_div(length, of * plan.parts * unit) * unit; };
  plan.tiles = ceil_div(length, std::max(least, even_steps(tiles)) * plan.parts);
  plan.part_steps = static_cast<int>(even_steps(plan.tiles));
  plan.early_steps =
      static_cast<int>(ceil_div(std::max<int64_t>(0, plan.part_steps - most), kEarlyBatch) * kEarlyBatch);
  plan.tiles = ceil_div(length, int64_t{plan.part_steps} * plan.parts);
  share_words(plan, room, step);
  if (plan.strips * plan.tiles >= kApartRounds * room) plan.apart = device.multiprocessors;
  plan.dependent = plan.strips * plan.tiles <= device.dependent_blocks(p);
  if (!step) fill_resident_powers(plan, p.gamma_value);
  lay_out_shared(plan, p, row_bytes);
  if (plan.shared_bytes + plan.exchange_bytes > plan.most_shared) return std::nullopt;
  if (plan.tiles > 1)
    plan.workspace_bytes =
        (plan.tiles + 2 * plan.groups) * plan.strips * plan.span * 16 * (wide_bytes / 8) * (step ? 2 : 1);
  // Blocks and words are counted in 32 bits.
  const int64_t blocks = plan.strips * plan.tiles;
  return blocks * plan.span < int64_t{1} << 30 ? std::optional<ResidentColumnsPlan>(plan) : std::nullopt;
}

}  // namespace dcs
