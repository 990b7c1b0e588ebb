// The problems of columns_on_cpu.cpp, drawn at random.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>

#include "dcs/scan/plan/kernels.h"

namespace {

using namespace dcs;

enum class Lie { kDense, kPadded, kMoved, kSpread, kOneOuter, kOneStep, kApart };  // how an operand lies in memory

struct Case {
  int64_t outer, length, inner;
  GammaKind kind;
  double gamma;
  bool reset, initial, reverse, shifted, backward;
  bool tiny_rows;  // time is contiguous
  bool small;      // by the kernel of small scans
  bool sharing;    // by blocks of it that leave each other words
  bool stream;     // by the kernel of long scans of few columns
  bool lookback;   // by clusters that look back
  bool parted;     // by threads with parts of the steps of few columns that are staged
  bool infinite;   // a value of the input is, and a gate is no number
  bool odd_rows;   // gammas of rows are any numbers, or none
  Lie lies[5];     // of the input, the output, the gates, the saved output, the resets
  int multiprocessors, cluster, shared;
  unsigned seed;
};

// Few columns whose time many blocks share.
void draw_sharing(Case& c, std::mt19937& random) {
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  const auto up_to = [&](unsigned n) { return static_cast<int64_t>(1 + random() % n); };
  c.small = c.sharing = true;
  c.tiny_rows = c.stream = false;
  c.outer = up_to(one_in(2) ? 1 : 3);
  c.inner = up_to(one_in(2) ? 8 : 24);
  c.multiprocessors = static_cast<int>(c.outer * (one_in(4) ? 132 : 4 + up_to(30)));
  c.length = c.multiprocessors * up_to(60);
  c.initial = c.initial && (c.backward || !c.shifted);
}

// Long scans of few columns, some in small tiles, in whole rounds of them, nearly: most types take them.
void draw_stream(Case& c, std::mt19937& random) {
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  const auto up_to = [&](unsigned n) { return static_cast<int64_t>(1 + random() % n); };
  c.stream = true;
  c.small = c.tiny_rows = c.backward = c.reset = false;
  if (c.kind == GammaKind::kStep) c.kind = GammaKind::kNumber;
  c.initial = one_in(3) && !c.shifted;
  const bool in_groups = one_in(3), large = !in_groups && one_in(3);
  c.inner = in_groups ? 4 + up_to(12) : up_to(one_in(2) ? 4 : 16);
  c.shared = large ? 227 << 10 : 124 << 10;
  c.outer = in_groups || one_in(2) ? 1 : up_to(6);
  const int64_t sharers = in_groups ? 32 + up_to(28) : up_to(large || c.outer > 1 ? 3 : 12);
  c.multiprocessors = static_cast<int>(c.outer * sharers);
  if (c.outer > 1 && one_in(2)) c.outer *= up_to(3) * sharers;  // more than blocks
  c.cluster = 16;
  const int64_t steps = 32 * kStreamWarps / c.inner * (large ? 65 : 33),
                rounds = c.outer > c.multiprocessors ? up_to(2) : (in_groups ? 2 : 1 + up_to(2)) * sharers;
  c.length = steps * rounds - up_to(static_cast<unsigned>(std::max<int64_t>(steps / 8, 1)));
  constexpr Lie kLies[] = {Lie::kDense, Lie::kMoved, Lie::kPadded};
  c.lies[0] = c.inner > 4 ? Lie::kDense : kLies[random() % 3];
  c.lies[1] = c.inner > 4 || one_in(2) ? Lie::kDense : Lie::kMoved;
}

// Of a shared gamma, in words of columns: with time in one block, a cluster, a group of these and more of them.
void draw_lookback(Case& c, std::mt19937& random) {
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  const auto up_to = [&](unsigned n) { return static_cast<int64_t>(1 + random() % n); };
  c.lookback = true;
  c.small = c.sharing = c.stream = c.parted = c.tiny_rows = c.backward = c.reset = false;
  c.kind = GammaKind::kNumber;
  if (std::abs(c.gamma) > 1.0) c.gamma = one_in(2) ? 1.0 : -0.999;
  c.initial = one_in(3) && !c.shifted;
  c.cluster = 16;
  const unsigned form = random() % 4;
  c.multiprocessors = static_cast<int>(form == 0 ? 132 : up_to(6));  // clusters of 8 blocks; fewer
  c.outer = one_in(2) ? 1 : up_to(3);
  c.inner = 12 + up_to(form == 0 ? 60 : form == 1 ? 400 : 150);
  c.length = form == 0 ? up_to(one_in(4) ? 40000 : 5000) : form == 1 ? up_to(700) : up_to(one_in(3) ? 9000 : 2500);
  if (c.length > 9000) c.outer = 1;
  constexpr Lie kLies[] = {Lie::kDense, Lie::kDense, Lie::kPadded, Lie::kMoved, Lie::kApart};
  for (Lie& lie : c.lies) lie = kLies[random() % 5];
}

// Few neighbors of a few outer rows a multiprocessor: of few steps and of several pieces of them, of one warp a column
// and more, also where shared memory has room for little.
void draw_parted(Case& c, std::mt19937& random) {
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  const auto up_to = [&](unsigned n) { return static_cast<int64_t>(1 + random() % n); };
  c.parted = true;
  c.small = c.sharing = c.stream = c.tiny_rows = c.backward = false;
  if (c.kind == GammaKind::kStep) c.kind = one_in(2) ? GammaKind::kNumber : GammaKind::kRow;
  if (c.gamma == -1.2) c.gamma = 1.001;
  c.odd_rows = one_in(4);
  c.initial = one_in(3) && !c.shifted;
  const bool is_long = one_in(3);
  c.outer = 1 + up_to(is_long ? 6 : 60);
  c.inner = 1 + up_to(one_in(2) ? 4 : 30);
  c.length = is_long ? up_to(6000) : one_in(4) ? up_to(60) : up_to(700);
  c.multiprocessors = static_cast<int>(one_in(2) ? 1 : up_to(is_long ? 20 : 4));
  c.shared = one_in(2) ? 227 << 10 : static_cast<int>(30 + random() % 70) << 10;
  constexpr Lie kLies[] = {Lie::kDense, Lie::kDense, Lie::kMoved, Lie::kApart};
  for (Lie& lie : c.lies) lie = kLies[random() % 4];
  if (one_in(8)) c.lies[0] = Lie::kOneOuter;
}

Case draw(std::mt19937& random) {
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  const auto up_to = [&](unsigned n) { return static_cast<int64_t>(1 + random() % n); };
  Case c{};
  const unsigned form = random() % 7;                            // 5: more tiles than two levels of groups hold
  const bool few_steps = form == 6 || (form == 0 && one_in(2));  // of columns of which a thread takes several
  c.outer = one_in(2) ? 1 : up_to(form == 0 || few_steps ? 20 : 3);
  c.length = form == 5 ? 4500 + up_to(1000)
      : form == 0      ? up_to(12)
      : form == 1      ? up_to(60)
      : form == 2      ? up_to(30000)
                       : up_to(3000);
  if (few_steps) c.length = up_to(kFewSteps);
  c.tiny_rows = few_steps && one_in(3);
  c.inner = 1 +
      (few_steps          ? up_to(3000)
              : form == 0 ? up_to(40)
              : form == 1 ? up_to(900)
              : form == 2 ? up_to(10)
                          : up_to(50));
  const bool narrow = form > 0 && form < 4 && one_in(2);  // few neighbors of many outer rows
  if (narrow) c.outer = 1 + up_to(200), c.length = 20 + up_to(form == 1 ? 60 : 400), c.inner = 1 + up_to(8);
  if (form == 5) c.outer = 1, c.inner = 28 + up_to(4);
  const bool wide = form == 3 && !narrow && one_in(2);  // rounds of blocks of more columns than few have
  if (wide) c.outer = 1, c.length = 1000 + up_to(2000), c.inner = kWideSpan + up_to(90);
  c.small = form < 5 && form != 2 && !narrow && !wide && one_in(2);
  if (one_in(2)) c.inner = (c.inner + 1) / 2 * 2;
  c.kind = static_cast<GammaKind>(random() % 3);
  constexpr double kGammas[] = {0.99, 1.0, -0.9, 0.5, 0.0, 1.1, -1.2, 1e-30};
  c.gamma = kGammas[random() % (c.small ? 8 : 5)];
  c.odd_rows = c.small && one_in(2);
  c.reset = one_in(3);
  c.reverse = one_in(2);
  c.backward = one_in(2);
  c.shifted = one_in(3);
  c.initial = one_in(3) && (c.backward || !c.shifted);
  constexpr Lie kOutputs[] = {Lie::kDense, Lie::kDense, Lie::kPadded, Lie::kMoved};
  for (Lie& lie : c.lies) lie = one_in(2) ? Lie::kDense : static_cast<Lie>(random() % 6);
  c.lies[0] = kOutputs[random() % 4];
  c.lies[1] = kOutputs[random() % 4];
  if (narrow && !one_in(3)) {  // as staged columns take them
    if (c.kind == GammaKind::kStep) c.kind = GammaKind::kRow;
    c.backward = false;
    c.initial = c.initial && !c.shifted;
    for (Lie& lie : c.lies) lie = one_in(2) ? Lie::kDense : Lie::kMoved;
    if (c.outer * c.inner < kStagedColumns) c.outer = kStagedColumns / c.inner + up_to(60);
  }
  const bool in_words = few_steps && one_in(2);  // of 8 and 16 bytes
  if (in_words) {
    const int64_t unit = one_in(2) ? 8 : 4;
    c.inner = (c.inner + unit - 1) / unit * unit;
    c.tiny_rows = false;
    if (one_in(2)) c.length = up_to(kFewestSteps);
    for (Lie& lie : c.lies) lie = Lie::kDense;
  }
  c.multiprocessors = static_cast<int>(narrow || wide ? 1 : form == 5 ? 132 : in_words ? 1 : one_in(8) ? 40 : up_to(6));
  if (c.small) c.multiprocessors = static_cast<int>(one_in(3) ? 132 : kClusterMultiprocessors * up_to(3));
  c.cluster = one_in(2) ? 16 : one_in(2) ? 8 : c.small && one_in(2) ? 2 : 0;  // of 2: of many warps
  c.shared = 227 << 10;
  if (one_in(6)) draw_parted(c, random);
  else if (one_in(4)) draw_stream(c, random);
  else if (one_in(4)) draw_sharing(c, random);
  else if (one_in(3)) draw_lookback(c, random);
  if (c.small && one_in(2)) {  // as columns in float take them
    c.kind = GammaKind::kNumber;
    c.reset = c.backward = c.shifted = false;
    if (std::abs(c.gamma) > 1.0) c.gamma = -1.0;
  }
  c.infinite = !c.backward && one_in(4);
  c.seed = random();
  return c;
}

}  // namespace
