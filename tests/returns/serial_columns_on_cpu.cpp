// Random problems through the temporal difference scan in which a thread takes a column serially
// (csrc/cuda/returns/serial_columns) on a CPU, against its definition in double: `serial_columns_on_cpu CASES SEED`.
// Prints what is wrong; the exit status says whether anything was.
#include "emulation.h"
#include "rollout_on_cpu.h"
#include "returns/serial_columns/kernel.cuh"

using namespace dcs;

namespace {

template <typename T>
class Trial : public trials::RolloutTrial<T> {
 public:
  using trials::RolloutTrial<T>::RolloutTrial;

  bool run() {
    if constexpr (sizeof(T) == 2) {
      // A CPU asks for no alignment.
      if (serial_form(p) != ColumnForm::kAll && !c.contiguous && c.inner % 2 == 0) return run<2>();
    }
    return run<1>();
  }

 private:
  using trials::RolloutTrial<T>::c, trials::RolloutTrial<T>::p;

  template <int kUnit>
  bool run() {
    switch (serial_form(p)) {
      case ColumnForm::kPlain: return run<kUnit, ColumnForm::kPlain>();
      case ColumnForm::kRatios: return run<kUnit, ColumnForm::kRatios>();
      case ColumnForm::kNext: return run<kUnit, ColumnForm::kNext>();
      case ColumnForm::kRatiosNext: return run<kUnit, ColumnForm::kRatiosNext>();
      default: return run<1, ColumnForm::kAll>();
    }
  }
  template <int kUnit, ColumnForm kForm>
  bool run() {
    const auto params = returns_column_params<T>(p, kUnit);
    return this->is_right(emulation::launch(ceil_div(params.cells, kSerialReturnsThreads), kSerialReturnsThreads, 0,
        false, c.seed, [&] { returns_serial_columns_kernel<T, kUnit, kForm>(params); }));
  }
};

// A third have next states' values beside the steps', of an even number of columns, for all of which there are pairs.
trials::Rollout draw(std::mt19937& random) {
  trials::Rollout c = trials::draw_rollout(random);
  if (random() % 3) return c;
  c.contiguous = false;
  c.inner += c.inner % 2;
  c.length = std::min<int64_t>(c.length, 400);
  c.values = c.next_values = true;
  c.bootstrap = c.values_are_next = false;
  c.rhos = random() % 2;
  c.advantages = random() % 4, c.targets = !c.advantages || random() % 4, c.pg = c.rhos && random() % 2;
  for (dcs::GammaKind* kind : {&c.gamma, &c.trace})
    if (*kind == dcs::GammaKind::kStep) *kind = dcs::GammaKind::kNumber;
  return c;
}

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial, true>(count, arguments, draw); }
