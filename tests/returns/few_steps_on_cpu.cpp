// Random problems of few steps through the temporal difference scan in which a thread takes several columns
// (csrc/cuda/returns/few_steps) on a CPU, against its definition in double and, bit by bit, the kernel that takes
// columns serially: `few_steps_on_cpu CASES SEED`. Prints what is wrong; the exit status says whether anything was.
#include "emulation.h"
#include "rollout_on_cpu.h"
#include "returns/few_steps/kernel.cuh"
#include "returns/serial_columns/kernel.cuh"

using namespace dcs;

namespace {

template <typename T>
class Trial : public trials::RolloutTrial<T> {
 public:
  explicit Trial(const trials::Rollout& of) : trials::RolloutTrial<T>(taken(of)) {}

  bool run() {
    const ColumnForm form = column_form(p);
    if constexpr (sizeof(T) == 8) return true;  // taken serially
    else if (form == ColumnForm::kPlain) return run<ColumnForm::kPlain>();
    else return form == ColumnForm::kRatios ? run<ColumnForm::kRatios>() : run<ColumnForm::kAll>();
  }

 private:
  using trials::RolloutTrial<T>::c, trials::RolloutTrial<T>::p;

  // Rates of rows in double are taken serially, too.
  static trials::Rollout taken(trials::Rollout c) {
    if (c.row_dtype == ElementType::Double) c.row_dtype = ElementType::Float;
    return c;
  }

  template <ColumnForm kForm>
  bool run() {
    const int wide = few_returns_word(p);
    constexpr int kWidest = few_returns_wide(sizeof(T), kForm);
    if constexpr (kWidest > 1) {
      if (wide == kWidest) return run<kWidest, kForm>();
    }
    const bool are_two = c.length <= 2 && c.seed % 4;
    if constexpr (sizeof(T) == 2) {
      if (wide == 2) return are_two ? run<2, kForm, true>() : run<2, kForm>();
    }
    return are_two ? run<1, kForm, true>() : run<1, kForm>();
  }
  template <int kWide, ColumnForm kForm, bool kTwo = false>
  bool run() {
    auto params = few_returns_params<T>(p, kWide, kTwo);
    if (c.seed % 3 == 0) params.bootstrap_makes_words = params.gamma.makes_words = params.trace.makes_words = false;
    if (!this->is_right(emulation::launch(ceil_div(params.call.cells, kFewReturnsBlock), kFewReturnsBlock, 0, false,
            c.seed, [&] { few_returns_kernel<T, kWide, kForm, kTwo>(params); })))
      return this->complain("words of so many columns", 0, 0, 0, kWide, 0);
    // Rates of rows are made in float, those of serial columns in double.
    return has_row_rates(p) || is_as_serial<kForm>();
  }
  template <ColumnForm kForm>
  bool is_as_serial() {
    std::vector<T> found = all_results();
    for (auto* output : {&this->advantages, &this->targets, &this->pg}) output->clear();
    const auto params = returns_column_params<T>(p, 1);
    emulation::launch(ceil_div(params.cells, kSerialReturnsThreads), kSerialReturnsThreads, 0, false, c.seed,
        [&] { returns_serial_columns_kernel<T, 1, kForm>(params); });
    const std::vector<T> serial = all_results();
    return !std::memcmp(found.data(), serial.data(), found.size() * sizeof(T)) ||
        this->complain("a bit", 0, 0, 0, 0, 0);
  }
  std::vector<T> all_results() const {
    std::vector<T> results;
    for (const auto* output : {&this->advantages, &this->targets, &this->pg})
      for (int64_t o = 0; o < c.outer; ++o)
        for (int64_t t = 0; t < c.length; ++t)
          for (int64_t i = 0; i < c.inner; ++i) results.push_back(output->at(o, t, i));
    return results;
  }
};

trials::Rollout draw(std::mt19937& random) {
  trials::Rollout c = trials::draw_odd_rollout(random);
  c.contiguous = false;
  c.length = 1 + static_cast<int64_t>(random() % (random() % 3 == 0 ? 2 : random() % 2 ? 6 : 40));
  c.outer = 1 + static_cast<int64_t>(random() % 3);
  c.inner = 1 + static_cast<int64_t>(random() % (random() % 2 ? 40 : 700));
  c.aligned = random() % 4 != 0;
  const int64_t neighbors = int64_t{1} << random() % 4;
  if (c.aligned) c.inner = (c.inner + neighbors - 1) / neighbors * neighbors;
  if (random() % 2) c.padded = c.padded_flags = c.padded_results = false, c.same_flags = trials::Same::kNothing;
  return c;
}

// Products of floats in float are what they are in double. Beyond float's range the rest is as large as may be.
bool products_are_right(unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.5f, 1.5f);
  constexpr float kOdd[] = {0.f, 1.f, -1.f, 0.5f, 3e38f, INFINITY, NAN};
  const auto draw = [&] { return random() % 3 ? uniform(random) : kOdd[random() % 7]; };
  for (int i = 0; i < 100000; ++i) {
    const float gamma = draw(), trace = draw();
    const double product = static_cast<double>(gamma) * static_cast<double>(trace);
    const Rates<float> rates = rates_of_row(SplitRate<float>{gamma, 0.f}, SplitRate<float>{trace, 0.f});
    const Gate<float> wanted = split_gamma(product);
    const float rest = static_cast<float>(static_cast<double>(gamma) - product);
    const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
    const bool is_beyond = std::isfinite(product) && std::abs(product) > FLT_MAX;
    if (same(rates.gate.value, wanted.value) && same(rates.gate.rest, is_beyond ? wanted.value : wanted.rest) &&
        (same(rates.rest, rest) || std::abs(rates.rest - rest) <= 6e-8f * std::abs(rest)))
      continue;
    printf("%g * %g is %g and %g for %g and %g, the rest %g for %g\n", gamma, trace, rates.gate.value, rates.gate.rest,
        wanted.value, wanted.rest, rates.rest, rest);
    return false;
  }
  return true;
}

// Whose problems they are: many columns of few steps, whose words are as wide as all operands have them.
bool rules_are_right() {
  alignas(64) static char memory[64];
  const auto is_taken = [](int64_t length, int64_t inner, ElementType row_rates, const void* values) {
    ReturnsProblem p{};
    p.dtype = ElementType::BFloat16, p.length = length, p.inner = inner;
    const Strides strides{length * inner, inner, 1};
    p.rewards = {memory, strides}, p.values = {values, strides}, p.targets = {memory, strides};
    p.gamma.kind = GammaKind::kRow, p.gamma.dtype = row_rates, p.gamma.tensor = {memory, {inner, 0, 1}};
    return takes_serial_columns(p, 100) && takes_few_returns(p, 100) ? few_returns_word(p) : 0;
  };
  constexpr auto kFloat = ElementType::Float;
  const bool are_right = is_taken(3, 800000, kFloat, memory) == 8 && is_taken(3, 800002, kFloat, memory) == 2 &&
      is_taken(3, 800001, kFloat, memory) == 1 && is_taken(3, 800000, kFloat, memory + 2) == 1 &&
      !is_taken(3, 8000, kFloat, memory) && !is_taken(128, 800000, kFloat, memory) &&
      !is_taken(3, 800000, ElementType::Double, memory);
  if (!are_right) printf("the wrong problems are taken\n");
  return are_right;
}

}  // namespace

int main(int count, char** arguments) {
  if (!rules_are_right()) return 1;
  if (count == 3 && !products_are_right(static_cast<unsigned>(std::atoi(arguments[2])))) return 1;
  return trials::run_seeded<Trial, true>(count, arguments, draw);
}
