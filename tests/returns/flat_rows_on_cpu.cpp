// Random problems through the temporal difference scan of contiguous rows (csrc/cuda/returns/flat_rows, and short rows
// of csrc/cuda/returns/small.cuh) on a CPU, against its definition in double: `flat_rows_on_cpu CASES SEED`. Prints
// what is wrong; the exit status says whether anything was.
#include "emulation.h"
#include "rollout_on_cpu.h"
#include "returns/flat_rows/kernel.cuh"
#include "returns/small.cuh"

using namespace dcs;

namespace {

struct FlatRollout : trials::Rollout {
  bool links = false;  // rows in small tiles that no cluster holds
};

template <typename T>
class Trial : public trials::RolloutTrial<T> {
 public:
  explicit Trial(const FlatRollout& of) : trials::RolloutTrial<T>(of), links(of.links) {}

  bool run() {
    together = with_rows_together(p);
    const auto found = c.seed % 4 ? plan_flat_returns(together, c.multiprocessors, 224 << 10, 16)
                                  : plan_flat_returns(together, c.multiprocessors, 96 << 10, 1);
    if (!found) return takes_short_returns(p) ? run_short() : this->complain("the plan", 0, 0, 0, 0.0, 0.0);
    plan = links ? linked_plan() : *found;
    switch (flat_form(together)) {
      case FlatForm::kOwn: return run<FlatForm::kOwn>();
      case FlatForm::kLambda: return run<FlatForm::kLambda>();
      case FlatForm::kRatios: return run<FlatForm::kRatios>();
      case FlatForm::kRows: return run<FlatForm::kRows>();
      case FlatForm::kSteps: return run<FlatForm::kSteps>();
      case FlatForm::kRowRatios: return run<FlatForm::kRowRatios>();
      default: return run<FlatForm::kAll>();
    }
  }

 private:
  using trials::RolloutTrial<T>::c, trials::RolloutTrial<T>::p;

  template <FlatForm kForm>
  bool run() {
    constexpr int kMany = flat_vectors(sizeof(T));
    if constexpr (has_one_vector(kForm)) {
      if (plan.vectors == 1) return run<kForm, 1>();
    }
    return plan.vectors == kMany && run<kForm, kMany>();
  }
  template <FlatForm kForm, int kVectors>
  bool run() {
    std::vector<Word> words(static_cast<size_t>(plan.workspace_bytes / 16), Word{7, 7});
    uint32_t launches = 0;
    const auto params = flat_returns_params<T>(
        together, plan, words.data(), {0x123456789abcdef0 | 2, c.seed % 3 == 0 ? &launches : nullptr});
    const auto launch = [&](bool at_once, unsigned seed) {
      return emulation::launch(
          plan.tiles, 32 * plan.warps, plan.shared_bytes, at_once, seed,
          [&] { flat_returns_kernel<T, kForm, kVectors>(params); }, plan.cluster);
    };
    bool ended = launch(plan.cluster > 1 || plan.is_linked(), c.seed);
    if (plan.is_linked()) {
      // One after the other, blocks wait for none that is behind them, and give the same bits. A counted launch's words
      // are left as they are.
      const std::vector<T> before = results();
      if (c.seed % 3) std::fill(words.begin(), words.end(), Word{7, 7});
      ended = ended && launch(false, c.seed + 1);
      const std::vector<T> now = results();
      if (std::memcmp(now.data(), before.data(), now.size() * sizeof(T)) != 0)
        return this->complain("another launch", 0, 0, 0, 0.0, 0.0);
    }
    if (this->is_right(ended)) return true;
    printf("form %d, aligned %d, numeric %d, %d vectors, %d warps, clusters of %d, %ld tiles of %ld rows, ",
        static_cast<int>(kForm), c.aligned, c.numeric_flags, plan.vectors, plan.warps, plan.cluster, plan.tiles,
        plan.rows);
    printf("%ld of a row, groups of 2^%d\n", plan.row_tiles, plan.fan_bits);
    return false;
  }
  // By the kernel that short rows are left to.
  bool run_short() {
    if constexpr (sizeof(T) <= 4) {
      switch (form_of(p)) {
        case kAdvantages: return run_short<kAdvantages>();
        case kRatios: return run_short<kRatios>();
        case kMixed: return run_short<kMixed>();
        case kMixedShifted: return run_short<kMixedShifted>();
        case kAdvantagesNext: return run_short<kAdvantagesNext>();
        case kRatiosNext: return run_short<kRatiosNext>();
      }
    }
    return this->complain("short rows' form", 0, 0, 0, 0.0, 0.0);
  }
  template <int kForm>
  bool run_short() {
    const auto launch = [&](auto wide) {
      return emulation::launch(ceil_div(p.rows() * p.length * sizeof(T) / 16, kShortRowThreads), kShortRowThreads, 0,
          false, c.seed, [&] { returns_short_rows_kernel<T, kForm, decltype(wide)>(short_rows_call<T>(p)); });
    };
    const bool in_float = !(kForm & kWithRhos) && float_holds_gates(p, kForm),
               is_right = this->is_right(in_float ? launch(float{}) : launch(double{}));
    if (!is_right) printf("short rows, form %d, in float %d\n", kForm, in_float);
    return is_right;
  }

  std::vector<T> results() const {
    std::vector<T> all;
    for (const auto* output : {&this->advantages, &this->targets, &this->pg})
      for (int64_t o = 0; o < c.outer; ++o)
        for (int64_t i = 0; i < c.inner; ++i)
          for (int64_t t = 0; t < c.length; ++t) all.push_back(output->at(o, t, i));
    return all;
  }
  // Small tiles and groups.
  FlatReturnsPlan linked_plan() const {
    constexpr int64_t kBytes = sizeof(T);
    const bool has_one = has_one_vector(flat_form(together)) && c.seed % 2;
    const FlatReturnsSizes sizes{kBytes, sizeof(typename Types<T>::Acc), has_one ? 1 : flat_vectors(kBytes)};
    return *plan_linked_returns(together, sizes, 224 << 10, 1 + c.seed / 2 % 3, 1 + static_cast<int>(c.seed / 6 % 3));
  }

  const bool links;
  ReturnsProblem together{};
  FlatReturnsPlan plan{};
};

// As the kernel of short rows takes them, or almost.
void make_short(FlatRollout& c, std::mt19937& random) {
  c.links = c.narrow_gamma = c.narrow_trace = c.numeric_flags = false;
  c.length = 4 << random() % 5;
  c.outer = 1 + random() % 40;
  c.gamma = c.trace = GammaKind::kNumber;
  c.pg = c.pg && c.rhos;
  c.same_flags = c.same_values = trials::Same::kNothing;
  c.padded = c.padded_flags = c.padded_results = false;
}

FlatRollout draw(std::mt19937& random) {
  FlatRollout c{trials::draw_odd_rollout(random)};
  const auto up_to = [&](unsigned n) { return static_cast<int64_t>(1 + random() % n); };
  const unsigned form = random() % 9;
  c.links = form == 6 || form == 7;
  c.length = form == 0 ? 1 + up_to(3)
      : form == 1      ? 1 + up_to(60)
      : form == 4      ? 1 + up_to(9000)
      : c.links        ? 1 + up_to(form == 6 ? 12000 : 3000)
      : form == 8      ? 600 + up_to(12000)
                       : 1 + up_to(800);
  if (form == 5) {
    c.length = 4000 + up_to(80000);
    if (random() % 2) c.multiprocessors = 132;  // of which some make a large cluster
  }
  // Few rows beside multiprocessors, which share them out.
  constexpr int kMany[] = {17, 33, 132, 5000};
  if (form == 8) c.multiprocessors = kMany[random() % 4];
  c.outer = form == 0 ? up_to(1500) : form == 1 ? up_to(200) : up_to(form == 5 || form == 6 || form == 8 ? 2 : 8);
  c.inner = random() % 2 ? 1 : up_to(form >= 4 ? 2 : 6);
  if (c.links && random() % 2) c.terminated = c.truncated = false;
  if (random() % 4 == 0) {
    // As a kernel takes it that has nothing else of steps.
    c.rhos = c.pg = false;
    c.gamma = GammaKind::kStep;
    c.trace = GammaKind::kNumber;
    if (random() % 3 == 0) c.trace_value = 1.0;
    c.small_steps = random() % 2 == 0;
    if (c.small_steps) c.odd_steps = false, c.infinite = true, c.trace_value = random() % 2 ? 0.9 : -1.0;
  }
  constexpr double kLarge[] = {1.05, 1.3, -3.0, 1e30, INFINITY, NAN};
  // Not beside a step's discount of 0: a carry that has left double's range makes a NaN of it in order, but not in
  // parts.
  const bool has_steps = c.gamma == GammaKind::kStep || c.trace == GammaKind::kStep;
  if (!has_steps && random() % 8 == 0) c.gamma_value = kLarge[random() % 6];
  if (!has_steps && random() % 8 == 0) c.trace_value = kLarge[random() % 6];
  c.contiguous = true;
  if (random() % 6 == 0) make_short(c, random);
  c.aligned = random() % 4 != 0;
  if (random() % 2) c.padded = c.padded_flags = c.padded_results = false;
  return c;
}

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial, true>(count, arguments, draw); }
