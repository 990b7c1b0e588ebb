// Random problems through the kernels of the gradients of returns (csrc/cuda/returns/gradients) on a CPU, against the
// loops of their definition, transposed, in double: `gradients_on_cpu CASES SEED`. Prints what is wrong; the exit
// status says whether anything was.
#include "emulation.h"
#include "trials.h"
#include "gradients_cases.h"
#include "scan_on_cpu.h"
#include "dcs/limits.h"
#include "returns/gradients/stages.cuh"
#include "returns/gradients/flat_rows.cuh"
#include "returns/gradients/tile_columns.cuh"
#include "returns/gradients/flat_columns.cuh"
#include "returns/few_steps/kernel.cuh"
#include "returns/n_step_blocks.cuh"
#include "returns/serial_columns/kernel.cuh"

using namespace dcs;
using gradients::Case, gradients::draw, gradients::Way;
using trials::Operand, trials::run_scan, trials::Same, trials::widened;

namespace {

template <typename T>
class Trial {
  using Acc = typename Types<T>::Acc;

 public:
  Trial(const Case& of)
      : c(of),
        random(of.seed),
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
    const double rate = 0.9 + 0.1 * std::uniform_real_distribution<double>()(random);
    const unsigned odd = c.odd_rates ? random() % 20 : 20;
    return odd == 0 ? 0.0 : odd == 1 ? -rate : rate;
  }

  bool run() {
    for (const Way way :
        {Way::kThreeLaunches, Way::kWindowBlocks, Way::kSerialColumns, Way::kSerialPairs, Way::kFewSteps,
            Way::kTileColumns, Way::kSmallTiles, Way::kFlatColumns, Way::kFlatRows, Way::kLinkedRows}) {
      if (!takes(way)) continue;
      current = way;
      for (Operand<T>* output : {&of_rewards, &of_values, &of_next}) output->clear();
      of_bootstrap.assign(static_cast<size_t>(c.outer * c.inner), trials::narrowed<T>(77.0));
      gradients.bootstrap_value.data = c.next_values || !(c.needs & 8) ? nullptr : of_bootstrap.data();
      if (!run_kernels(way)) return complain("the end", 0, 0, 0, 0, 0);
      for (const Operand<T>* output : {&of_rewards, &of_values, &of_next})
        if (output->is_spoiled(c)) return complain("memory beside an output", 0, 0, 0, 0, 0);
      for (int64_t row = 0; row < c.outer * c.inner; ++row)
        if (!check(row / c.inner, row % c.inner)) return false;
    }
    return true;
  }

 private:
  bool takes(Way way) const {
    if (way == Way::kThreeLaunches) return true;
    if (way == Way::kWindowBlocks) return scans_one_gradient(gradients);
    if (way >= Way::kFlatRows)
      return !c.n && is_contiguous(as_scan(gradients)) && GradientsShape(gradients).time_is_fast;
    if (c.n || GradientsShape(gradients).time_is_fast) return false;
    const ReturnsProblem scan = mirrored(as_scan(gradients));
    const bool is_plain = column_form(scan) == ColumnForm::kGradients;
    if (way == Way::kSerialPairs) return sizeof(T) == 2 && is_plain && columns_pair(scan);
    if (way == Way::kTileColumns && !plan_tiles(scan, 8, true, 227 << 10, false)) return false;
    if (way == Way::kSmallTiles) return plan_small_tiles(scan, {64, 227 << 10, 16}).has_value();
    if (way == Way::kFlatColumns) return plan_flat_columns(1, false).has_value();
    return way != Way::kFewSteps || (sizeof(T) < 8 && !(c.row_double && has_row_rates(scan)));
  }
  std::optional<ResidentColumnsPlan> plan_flat_columns(int64_t multiprocessors, bool has_clusters) const {
    const auto plan = plan_tiles(as_scan(gradients), multiprocessors, has_clusters, 227 << 10, true);
    return plan && plan->flat ? plan : std::nullopt;
  }
  // As a scan of columns, of either form.
  template <ColumnForm kForm>
  bool run_columns(Way way, const ReturnsProblem& scan) {
    if (way == Way::kTileColumns || way == Way::kFlatColumns) return run_tile_columns<kForm>(way, scan);
    if constexpr (sizeof(T) < 8 && kForm == ColumnForm::kGradients) {
      if (way == Way::kSmallTiles) return run_small_tiles(scan);
    }
    if (way == Way::kFewSteps) {
      if constexpr (sizeof(T) < 8) {
        constexpr int kWidest = few_returns_wide(sizeof(T), kForm);
        const int wide = few_returns_word(scan);
        if (kWidest > 1 && wide == kWidest) return run_few<kWidest, kForm>(scan);
        const bool are_two = c.length <= 2 && random() % 4;
        if constexpr (sizeof(T) == 2) {
          if (wide == 2) return are_two ? run_few<2, kForm, true>(scan) : run_few<2, kForm>(scan);
        }
        return are_two ? run_few<1, kForm, true>(scan) : run_few<1, kForm>(scan);
      }
    }
    if constexpr (sizeof(T) == 2 && kForm == ColumnForm::kGradients) {
      if (way == Way::kSerialPairs) return run_serial<2, kForm>(scan);
    }
    return run_serial<1, kForm>(scan);
  }
  template <int kUnit, ColumnForm kForm>
  bool run_serial(const ReturnsProblem& scan) const {
    const auto params = returns_column_params<T>(scan, kUnit);
    return emulation::launch(ceil_div(params.cells, kSerialReturnsThreads), kSerialReturnsThreads, 0, false, c.seed,
        [&] { returns_serial_columns_kernel<T, kUnit, kForm>(params); });
  }
  template <int kWide, ColumnForm kForm, bool kTwo = false>
  bool run_few(const ReturnsProblem& scan) const {
    const auto params = few_returns_params<T>(scan, kWide, kTwo);
    return emulation::launch(ceil_div(params.call.cells, kFewReturnsBlock), kFewReturnsBlock, 0, false, c.seed,
        [&] { few_returns_kernel<T, kWide, kForm, kTwo>(params); });
  }
  template <ColumnForm kForm>
  bool run_tile_columns(Way way, const ReturnsProblem& mirror) {
    const auto multiprocessors = static_cast<int64_t>(1 + random() % 40);
    const bool is_flat = way == Way::kFlatColumns, has_clusters = random() % 2;
    const ReturnsProblem scan = is_flat ? as_scan(gradients) : mirror;
    const auto plan = is_flat ? plan_flat_columns(multiprocessors, has_clusters)
                              : plan_tiles(scan, multiprocessors, has_clusters, 227 << 10, false);
    if (!plan) return false;
    std::vector<Word> words(static_cast<size_t>(plan->workspace_bytes / 16) + 1, Word{7, 7});
    uint32_t launches = 0;
    const auto params =
        tile_columns_params<T>(scan, *plan, words.data(), {2 * uint64_t{random()}, random() % 3 ? nullptr : &launches});
    return emulation::launch(
        plan->strips * plan->tiles, kColumnThreads, plan->shared_bytes, plan->tiles > 1, c.seed, [&] {
          if (is_flat) flat_gradient_columns_kernel<T, kForm>(params);
          else gradients_tile_columns_kernel<T, kForm>(params);
        });
  }
  bool run_small_tiles(const ReturnsProblem& mirror) {
    auto plan = plan_small_tiles(mirror, {64, 227 << 10, random() % 3 ? 16 : 0});
    if (!plan) plan = plan_small_tiles(mirror, {64, 227 << 10, 16});
    const auto params = small_tile_params<T>(mirror, *plan);
    return emulation::launch(
        plan->blocks, 32 * plan->warps, 0, plan->cluster > 1, c.seed, [&] { small_gradient_columns_kernel<T>(params); },
        plan->cluster);
  }
  // Rows as they are planned, in clusters or not, or in small tiles that no cluster holds.
  bool run_flat(bool are_linked) {
    const ReturnsProblem scan = with_rows_together(as_scan(gradients));
    const auto found = random() % 4 ? plan_flat_returns(scan, static_cast<int64_t>(1 + random() % 40), 224 << 10, 16)
                                    : plan_flat_returns(scan, static_cast<int64_t>(1 + random() % 40), 96 << 10, 1);
    if (!found) return false;
    constexpr int kMany = flat_vectors(sizeof(T));
    FlatReturnsPlan plan = *found;
    if (are_linked) {
      const FlatReturnsSizes sizes{sizeof(T), sizeof(Acc), random() % 2 ? 1 : kMany};
      plan = *plan_linked_returns(scan, sizes, 224 << 10, 1 + random() % 3, 1 + static_cast<int>(random() % 3));
    }
    tensors.clear();
    FlatReturnsSizes{sizeof(T), sizeof(Acc), 1}.each_operand(scan, [&](const ReturnsInput& input, int64_t bytes, bool) {
      const Strides& s = input.strides;
      tensors.push_back({input.data, ((scan.outer - 1) * s.outer + scan.length + (scan.inner - 1) * s.inner) * bytes});
    });
    if (flat_form(scan) == FlatForm::kGradients)
      return plan.vectors == 1 ? run_flat<FlatForm::kGradients, 1>(scan, plan)
                               : run_flat<FlatForm::kGradients, kMany>(scan, plan);
    return plan.vectors == 1 ? run_flat<FlatForm::kAnyGradients, 1>(scan, plan)
                             : run_flat<FlatForm::kAnyGradients, kMany>(scan, plan);
  }
  template <FlatForm kForm, int kVectors>
  bool run_flat(const ReturnsProblem& scan, const FlatReturnsPlan& plan) {
    std::vector<Word> words(static_cast<size_t>(plan.workspace_bytes / 16), Word{7, 7});
    uint32_t launches = 0;
    const auto params = flat_gradients_params<T>(
        scan, plan, words.data(), {2 * uint64_t{random()}, random() % 3 ? nullptr : &launches});
    return emulation::launch(
        plan.tiles, 32 * plan.warps, plan.shared_bytes, plan.cluster > 1 || (plan.is_linked() && random() % 2), c.seed,
        [&] { flat_gradients_kernel<T, kForm, kVectors>(params); }, plan.cluster);
  }
  // In float where that is enough for the window.
  bool run_windows() const {
    const auto plan = plan_gradient_scan(gradients, {1, 227 << 10, 16}, 1 << 10);
    if (!plan || !plan->scan.steps) return false;
    if constexpr (sizeof(T) <= 4) {
      if (is_plain(plan->scan) && plan->scan.steps <= kFloatSteps) return run_windows_in<Acc, true>(plan->scan);
    }
    return run_windows_in<double, false>(plan->scan);
  }
  template <typename Number, bool kPlain>
  bool run_windows_in(const ReturnsProblem& windows) const {
    const auto params = n_step_blocks_params<T, Number>(windows, n_step_rates<Number>(windows));
    return emulation::launch(params.blocks(), kNStepThreads, params.shared_bytes(), false, c.seed,
        [&] { n_step_blocks_kernel<T, Number, kPlain, true>(params); });
  }
  bool launch(void (*kernel)(GradientsParams<T>), const GradientsParams<T>& params, int64_t count, int threads) const {
    return emulation::launch(ceil_div(count, threads), threads, 0, false, c.seed, [&] { kernel(params); });
  }
  bool run_kernels(Way way) {
    if (way >= Way::kFlatRows) return run_flat(way == Way::kLinkedRows);
    if (way > Way::kWindowBlocks) {
      const ReturnsProblem scan = mirrored(as_scan(gradients));
      return (way == Way::kFewSteps ? few_form(scan) : column_form(scan)) == ColumnForm::kGradients
          ? run_columns<ColumnForm::kGradients>(way, scan)
          : run_columns<ColumnForm::kAnyGradients>(way, scan);
    }
    if (way == Way::kWindowBlocks) return run_windows();
    const GradientsMemory memory(gradients);
    std::vector<char> workspace(static_cast<size_t>(memory.bytes), 77);
    const GradientsParams<T> params(gradients, memory, workspace.data());
    const int64_t threads = ceil_div(gradients.count(), kSlots);
    if (memory.has_sources() && !launch(gradient_sources_kernel<T>, params, threads, kSlotThreads)) return false;
    run_scan(scan_of(gradients, memory, workspace.data()));
    return by_form(params.form,
        [&](auto form) { return launch(gradients_kernel<T, decltype(form)::value>, params, threads, kSlotThreads); });
  }

  void describe() {
    ReturnsGradientsProblem& g = gradients;
    g.dtype = sizeof(T) == 2 ? ElementType::BFloat16 : sizeof(T) == 4 ? ElementType::Float : ElementType::Double;
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

  const Case c;
  Way current{};
  std::mt19937 random;
  Operand<T> advantages, targets, pg, rhos;
  Operand<Acc> gammas, traces;
  Operand<uint8_t> ends, lacks;
  Operand<T> of_rewards, of_values, of_next;
  std::vector<float> row_gammas;
  std::vector<double> row_doubles;
  std::vector<T> of_bootstrap;
  ReturnsGradientsProblem gradients{};
};

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial>(count, arguments, draw); }
