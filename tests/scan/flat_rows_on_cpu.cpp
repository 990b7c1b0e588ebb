// Random problems through the kernels of contiguous time (csrc/cuda/scan/rows) on a CPU, against the recurrence in
// double: `flat_rows_on_cpu CASES SEED`. Prints what is wrong; the exit status says whether anything was.
#include "emulation.h"
#include "trials.h"
#include "dcs/scan/plan/kernels.h"
#include "scan/rows/flat_launch.cuh"

using namespace dcs;
using trials::narrowed, trials::widened;

namespace {

struct Case {
  int64_t rows, length;
  GammaKind kind;
  double gamma;
  bool reset, initial, padded, reverse, backward, by_long_rows, two_levels, broadcast;
  int multiprocessors;
  int64_t unit;  // of padded rows: where they begin is a multiple of it
  unsigned seed;
};

// Elements at an address of so many elements behind a multiple of 16 bytes.
template <typename T>
class Memory {
 public:
  Memory(int64_t count, int64_t offset = 0) : bytes_(static_cast<size_t>(count + 32) * sizeof(T) + 64) {
    data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(bytes_.data()) + 15) / 16 * 16) + offset;
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
        pitch(c.padded ? c.length + c.unit * (1 + static_cast<int64_t>(random() % 7)) : c.length),
        x(c.rows * pitch, c.padded ? c.unit * static_cast<int64_t>(random() % 3) : 0),
        gates(size()),
        saved(size()),
        y(size()),
        gate_gradient(size()),
        resets(size()),
        initial(c.rows),
        row_gammas(c.rows) {
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    for (int64_t i = 0; i < c.rows * pitch; ++i) x.data[i] = narrowed<T>(normal(random));
    for (int64_t i = 0; i < size(); ++i) {
      gates.data[i] = narrowed<T>(uniform(random) < 0.02 ? 0.0 : 0.5 + 0.5 * uniform(random));
      saved.data[i] = narrowed<T>(normal(random));
      resets.data[i] = uniform(random) < 0.05;
      y.data[i] = gate_gradient.data[i] = narrowed<T>(NAN);
    }
    for (int64_t row = 0; row < c.rows; ++row) {
      initial.data[row] = narrowed<T>(normal(random));
      row_gammas.data[row] = static_cast<float>(0.7 + 0.3 * uniform(random));
    }
    describe();
  }

  // False where something is wrong.
  bool run() {
    const DeviceLimits device{c.multiprocessors, 227 << 10, 16};
    const auto plan = c.by_long_rows ? plan_by<plan_long_rows>(p, device) : plan_rows(device);
    if (!plan) return true;
    const bool sums = c.backward && c.kind != GammaKind::kStep;
    if (const LongRowsPlan* const rows = std::get_if<LongRowsPlan>(&*plan)) {
      if (sums && c.length <= RowSizes(p, device).slice(rows->vectors)) return true;  // rows of the other kernel
    }
    p.partials = partials(*plan);
    std::vector<Stored> row_sums(static_cast<size_t>(c.rows * p.partials), Stored(NAN));
    if (sums) {
      p.grad_gamma = row_sums.data();
      p.grad_gamma_strides = {inner() * p.partials, 0, p.partials};
    }
    const bool is_done = c.kind == GammaKind::kStep
        ? (c.backward ? launch<true, true>(*plan) : launch<true, false>(*plan))
        : (c.backward ? launch<false, true>(*plan) : launch<false, false>(*plan));
    return is_done && check(row_sums);
  }

 private:
  std::optional<KernelPlan> plan_rows(const DeviceLimits& device) const {
    const auto plan = plan_by<plan_flat_rows>(p, device);
    return plan ? plan : plan_by<plan_long_rows>(p, device);
  }
  int64_t size() const { return c.rows * c.length; }
  int64_t inner() const { return c.two_levels ? 2 : 1; }

  void describe() {
    const int64_t outer = c.rows / inner();
    const Strides dense{inner() * c.length, 1, c.two_levels ? c.length : 0};
    const Strides others = c.broadcast ? Strides{0, 1, 0} : dense;
    p.dtype = sizeof(T) == 2 ? ElementType::BFloat16 : sizeof(T) == 4 ? ElementType::Float : ElementType::Double;
    p.outer = outer;
    p.length = c.length;
    p.inner = inner();
    p.reverse = c.reverse;
    p.shifted = p.backward = c.backward;
    p.input = x.data;
    p.input_strides = {pitch, 1, c.two_levels ? outer * pitch : 0};
    p.output = y.data;
    p.output_strides = dense;
    p.gamma_kind = c.kind;
    p.gamma_value = c.gamma;
    if (c.kind == GammaKind::kRow) {
      p.gamma = row_gammas.data;
      p.gamma_dtype = ElementType::Float;
      p.gamma_strides = {inner(), 0, 1};
    } else if (c.kind == GammaKind::kStep) {
      p.gamma = gates.data;
      p.gamma_strides = others;
    }
    if (c.reset) {
      p.reset = resets.data;
      p.reset_strides = others;
    }
    if (c.initial) {
      p.initial = initial.data;
      p.initial_strides = {inner(), 0, 1};
    }
    if (c.backward) {
      p.saved = saved.data;
      p.saved_strides = dense;
      p.grad_gamma = gate_gradient.data;
      p.grad_gamma_strides = dense;
    }
  }

  template <bool kStep, bool kBackward>
  bool launch(const KernelPlan& plan) {
    if (const FlatRowsPlan* const rows = std::get_if<FlatRowsPlan>(&plan)) {
      const FlatParams params = flat_params<T>(p, *rows);
      const auto kernel = [&] {
        if (p.reverse) flat_rows_kernel<T, kStep, kBackward, true>(params);
        else flat_rows_kernel<T, kStep, kBackward, false>(params);
      };
      return emulation::launch(
          rows->tiles, 32 * rows->warps, rows->shared_bytes, rows->cluster > 1, c.seed, kernel, rows->cluster);
    }
    const LongRowsPlan& rows = std::get<LongRowsPlan>(plan);
    FlatParams params = flat_params<T>(p, rows);
    Memory<Word> pieces(rows.workspace_bytes / 16);
    params.stages = rows.stages;
    params.pieces = pieces.data;
    params.tag = 0x123456789abcdef0;
    return emulation::launch(rows.blocks, 32 * (kLongWarps + 1), rows.shared_bytes, true, c.seed, [&] {
      if (p.reverse) long_rows_kernel<T, kStep, kBackward, true>(params);
      else long_rows_kernel<T, kStep, kBackward, false>(params);
    });
  }

  double gate(int64_t row, int64_t step) const {
    if (c.kind == GammaKind::kNumber) return c.gamma;
    return c.kind == GammaKind::kRow ? row_gammas.data[row]
                                     : widened(gates.data[(c.broadcast ? 0 : row) * c.length + step]);
  }
  bool is_reset(int64_t row, int64_t step) const {
    return c.reset && resets.data[(c.broadcast ? 0 : row) * c.length + step];
  }

  bool is_near(double found, double wanted, double scale) const {
    const double eps = sizeof(T) == 2 ? 4e-3 : sizeof(T) == 4 ? 1.3e-7 : 2e-11;
    return std::abs(found - wanted) <= eps * (std::abs(wanted) + 0.1 * scale);
  }
  bool complain(const char* what, int64_t row, int64_t step, double found, double wanted) const {
    printf(
        "%s[%ld, %ld] is %g for %g: %ld x %ld, %zu bytes, kind %d, gamma %g, reset %d, initial %d, padded %d by %ld, "
        "reverse %d, backward %d, long %d, levels %d, broadcast %d, multiprocessors %d, seed %u\n",
        what, row, step, found, wanted, c.rows, c.length, sizeof(T), static_cast<int>(c.kind), c.gamma, c.reset,
        c.initial, c.padded, c.unit, c.reverse, c.backward, c.by_long_rows, c.two_levels, c.broadcast,
        c.multiprocessors, c.seed);
    return false;
  }

  bool check(const std::vector<Stored>& row_sums) const {
    for (int64_t row = 0; row < c.rows; ++row) {
      const int64_t input_row = c.two_levels ? row % 2 * (c.rows / 2) + row / 2 : row;
      double state = c.initial && !c.backward ? widened(initial.data[row]) : 0.0, sum = 0.0, magnitude = 1e-3;
      for (int64_t i = 0; i < c.length; ++i) {
        const int64_t step = c.reverse ? c.length - 1 - i : i, before = c.reverse ? step + 1 : step - 1,
                      after = c.reverse ? step - 1 : step + 1, at = row * c.length + step;
        // The adjoint takes the gate and the reset of the step before.
        const bool cut = c.backward ? i == 0 || is_reset(row, before) : is_reset(row, step) || (i == 0 && !c.initial);
        const double value = widened(x.data[input_row * pitch + step]);
        state = cut ? value : value + gate(row, c.backward ? before : step) * state;
        const double result = widened(y.data[at]);
        if (!is_near(result, state, 1.0)) return complain("y", row, step, result, state);
        if (!c.backward) continue;
        const double next = i + 1 < c.length ? widened(saved.data[row * c.length + after])
            : c.initial                      ? widened(initial.data[row])
                                             : 0.0;
        const double term = is_reset(row, step) ? 0.0 : result * next;
        sum += term;
        magnitude += std::abs(term);
        if (c.kind != GammaKind::kStep) continue;
        const double found = widened(gate_gradient.data[at]);
        if (!is_near(found, term, 1.0)) return complain("the gates' gradient", row, step, found, term);
      }
      if (!c.backward || c.kind == GammaKind::kStep) continue;
      double found = 0.0;
      for (int64_t j = 0; j < p.partials; ++j) found += row_sums[static_cast<size_t>(row * p.partials + j)];
      if (!(std::abs(found - sum) <= (sizeof(T) == 8 ? 1e-11 : 1e-5) * magnitude))
        return complain("gamma's gradient", row, 0, found, sum);
    }
    return true;
  }

  const Case c;
  std::mt19937 random;
  const int64_t pitch;
  Memory<T> x, gates, saved, y, gate_gradient;
  Memory<bool> resets;
  Memory<T> initial;
  Memory<float> row_gammas;
  ScanProblem p{};
};

Case draw(std::mt19937& random) {
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  Case c{};
  c.by_long_rows = one_in(2);
  const int64_t elements = c.by_long_rows ? 2000 + random() % 12000 : 20 + random() % 6000;
  c.length = 1 + random() % (one_in(4) ? 40 : elements);
  if (c.by_long_rows && one_in(3)) c.length = elements;
  c.rows = std::max<int64_t>(1, elements / c.length);
  const bool clustered = !c.by_long_rows && one_in(6);
  if (clustered) c.length = 7000 + random() % 50000, c.rows = 1 + random() % 3;
  c.kind = static_cast<GammaKind>(random() % 3);
  constexpr double kGammas[] = {0.99, 1.0, -0.9, 0.5, 0.0, 1.003};
  c.gamma = kGammas[random() % 6];
  if (clustered) c.gamma = std::min(c.gamma, 1.0);  // within the range of half precision
  c.reset = one_in(3);
  c.initial = one_in(3);
  c.padded = one_in(4);
  c.unit = int64_t{1} << random() % 4;
  if (c.padded && one_in(2)) c.length = (c.length + c.unit - 1) / c.unit * c.unit;
  c.reverse = one_in(2);
  c.backward = one_in(2);
  c.two_levels = c.rows % 2 == 0 && one_in(3);
  c.broadcast = one_in(4);
  c.multiprocessors = clustered ? 132 : c.by_long_rows ? 1 + static_cast<int>(random() % 4) : one_in(2) ? 1 : 100;
  if (c.by_long_rows && one_in(12)) {  // more tiles before one than a warp has lanes
    c.length = 44000;
    c.rows = 1;
    c.two_levels = false;
    c.multiprocessors = 64;
    c.gamma = std::min(c.gamma, 1.0);  // within the range of float
  }
  c.seed = random();
  return c;
}

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial>(count, arguments, draw); }
