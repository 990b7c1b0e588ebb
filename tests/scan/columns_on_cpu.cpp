// Random problems through the kernels of columns (csrc/cuda/scan/columns) on a CPU, against the recurrence in double:
// `columns_on_cpu CASES SEED`. Prints what is wrong; the exit status says whether anything
// was.
#include "emulation.h"
#include "trials.h"
#include "operands.h"
#include "columns_cases.h"
#include "scan/columns/columns_launch.cuh"
#include "dcs/scan/plan/kernels.h"

using namespace dcs;
using trials::narrowed, trials::widened;

namespace {

// A tensor, and memory around it that must stay as it is; before it or behind it is a page that must not be touched.
template <typename T>
class Operand {
 public:
  Operand(const Case& c, Lie lie, std::mt19937& random)
      : strides(strides_of(c, lie, random)),
        extent_((c.outer - 1) * strides.outer + (c.length - 1) * strides.time + (c.inner - 1) * strides.inner + 1),
        memory_(extent_ * kBytes,
            lie == Lie::kPadded || lie == Lie::kMoved || lie == Lie::kApart ? random() % 9 * kBytes : 0, random() % 2,
            lie == Lie::kDense),
        data(reinterpret_cast<T*>(memory_.data)) {}
  T& at(int64_t o, int64_t t, int64_t i) const {
    return data[o * strides.outer + t * strides.time + i * strides.inner];
  }
  Bytes bytes() const { return {data, extent_ * kBytes}; }
  void forget(const Case& c) {
    for (int64_t o = 0; o < c.outer; ++o)
      for (int64_t t = 0; t < c.length; ++t)
        for (int64_t i = 0; i < c.inner; ++i) at(o, t, i) = narrowed<T>(NAN);
  }
  // Bytes that have changed and are no element's.
  int64_t spoiled(const Case& c) const {
    std::vector<bool> own(static_cast<size_t>(extent_), false);
    for (int64_t o = 0; o < c.outer; ++o)
      for (int64_t t = 0; t < c.length; ++t)
        for (int64_t i = 0; i < c.inner; ++i) own[static_cast<size_t>(&at(o, t, i) - data)] = true;
    int64_t count = 0;
    for (int64_t b = 0; b < extent_ * kBytes; ++b)
      count += !own[static_cast<size_t>(b / kBytes)] && memory_.data[b] != '\xff';
    return count;
  }

  const Strides strides;

 private:
  static constexpr int64_t kBytes = sizeof(T);
  static Strides strides_of(const Case& c, Lie lie, std::mt19937& random) {
    const int64_t more = lie == Lie::kPadded ? 1 + static_cast<int64_t>(random() % 5) : 0,
                  apart = lie == Lie::kSpread ? 2 : 1, pitch = apart * (c.tiny_rows ? c.length : c.inner) + more;
    Strides strides{c.length * pitch, pitch, apart};
    if (c.tiny_rows) strides = {c.inner * pitch, apart, pitch};
    if (lie == Lie::kOneOuter) strides.outer = 0;
    if (lie == Lie::kApart) strides.outer += 1 + static_cast<int64_t>(random() % 20);
    if (lie == Lie::kOneStep) strides.outer = strides.time = 0;
    return strides;
  }
  const int64_t extent_;
  const trials::Guarded memory_;

 public:
  T* const data;
};

template <typename T>
class Trial {
  using Stored = typename Types<T>::Acc;

 public:
  explicit Trial(const Case& of)
      : c(of),
        random(of.seed),
        x(c, c.lies[0], random),
        y(c, c.lies[1], random),
        gates(c, c.lies[2], random),
        saved(c, c.lies[3], random),
        gate_gradient(c, Lie::kDense, random),
        resets(c, c.lies[4], random),
        initial(static_cast<size_t>(c.outer * c.inner)),
        row_gammas(initial.size()) {
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    for (int64_t o = 0; o < c.outer; ++o)
      for (int64_t t = 0; t < c.length; ++t)
        for (int64_t i = 0; i < c.inner; ++i) {
          x.at(o, t, i) = narrowed<T>(normal(random));
          gates.at(o, t, i) = narrowed<T>(uniform(random) < 0.02 ? 0.0 : 1.0 - 1.5 * uniform(random));
          saved.at(o, t, i) = narrowed<T>(normal(random));
          reinterpret_cast<unsigned char&>(resets.at(o, t, i)) =
              static_cast<unsigned char>(uniform(random) < 0.03 ? 1 + random() % 255 : 0);
        }
    for (size_t i = 0; i < initial.size(); ++i) {
      initial[i] = narrowed<T>(normal(random));
      row_gammas[i] = static_cast<float>(1.0 - 1.5 * uniform(random));
      constexpr float kOdd[] = {0.f, -0.f, 1.5f, -3.f, 1.001f, 1e30f, -1e-30f, INFINITY, -INFINITY, NAN};
      if (c.odd_rows && random() % 2) row_gammas[i] = kOdd[random() % 10];
    }
    if (c.infinite) spoil();
    describe();
  }

  // False where something is wrong.
  bool run() {
    const bool sums = c.backward && c.kind != GammaKind::kStep;
    const DeviceLimits device{c.multiprocessors, c.shared, c.cluster};
    if (c.stream) stream = fit_stream_columns(p, device);
    if (c.stream && !stream) return true;
    if (c.lookback) lookback = fit_lookback_columns(p, device);
    if (c.lookback && !lookback) return true;
    if (c.small) small = c.sharing ? plan_shared_columns(p, device) : plan_small_columns(p, device);
    if (c.small && !small) return true;
    if (c.parted && columns_are_staged(p)) staged = fit_staged_parts(p, device);
    if (c.parted && !staged) return true;
    const bool is_planned = small || stream || staged || lookback;
    if (!is_planned && c.seed % 4) few = plan_few_steps<kFewSteps>(p, device);  // the others take those of more steps
    if (!is_planned && !few && c.seed % 3) staged = plan_staged_columns(p, device);
    if (!is_planned && !few && !staged) serial = plan_serial_columns(p, device);
    if (!is_planned && !few && !staged && !serial) resident = plan_resident_columns(p, device);
    const int64_t parts = resident ? resident->tiles : small ? small->sharers : 1;
    p.partials = sums ? parts + c.seed % 2 : 1;
    partial_sums.assign(initial.size() * static_cast<size_t>(p.partials), Stored(NAN));
    if (sums) {
      p.grad_gamma = partial_sums.data();
      p.grad_gamma_strides = {c.inner * p.partials, 0, p.partials};
    }
    const bool is_done = c.kind == GammaKind::kStep ? (c.backward ? launch<true, true>() : launch<true, false>())
                                                    : (c.backward ? launch<false, true>() : launch<false, false>());
    bool is_right = is_done && y.spoiled(c) == 0;
    if (!is_right) complain(is_done ? "memory beside y" : "the end", 0, 0, 0, 0.0, 0.0);
    for (int64_t o = 0; o < c.outer; ++o)
      for (int64_t i = 0; i < c.inner && is_right; ++i) is_right = check(o, i);
    return is_right;
  }

 private:
  // An infinity in the input, and a gate of all bits, which is no number: of a step at which warps may begin.
  void spoil() {
    x.at(0, static_cast<int64_t>(random() % static_cast<unsigned>(c.length)), 0) = narrowed<T>(INFINITY);
    const int64_t n = static_cast<int64_t>(random() % static_cast<unsigned>(c.length)) / 64 * 64;
    memset(&gates.at(c.outer - 1, c.reverse ? c.length - 1 - n : n, c.inner - 1), 0xff, sizeof(T));
  }
  void describe() {
    p.dtype = trials::element_type_of<T>();
    p.outer = c.outer, p.length = c.length, p.inner = c.inner;
    p.reverse = c.reverse;
    p.shifted = c.shifted || c.backward;
    p.backward = c.backward;
    p.input = x.data, p.input_strides = x.strides;
    p.output = y.data, p.output_strides = y.strides;
    p.gamma_kind = c.kind;
    p.gamma_value = c.gamma;
    if (c.kind == GammaKind::kRow) {
      p.gamma = row_gammas.data();
      p.gamma_dtype = ElementType::Float;
      p.gamma_strides = {c.inner, 0, 1};
    } else if (c.kind == GammaKind::kStep) {
      p.gamma = gates.data, p.gamma_strides = gates.strides;
    }
    if (c.reset) p.reset = resets.data, p.reset_strides = resets.strides;
    if (c.initial) p.initial = initial.data(), p.initial_strides = {c.inner, 0, 1};
    if (!c.backward) return;
    p.saved = saved.data, p.saved_strides = saved.strides;
    p.grad_gamma = gate_gradient.data, p.grad_gamma_strides = gate_gradient.strides;
  }

  template <bool kStep, bool kBackward>
  bool launch() {
    if (resident) {
      return replay(resident->workspace_bytes, [&](Word* words, const CallTag& tag, unsigned seed) {
        const ResidentColumnsParams params{p, *resident, words, tag};
        return emulation::launch(
            resident->strips * resident->tiles, kColumnThreads, resident->shared_bytes, resident->tiles > 1, seed, [&] {
              if (resident->flat) resident_columns_kernel<T, kStep, kBackward, true>(params);
              else resident_columns_kernel<T, kStep, kBackward, false>(params);
            });
      });
    }
    if (small) return launch_small();
    if (stream) return launch_stream();
    if (lookback) return launch_lookback();
    if (few) {
      const FewStepsParams params = few_steps_params(p, *few);
      const auto kernel = few_steps_kernel_of<T, kStep, kBackward>(*few);
      return emulation::launch(few->blocks, kColumnThreads, 0, false, c.seed, [&] { kernel(params); });
    }
    if (staged) {
      const StagedColumnsParams params{p, *staged};
      const auto kernel = staged->part_steps > 0 ? staged_parts_kernel<T> : staged_columns_kernel<T>;
      return emulation::launch(
          staged->blocks, staged->threads, staged->shared_bytes, false, c.seed, [&] { kernel(params); });
    }
    const auto run_serial = [&](auto unit) {
      const auto kernel = p.reset ? serial_columns_kernel<T, kStep, kBackward, unit(), true>
                                  : serial_columns_kernel<T, kStep, kBackward, unit(), false>;
      return emulation::launch(serial->blocks, kColumnThreads, 0, false, c.seed, [&] { kernel(p); });
    };
    if constexpr (sizeof(T) == 2) {
      if (serial->pairs) return run_serial(std::integral_constant<int, 2>());
    }
    return run_serial(std::integral_constant<int, 1>());
  }

  bool launch_small() {
    if constexpr (sizeof(T) <= 4) {
      SmallColumnsParams params = small_columns_params(p, *small);
      const auto kernel = small->sharers > 1 ? small_columns_kernel_of<T, true>(c.kind, c.backward)
                                             : small_columns_kernel_of<T, false>(c.kind, c.backward);
      const auto float_kernel = small->sharers > 1 ? float_columns_kernel_of<T, true>(small->steps)
                                                   : float_columns_kernel_of<T, false>(small->steps);
      return replay(small->workspace_bytes, [&](Word* words, const CallTag& tag, unsigned seed) {
        if (small->sharers > 1) params.words = words, params.tag = tag;
        const FloatLinesParams float_params = float_columns_params(params, small->warps);
        return emulation::launch(
            small->blocks, 32 * small->warps, small->shared_bytes, small->blocks > 1, seed,
            [&] { small->in_float ? float_kernel(float_params) : kernel(params); }, small->cluster);
      });
    }
    return false;
  }

  bool launch_stream() {
    if constexpr (sizeof(T) <= 4 || std::is_same_v<T, double>) {
      return replay(stream->workspace_bytes, [&](Word* words, const CallTag& tag, unsigned seed) {
        const StreamColumnsParams params{p, *stream, words, tag};
        return emulation::launch(stream->blocks, kStreamThreads, stream->shared_bytes, true, seed,
            [&] { stream_columns_kernel<T>(params); });
      });
    }
    return false;
  }

  bool launch_lookback() {
    if constexpr (sizeof(T) <= 4) {
      LookbackParams params = lookback_params(p, *lookback, sizeof(T));
      const auto kernel = lookback_columns_kernel_of<T>(*lookback);
      // A word of two columns may have one half beside the tensor, where it must not be read whole.
      tensors = {x.bytes()};
      words_are_of_tensors = true;
      const bool is_done = replay(lookback->workspace_bytes, [&](Word* words, const CallTag& tag, unsigned seed) {
        params.words = words, params.tag = tag;
        return emulation::launch(
            lookback->blocks, 32 * lookback->warps, 0, lookback->blocks > 1, seed, [&] { kernel(params); },
            lookback->cluster);
      });
      words_are_of_tensors = false;
      return is_done;
    }
    return false;
  }

  // launch(words, their tag, a seed), of some twice: a graph's second replay finds the words of the first one.
  template <typename Launch>
  bool replay(int64_t bytes, const Launch& launch) {
    std::vector<Word> words(static_cast<size_t>(bytes / 16) + 1, Word{7, 7});
    uint32_t launches = 0;
    const CallTag tag{0x123456789abcdef0 | 2, c.seed % 2 ? &launches : nullptr};
    for (int replay = c.seed % 2; replay >= 0; --replay) {
      if (!launch(words.data(), tag, c.seed + static_cast<unsigned>(replay))) return false;
      if (replay > 0) y.forget(c);
    }
    return true;
  }

  double gate(int64_t o, int64_t t, int64_t i) const {
    if (c.kind == GammaKind::kNumber) return c.gamma;
    return c.kind == GammaKind::kRow ? row_gammas[static_cast<size_t>(o * c.inner + i)] : widened(gates.at(o, t, i));
  }
  double started(int64_t o, int64_t i) const {
    return c.initial ? widened(initial[static_cast<size_t>(o * c.inner + i)]) : 0.0;
  }
  static bool is_near(double found, double wanted, double scale) {
    // Halves of the type's range: what is beyond may be infinite.
    constexpr bool kFloat16 = std::is_same_v<T, __half>;
    constexpr double kHalf = kFloat16 ? 3.2e4 : 1.6e38, kLeast = kFloat16 ? 3e4 : 1.5e38;
    if (std::abs(wanted) > kHalf && std::isfinite(wanted) && sizeof(T) < 8) return !(std::abs(found) < kLeast);
    if (!std::isfinite(wanted)) return !std::isfinite(found);
    const double eps = sizeof(T) == 2 ? 6e-3 : sizeof(T) == 4 ? 2e-7 : 2e-12;
    return std::abs(found - wanted) <= eps * (std::abs(wanted) + 0.1 * scale);
  }
  bool complain(const char* what, int64_t o, int64_t t, int64_t i, double found, double wanted) const {
    printf("%s[%ld, %ld, %ld] is %g for %g: %ld x %ld x %ld, %zu bytes, kind %d, reset %d, initial %d, reverse %d, ",
        what, o, t, i, found, wanted, c.outer, c.length, c.inner, sizeof(T), static_cast<int>(c.kind), c.reset,
        c.initial, c.reverse);
    printf(
        "shifted %d, backward %d, seed %u; resident %d, flat %d, tiles of a lane %d, span %d, parts %d of %d steps, tiles %ld\n",
        c.shifted, c.backward, c.seed, resident.has_value(), resident && resident->flat,
        resident ? 1 << resident->read_bits : 0, resident ? resident->span : 0, resident ? resident->parts : 0,
        resident ? resident->part_steps : 0, resident ? resident->tiles : 0);
    if (staged)
      printf("staged: %d slabs of %d steps, %d threads, %d parts of %d steps, teams of %d\n", staged->slabs,
          staged->steps, staged->threads, 1 << (staged->fan_bits + staged->team_bits), staged->part_steps,
          1 << staged->team_bits);
    if (small)
      printf("small: flat %d, span %d of %ld, %d steps, %d warps, clusters of %d, %d sharers\n", small->flat,
          small->span, small->spans, small->steps, small->warps, small->cluster, small->sharers);
    if (lookback)
      printf("lookback: apart %d, span %d of %ld, %d across, %d steps, clusters of %d, %ld chunks in groups of %d\n",
          lookback->apart, lookback->span, lookback->spans, 1 << lookback->across_bits, lookback->steps,
          lookback->cluster, lookback->chunks, lookback->group);
    return false;
  }

  // One column.
  bool check(int64_t o, int64_t i) const {
    double state = 0.0, sum = 0.0, magnitude = 1e-3, largest = 1.0, size = std::abs(started(o, i));
    for (int64_t n = 0; n < c.length; ++n) {
      const int64_t t = c.reverse ? c.length - 1 - n : n, before = c.reverse ? t + 1 : t - 1, after = 2 * t - before;
      const int64_t from = p.shifted ? before : t;  // of the gate and the reset
      const bool exists = from >= 0 && from < c.length, enters = c.initial && !c.backward && n == 0;
      if (enters) state = started(o, i);
      const bool cut = (n == 0 && !enters) || (exists && c.reset && resets.at(o, from, i));
      const double value = widened(x.at(o, t, i)), found = widened(y.at(o, t, i));
      state = cut ? value : value + gate(o, from, i) * state;
      if (std::isfinite(state)) largest = std::max(largest, std::abs(state));
      size = std::abs(value) + std::abs(c.gamma) * size;
      // In float, where gamma is a number, a result comes of up to 30 sums, of many chunks 60, each of which is
      // rounded.
      const bool in_float = lookback || (small && small->in_float),
                 is_close = in_float && std::abs(found - state) <= (lookback ? 60 : 30) * 0x1p-24 * size;
      if (!is_close && !is_near(found, state, largest)) return complain("y", o, t, i, found, state);
      if (!c.backward) continue;
      const double next = n + 1 < c.length ? widened(saved.at(o, after, i)) : started(o, i);
      const double term = c.reset && resets.at(o, t, i) ? 0.0 : state * next;
      sum += term;
      magnitude += std::abs(term);
      if (c.kind != GammaKind::kStep) continue;
      const double of_gate = widened(gate_gradient.at(o, t, i));
      if (!is_near(of_gate, term, 2.0 * largest)) return complain("the gates' gradient", o, t, i, of_gate, term);
    }
    if (!c.backward || c.kind == GammaKind::kStep) return true;
    double found = 0.0;
    for (int64_t j = 0; j < p.partials; ++j)
      found += static_cast<double>(partial_sums[static_cast<size_t>((o * c.inner + i) * p.partials + j)]);
    const double eps = sizeof(T) == 8 ? 1e-11 : 1e-5;
    if (!std::isfinite(sum)) return !std::isfinite(found) || complain("gamma's gradient", o, 0, i, found, sum);
    if (sizeof(T) < 8 && std::max(magnitude, largest) > 1e37) return true;  // beyond the range of a sum or a state
    return std::abs(found - sum) <= eps * magnitude || complain("gamma's gradient", o, 0, i, found, sum);
  }

  const Case c;
  std::mt19937 random;
  Operand<T> x, y, gates, saved, gate_gradient;
  Operand<bool> resets;
  std::vector<T> initial;
  std::vector<float> row_gammas;
  std::vector<Stored> partial_sums;
  ScanProblem p{};
  std::optional<FewStepsPlan> few;
  std::optional<StagedColumnsPlan> staged;
  std::optional<SerialColumnsPlan> serial;
  std::optional<SmallColumnsPlan> small;
  std::optional<StreamColumnsPlan> stream;
  std::optional<LookbackColumnsPlan> lookback;
  std::optional<ResidentColumnsPlan> resident;
};

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial, true>(count, arguments, draw); }
