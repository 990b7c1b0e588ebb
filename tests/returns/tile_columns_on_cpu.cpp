// Random problems through the temporal difference scan in which blocks take tiles of columns
// (csrc/cuda/returns/tile_columns) on a CPU, against its definition in double: `tile_columns_on_cpu CASES SEED`. Prints
// what is wrong; the exit status says whether anything was.
#include "emulation.h"
#include "rollout_on_cpu.h"
#include "returns/tile_columns/flat.cuh"
#include "returns/tile_columns/kernel.cuh"

using namespace dcs;

namespace {

constexpr int64_t kSharedBytes = 227 << 10;

template <typename T>
class Trial : public trials::RolloutTrial<T> {
 public:
  using trials::RolloutTrial<T>::RolloutTrial;

  bool run() {
    if (const bool is_small = c.seed % 2; is_small && sizeof(T) <= 4) {
      const auto found = plan_small_tiles(p, {64, static_cast<int>(kSharedBytes), c.seed / 2 % 4 ? 16 : 0});
      if (found) return run_small(*found);
    }
    const auto found = plan_tiles(p, c.multiprocessors, c.seed % 2, kSharedBytes, true);
    // Powers above 1 are not folded.
    if (!found) return std::abs(p.gamma.value * p.trace.value) > 1.0 || this->complain("the plan", 0, 0, 0, 0.0, 0.0);
    plan = *found;
    if (plan.flat && (c.padded || c.padded_results)) return this->complain("a flat plan", 0, 0, 0, 0.0, 0.0);
    const ColumnForm form = tile_form(p);
    return form == ColumnForm::kPlain ? run<ColumnForm::kPlain>()
        : form == ColumnForm::kRatios ? run<ColumnForm::kRatios>()
                                      : run<ColumnForm::kAll>();
  }

 private:
  using trials::RolloutTrial<T>::c, trials::RolloutTrial<T>::p;

  template <ColumnForm kForm>
  bool run() {
    std::vector<Word> words(static_cast<size_t>(plan.workspace_bytes / 16) + 1, Word{7, 7});
    uint32_t launches = 0;
    const auto params =
        tile_columns_params<T>(p, plan, words.data(), {0x123456789abcdef0 | 2, c.seed % 3 == 0 ? &launches : nullptr});
    const bool ended =
        emulation::launch(plan.strips * plan.tiles, kColumnThreads, plan.shared_bytes, plan.tiles > 1, c.seed, [&] {
          if (plan.flat) return flat_columns_kernel<T, kForm>(params);
          tile_columns_kernel<T, kForm>(params);
        });
    return this->is_right(ended) || complain_of_plan();
  }
  bool run_small(const SmallColumnsPlan& found) {
    if constexpr (sizeof(T) <= 4) {
      const auto params = small_tile_params<T>(p, found);
      const bool ended = emulation::launch(
          found.blocks, 32 * found.warps, 0, found.cluster > 1, c.seed, [&] { small_tile_columns_kernel<T>(params); },
          found.cluster);
      if (this->is_right(ended)) return true;
      printf(
          "small: span %d, %d steps, %d warps, clusters of %d\n", found.span, found.steps, found.warps, found.cluster);
    }
    return false;
  }
  bool complain_of_plan() const {
    printf("flat %d, %ld strips, span %d, %d parts of %d steps, %ld tiles in %ld groups\n", plan.flat, plan.strips,
        plan.span, plan.parts, plan.part_steps, plan.tiles, plan.groups);
    return false;
  }

  ResidentColumnsPlan plan{};
};

// Groups of tiles, of groups, too, whose discounts leave something of what enters them.
trials::Rollout draw_groups(std::mt19937& random) {
  trials::Rollout c = trials::draw_rollout(random);
  c.contiguous = false;
  c.outer = 1;
  c.inner = 17 + static_cast<int64_t>(random() % 47);
  c.length = 2500 + static_cast<int64_t>(random() % 2500);
  c.padded = c.padded_flags = c.padded_results = random() % 2;
  c.rhos = false;
  c.gamma = random() % 5 ? dcs::GammaKind::kNumber : dcs::GammaKind::kRow;
  c.trace = dcs::GammaKind::kNumber;
  constexpr double kGammas[] = {1.0, 0.9999, 0.99999, -0.9999};
  c.gamma_value = kGammas[random() % 4];
  c.trace_value = 1.0;
  c.terminated = random() % 3 == 0, c.truncated = false;
  c.multiprocessors = 1 + random() % 2;
  return c;
}

// Strips of many tiles are many threads here. Half of the tensors have nothing between their steps, at any address.
trials::Rollout draw(std::mt19937& random) {
  if (random() % 4 == 0) return draw_groups(random);
  trials::Rollout c = trials::draw_odd_rollout(random);
  c.contiguous = false;
  c.length = std::min<int64_t>(c.length, 12000);
  if (random() % 2) {
    c.padded = c.padded_flags = c.padded_results = false;
    c.same_flags = c.same_rates = c.same_values = trials::Same::kNothing;
    c.inner = 1 + (c.inner - 1) % 64;
    if (random() % 3 == 0) c.outer *= 1 + random() % 40, c.length = 4 + (c.length - 1) % 200;
    if (random() % 2)
      c.offsets = (uint64_t{random()} << 32 | random()) & (random() % 2 ? ~uint64_t{0} : 0x1111111111111111 * 14);
  }
  if (random() % 8 == 0) c.multiprocessors = 40;
  return c;
}

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial, true>(count, arguments, draw); }
