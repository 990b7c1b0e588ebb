// Into which tiles a scan along a strided time is cut (columns/tiled_columns.cuh). Host code without CUDA or torch
// types.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "dcs/scan/problem.h"
#include "common/device.h"
#include "scan/plan/planner.h"

namespace dcs {

// Threads of a block: those that walk along columns alone; those that share columns, and collect their carries.
constexpr int kWalkThreads = 256, kMostColumnThreads = 384, kCarryThreads = 256;
constexpr int kMostColumns = kCarryThreads / 2;  // of a tile whose carries are collected, by two lanes at least
constexpr int kLeastSteps = 32;                  // of a walk that a block takes
constexpr int kWordSlots = 8;                    // rounds whose totals other blocks can still read

constexpr int64_t kMostSteps = int64_t{1} << 30;

enum { kTileInput, kTileGates, kTileSaved, kTileFlags, kTileOperands };

// An operand of a tile in shared memory.
struct TileOperand {
  int at = 0;       // in a stage, bytes; -1: there is none
  int pitch = 0;    // bytes from row to row
  int vectors = 0;  // of 16 bytes that a row can touch; 0: copied element by element; -1: rows lie one behind the other
};

struct ColumnTiles {
  bool taken = false;
  bool pairs = false;                        // halves are read in pairs
  bool walks_alone = false;                  // a thread takes all steps of a column: one reading, no carries to collect
  bool staged = false;                       // results go to global memory by way of shared memory, in vectors
  bool whole_vectors = false;                // of which none holds anything else
  int64_t outer = 1, steps = 1, period = 1;  // a row of the merged time starts anew every `period` steps
  int span = 0, spans = 0;                   // columns of a tile, tiles beside each other
  int64_t walks = 0;                         // outer * spans
  int peers = 1, group = 1, groups = 1;      // blocks of a walk, which take its tiles in turn; groups of them
  int parts = 1, part_steps = 1, tile_steps = 1;
  int chunks = 1;   // of time
  int threads = 0;  // that scan
  int stages = 1, ahead = 0, in_flight = 1;
  int team = 1;  // lanes that collect a column's carries
  int64_t blocks = 0;
  TileOperand operands[kTileOperands];
  int stage_bytes = 0, state_at = 0, sums_at = 0, shared_bytes = 0;
  int64_t workspace_bytes = 0;
};

class ColumnTilesPlanner {
 public:
  ColumnTilesPlanner(const ScanProblem& problem, int multiprocessors, int shared_bytes)
      : p_(problem), multiprocessors_(multiprocessors), shared_bytes_(shared_bytes) {}

  static constexpr int kSharedBlocks = 1, kWalkingBlocks = 2;  // a multiprocessor
  static constexpr int kWantedStages = 4, kSharedInFlight = 2, kMostAhead = 2;

  ColumnTiles plan() const {
    ColumnTiles t;
    if (!takes()) return t;
    describe(t);
    const Choice walk = best_walk(t), shared = best_shared(t);
    if (walk.score >= shared.score) plan_walk(t, walk);
    else plan_shared(t, shared);
    // The partial sums of gamma's gradient were counted before.
    const bool counted = !sums() || !p_.grad_gamma || t.peers <= p_.partials;
    t.taken = t.blocks < int64_t{1} << 31 && t.walks < int64_t{1} << 31 && t.shared_bytes <= shared_bytes_ &&
        t.tile_steps > 0 && counted;
    return t;
  }

 private:
  struct Choice {
    int64_t columns = 0;
    int64_t peers = 1;
    double score = -1.0;
  };

  int64_t bytes() const { return bytes_of(p_.dtype); }
  int64_t wide_bytes() const { return wide_bytes_of(p_.dtype); }
  bool step() const { return p_.gamma_kind == GammaKind::kStep; }
  bool sums() const { return p_.backward && !step(); }

  bool takes() const {
    if (p_.window > 0 || p_.inner < 2 || p_.length >= kMostSteps || p_.input_strides.inner != 1 ||
        p_.output_strides.inner != 1)
      return false;
    return powers_fold(p_);
  }

  // Visits the operands with a value for every step: pointer, strides, bytes, place in a tile.
  template <typename Visit>
  void each_operand(const Visit& visit) const {
    visit(p_.input, p_.input_strides, bytes(), kTileInput);
    if (step()) visit(p_.gamma, p_.gamma_strides, bytes(), kTileGates);
    if (p_.backward) visit(p_.saved, p_.saved_strides, bytes(), kTileSaved);
    if (p_.reset) visit(p_.reset, p_.reset_strides, int64_t{1}, kTileFlags);
  }
  template <typename Visit>
  void each_result(const Visit& visit) const {
    visit(p_.output, p_.output_strides);
    if (p_.backward && step()) visit(p_.grad_gamma, p_.grad_gamma_strides);
  }

  void describe(ColumnTiles& t) const {
    t.outer = p_.outer, t.steps = t.period = p_.length;
    // All outer indices as one long time, where the rows of all operands lie that way.
    bool merges =
        p_.outer > 1 && !p_.initial && !sums() && (p_.gamma_kind != GammaKind::kRow || p_.gamma_strides.outer == 0);
    const auto lies = [&](const Strides& s) { merges = merges && s.outer == s.time * p_.length; };
    each_operand([&](const void*, const Strides& s, int64_t, int) { lies(s); });
    each_result([&](const void*, const Strides& s) { lies(s); });
    if (merges && p_.outer * p_.length < kMostSteps) {
      t.outer = 1;
      t.steps = p_.outer * p_.length;
    }
    bool pairs = bytes() == 2 && p_.inner % 2 == 0;
    const auto test = [&](const void* pointer, const Strides& s) {
      pairs = pairs &&
          (s.inner != 1 || (reinterpret_cast<uintptr_t>(pointer) % 4 == 0 && s.time % 2 == 0 && s.outer % 2 == 0));
    };
    each_operand([&](const void* pointer, const Strides& s, int64_t size, int) {
      if (size > 1) test(pointer, s);
    });
    each_result([&](const void* pointer, const Strides& s) {
      test(pointer, s);
      pairs = pairs && s.inner == 1;
    });
    t.pairs = pairs;
    const auto congruent = [&](int64_t a, int64_t b) { return (a - b) * bytes() % 16 == 0; };
    const auto apart = reinterpret_cast<uintptr_t>(p_.input) - reinterpret_cast<uintptr_t>(p_.output);
    t.staged = apart % 16 == 0 && congruent(p_.input_strides.time, p_.output_strides.time) &&
        (t.outer == 1 || congruent(p_.input_strides.outer, p_.output_strides.outer)) &&
        (p_.input_strides.time == p_.inner) == (p_.output_strides.time == p_.inner);
  }

  int64_t unit(const ColumnTiles& t) const { return t.pairs ? 2 : 1; }
  // What rows of so many bytes cost that begin anywhere: they share sectors of 32 bytes.
  double aligned_share(const ColumnTiles& t, int64_t columns) const {
    if (columns == p_.inner) return 1.0;
    const int64_t row = columns * bytes();
    const bool aligned = row % 32 == 0 && p_.input_strides.time * bytes() % 32 == 0;
    return aligned ? 1.0 : static_cast<double>(row) / (row + 32);
  }

  // So many columns or a few more, for whole sectors of memory where they can be had.
  int64_t rounded(const ColumnTiles& t, int64_t columns, int64_t most) const {
    const int64_t sector = p_.input_strides.time * bytes() % 32 == 0 ? std::max<int64_t>(32 / bytes(), 1) : unit(t);
    return std::min(std::min(ceil_div(columns, sector) * sector, most), p_.inner);
  }

  // Columns that blocks walk along alone: as few rounds as can be.
  Choice best_walk(const ColumnTiles& t) const {
    Choice best;
    const int64_t blocks = int64_t{kWalkingBlocks} * multiprocessors_, most = t.steps <= 16 ? 2048 : 1024;
    for (int64_t rounds = 1; rounds <= 8; ++rounds) {
      const int64_t spans = std::max<int64_t>(rounds * blocks / t.outer, 1);
      const int64_t columns = rounded(t, ceil_div(p_.inner, spans), most), lanes = ceil_div(columns, unit(t));
      const int64_t turns = ceil_div(t.outer * ceil_div(p_.inner, columns), blocks);
      double score = static_cast<double>(t.outer * p_.inner) / (turns * blocks * columns) * aligned_share(t, columns);
      score *= std::min(1.0, kWalkingBlocks * lanes / 224.0);  // too few warps
      if (score > best.score + 0.02) best = {columns, 1, score};
    }
    return best;
  }

  // Columns whose steps several threads share, and several blocks where there are too few columns.
  Choice best_shared(const ColumnTiles& t) const {
    Choice best;
    const int64_t blocks = int64_t{kSharedBlocks} * multiprocessors_, most = most_columns(t);
    const int64_t least = ceil_div(p_.inner, most);
    const auto consider = [&](int64_t spans) {
      const int64_t columns = rounded(t, ceil_div(p_.inner, spans), most),
                    walks = t.outer * ceil_div(p_.inner, columns);
      const int64_t peers = std::max<int64_t>(1, std::min(blocks / walks, t.steps / kLeastSteps));
      const int64_t turns = peers > 1 ? 1 : ceil_div(walks, blocks);
      const int64_t lanes = ceil_div(columns, unit(t)), parts = kMostColumnThreads / lanes;
      double score =
          static_cast<double>(peers * t.outer * p_.inner) / (turns * blocks * columns) * aligned_share(t, columns);
      if (peers > 1) score *= 0.95;
      if (columns < p_.inner && columns * bytes() < 128) score *= 0.9;  // short pieces of memory's pages
      score *= 0.75 + 0.25 * static_cast<double>(parts * lanes) / kMostColumnThreads;
      if (score > best.score + 0.01) best = {columns, peers, score};
    };
    for (int64_t spans = least; spans < least + 3; ++spans) consider(spans);
    for (int64_t peers = 1; peers <= 8; ++peers) {
      const int64_t spans = blocks / (peers * t.outer);
      if (spans > least && spans * 64 <= p_.inner * bytes()) consider(spans);
    }
    best.score *= 0.9;  // two readings
    return best;
  }
  int64_t most_columns(const ColumnTiles& t) const {
    return std::min<int64_t>(kMostColumns, kMostColumnThreads * unit(t));
  }

  // Pitches of the operands; the bytes of a step.
  int64_t lay_out(ColumnTiles& t, int64_t columns) const {
    t.span = static_cast<int>(columns);
    t.spans = static_cast<int>(ceil_div(p_.inner, columns));
    t.walks = t.outer * t.spans;
    int64_t all = 0;
    for (TileOperand& operand : t.operands) operand.at = -1;
    each_operand([&](const void* pointer, const Strides& s, int64_t size, int which) {
      TileOperand& operand = t.operands[which];
      operand.at = 0;
      const int64_t row = columns * size, pitch = s.time * size;
      if (s.inner != 1) {
        operand.vectors = 0;
        operand.pitch = static_cast<int>(ceil_div(row, 16) * 16);
      } else if (t.spans == 1 && pitch == row) {
        operand.vectors = -1;
        operand.pitch = static_cast<int>(row);
      } else {
        const bool aligned = reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && pitch % 16 == 0 && row % 16 == 0 &&
            s.outer * size % 16 == 0;
        // Congruent to the pitch in memory, so that vectors are aligned in both.
        operand.vectors = static_cast<int>(aligned ? row / 16 : ceil_div(row + 15, 16));
        int64_t wanted = aligned ? row : row + 30;
        wanted += ((pitch - wanted) % 16 + 16) % 16;
        operand.pitch = static_cast<int>(wanted);
      }
      all += operand.pitch;
    });
    return all;
  }

  // Places of the operands in a stage and of what follows the stages.
  void finish(ColumnTiles& t, int64_t stages_most, int64_t budget) const {
    t.chunks = static_cast<int>(ceil_div(t.steps, t.tile_steps));
    int64_t at = 0;
    for (int i = 0; i < kTileOperands; ++i) {
      if (t.operands[i].at < 0) continue;
      t.operands[i].at = static_cast<int>(at);
      at += ceil_div(int64_t{t.operands[i].pitch} * (t.tile_steps + (i == kTileFlags ? 1 : 0)) + 32, 16) * 16;
    }
    t.stage_bytes = static_cast<int>(at);
    const auto whole = [&](int64_t elements) { return elements * bytes() % 16 == 0; };
    const bool flat = t.operands[kTileInput].vectors < 0;
    t.whole_vectors =
        reinterpret_cast<uintptr_t>(p_.output) % 16 == 0 && (t.outer == 1 || whole(p_.output_strides.outer));
    if (flat) t.whole_vectors = t.whole_vectors && whole(t.tile_steps * p_.inner) && whole(t.steps * p_.inner);
    else t.whole_vectors = t.whole_vectors && whole(t.span) && whole(p_.inner) && whole(p_.output_strides.time);
    const int64_t items = int64_t{t.parts} * t.span, kept = sums() ? items * wide_bytes() : 0;
    int64_t state = (t.ahead + 1) * items * (wide_bytes() * (step() ? 2 : 1) + 1);
    if (t.walks_alone) state = t.chunks > 1 ? items * wide_bytes() : 0;
    state = ceil_div(state, 16) * 16;
    const int64_t sums_at = state;
    if (!t.walks_alone || t.chunks > 1) state += kept;
    t.stages = static_cast<int>(std::min<int64_t>(stages_most, (budget - state - 64) / at));
    t.in_flight = t.stages - t.ahead - 1;
    t.state_at = t.stages * t.stage_bytes;
    t.sums_at = t.state_at + static_cast<int>(sums_at);
    t.shared_bytes = static_cast<int>(ceil_div(t.state_at + state, 16) * 16);
    if (t.in_flight < 1) t.shared_bytes = shared_bytes_ + 1;  // no room
  }

  int64_t budget(int blocks) const { return (shared_bytes_ + 1024) / blocks - 1024 - 512; }

  void plan_walk(ColumnTiles& t, const Choice& choice) const {
    t.walks_alone = true;
    t.threads = kWalkThreads;
    const int64_t step_bytes = lay_out(t, choice.columns), room = budget(kWalkingBlocks);
    const auto steps_in = [&](int64_t state) {
      const int64_t stage = (room - state) / kWantedStages - 64 * kTileOperands;
      return std::max<int64_t>(1, stage / step_bytes);
    };
    int64_t chunks = ceil_div(t.steps, steps_in(64));
    if (chunks > 1) chunks = ceil_div(t.steps, steps_in(64 + (sums() ? 2 : 1) * t.span * wide_bytes()));
    t.tile_steps = t.part_steps = static_cast<int>(ceil_div(t.steps, chunks));
    finish(t, chunks == 1 ? 8 : kWantedStages, room);
    t.blocks = std::min<int64_t>(t.walks, int64_t{kWalkingBlocks} * multiprocessors_);
  }

  // Steps of a part, whose lanes read from different banks where a warp has several parts.
  int64_t part_of(const ColumnTiles& t, int64_t steps) const {
    const int64_t cells = ceil_div(t.span, unit(t)), row = t.operands[kTileInput].pitch;
    int64_t n = std::max<int64_t>(1, steps);
    const int64_t every = 128 / std::gcd<int64_t>(128, row);
    const bool conflicts = (row * n - cells * unit(t) * bytes()) % 128 != 0;
    if (cells < 32 && every > 1 && conflicts && n > every / 2) n = ceil_div(n - 1, every) * every + 1;
    return n;
  }

  void plan_shared(ColumnTiles& t, const Choice& choice) const {
    const int64_t step_bytes = lay_out(t, choice.columns), room = budget(kSharedBlocks);
    const int64_t cells = ceil_div(choice.columns, unit(t));
    int64_t peers = std::min(choice.peers, std::max<int64_t>(1, t.steps / kLeastSteps));
    int64_t parts = std::max<int64_t>(1, kMostColumnThreads / cells);
    t.ahead = peers > 1 ? kMostAhead : 1;
    const int64_t state =
        parts * choice.columns * ((t.ahead + 1) * (wide_bytes() * (step() ? 2 : 1) + 1) + (sums() ? wide_bytes() : 0));
    const int64_t wanted = t.ahead + 1 + kSharedInFlight;
    const int64_t stage = (room - state - 64) / wanted - 64 * kTileOperands;
    const int64_t most = std::max<int64_t>(1, stage / step_bytes);
    // As many rounds as there must be, in tiles as even as can be.
    int64_t rounds = ceil_div(t.steps, peers * most);
    int64_t n = 1;
    for (;; ++rounds) {
      const int64_t even = ceil_div(t.steps, peers * rounds * parts);
      n = part_of(t, even);
      if (n * parts <= most) break;
      if (n > even && 3 * n * parts <= 4 * most) {
        parts = most / n;
        break;
      }
      n = even;
      if (n * parts <= most || n == 1) break;
    }
    rounds = ceil_div(t.steps, peers * n * parts);
    parts = std::min(parts, ceil_div(t.steps, peers * n * rounds));
    t.parts = static_cast<int>(std::max<int64_t>(1, std::min(parts, most)));
    t.part_steps = static_cast<int>(n);
    t.tile_steps = t.parts * t.part_steps;
    t.chunks = static_cast<int>(ceil_div(t.steps, t.tile_steps));
    t.peers = static_cast<int>(std::min<int64_t>(peers, t.chunks));
    t.threads = static_cast<int>(ceil_div(t.parts * cells, 32) * 32);
    t.threads = std::max(t.threads, kWalkThreads);
    const int64_t turns = ceil_div(t.chunks, t.peers);
    t.ahead = static_cast<int>(std::min<int64_t>(t.peers > 1 ? kMostAhead : 1, turns - 1));
    finish(t, wanted + 2, room);
    t.group = 1;
    while (t.peers > 12 && t.group * t.group < t.peers) ++t.group;
    t.groups = static_cast<int>(ceil_div(t.peers, t.group));
    t.team = 1;
    while (t.team < 16 && 2 * t.team * t.span <= kCarryThreads) t.team *= 2;
    t.blocks = t.walks * t.peers;
    if (t.peers > 1) {
      t.workspace_bytes =
          int64_t{kWordSlots} * (t.peers + t.groups) * t.walks * t.span * 16 * (wide_bytes() / 8) * (step() ? 2 : 1);
    } else {
      t.blocks = std::min<int64_t>(t.walks, int64_t{kSharedBlocks} * multiprocessors_);
    }
  }

  const ScanProblem& p_;
  int multiprocessors_, shared_bytes_;
};

}  // namespace dcs
