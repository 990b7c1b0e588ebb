// Random problems through the temporal difference scan in which a thread walks along a column (csrc/cuda/returns/walk)
// on a CPU, against its definition in double: `walk_on_cpu CASES SEED`. Prints what is wrong; the exit status says
// whether anything was.
#include "emulation.h"
#include "rollout_on_cpu.h"
#include "returns/walk/kernel.cuh"

using namespace dcs;

namespace {

template <typename T>
class Trial : public trials::RolloutTrial<T> {
 public:
  using trials::RolloutTrial<T>::RolloutTrial;

  bool run() {
    const WalkForm form = walk_form(p);
    if constexpr (sizeof(T) == 2) {
      // A CPU asks for no alignment.
      const bool in_pairs = !c.contiguous && c.inner % 2 == 0;
      if (form == WalkForm::kPlain && in_pairs) return run<2, WalkForm::kPlain>();
      if (form == WalkForm::kRatios && in_pairs) return run<2, WalkForm::kRatios>();
    }
    return form == WalkForm::kPlain ? run<1, WalkForm::kPlain>()
        : form == WalkForm::kRatios ? run<1, WalkForm::kRatios>()
                                    : run<1, WalkForm::kAll>();
  }

 private:
  using trials::RolloutTrial<T>::c, trials::RolloutTrial<T>::p;

  template <int kUnit, WalkForm kForm>
  bool run() {
    const auto params = walk_params<T>(p, kUnit);
    return this->is_right(emulation::launch(ceil_div(params.cells, kReturnsWalkThreads), kReturnsWalkThreads, 0, false,
        c.seed, [&] { returns_walk_kernel<T, kUnit, kForm>(params); }));
  }
};

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial>(count, arguments, trials::draw_rollout); }
