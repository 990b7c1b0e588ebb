// Random problems through the kernels of returns over n steps (csrc/cuda/returns/n_step*.cuh) on a CPU, against their
// definition in double: `n_step_on_cpu CASES SEED`. Prints what is wrong; the exit status says whether anything was.
#include "emulation.h"
#include "rollout_on_cpu.h"
#include "dcs/limits.h"
#include "returns/n_step_blocks.cuh"
#include "returns/n_step_windows.cuh"

using namespace dcs;
using trials::widened;

namespace {

template <typename T>
class Trial : public trials::RolloutTrial<T> {
  using Base = trials::RolloutTrial<T>;

 public:
  Trial(const trials::Rollout& of) : Base(of) {
    p.steps = 1 + c.seed % std::min<int64_t>(c.length - 1, c.seed / 128 % 2 ? 70 : 8);
  }

  bool run() {
    const bool few = is_plain(p) && (p.next_values.data || p.values.data) && p.steps <= kMostSteps;
    if constexpr (sizeof(T) <= 4) {
      if (few && !run_few<kMostSteps>()) return complain_of("few steps");
    }
    if (few && !c.contiguous && c.inner > 1) {
      if constexpr (sizeof(T) == 2) {
        if (c.inner % kNStepColumns == 0 && !run_any_few<kNStepColumns>()) return complain_of("few steps of words");
      }
      if (!run_any_few<1>()) return complain_of("few steps of a column");
    }
    if (!(p.steps < 8 ? run_any<1>() : run_any<8>())) return complain_of("any");
    if (takes_n_step_windows(p) && !run_windows()) return complain_of("windows");
    bool is_right;
    if constexpr (sizeof(T) <= 4) is_right = is_plain(p) ? run_blocks<float, true>() : run_blocks<double, false>();
    else is_right = run_blocks<double, false>();
    return is_right || complain_of("blocks");
  }

 private:
  using Base::c, Base::p;

  bool complain_of(const char* kernel) const {
    printf("%s, n %ld\n", kernel, p.steps);
    return false;
  }
  bool launch(int64_t threads, const std::function<void()>& kernel) {
    this->targets.clear();
    return this->is_right(emulation::launch(ceil_div(threads, kNStepThreads), kNStepThreads, 0, false, c.seed, kernel));
  }
  template <typename Number>
  NStepCall<Number> call() const {
    return {p, n_step_rates<Number>(p), kNStepBatch << c.seed / 64 % 4};
  }

  template <int kN>
  bool run_few() {
    if constexpr (kN > 1) {
      if (p.steps < kN) return run_few<kN - 1>();
    }
    return p.next_values.data ? run_few<kN, true>() : run_few<kN, false>();
  }
  template <int kN, bool kNext>
  bool run_few() {
    const NStepCall<float> few = call<float>();
    if (c.contiguous) {
      constexpr int kVec = 16 / sizeof(T);
      return launch(
          p.rows() * ceil_div(p.length, kVec), [&] { n_step_rows_kernel<T, kMostSteps, kNext, kVec, false>(few); });
    }
    // A CPU asks for no alignment.
    if (c.inner % kNStepColumns) return true;
    return launch(
        p.rows() / kNStepColumns * ceil_div(p.length, few.chunk), [&] { n_step_columns_kernel<T, kN, kNext>(few); });
  }
  template <int kColumns>
  bool run_any_few() {
    constexpr int kHalf = kMostSteps / 2;
    const bool next = p.next_values.data;
    if (p.steps > kHalf)
      return next ? run_any_few<kColumns, kMostSteps, true>() : run_any_few<kColumns, kMostSteps, false>();
    return next ? run_any_few<kColumns, kHalf, true>() : run_any_few<kColumns, kHalf, false>();
  }
  template <int kColumns, int kN, bool kNext>
  bool run_any_few() {
    const auto few = call<typename Types<T>::Acc>();
    return launch(p.rows() / kColumns * ceil_div(p.length, few.chunk),
        [&] { n_step_columns_kernel<T, kN, kNext, kColumns, false>(few); });
  }
  template <int kOut>
  bool run_any() {
    const NStepCall<double> any = call<double>();
    return launch(p.rows() * ceil_div(p.length, kOut), [&] { n_step_kernel<T, kOut>(any); });
  }
  bool run_windows() {
    const auto params = n_step_windows_params<T>(p);
    this->targets.clear();
    return this->is_right(emulation::launch(ceil_div(params.count, params.outputs), kNStepWindowThreads,
        n_step_windows_bytes<T>(), false, c.seed, [&] { n_step_windows_kernel<T, false>(params); }));
  }
  template <typename Number, bool kPlain>
  bool run_blocks() {
    const auto params = n_step_blocks_params<T, Number>(p, n_step_rates<Number>(p));
    this->targets.clear();
    return this->is_right(emulation::launch(params.blocks(), kNStepThreads, static_cast<int>(params.shared_bytes()),
        false, c.seed, [&] { n_step_blocks_kernel<T, Number, kPlain, false>(params); }));
  }

  bool check(int64_t o, int64_t i) const override {
    const double behind = c.bootstrap ? widened(this->bootstraps[this->bootstrap_index(o, i)]) : 0.0;
    for (int64_t t = 0; t < c.length; ++t) {
      double y = 0.0, largest = 1.0;
      const int64_t last = std::min(t + p.steps, c.length) - 1;
      for (int64_t s = last; s >= t; --s) {
        const bool is_last = s == c.length - 1, terminates = c.terminated && this->is_terminated.at(o, s, i),
                   truncates = c.truncated && this->is_truncated.at(o, s, i);
        const double gamma = this->rate_at(c.gamma, c.gamma_value, this->gammas, this->row_gammas, o, s, i),
                     gate = gamma * this->rate_at(c.trace, c.trace_value, this->traces, this->row_traces, o, s, i),
                     reward = widened(this->rewards.at(o, s, i));
        double after = is_last ? behind : c.values ? widened(this->values.at(o, s + 1, i)) : 0.0;
        if (c.next_values) after = widened(this->next.at(o, s, i));
        if (terminates || (truncates && !c.next_values)) after = 0.0;
        const bool is_own = terminates || truncates || s == last;
        y = is_own ? reward + gamma * after : reward + (gamma - gate) * after + gate * y;
        largest = std::max(largest, std::abs(y));
      }
      if (!this->is_near("targets", this->targets, o, t, i, y, largest)) return false;
    }
    return true;
  }
};

trials::Rollout draw(std::mt19937& random) {
  trials::Rollout c = trials::draw_rollout(random);
  c.length = std::clamp<int64_t>(c.length, 2, 2000);
  c.rhos = c.advantages = c.pg = c.narrow_gamma = c.narrow_trace = false;
  c.targets = true;
  return c;
}

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial, true>(count, arguments, draw); }
