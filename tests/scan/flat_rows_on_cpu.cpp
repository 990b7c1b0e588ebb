// Random problems through the kernels of contiguous time (csrc/cuda/scan/rows) on a CPU, against the recurrence in
// double: `flat_rows_on_cpu CASES SEED`. Prints what is wrong; the exit status says whether anything was.
#include "emulation.h"
#include "operands.h"
#include "trials.h"
#include "dcs/scan/plan/kernels.h"
#include "scan/rows/flat_launch.cuh"

using namespace dcs;
using trials::narrowed, trials::widened, trials::Layout, trials::Operand;

namespace {

struct Case {
  int64_t rows, length;
  GammaKind kind;
  double gamma;
  bool reset, initial, reverse, shifted, backward, by_long_rows, by_small_rows, two_levels;
  bool infinite;  // an element of the first row is
  Layout input, gates, reset_flags, saved, output, gate_gradient;
  int multiprocessors;
  unsigned seed;
};

// Elements from a multiple of 16 bytes on.
template <typename T>
class Memory {
 public:
  explicit Memory(int64_t count) : bytes_(static_cast<size_t>(count) * sizeof(T) + 15) {
    data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(bytes_.data()) + 15) / 16 * 16);
  }
  T* data;

 private:
  std::vector<char> bytes_;
};

template <typename T>
class Trial {
  using Stored = typename Types<T>::Acc;

 public:
  explicit Trial(const Case& of)
      : c(of),
        random(of.seed),
        x(operand<T>(c.input)),
        gates(operand<T>(c.gates)),
        saved(operand<T>(c.saved)),
        y(operand<T>(c.output)),
        gate_gradient(operand<T>(c.gate_gradient)),
        resets(operand<bool>(c.reset_flags)),
        initial(c.rows),
        row_gammas(c.rows) {
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    for (int64_t row = 0; row < c.rows; ++row) {
      for (int64_t step = 0; step < c.length; ++step) {
        x.at(row, step) = narrowed<T>(normal(random));
        gates.at(row, step) = narrowed<T>(uniform(random) < 0.02 ? 0.0 : 0.5 + 0.5 * uniform(random));
        saved.at(row, step) = narrowed<T>(normal(random));
        resets.at(row, step) = uniform(random) < 0.05;
      }
      initial.data[row] = narrowed<T>(normal(random));
      row_gammas.data[row] = static_cast<float>(0.7 + 0.3 * uniform(random));
    }
    if (c.infinite) x.at(0, random() % c.length) = narrowed<T>(INFINITY);
    // What may be read in whole vectors.
    tensors = {
        {x.data, x.bytes()}, {gates.data, gates.bytes()}, {saved.data, saved.bytes()}, {resets.data, resets.bytes()}};
    describe();
  }

  // False where something is wrong.
  bool run() {
    const DeviceLimits device{c.multiprocessors, 227 << 10, 16};
    const auto plan = c.by_long_rows ? plan_by<plan_long_rows>(p, device)
        : c.by_small_rows            ? plan_by<plan_small_rows>(p, device)
                                     : plan_rows(device);
    if (!plan) return true;
    if (const SmallRowsPlan* const rows = std::get_if<SmallRowsPlan>(&*plan)) in_float = rows->in_float;
    const bool sums = c.backward && c.kind != GammaKind::kStep;
    if (const LongRowsPlan* const rows = std::get_if<LongRowsPlan>(&*plan)) {
      if (sums && c.length <= RowSizes(p, device).slice(rows->vectors)) return true;  // rows of the other kernel
    }
    p.partials = partials(*plan);
    std::vector<Stored> row_sums(static_cast<size_t>(c.rows * p.partials), narrowed<Stored>(NAN));
    if (sums) {
      p.grad_gamma = row_sums.data();
      p.grad_gamma_strides = {inner() * p.partials, 0, p.partials};
    }
    const bool is_done = c.kind == GammaKind::kStep
        ? (c.backward ? launch<true, true>(*plan) : launch<true, false>(*plan))
        : (c.backward ? launch<false, true>(*plan) : launch<false, false>(*plan));
    return is_done && check(row_sums) && check_padding();
  }

 private:
  std::optional<KernelPlan> plan_rows(const DeviceLimits& device) const {
    const auto plan = plan_by<plan_flat_rows>(p, device);
    return plan ? plan : plan_by<plan_long_rows>(p, device);
  }
  int64_t inner() const { return c.two_levels ? 2 : 1; }
  template <typename E>
  Operand<E> operand(Layout layout) {
    return Operand<E>(layout, c.rows / inner(), c.length, inner(), random);
  }

  void describe() {
    p.dtype = trials::element_type_of<T>();
    p.outer = c.rows / inner();
    p.length = c.length;
    p.inner = inner();
    p.reverse = c.reverse;
    p.shifted = c.shifted;
    p.backward = c.backward;
    p.input = x.data;
    p.input_strides = x.strides;
    p.output = y.data;
    p.output_strides = y.strides;
    p.gamma_kind = c.kind;
    p.gamma_value = c.gamma;
    if (c.kind == GammaKind::kRow) {
      p.gamma = row_gammas.data;
      p.gamma_dtype = ElementType::Float;
      p.gamma_strides = {inner(), 0, 1};
    } else if (c.kind == GammaKind::kStep) {
      p.gamma = gates.data;
      p.gamma_strides = gates.strides;
    }
    if (c.reset) {
      p.reset = resets.data;
      p.reset_strides = resets.strides;
    }
    if (c.initial) {
      p.initial = initial.data;
      p.initial_strides = {inner(), 0, 1};
    }
    if (c.backward) {
      p.saved = saved.data;
      p.saved_strides = saved.strides;
      p.grad_gamma = gate_gradient.data;
      p.grad_gamma_strides = gate_gradient.strides;
    }
    if (c.length > 1) return;
    // How far apart the steps of a single one are means nothing.
    for (Strides* strides : {&p.input_strides, &p.output_strides, &p.gamma_strides, &p.reset_strides, &p.saved_strides,
             &p.grad_gamma_strides})
      strides->time = static_cast<int64_t>(random() % 5) * c.rows;
  }

  bool launch_small(const SmallRowsPlan& plan) {
    const SmallRowsParams params = small_params<T>(p, plan);
    const auto kernel = [&] {
      if constexpr (sizeof(T) <= 4)
        if (plan.in_float) return float_rows_kernel<T>(float_rows_params<T>(p, plan));
      in_small_form<T>(p, [&](auto gates, auto gradient) { small_rows_kernel<T, gates(), gradient()>(params); });
    };
    const int threads = 32 * plan.warps;
    return emulation::launch(plan.blocks, threads, 16 * threads, plan.cluster > 1, c.seed, kernel, plan.cluster);
  }
  template <bool kStep, bool kBackward>
  bool launch(const KernelPlan& plan) {
    if constexpr (sizeof(T) <= 4 || std::is_same_v<T, double>)
      if (const SmallRowsPlan* const rows = std::get_if<SmallRowsPlan>(&plan)) return launch_small(*rows);
    if (const FlatRowsPlan* const rows = std::get_if<FlatRowsPlan>(&plan)) {
      const FlatParams params = flat_params<T>(p, *rows);
      const auto kernel = [&] {
        in_direction<T>(p, [&](auto direction) { flat_rows_kernel<T, kStep, kBackward, direction()>(params); });
      };
      return emulation::launch(
          rows->tiles, 32 * rows->warps, rows->shared_bytes, rows->cluster > 1, c.seed, kernel, rows->cluster);
    }
    const LongRowsPlan& rows = std::get<LongRowsPlan>(plan);
    FlatParams params = flat_params<T>(p, rows);
    Memory<Word> segments(rows.workspace_bytes / 16);
    params.stages = rows.stages;
    params.segments = segments.data;
    uint32_t launches = 0;
    params.tag = {0x123456789abcdef0, c.seed % 3 == 0 ? &launches : nullptr};
    const auto kernel = [&] {
      in_direction<T>(p, [&](auto direction) {
        if constexpr (!kStep && !kBackward && sizeof(T) <= 4) {
          if (rows.apart) return long_rows_kernel<T, false, false, direction(), true>(params);
        }
        long_rows_kernel<T, kStep, kBackward, direction()>(params);
      });
    };
    return emulation::launch(rows.blocks, 32 * (kLongWarps + 1), rows.shared_bytes, !rows.dependent, c.seed, kernel);
  }

  double gate(int64_t row, int64_t step) const {
    if (c.kind == GammaKind::kNumber) return c.gamma;
    return c.kind == GammaKind::kRow ? row_gammas.data[row] : widened(gates.at(row, step));
  }
  bool is_reset(int64_t row, int64_t step) const { return c.reset && resets.at(row, step); }

  bool is_near(double found, double wanted, double scale) const {
    if (!std::isfinite(wanted)) return found == wanted || (std::isnan(found) && std::isnan(wanted));
    const double eps = sizeof(T) == 2 ? 4e-3 : sizeof(T) == 4 ? 1.3e-7 : 2e-11;
    // In float a result comes of up to 30 sums, each of which is rounded.
    if (in_float && std::abs(found - wanted) <= 30 * 0x1p-24 * scale) return true;
    return std::abs(found - wanted) <= eps * (std::abs(wanted) + 0.1 * scale);
  }
  bool complain(const char* what, int64_t row, int64_t step, double found, double wanted) const {
    printf(
        "%s[%ld, %ld] is %g for %g: %ld x %ld, %zu bytes, kind %d, gamma %g, reset %d, initial %d, layouts %d %d %d %d "
        "%d %d, reverse %d, shifted %d, backward %d, long %d, small %d, levels %d, multiprocessors %d, seed %u\n",
        what, row, step, found, wanted, c.rows, c.length, sizeof(T), static_cast<int>(c.kind), c.gamma, c.reset,
        c.initial, static_cast<int>(c.input), static_cast<int>(c.gates), static_cast<int>(c.reset_flags),
        static_cast<int>(c.saved), static_cast<int>(c.output), static_cast<int>(c.gate_gradient), c.reverse, c.shifted,
        c.backward, c.by_long_rows, c.by_small_rows, c.two_levels, c.multiprocessors, c.seed);
    return false;
  }

  bool check_padding() const {
    return (y.is_padding_whole() && gate_gradient.is_padding_whole()) || complain("what is between rows", 0, 0, 0, 0);
  }
  bool check(const std::vector<Stored>& row_sums) const {
    for (int64_t row = 0; row < c.rows; ++row) {
      double state = c.initial && !c.backward ? widened(initial.data[row]) : 0.0, sum = 0.0, magnitude = 1e-3;
      double size = std::abs(state);  // of the state's terms
      for (int64_t i = 0; i < c.length; ++i) {
        const int64_t step = c.reverse ? c.length - 1 - i : i, before = c.reverse ? step + 1 : step - 1,
                      after = c.reverse ? step - 1 : step + 1;
        // The adjoint takes the gate and the reset of the step before.
        const bool cut = c.shifted ? i == 0 || is_reset(row, before) : is_reset(row, step) || (i == 0 && !c.initial);
        const double value = widened(x.at(row, step));
        const double factor = cut ? 0.0 : gate(row, c.shifted ? before : step);
        state = cut ? value : value + factor * state;
        size = std::abs(value) + std::abs(factor) * size;
        const double result = widened(y.at(row, step));
        if (!is_near(result, state, std::max(1.0, size))) return complain("y", row, step, result, state);
        if (!c.backward) continue;
        const double next = i + 1 < c.length ? widened(saved.at(row, after))
            : c.initial                      ? widened(initial.data[row])
                                             : 0.0;
        const double term = is_reset(row, step) ? 0.0 : result * next;
        sum += term;
        magnitude += std::abs(term);
        if (c.kind != GammaKind::kStep) continue;
        const double found = widened(gate_gradient.at(row, step));
        if (!is_near(found, term, std::max(1.0, size * std::abs(next))))
          return complain("the gates' gradient", row, step, found, term);
      }
      if (!c.backward || c.kind == GammaKind::kStep) continue;
      double found = 0.0;
      for (int64_t j = 0; j < p.partials; ++j) found += widened(row_sums[static_cast<size_t>(row * p.partials + j)]);
      if (!(std::abs(found - sum) <= (sizeof(T) >= 8 ? 1e-11 : 1e-5) * magnitude))
        return complain("gamma's gradient", row, 0, found, sum);
    }
    return true;
  }

  const Case c;
  std::mt19937 random;
  const Operand<T> x, gates, saved, y, gate_gradient;
  const Operand<bool> resets;
  Memory<T> initial;
  Memory<float> row_gammas;
  ScanProblem p{};
  bool in_float = false;  // by rows/float_rows.cuh
};

void draw_layouts(Case& c, std::mt19937& random) {
  // All flat, or each operand as it comes; time of the input and the output is contiguous.
  const auto pick = [&](std::initializer_list<Layout> of) { return of.begin()[random() % of.size()]; };
  const bool loose = random() % 4 != 0;
  const auto any = [&] {
    return loose ? pick({Layout::kFlat, Layout::kPadded, Layout::kPadded, Layout::kScattered, Layout::kShared})
                 : Layout::kFlat;
  };
  c.gates = any();
  c.reset_flags = any();
  c.saved = any();
  c.input = c.output = c.gate_gradient = Layout::kFlat;
  if (!loose) return;
  c.input = pick({Layout::kFlat, Layout::kPadded, Layout::kPadded, Layout::kShared, Layout::kOne});
  c.output = pick({Layout::kFlat, Layout::kPadded});
  c.gate_gradient = pick({Layout::kFlat, Layout::kPadded, Layout::kScattered});
}

Case draw(std::mt19937& random) {
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  Case c{};
  c.by_long_rows = one_in(3);
  c.by_small_rows = !c.by_long_rows && one_in(2);
  const int64_t elements = c.by_long_rows ? 2000 + random() % 12000 : 20 + random() % 6000;
  c.length = one_in(16) ? 1 : 1 + random() % (one_in(4) ? 40 : elements);
  if (c.by_long_rows && one_in(3)) c.length = elements;
  c.rows = std::max<int64_t>(1, elements / c.length);
  const bool clustered = !c.by_long_rows && one_in(6);
  if (clustered) c.length = 7000 + random() % 50000, c.rows = 1 + random() % 3;
  // Of small rows also lengths that fill a cluster's blocks but for some elements of a word.
  if (clustered && c.by_small_rows && one_in(3)) c.length = c.length / 4096 * 4096 - random() % 8;
  c.kind = static_cast<GammaKind>(random() % 3);
  constexpr double kGammas[] = {0.99, 1.0, -0.9, 0.5, 0.0, 1.003};
  c.gamma = kGammas[random() % 6];
  if (clustered) c.gamma = std::min(c.gamma, 1.0);  // within the range of half precision
  c.reset = one_in(3);
  c.initial = one_in(3);
  c.reverse = one_in(2);
  c.backward = one_in(2);
  c.shifted = c.backward || (c.by_small_rows && one_in(4));
  if (c.by_small_rows && c.shifted && !c.backward) c.initial = false;
  const bool in_float = c.by_small_rows && one_in(2);  // as rows in float take them, if they are long
  if (in_float) {
    c.kind = GammaKind::kNumber;
    c.reset = c.backward = c.shifted = false;
    c.gamma = std::min(c.gamma, 1.0);
  }
  c.infinite = c.by_small_rows && !c.backward && c.kind != GammaKind::kStep && one_in(3);
  c.two_levels = c.rows % 2 == 0 && one_in(3);
  draw_layouts(c, random);
  if (in_float && one_in(6)) c.input = Layout::kOne;
  if (c.by_long_rows && one_in(2)) {  // one tensor that is not flat
    if (c.kind == GammaKind::kStep) c.kind = GammaKind::kNumber;
    c.backward = c.shifted = false;
    c.input = one_in(8) ? Layout::kShared : Layout::kPadded;
    c.output = c.reset_flags = Layout::kFlat;
  }
  c.multiprocessors = clustered ? 132 : c.by_long_rows ? 1 + static_cast<int>(random() % 4) : one_in(2) ? 1 : 100;
  if (c.by_long_rows && one_in(12)) {  // more tiles before one than a warp has lanes
    c.length = 44000;
    c.rows = 1;
    c.two_levels = false;
    c.multiprocessors = 64;
    c.gamma = std::min(c.gamma, 1.0);  // within the range of float
  }
  if (c.by_long_rows && !c.backward && c.output == Layout::kFlat && one_in(12)) {  // more rounds than a warp has lanes
    c.length = 2000 + random() % 30000;
    c.rows = 720000 / c.length / 2 * 2;
    c.multiprocessors = 1;
    c.gamma = std::min(c.gamma, 0.99);
  }
  c.seed = random();
  return c;
}

}  // namespace

int main(int count, char** arguments) {
  return trials::run_all(
      count, arguments, [](int, std::mt19937& random) { return draw(random); },
      [](const Case& c, auto type, std::mt19937& random) {
        using T = typename decltype(type)::type;
        // Of 16 bytes, which no long rows have.
        if constexpr (sizeof(T) == 8) {
          if (!c.by_long_rows && random() % 2) return Trial<Complex<double>>(c).run();
        }
        return Trial<T>(c).run();
      });
}
