// Random problems through the temporal difference scan of rows that fit into a block (csrc/cuda/returns/flat_rows) on a
// CPU, against its definition in double: `flat_rows_on_cpu CASES SEED`. Prints what is wrong; the exit status says
// whether anything was.
#include "emulation.h"
#include "rollout_on_cpu.h"
#include "returns/flat_rows/kernel.cuh"

using namespace dcs;

namespace {

template <typename T>
class Trial : public trials::RolloutTrial<T> {
 public:
  using trials::RolloutTrial<T>::RolloutTrial;

  bool run() {
    together = with_rows_together(p);
    const auto found = c.seed % 4 ? plan_flat_returns(together, c.multiprocessors, 224 << 10, 16)
                                  : plan_flat_returns(together, c.multiprocessors, 96 << 10, 1);
    if (!found) return true;
    plan = *found;
    // What may be read in whole vectors.
    tensors.clear();
    FlatReturnsSizes{sizeof(T), sizeof(typename Types<T>::Acc), 1}.each_operand(
        p, [&](const ReturnsInput& input, int64_t bytes, bool) {
          const Strides& s = input.strides;
          tensors.push_back({input.data, ((p.outer - 1) * s.outer + p.length + (p.inner - 1) * s.inner) * bytes});
        });
    switch (flat_form(together)) {
      case FlatForm::kOwn: return run<FlatForm::kOwn>();
      case FlatForm::kLambda: return run<FlatForm::kLambda>();
      case FlatForm::kRatios: return run<FlatForm::kRatios>();
      case FlatForm::kRows: return run<FlatForm::kRows>();
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
    const auto params = flat_returns_params<T>(together, plan);
    const bool ended = emulation::launch(
        plan.tiles, 32 * plan.warps, plan.shared_bytes, plan.cluster > 1, c.seed,
        [&] { flat_returns_kernel<T, kForm, kVectors>(params); }, plan.cluster);
    if (this->is_right(ended)) return true;
    printf("form %d, aligned %d, numeric %d, %d vectors, %d warps, clusters of %d, %ld tiles of %ld rows\n",
        static_cast<int>(kForm), c.aligned, c.numeric_flags, plan.vectors, plan.warps, plan.cluster, plan.tiles,
        plan.rows);
    return false;
  }

  ReturnsProblem together{};
  FlatReturnsPlan plan{};
};

trials::Rollout draw(std::mt19937& random) {
  trials::Rollout c = trials::draw_odd_rollout(random);
  const auto up_to = [&](unsigned n) { return static_cast<int64_t>(1 + random() % n); };
  const unsigned form = random() % 6;
  c.length = form == 0 ? 1 + up_to(3) : form == 1 ? 1 + up_to(60) : form == 4 ? 1 + up_to(9000) : 1 + up_to(800);
  if (form == 5) {
    c.length = 4000 + up_to(80000);
    if (random() % 2) c.multiprocessors = 132;  // of which some make a large cluster
  }
  c.outer = form == 0 ? up_to(1500) : form == 1 ? up_to(200) : up_to(form == 5 ? 2 : 8);
  c.inner = random() % 2 ? 1 : up_to(form >= 4 ? 2 : 6);
  c.contiguous = true;
  c.aligned = random() % 4 != 0;
  if (random() % 2) c.padded = c.padded_flags = c.padded_results = false;
  return c;
}

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial>(count, arguments, draw); }
