// Random rollouts for the programs that run kernels of the temporal difference scan on a CPU, and what comes of them by
// its definition in double.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "operand_on_cpu.h"
#include "trials.h"
#include "dcs/returns/problem.h"
#include "common/element_types.cuh"

namespace trials {

struct Rollout {
  int64_t outer, length, inner;
  bool contiguous, padded, padded_flags, padded_results;  // time; rows in memory
  bool aligned;                                           // first elements
  bool values, next_values, bootstrap, rhos, terminated, truncated, numeric_flags, values_are_next;
  dcs::GammaKind gamma, trace;
  bool narrow_gamma = false, narrow_trace = false;  // one a step is in half precision, where all else is
  bool advantages, targets, pg;
  double gamma_value, trace_value;
  int multiprocessors;
  unsigned seed;
  Same same_flags = Same::kNothing, same_rates = Same::kNothing, same_values = Same::kNothing,
       same_bootstrap = Same::kNothing;
  // Of discounts that are one a row; `odd` ones, of rows or steps, are 0, of any sign, above 1 or no numbers.
  dcs::ElementType row_dtype = dcs::ElementType::Float;
  Same same_rows = Same::kNothing;
  bool odd_rows = false, odd_steps = false;
  // Discounts of steps are so small that products of a few leave float's range, and what is infinite stays so.
  bool small_steps = false;
  bool infinite = false;  // some rewards are, and what counts for nothing is no number
  uint64_t offsets = 0;   // four bits an operand: elements that it begins behind where it would
  int64_t offset(int operand) const { return static_cast<int64_t>(offsets >> 4 * operand & 15); }
};

// What is drawn for it. Derived classes run kernels on it, and ask whether that was right; those of other kernels than
// the temporal difference scan's have a `check` of their own.
template <typename T>
class RolloutTrial {
 public:
  using Acc = typename dcs::Types<T>::Acc;
  RolloutTrial(const Rollout& of)
      : c(of),
        random(of.seed),
        rewards(c, c.padded, Same::kNothing, c.offset(0)),
        values(c, c.padded, c.same_values, c.offset(1)),
        next(c, c.padded, c.same_values, c.offset(2)),
        rhos(c, c.padded, Same::kNothing, c.offset(3)),
        terminated(c, c.padded, c.same_flags, c.offset(4)),
        truncated(c, c.padded, c.same_flags, c.offset(5)),
        is_terminated(c, c.padded_flags, c.same_flags, c.offset(6)),
        is_truncated(c, c.padded_flags, c.same_flags, c.offset(7)),
        gammas(c, c.padded, c.same_rates, c.offset(8)),
        traces(c, c.padded, c.same_rates, c.offset(9)),
        narrow_gammas(c, c.padded, c.same_rates, c.offset(10)),
        narrow_traces(c, c.padded, c.same_rates, c.offset(11)),
        advantages(c, c.padded_results, Same::kNothing, c.offset(12)),
        targets(c, c.padded_results, Same::kNothing, c.offset(13)),
        pg(c, c.padded_results, Same::kNothing, c.offset(14)) {
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    each([&](int64_t o, int64_t t, int64_t i) {
      for (Operand<T>* tensor : {&rewards, &values, &next}) tensor->at(o, t, i) = narrowed<T>(normal(random));
      rhos.at(o, t, i) = narrowed<T>(std::exp(0.5 * normal(random)));
      is_terminated.at(o, t, i) = uniform(random) < 0.01;
      is_truncated.at(o, t, i) = uniform(random) < 0.01;
      terminated.at(o, t, i) = narrowed<T>(is_terminated.at(o, t, i));
      truncated.at(o, t, i) = narrowed<T>(is_truncated.at(o, t, i));
      draw_rate(o, t, i, c.narrow_gamma, gammas, narrow_gammas);
      draw_rate(o, t, i, c.narrow_trace, traces, narrow_traces);
    });
    for (int64_t row = 0; row < c.outer * c.inner; ++row) {
      for (RowRates* rates : {&row_gammas, &row_traces}) draw_row(rates, row, uniform(random));
      bootstraps.push_back(narrowed<T>(normal(random)));
    }
    bootstrap_strides = strides_of_rows(c.same_bootstrap);
    if (c.infinite) spoil();
    describe();
  }

 protected:
  // Whether the results are there, and nothing else has been written. `ended`: the kernels have.
  bool is_right(bool ended) const {
    bool is_right = ended;
    for (const Operand<T>* output : {&advantages, &targets, &pg}) is_right = is_right && !output->is_spoiled(c);
    if (!is_right) complain("memory beside an output, or the end", 0, 0, 0, 0, 0);
    for (int64_t o = 0; o < c.outer; ++o)
      for (int64_t i = 0; i < c.inner && is_right; ++i) is_right = check(o, i);
    return is_right;
  }

  const Rollout c;
  std::mt19937 random;
  Operand<T> rewards, values, next, rhos, terminated, truncated;
  Operand<uint8_t> is_terminated, is_truncated;
  Operand<Acc> gammas, traces;
  Operand<T> narrow_gammas, narrow_traces;  // the same numbers
  Operand<T> advantages, targets, pg;
  // Discounts that are one a row, in memory and as numbers.
  struct RowRates {
    std::vector<double> memory, numbers;
    dcs::Strides strides;
  };
  RowRates row_gammas, row_traces;
  std::vector<T> bootstraps;
  dcs::Strides bootstrap_strides;
  dcs::ReturnsProblem p{};

  size_t bootstrap_index(int64_t o, int64_t i) const {
    return static_cast<size_t>(o * bootstrap_strides.outer + i * bootstrap_strides.inner);
  }

  double rate_at(dcs::GammaKind kind, double value, const Operand<Acc>& steps, const RowRates& rows, int64_t o,
      int64_t t, int64_t i) const {
    if (kind == dcs::GammaKind::kNumber) return value;
    return kind == dcs::GammaKind::kRow
        ? rows.numbers[static_cast<size_t>(o * rows.strides.outer + i * rows.strides.inner)]
        : steps.at(o, t, i);
  }
  bool complain(const char* what, int64_t o, int64_t t, int64_t i, double found, double wanted) const {
    printf("%s[%ld, %ld, %ld] is %g for %g: %ld x %ld x %ld, %zu bytes, contiguous %d, padded %d, values %d, next %d, ",
        what, o, t, i, found, wanted, c.outer, c.length, c.inner, sizeof(T), c.contiguous, c.padded, c.values,
        c.next_values);
    printf("rhos %d, terminated %d, truncated %d, kinds %d %d, rows' type %d, odd %d, seed %u\n", c.rhos, c.terminated,
        c.truncated, static_cast<int>(c.gamma), static_cast<int>(c.trace), static_cast<int>(c.row_dtype), c.odd_rows,
        c.seed);
    return false;
  }
  // Of numbers of two bytes, what bfloat16 rounds to its largest one.
  static bool is_in_range(double number) {
    constexpr double kMost = std::is_same_v<T, __half> ? 65520.0
        : sizeof(T) == 8                               ? DBL_MAX
        : sizeof(T) == 4                               ? FLT_MAX
                                                       : 0x1.ffp127;
    return sizeof(T) == 2 ? std::abs(number) < kMost : std::abs(number) <= kMost;
  }
  // `carried`: over so many steps, each of which may round, as may a power of their gates.
  bool is_near(const char* name, const Operand<T>& output, int64_t o, int64_t t, int64_t i, double wanted,
      double largest, int64_t carried = 0) const {
    const double own = sizeof(T) == 2 ? 6e-3
        : sizeof(T) == 4              ? 3e-6
                                      : 2e-13,
                 eps = own + static_cast<double>(carried) * DBL_EPSILON / 2, value = widened(output.at(o, t, i));
    // As a NaN or as an infinity, it is where the recurrence carries it.
    if (c.small_steps && std::isinf(wanted)) return value == wanted || complain(name, o, t, i, value, wanted);
    if (!is_in_range(wanted)) return !std::isfinite(value) || complain(name, o, t, i, value, wanted);
    return std::abs(value - wanted) <= eps * (std::abs(wanted) + largest) || complain(name, o, t, i, value, wanted);
  }

  // One row.
  virtual bool check(int64_t o, int64_t i) const {
    const bool own_values = c.values && !c.values_are_next;
    double carry = 0.0, largest = 1.0;
    bool has_left = false;  // the range that results have, as may a part's sum from nothing; it may be back
    int64_t carried = 0;
    for (int64_t t = c.length - 1; t >= 0; --t) {
      const bool is_last = t == c.length - 1, terminates = c.terminated && is_terminated.at(o, t, i),
                 ends = terminates || (c.truncated && is_truncated.at(o, t, i)), is_cut = ends || is_last;
      const double g = rate_at(c.gamma, c.gamma_value, gammas, row_gammas, o, t, i),
                   l = rate_at(c.trace, c.trace_value, traces, row_traces, o, t, i),
                   reward = widened(rewards.at(o, t, i));
      double after = is_last ? (c.bootstrap ? widened(bootstraps[bootstrap_index(o, i)]) : 0.0)
          : c.values         ? widened(values.at(o, t + 1, i))
                             : 0.0;
      if (c.next_values) after = widened(next.at(o, t, i));
      const double weight = own_values || is_cut ? g : g - g * l, rho = c.rhos ? widened(rhos.at(o, t, i)) : 1.0;
      const bool drops = c.next_values ? terminates : ends;
      const double own = own_values ? widened(values.at(o, t, i)) : 0.0,
                   difference = reward + (drops || (!own_values && weight == 0.0) ? 0.0 : weight * after) - own;
      const auto clip = [&](double most) { return c.rhos ? std::min(rho, most) : 1.0; };
      const double unweighted = difference + (is_cut ? 0.0 : g * l * carry), policy = clip(1.2) * unweighted;
      carry = clip(1.1) * difference + (is_cut ? 0.0 : g * l * clip(0.9) * carry);
      carried = is_cut ? 0 : carried + 1;
      if (is_cut) largest = 1.0, has_left = false;
      // What is wrong with the step behind grows as that would, even where rewards keep the carry small.
      else largest *= std::max(1.0, std::abs(g * l * clip(0.9)));
      if (std::isfinite(carry)) largest = std::max(largest, std::abs(carry));
      has_left = has_left || !is_in_range(carry) || !is_in_range(largest);
      const auto is_near = [&](const char* name, const Operand<T>& found, double wanted) {
        if (has_left && !c.small_steps && !std::isfinite(widened(found.at(o, t, i)))) return true;
        return this->is_near(name, found, o, t, i, wanted, largest, carried);
      };
      if (c.advantages && !is_near("advantages", advantages, carry)) return false;
      if (c.targets && !is_near("targets", targets, carry + own)) return false;
      // Its ratio comes last, and does not bring back what has left the range.
      const bool pg_has_left = !is_in_range(unweighted) && !std::isfinite(widened(pg.at(o, t, i)));
      if (c.pg && !pg_has_left && !is_near("pg_advantages", pg, policy)) return false;
    }
    return true;
  }

 private:
  template <typename Visit>
  void each(const Visit& visit) const {
    for (int64_t o = 0; o < c.outer; ++o)
      for (int64_t t = 0; t < c.length; ++t)
        for (int64_t i = 0; i < c.inner; ++i) visit(o, t, i);
  }
  static constexpr bool kHalf = sizeof(T) == 2;
  dcs::Strides strides_of_rows(Same same) const {
    const bool is_one = same == Same::kTime;
    return {is_one || same == Same::kOuter ? 0 : c.inner, 0, is_one || same == Same::kInner ? 0 : 1};
  }
  void draw_rate(int64_t o, int64_t t, int64_t i, bool is_narrow, Operand<Acc>& wide, Operand<T>& narrow) {
    constexpr double kOdd[] = {0.0, 1.0, -0.9, 1.05, 3.0, 1e30, INFINITY, NAN};
    const double draw = std::uniform_real_distribution<double>()(random);
    const double usual = (0.9 + 0.1 * draw) * (c.small_steps ? kHalf && is_narrow ? 1e-3 : 1e-12 : 1.0),
                 rate = c.odd_steps && draw > 0.97 ? kOdd[random() % 8] : usual;
    narrow.at(o, t, i) = narrowed<T>(rate);
    wide.at(o, t, i) = static_cast<Acc>(kHalf && is_narrow ? widened(narrow.at(o, t, i)) : rate);
  }
  // `draw`: between 0 and 1.
  void draw_row(RowRates* rates, int64_t row, double draw) {
    constexpr double kOdd[] = {0.0, 1.0, -0.9, -1.0, 1.0005, 0.3, NAN};
    // Long rows of larger ones leave float's range.
    const double odd = c.length <= 200 && draw > 0.9 ? 1.05 : kOdd[random() % 7];
    const double number = c.odd_rows && draw > 0.5 ? odd : 0.9 + 0.1 * draw;
    rates->memory.resize(static_cast<size_t>(c.outer * c.inner));
    rates->numbers.resize(rates->memory.size());
    rates->strides = strides_of_rows(c.same_rows);
    const auto put = [&](auto element, double whole) {
      reinterpret_cast<decltype(element)*>(rates->memory.data())[row] = element;
      rates->numbers[static_cast<size_t>(row)] = whole;
    };
    switch (c.row_dtype) {
      case dcs::ElementType::Half: {
        const __half half = __float2half_rn(static_cast<float>(number));
        return put(half, __half2float(half));
      }
      case dcs::ElementType::BFloat16: {
        const __nv_bfloat16 half = narrowed<__nv_bfloat16>(number);
        return put(half, widened(half));
      }
      case dcs::ElementType::Float: return put(static_cast<float>(number), static_cast<float>(number));
      default: return put(number, number);
    }
  }
  // One reward, and next states' values where episodes end.
  void spoil() {
    std::uniform_real_distribution<double> uniform;
    rewards.at(c.outer / 2, static_cast<int64_t>(uniform(random) * static_cast<double>(c.length)), c.inner / 2) =
        narrowed<T>(INFINITY);
    if (c.same_flags != c.same_values) return;
    each([&](int64_t o, int64_t t, int64_t i) {
      const bool terminates = c.terminated && is_terminated.at(o, t, i);
      if (terminates) next.at(o, t, i) = narrowed<T>(NAN);
      if (!c.values_are_next || !(terminates || (c.truncated && is_truncated.at(o, t, i)))) return;
      if (t + 1 < c.length) values.at(o, t + 1, i) = narrowed<T>(NAN);
      else bootstraps[bootstrap_index(o, i)] = narrowed<T>(NAN);
    });
    spoil_weightless();
    if (c.values_are_next && c.same_values == Same::kNothing)
      for (int64_t i = 0; i < c.inner; ++i) values.at(0, 0, i) = narrowed<T>(NAN);
  }
  // Next states' values that count for nothing beside gammas of steps.
  void spoil_weightless() {
    if (c.gamma != dcs::GammaKind::kStep || c.same_rates != Same::kNothing || c.same_values != Same::kNothing) return;
    if (c.values && !c.values_are_next) return;
    each([&](int64_t o, int64_t t, int64_t i) {
      const bool is_cut =
          t == c.length - 1 || (c.terminated && is_terminated.at(o, t, i)) || (c.truncated && is_truncated.at(o, t, i));
      const double g = gammas.at(o, t, i), l = rate_at(c.trace, c.trace_value, traces, row_traces, o, t, i);
      if ((is_cut ? g : g - g * l) != 0.0) return;
      if (c.next_values) next.at(o, t, i) = narrowed<T>(NAN);
      else if (c.values && t + 1 < c.length) values.at(o, t + 1, i) = narrowed<T>(NAN);
    });
  }
  void describe() {
    p.dtype = element_type_of<T>();
    p.outer = c.outer, p.length = c.length, p.inner = c.inner;
    p.rewards = {rewards.data, rewards.strides};
    if (c.values) p.values = {values.data, values.strides};
    if (c.next_values) p.next_values = {next.data, next.strides};
    if (c.bootstrap) p.bootstrap_value = {bootstraps.data(), bootstrap_strides};
    if (c.rhos) p.rhos = {rhos.data, rhos.strides};
    p.terminated_is_bool = p.truncated_is_bool = !c.numeric_flags;
    const auto flag = [&](const Operand<T>& numbers, const Operand<uint8_t>& flags) {
      return c.numeric_flags ? dcs::ReturnsInput{numbers.data, numbers.strides}
                             : dcs::ReturnsInput{flags.data, flags.strides};
    };
    if (c.terminated) p.terminated = flag(terminated, is_terminated);
    if (c.truncated) p.truncated = flag(truncated, is_truncated);
    p.values_are_next = c.values_are_next;
    discount(p.gamma, c.gamma, c.gamma_value, c.narrow_gamma, gammas, narrow_gammas, row_gammas);
    discount(p.trace, c.trace, c.trace_value, c.narrow_trace, traces, narrow_traces, row_traces);
    p.clip_rho = 1.1, p.clip_c = 0.9, p.clip_pg = 1.2;
    if (c.advantages) p.advantages = {advantages.data, advantages.strides};
    if (c.targets) p.targets = {targets.data, targets.strides};
    if (c.pg) p.pg_advantages = {pg.data, pg.strides};
  }
  void discount(dcs::ReturnsDiscount& rate, dcs::GammaKind kind, double value, bool is_narrow,
      const Operand<Acc>& steps, const Operand<T>& narrow_steps, const RowRates& rows) {
    rate.kind = kind;
    constexpr double kBehindTensors[] = {1.0, 0.0, 0.5};
    rate.value = kind == dcs::GammaKind::kNumber ? value : kBehindTensors[c.seed % 3];
    if (kind == dcs::GammaKind::kRow) rate.dtype = c.row_dtype, rate.tensor = {rows.memory.data(), rows.strides};
    if (kind != dcs::GammaKind::kStep) return;
    rate.dtype = sizeof(Acc) == 8 ? dcs::ElementType::Double : dcs::ElementType::Float;
    rate.tensor = {steps.data, steps.strides};
    if (kHalf && is_narrow) rate.dtype = p.dtype, rate.tensor = {narrow_steps.data, narrow_steps.strides};
  }
};

inline Rollout draw_rollout(std::mt19937& random) {
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  const auto up_to = [&](unsigned n) { return static_cast<int64_t>(1 + random() % n); };
  Rollout c{};
  const unsigned form = random() % 5;
  c.length = form == 0 ? up_to(12) : form == 1 ? up_to(200) : form == 2 ? up_to(30000) : up_to(4000);
  c.outer = form == 0 ? up_to(60) : one_in(2) ? 1 : up_to(4);
  c.inner = form == 0 ? up_to(9) : form == 1 ? up_to(200) : form == 2 ? up_to(3) : up_to(12);
  c.contiguous = one_in(2);
  c.padded = one_in(3);
  c.padded_flags = one_in(3) ? !c.padded : c.padded;
  c.padded_results = one_in(3) ? !c.padded : c.padded;
  c.values = !one_in(4);
  c.next_values = one_in(2);
  c.bootstrap = !c.next_values && !one_in(4);
  c.rhos = c.values && one_in(3);
  c.values_are_next = c.values && !c.rhos && one_in(4);
  c.advantages = c.values && !c.values_are_next && !one_in(4);
  c.targets = !c.advantages || !one_in(4);
  c.pg = c.values && !c.values_are_next && one_in(c.rhos ? 2 : 8);
  c.terminated = !one_in(4);
  c.truncated = one_in(3);
  c.numeric_flags = one_in(5);
  const auto kind = [&] { return one_in(2) ? dcs::GammaKind::kNumber : static_cast<dcs::GammaKind>(random() % 3); };
  c.gamma = kind();
  c.trace = kind();
  constexpr double kGammas[] = {0.99, 1.0, 0.9};
  c.gamma_value = kGammas[random() % 3];
  c.trace_value = kGammas[random() % 3];
  c.multiprocessors = static_cast<int>(up_to(6));
  c.seed = random();
  c.narrow_gamma = !one_in(3);
  c.narrow_trace = !one_in(3);
  constexpr dcs::ElementType kRowTypes[] = {
      dcs::ElementType::Half, dcs::ElementType::BFloat16, dcs::ElementType::Float, dcs::ElementType::Double};
  c.row_dtype = kRowTypes[random() % 4];
  c.same_rows = one_in(3) ? static_cast<Same>(random() % 4) : Same::kNothing;
  return c;
}

// The same, and operands that are broadcast, numbers that are not finite, discounts of any sign.
inline Rollout draw_odd_rollout(std::mt19937& random) {
  Rollout c = draw_rollout(random);
  const auto same = [&] { return random() % 4 ? Same::kNothing : static_cast<Same>(random() % 4); };
  c.same_flags = same();
  c.same_rates = same();
  c.same_values = same();
  c.same_bootstrap = same();
  c.infinite = random() % 3 == 0;
  c.odd_rows = random() % 2 == 0;
  c.odd_steps = random() % 2 == 0;
  constexpr double kGammas[] = {0.0, -0.9, -1.0, 1.0005, 0.3};
  if (random() % 3 == 0) c.gamma_value = kGammas[random() % 5];
  if (random() % 3 == 0) c.trace_value = kGammas[random() % 5];
  return c;
}

}  // namespace trials
