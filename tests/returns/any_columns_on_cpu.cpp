// Random problems through the temporal difference scan of any size and strides (csrc/cuda/returns/any_columns.cuh) on a
// CPU, against its definition in double: `any_columns_on_cpu CASES SEED`. Prints what is wrong; the exit status says
// whether anything was.
#include "emulation.h"
#include "rollout_on_cpu.h"
#include "dcs/limits.h"
#include "returns/any_columns.cuh"

using namespace dcs;

namespace {

template <typename T>
class Trial : public trials::RolloutTrial<T> {
 public:
  using trials::RolloutTrial<T>::RolloutTrial;

  bool run() {
    const int threads = 32 << c.seed % 4;
    return this->is_right(emulation::launch(
        ceil_div(p.rows(), 32), threads, 0, false, c.seed, [&] { returns_any_columns_kernel<T>(p); }));
  }

 private:
  using trials::RolloutTrial<T>::c, trials::RolloutTrial<T>::p;
};

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial>(count, arguments, trials::draw_rollout); }
