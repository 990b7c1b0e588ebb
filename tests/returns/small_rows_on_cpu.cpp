// Random problems through the temporal difference scan of small contiguous rows (csrc/cuda/returns/small_rows) on a
// CPU, against its definition in double: `small_rows_on_cpu CASES SEED`. Prints what is wrong; the exit status says
// whether anything was.
#include "emulation.h"
#include "rollout_on_cpu.h"
#include "returns/small_rows/launch.cuh"

using namespace dcs;

namespace {

template <typename T>
class Trial : public trials::RolloutTrial<T> {
 public:
  using trials::RolloutTrial<T>::RolloutTrial;

  bool run() {
    together = with_rows_together(p);
    const DeviceLimits device{c.multiprocessors, 96 << 10, 16};
    auto found = plan_small_returns(together, device);
    if (!found) return this->complain("the plan", 0, 0, 0, 0.0, 0.0);
    plan = *found;
    if (c.seed % 2) use_other_steps(device);
    name_tensors();
    const auto params = small_returns_params<T>(together, plan);
    const int threads = 32 * plan.warps;
    const bool ended = in_small_returns_form<T>(together, plan, [&](auto form, auto steps) {
      return emulation::launch(
          plan.blocks, threads, threads * steps() * static_cast<int>(sizeof(T)), plan.cluster > 1, c.seed,
          [&] { small_returns_rows_kernel<T, form(), steps()>(params); }, plan.cluster);
    });
    if (this->is_right(ended)) return true;
    printf("aligned %d, %d steps, %d warps, clusters of %d, %ld blocks of %ld rows, %d multiprocessors\n", c.aligned,
        plan.steps, plan.warps, plan.cluster, plan.blocks, plan.group_rows, c.multiprocessors);
    return false;
  }

 private:
  using trials::RolloutTrial<T>::c, trials::RolloutTrial<T>::p;

  // As many of a thread as it is not planned to have, if there is a kernel for them, and other blocks.
  void use_other_steps(const DeviceLimits& device) {
    const int fewest = small_returns_fewest(sizeof(T), p.rhos.data), most = small_returns_most(p.rhos.data);
    const int steps = plan.steps == fewest ? most : fewest;
    const SmallRowsLimits limits{
        1 + c.seed / 2 % 8, 8 << c.seed / 16 % 2, kSmallReturnsWarps, kMostSmallReturnsTileWarps, 2};
    const auto rows = share_small_rows(together.rows(), together.length, steps, limits, device);
    if (rows) plan = {*rows, steps};
  }

  // What may be read.
  void name_tensors() const {
    words_are_of_tensors = true;
    tensors.clear();
    const auto name = [&](const void* data, const Strides& s, int64_t bytes) {
      const int64_t last = (p.outer - 1) * s.outer + (p.length - 1) * s.time + (p.inner - 1) * s.inner;
      tensors.push_back({data, (last + 1) * bytes});
      return true;
    };
    all_step_operands(p, name);
    if (p.bootstrap_value.data) name(p.bootstrap_value.data, p.bootstrap_value.strides, sizeof(T));
  }

  ReturnsProblem together{};
  SmallReturnsPlan plan{};
};

// Of few rows, or of rows that clusters take.
trials::Rollout draw(std::mt19937& random) {
  trials::Rollout c = trials::draw_odd_rollout(random);
  const auto up_to = [&](unsigned n) { return static_cast<int64_t>(1 + random() % n); };
  const unsigned form = random() % 5;
  c.length = form == 0 ? 1 + up_to(8)
      : form == 1      ? 1 + up_to(60)
      : form == 2      ? 1 + up_to(800)
      : form == 3      ? 1 + up_to(9000)
                       : 4097 + up_to(40000);
  c.outer = up_to(form == 0 ? 300 : form == 1 ? 100 : form == 2 ? 12 : form == 3 ? 5 : 2);
  c.inner = random() % 2 ? 1 : up_to(form < 3 ? 5 : 2);
  c.contiguous = true;
  c.numeric_flags = false;
  c.gamma = c.trace = GammaKind::kNumber;
  c.rhos = c.rhos && !c.values_are_next;
  c.pg = c.rhos && random() % 2;
  if (c.rhos) c.length = std::min<int64_t>(c.length, 32'768);  // what a cluster holds
  if (!c.advantages && !c.pg) c.targets = true;
  constexpr double kSmall[] = {0.0, 1e-30, -1.0, 0.3};
  if (random() % 4 == 0) c.gamma_value = kSmall[random() % 4];
  if (random() % 8 == 0) c.gamma_value = 1e300, c.trace_value = 0.0;  // no value may be weighed with it but rows' last
  // A power of such a product may be any number.
  if (std::abs(c.gamma_value * c.trace_value) > 1.0) c.trace_value = 0.9;
  // So many that all problems of this size are on the GPU at once.
  c.multiprocessors = static_cast<int>(form < 2 ? up_to(6) + 12 : 132);
  c.aligned = random() % 4 != 0;
  if (random() % 2) c.padded = c.padded_flags = c.padded_results = false;
  // Rows of each operand lie equally far apart.
  const auto is_uneven = [](trials::Same same) { return same == trials::Same::kOuter || same == trials::Same::kInner; };
  if (is_uneven(c.same_flags) || is_uneven(c.same_values)) c.inner = 1;
  // Rows that no warp shares with another one.
  if (form < 2 && random() % 4 == 0) c.length = 128 << random() % 2, c.outer = up_to(40);
  // Not as a lane a vector (returns/small.cuh) takes them.
  if (c.length % 4 == 0 && c.length <= 64) ++c.length;
  return c;
}

template <typename T>
using SmallElement = std::conditional_t<sizeof(T) == 8, float, T>;  // no kernel is for double

}  // namespace

int main(int count, char** arguments) {
  return trials::run_all<true>(
      count, arguments, [](int, std::mt19937& random) { return draw(random); },
      [](const auto& c, auto type, std::mt19937&) {
        return Trial<SmallElement<typename decltype(type)::type>>(c).run();
      });
}
