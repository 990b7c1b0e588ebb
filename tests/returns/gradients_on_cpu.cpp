// Random problems through the kernels of the gradients of returns (csrc/cuda/returns/gradients) on a CPU, against the
// loops of their definition, transposed, in double: `gradients_on_cpu CASES SEED`. Prints what is wrong; the exit
// status says whether anything was.
#include "emulation.h"
#include "trials.h"
#include "gradients_ways.h"

using namespace dcs;
using gradients::Case, gradients::draw, gradients::Way;
using trials::Operand, trials::Same, trials::widened;

namespace {

template <typename T>
class Trial : gradients::Ways<T> {
  using Base = gradients::Ways<T>;
  using Base::c, Base::random, Base::gradients;
  using typename Base::Acc;

 public:
  Trial(const Case& of)
      : Base(of),
        advantages(c, c.padded, c.same_grads),
        targets(c, c.padded, c.same_grads),
        pg(c, c.padded, c.same_grads),
        rhos(c, c.padded),
        gammas(c, c.padded, c.same_rates),
        traces(c, c.padded, c.same_rates),
        ends(c, c.padded_flags),
        lacks(c, c.padded),
        of_rewards(c, c.padded_results),
        of_values(c, c.padded),
        of_next(c, c.padded_results) {
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    for (int64_t o = 0; o < c.outer; ++o)
      for (int64_t t = 0; t < c.length; ++t)
        for (int64_t i = 0; i < c.inner; ++i) {
          for (Operand<T>* tensor : {&advantages, &targets, &pg})
            tensor->at(o, t, i) = trials::narrowed<T>(normal(random));
          rhos.at(o, t, i) = trials::narrowed<T>(std::exp(0.5 * normal(random)));
          const bool terminates = c.terminated && uniform(random) < c.often,
                     truncates = c.truncated && uniform(random) < c.often;
          ends.at(o, t, i) = terminates || truncates;
          lacks.at(o, t, i) = terminates || (truncates && !c.next_values);
          const bool other = uniform(random) < c.often;
          if (c.flags == 1) lacks.at(o, t, i) = 0;
          if (c.flags == 2) ends.at(o, t, i) = 0, lacks.at(o, t, i) = other;
          if (c.flags == 3) ends.at(o, t, i) = terminates, lacks.at(o, t, i) = other;
          if (c.flags == 4) ends.at(o, t, i) = lacks.at(o, t, i) = other;
          if (c.wild && ends.at(o, t, i) && lacks.at(o, t, i)) {
            const double bad = random() % 2 ? NAN : INFINITY;
            if (random() % 2) advantages.at(o, t, i) = trials::narrowed<T>(bad);
            if (random() % 2) targets.at(o, t, i) = trials::narrowed<T>(bad);
            if (random() % 2) pg.at(o, t, i) = trials::narrowed<T>(bad);
            if (random() % 2) rhos.at(o, t, i) = trials::narrowed<T>(NAN);
          }
          if (c.infinite && t == 0)
            advantages.at(o, t, i) = targets.at(o, t, i) = trials::narrowed<T>(random() % 2 ? INFINITY : -INFINITY);
          gammas.at(o, t, i) = static_cast<Acc>(drawn_rate());
          traces.at(o, t, i) = static_cast<Acc>(drawn_rate());
        }
    for (int64_t row = 0; row < c.outer * c.inner; ++row)
      row_gammas.push_back(static_cast<float>(drawn_rate())), row_doubles.push_back(drawn_rate());
    describe();
  }

  double drawn_rate() {
    const double rate = (0.9 + 0.1 * std::uniform_real_distribution<double>()(random)) * (c.small_rates ? 1e-12 : 1.0);
    const unsigned odd = c.odd_rates ? random() % 20 : 20;
    return odd == 0 ? 0.0 : odd == 1 ? -rate : rate;
  }

  bool run() {
    for (const Way way :
        {Way::kThreeLaunches, Way::kWindowBlocks, Way::kSerialColumns, Way::kSerialPairs, Way::kFewSteps,
            Way::kTileColumns, Way::kSmallTiles, Way::kFlatColumns, Way::kFlatRows, Way::kLinkedRows}) {
      if (!this->takes(way)) continue;
      current = way;
      for (Operand<T>* output : {&of_rewards, &of_values, &of_next}) output->clear();
      of_bootstrap.assign(static_cast<size_t>(c.outer * c.inner), trials::narrowed<T>(77.0));
      gradients.bootstrap_value.data = c.next_values || !(c.needs & 8) ? nullptr : of_bootstrap.data();
      if (!this->run_kernels(way)) return complain("the end", 0, 0, 0, 0, 0);
      for (const Operand<T>* output : {&of_rewards, &of_values, &of_next})
        if (output->is_spoiled(c)) return complain("memory beside an output", 0, 0, 0, 0, 0);
      for (int64_t row = 0; row < c.outer * c.inner; ++row)
        if (!check(row / c.inner, row % c.inner)) return false;
    }
    return true;
  }

 private:
  void describe() {
    ReturnsGradientsProblem& g = gradients;
    g.dtype = trials::element_type_of<T>();
    g.outer = c.outer, g.length = c.length, g.inner = c.inner;
    g.steps = c.n;
    if (c.advantages) g.of_advantages = {advantages.data, advantages.strides};
    if (c.targets) g.of_targets = {targets.data, targets.strides};
    if (c.pg) g.of_pg = {pg.data, pg.strides};
    if (c.rhos) g.rhos = {rhos.data, rhos.strides};
    if (c.flags == 0) {
      if (c.terminated || c.truncated) g.ends = {ends.data, ends.strides};
      if (c.terminated || (c.truncated && !c.next_values)) g.lacks_after = {lacks.data, lacks.strides};
      // Where all steps that end lack a next value, either tensor says so.
      if (g.lacks_after.data && (!c.truncated || !c.next_values) && c.seed % 3) g.lacks_after = g.ends;
    } else {
      if (c.flags != 2) g.ends = {ends.data, ends.strides};
      if (c.flags >= 2) g.lacks_after = {lacks.data, lacks.strides};
      if (c.flags == 4) g.lacks_after = g.ends;
    }
    discount(g.gamma, c.gamma, c.gamma_value, gammas);
    discount(g.trace, c.trace, c.trace_value, traces);
    g.clip_rho = 1.1, g.clip_c = 0.9, g.clip_pg = 1.2;
    g.has_own_values = c.own_values;
    g.has_next_values = c.next_values;
    if (c.needs & 1) g.rewards = {of_rewards.data, of_rewards.strides};
    if (c.needs & 2 && (c.own_values || !c.next_values)) g.values = {of_values.data, of_values.strides};
    if (c.needs & 4 && c.next_values) g.next_values = {of_next.data, of_next.strides};
    if (!c.next_values) g.bootstrap_value.strides = {c.inner, 0, 1};
    if (c.seed % 2) make_odd(g);
  }
  // A dimension of one element may have any stride.
  void make_odd(ReturnsGradientsProblem& g) const {
    const auto each = [&](auto&... tensors) {
      const auto change = [&](Strides& strides) {
        if (c.outer == 1) strides.outer = 12345;
        if (c.inner == 1) strides.inner = c.seed % 5;
        if (c.length == 1) strides.time = c.seed % 7;
      };
      (..., (tensors.data ? change(tensors.strides) : void()));
    };
    each(g.of_advantages, g.of_targets, g.of_pg, g.rhos, g.ends, g.lacks_after);
    each(g.rewards, g.values, g.next_values);
  }
  void discount(ReturnsDiscount& rate, GammaKind kind, double value, const Operand<Acc>& steps) {
    rate.kind = kind;
    rate.value = kind == GammaKind::kNumber ? value : 0.5;  // which a tensor takes the place of
    if (kind == GammaKind::kRow) rate.dtype = ElementType::Float, rate.tensor = {row_gammas.data(), {c.inner, 0, 1}};
    if (kind == GammaKind::kRow && c.row_double)
      rate.dtype = ElementType::Double, rate.tensor = {row_doubles.data(), {c.inner, 0, 1}};
    if (kind == GammaKind::kStep) {
      rate.dtype = sizeof(Acc) > 4 ? ElementType::Double : ElementType::Float;
      rate.tensor = {steps.data, steps.strides};
    }
  }
  double rate_at(GammaKind kind, double value, const Operand<Acc>& steps, int64_t o, int64_t t, int64_t i) const {
    if (kind == GammaKind::kNumber) return value;
    if (kind == GammaKind::kRow && c.row_double) return row_doubles[static_cast<size_t>(o * c.inner + i)];
    return kind == GammaKind::kRow ? row_gammas[static_cast<size_t>(o * c.inner + i)] : steps.at(o, t, i);
  }
  bool complain(const char* what, int64_t o, int64_t t, int64_t i, double found, double wanted) const {
    printf("%s[%ld, %ld, %ld] is %g for %g: %ld x %ld x %ld, %zu bytes, contiguous %d, padded %d, ", what, o, t, i,
        found, wanted, c.outer, c.length, c.inner, sizeof(T), c.contiguous, c.padded);
    printf("aligned %d, same %d %d, flags %u, needs %u, wild %d, double %d, rates %g %g, ", c.aligned,
        static_cast<int>(c.same_grads), static_cast<int>(c.same_rates), c.flags, c.needs, c.wild, c.row_double,
        c.gamma_value, c.trace_value);
    printf("way %d, of %d %d %d, own %d, next %d, rhos %d, terminated %d, truncated %d, kinds %d %d, n %ld, seed %u\n",
        static_cast<int>(current), c.advantages, c.targets, c.pg, c.own_values, c.next_values, c.rhos, c.terminated,
        c.truncated, static_cast<int>(c.gamma), static_cast<int>(c.trace), c.n, c.seed);
    return false;
  }

  // Of one row: the loop of the definition, transposed.
  bool check(int64_t o, int64_t i) const {
    const ReturnsGradientsProblem& g = gradients;
    const auto rows = static_cast<size_t>(c.length);
    std::vector<double> of_r(rows), of_v(rows + 1), of_n(rows);
    const auto gamma = [&](int64_t t) { return rate_at(c.gamma, c.gamma_value, gammas, o, t, i); };
    const auto gate = [&](int64_t t) {
      const bool is_cut = t == c.length - 1 || ends.at(o, t, i);
      return is_cut ? 0.0 : gamma(t) * rate_at(c.trace, c.trace_value, traces, o, t, i);
    };
    const auto upstream = [&](const ReturnsInput& of, const Operand<T>& result, int64_t t) {
      return of.data ? widened(result.at(o, t, i)) : 0.0;
    };
    const auto clip = [&](int64_t t, double most) {
      const double rho = g.rhos.data ? widened(rhos.at(o, t, i)) : 1.0;
      return g.rhos.data && !(rho <= most) && rho == rho ? most : rho;
    };
    // A difference d of step t is worth `worth`; a boot value is gamma v' of it, or the rest that the next leaves.
    const auto add = [&](int64_t t, double worth, double of_target) {
      const auto k = static_cast<size_t>(t);
      of_r[k] += worth;
      if (g.has_own_values) of_v[k] += of_target - worth;
      else if (c.n && t > 0 && !ends.at(o, t - 1, i)) of_n[k - 1] += of_target - worth;
      const double rest = g.has_own_values || c.n ? gamma(t)
          : t == c.length - 1 || ends.at(o, t, i) ? gamma(t)
                                                  : gamma(t) - gate(t);
      if (!lacks.at(o, t, i)) of_n[k] += rest * worth;
    };
    // `mass`: s of magnitudes, which takes the errors of steps as far as a factor above 1 does.
    double s = 0.0, mass = 0.0, largest = 1.0;
    const bool grows = std::abs(c.gamma_value * c.trace_value) > 1.0;
    for (int64_t t = 0; t < c.length; ++t) {
      const double target = upstream(g.of_targets, targets, t), p_t = clip(t, 1.2) * upstream(g.of_pg, pg, t);
      if (c.n) {
        s = 0.0;
        double weight = 1.0;
        for (int64_t j = t; j >= 0 && j > t - c.n; --j) {
          s += weight * (upstream(g.of_targets, targets, j) + upstream(g.of_advantages, advantages, j));
          if (j > 0 && ends.at(o, j - 1, i)) break;
          if (j > 0) weight *= gate(j - 1);
        }
      } else {
        const double before = t == 0 ? 0.0 : gate(t - 1);
        const bool is_cut = t == 0 || ends.at(o, t - 1, i);
        const double carried =
            is_cut ? 0.0 : before * clip(t - 1, 0.9) * s + before * (clip(t - 1, 1.2) * upstream(g.of_pg, pg, t - 1));
        s = upstream(g.of_advantages, advantages, t) + target + carried;
        mass = std::abs(s - carried) + (is_cut ? 0.0 : std::abs(before * clip(t - 1, 0.9)) * mass + std::abs(carried));
        if (grows && std::isfinite(mass)) largest = std::max(largest, mass);
      }
      add(t, clip(t, 1.1) * s + p_t, target);
      for (const double x : {s, p_t, target})
        if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    }
    if (!c.next_values)
      for (size_t k = 0; k < rows; ++k) of_v[k + 1] += of_n[k];
    for (int64_t t = 0; t < c.length; ++t) {
      // Rounded at each of 100 steps, which is how far a factor of 0.99 reaches, or at all that one of 1 or more does;
      // and where it is stored.
      const double reach = std::abs(c.gamma_value * c.trace_value) < 1.0 ? 1.0 : std::max(1.0, c.length / 100.0);
      const double eps = sizeof(T) == 2 ? 4e-3 : reach * (sizeof(T) == 8 ? 4e-13 : 6e-6);
      const auto k = static_cast<size_t>(t);
      const auto is_near = [&](const char* name, double value, double wanted) {
        if (!std::isfinite(wanted))
          return (std::isinf(wanted) ? value == wanted : !std::isfinite(value)) ||
              complain(name, o, t, i, value, wanted);
        return std::abs(value - wanted) <= eps * (std::abs(wanted) + largest) || complain(name, o, t, i, value, wanted);
      };
      const auto is_right = [&](const char* name, const ReturnsOutput& made, const Operand<T>& found, double wanted) {
        return !made.data || is_near(name, widened(found.at(o, t, i)), wanted);
      };
      if (!is_right("gradient of rewards", g.rewards, of_rewards, of_r[k]) ||
          !is_right("gradient of values", g.values, of_values, of_v[k]) ||
          !is_right("gradient of next_values", g.next_values, of_next, of_n[k]))
        return false;
      if (g.bootstrap_value.data && t == c.length - 1 &&
          !is_near(
              "gradient of bootstrap_value", widened(of_bootstrap[static_cast<size_t>(o * c.inner + i)]), of_v[k + 1]))
        return false;
    }
    return true;
  }

  Way current{};
  Operand<T> advantages, targets, pg, rhos;
  Operand<Acc> gammas, traces;
  Operand<uint8_t> ends, lacks;
  Operand<T> of_rewards, of_values, of_next;
  std::vector<float> row_gammas;
  std::vector<double> row_doubles;
  std::vector<T> of_bootstrap;
};

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial, true>(count, arguments, draw); }
