// The kernel for long rows of `_cross_entropy_rows_`, in blocks alone, on random rows against sums in double.
#include "emulation.h"
#include "trials.h"

#include "cross_entropy/long_rows.cuh"

namespace {

using namespace dcs;

constexpr int kThreads = 128, kBlocks = 2;
constexpr int64_t kIgnored = -100;

struct Case {
  int rows, columns, offset, gap, staged;  // staged: times the threads
  double scale;
  bool is_far, is_masked, is_certain, gradient, entropy;
};

Case draw(int, std::mt19937& random) {
  const auto one_in = [&](int count) { return random() % count == 0; };
  const auto below = [&](int count) { return static_cast<int>(random() % count); };
  return {1 + below(5), 40 + below(6000), below(9), below(9), below(3), one_in(2) ? 1.0 : 0.6, one_in(8), one_in(4),
      one_in(4), !one_in(3), !one_in(4)};
}

template <typename T, bool kEntropy>
bool launch(const LongParams& params, unsigned seed) {
  const auto kernel = params.problem.gradient
      ? cross_entropy_long_kernel<T, false, kEntropy, true, false, kThreads, 2>
      : cross_entropy_long_kernel<T, false, kEntropy, false, false, kThreads, 8>;
  return emulation::launch(kBlocks, kThreads, params.staged * 16, false, seed, [&] { kernel(params); });
}

// A row by its definition, in double.
struct Row {
  std::vector<double> log_p;
  double lse, entropy = 0;

  Row(const std::vector<double>& z) : log_p(z) {
    const double largest = *std::max_element(z.begin(), z.end());
    double total = 0;
    for (const double value : z) total += std::exp(value - largest);
    lse = largest + std::log(total);
    for (double& value : log_p) {
      value -= lse;
      if (std::exp(value) > 0) entropy -= std::exp(value) * value;
    }
  }
};

template <typename T>
bool run(const Case& c, trials::Type<T>, std::mt19937& random) {
  if constexpr (std::is_same_v<T, double>) {
    return true;  // has no such kernel
  } else {
    std::normal_distribution<double> normal;
    const int stride = c.columns + c.gap;
    std::vector<T> memory(c.offset + c.rows * stride + 64, trials::narrowed<T>(77));
    T* start = memory.data();
    while (reinterpret_cast<uintptr_t>(start) % 16) ++start;
    T* const logits = start + c.offset;
    std::vector<int64_t> target(c.rows);
    std::vector<float> grads[3], results[3];
    for (auto& each : grads) each.resize(c.rows);
    for (auto& each : results) each.assign(c.rows, -7);
    std::vector<Row> rows;
    for (int r = 0; r < c.rows; ++r) {
      target[r] = random() % 5 == 0 ? kIgnored : random() % (random() % 3 ? c.columns : 9);
      for (auto& each : grads) each[r] = static_cast<float>(normal(random));
      std::vector<double> z(c.columns);
      for (int j = 0; j < c.columns; ++j) {
        double value = 3 * normal(random) + (c.is_far ? 3e6 * (random() % 3) : 0);
        if (c.is_masked && random() % 3 == 0) value = -INFINITY;
        if (j == target[r] && (c.is_masked || c.is_certain)) value = c.is_certain ? 40 : 1;
        logits[r * stride + j] = trials::narrowed<T>(value);
        z[j] = c.scale * trials::widened(logits[r * stride + j]);
      }
      rows.emplace_back(z);
    }

    constexpr double kLogTwo = 0.693147180559945309;
    LongParams params;
    RowsProblem& problem = params.problem;
    problem.logits = logits, problem.rows = c.rows, problem.columns = c.columns, problem.stride = stride;
    problem.target = target.data(), problem.target_stride = 1, problem.ignore_index = kIgnored;
    problem.grad_loss = {grads[0].data(), 1}, problem.grad_lse = {grads[1].data(), 1};
    if (c.entropy) problem.grad_entropy = {grads[2].data(), 1}, problem.entropy = results[2].data();
    problem.logit_scale = c.scale, problem.gradient = c.gradient;
    problem.loss = results[0].data(), problem.lse = results[1].data();
    params.scale = static_cast<float>(c.scale), params.factor = static_cast<float>(c.scale / kLogTwo);
    params.staged = c.gradient ? c.staged * kThreads : 0;
    if (!(c.entropy ? launch<T, true>(params, random()) : launch<T, false>(params, random()))) return false;

    double worst = 0;  // error, in what is allowed
    const auto compare = [&](double found, double wanted, double allowed) {
      const double error = std::fabs(found - wanted) / allowed;
      worst = error <= worst ? worst : error == error ? error : INFINITY;
    };
    for (int r = 0; r < c.rows; ++r) {
      const Row& row = rows[r];
      const bool is_valid = target[r] != kIgnored;
      const double allowed = 3e-6 * std::max(1.0, std::fabs(row.lse));
      compare(results[0][r], is_valid ? -row.log_p[target[r]] : 0, allowed);
      compare(results[1][r], is_valid ? row.lse : 0, allowed);
      if (c.entropy) compare(results[2][r], is_valid ? row.entropy : 0, 3e-5);
      for (int j = 0; c.gradient && j < c.columns; ++j) {
        const double log_p = row.log_p[j], p = std::exp(log_p);
        double wanted = p * (grads[0][r] + grads[1][r]) - (j == target[r] ? grads[0][r] : 0);
        if (c.entropy && p > 0) wanted -= grads[2][r] * p * (log_p + row.entropy);
        wanted *= is_valid ? c.scale : 0;
        const double rounding = sizeof(T) == 2 ? 5e-3 : 2e-5;
        compare(trials::widened(logits[r * stride + j]), wanted, rounding * std::fabs(wanted) + 1e-7 + 6e-5 * p);
      }
    }
    if (worst <= 1) return true;
    printf(
        "%zu bytes, %d rows of %d, offset %d, gap %d, staged %d, scale %g, far %d, masked %d, certain %d, gradient "
        "%d, entropy %d: %g\n",
        sizeof(T), c.rows, c.columns, c.offset, c.gap, c.staged, c.scale, c.is_far, c.is_masked, c.is_certain,
        c.gradient, c.entropy, worst);
    return false;
  }
}

}  // namespace

int main(int count, char** arguments) {
  return trials::run_all(
      count, arguments, draw, [](const Case& c, auto type, std::mt19937& random) { return run(c, type, random); });
}
