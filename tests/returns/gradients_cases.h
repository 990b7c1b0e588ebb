// Random calls whose gradients gradients_on_cpu.cpp asks kernels for.
#pragma once

#include <random>

#include "operand_on_cpu.h"
#include "dcs/scan/problem.h"

namespace gradients {

using dcs::GammaKind;
using trials::Same;

// By which kernels.
enum class Way {
  kThreeLaunches,
  kWindowBlocks,
  kSerialColumns,
  kSerialPairs,
  kFewSteps,
  kTileColumns,
  kSmallTiles,
  kFlatColumns,
  kFlatRows,
  kLinkedRows
};

struct Case {
  int64_t outer, length, inner;
  bool contiguous, padded, padded_flags, padded_results;  // time; rows in memory
  bool advantages, targets, pg, rhos, terminated, truncated;
  bool own_values, next_values;
  GammaKind gamma, trace;
  double gamma_value, trace_value;
  int64_t n;                    // 0: not of returns over n steps
  bool aligned;                 // tensors begin at whole vectors
  Same same_grads, same_rates;  // what gradients, and discounts of steps, are the same along
  unsigned flags;               // 0: of episodes; 1: ends alone; 2: lacks alone; 3: both, of their own; 4: one tensor
  unsigned needs;               // bits: rewards, values, next values, bootstrap value
  bool wild;                    // not finite where a step ends and lacks a next value
  bool infinite;                // the first step's gradients
  bool odd_rates;               // discounts of rows and steps: some 0, some negative
  bool small_rates;             // the same: products of a few leave float's range
  bool row_double;              // discounts of rows
  double often;                 // flags
  unsigned seed;
};

inline Case draw(std::mt19937& random) {
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  const auto up_to = [&](unsigned n) { return static_cast<int64_t>(1 + random() % n); };
  Case c{};
  const unsigned form = random() % 4;
  c.length = form == 0 ? up_to(12) : form == 1 ? up_to(200) : up_to(1000);
  c.outer = form == 0 ? up_to(60) : one_in(2) ? 1 : up_to(4);
  c.inner = form == 0 ? up_to(9) : form == 1 ? up_to(150) : up_to(12);
  c.contiguous = one_in(2);
  c.padded = one_in(3);
  c.padded_flags = one_in(3) ? !c.padded : c.padded;
  c.padded_results = one_in(3) ? !c.padded : c.padded;
  c.n = one_in(4) ? up_to(one_in(2) ? 9 : 60) : 0;
  const bool is_common = one_in(3);  // of discounts that are numbers, without ratios
  // So many steps that a cluster takes small tiles of them.
  if (is_common && !c.contiguous && !c.n && form == 3) c.length = 1000 + up_to(4000);
  c.next_values = !is_common && one_in(2);
  c.own_values = c.n ? !c.next_values : !one_in(3);
  // Without values of their own, returns have targets alone.
  const bool may_have_all = c.own_values && !c.n;
  c.advantages = (may_have_all && !one_in(3)) || (c.n && one_in(8));
  c.targets = !c.advantages || !one_in(3);
  c.pg = may_have_all && !is_common && one_in(2);
  c.rhos = may_have_all && !is_common && one_in(2);
  c.terminated = !one_in(4);
  c.truncated = one_in(3);
  const auto kind = [&] { return is_common || one_in(2) ? GammaKind::kNumber : static_cast<GammaKind>(random() % 3); };
  c.gamma = kind();
  c.trace = kind();
  constexpr double kRates[] = {0.99, 1.0, 0.9};
  c.gamma_value = kRates[random() % 3];
  c.trace_value = kRates[random() % 3];
  if (one_in(3)) c.trace = GammaKind::kNumber, c.trace_value = 1.0;
  c.seed = random();
  c.aligned = one_in(2);
  if (one_in(3)) c.inner = 8 * up_to(12), c.padded = c.padded_flags = c.padded_results = false;
  if (one_in(6)) c.length = up_to(2);
  if (one_in(12)) c.inner = 1;
  c.same_grads = one_in(4) ? static_cast<Same>(random() % 4) : Same::kNothing;
  c.same_rates = one_in(2) ? static_cast<Same>(random() % 4) : Same::kNothing;
  c.flags = one_in(2) ? 0 : random() % 5;
  if (c.flags == 4 && c.n && !c.next_values) c.flags = 0;
  c.needs = one_in(2) ? 15 : random() % 16;
  if (!(c.needs & (c.next_values ? 4 : 8)) && !(c.needs & 1)) c.needs |= 1;
  c.wild = one_in(3) && c.same_grads == Same::kNothing;
  c.infinite = !c.wild && c.same_grads == Same::kNothing && one_in(6);
  c.odd_rates = one_in(4);
  c.small_rates = one_in(8) && !c.n && !c.wild && c.same_grads == Same::kNothing;
  if (c.small_rates) c.odd_rates = false, c.infinite = true;
  c.row_double = one_in(2);
  c.often = one_in(3) ? 0.2 : 0.01;
  if (may_have_all && one_in(4)) c.advantages = c.targets = false, c.pg = true;
  if (!c.n && one_in(4)) {
    // Few columns one behind the other.
    c.contiguous = c.padded = c.padded_flags = c.padded_results = false;
    c.inner = one_in(2) ? up_to(7) : up_to(63);
    c.length = 9 + up_to(1500) / (one_in(2) ? 20 : 1);
    c.same_grads = c.same_rates = Same::kNothing;
  }
  if (!is_common && one_in(3)) {
    // Without ratios and policy gradients, as kernels of flat rows have it beside discounts of rows, and of steps.
    c.pg = c.rhos = false;
    if (!c.advantages) c.targets = true;
    c.gamma = one_in(2) ? GammaKind::kStep : GammaKind::kRow;
    if (c.gamma == GammaKind::kStep || one_in(2)) c.trace = GammaKind::kNumber;
    c.contiguous = !one_in(4);
    if (!c.n && one_in(2)) c.own_values = c.advantages = false, c.targets = true;
    if (c.gamma == GammaKind::kStep && !c.n && !c.wild && c.same_grads == Same::kNothing && one_in(2))
      c.odd_rates = false, c.small_rates = c.infinite = true, c.trace_value = 0.9;
  }
  constexpr double kOdd[] = {0.0, 1.02, -0.9, 0.3, 1e-30, 1.0};
  if (one_in(4)) c.gamma_value = kOdd[random() % 6];
  if (one_in(6)) c.trace_value = kOdd[random() % 6];
  // Over a window a gate of 0 reads nothing of the step before.
  if (c.odd_rates || c.gamma_value == 0.0 || c.trace_value == 0.0) c.infinite = false;
  return c;
}

}  // namespace gradients
