// Random problems through the kernels of max_bmm and sample_bmm (csrc/cuda/log_bmm) on a CPU, against the terms in
// order: `select_on_cpu CASES SEED`. Prints what is wrong; the exit status says whether anything was.
#include "emulation.h"
#include "trials.h"

#include "log_bmm/sample_product.cuh"
#include "log_bmm/select.cuh"

using namespace dcs;
using trials::narrowed, trials::widened;

namespace {

struct Case {
  int64_t batches, rows, columns;
  int depth, splits;
  double scale;
  bool transposed, special, masked;
  unsigned seed;
};

Case draw(std::mt19937& random) {
  const auto upto = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)) + 1; };
  constexpr double kScales[] = {1, 10, 50, 1e4};
  Case c{upto(2), upto(random() % 2 ? 20 : 90), upto(random() % 2 ? 20 : 90), upto(random() % 3 ? 40 : 200), 1};
  c.splits = 1 + static_cast<int>(random() % 5);
  c.scale = kScales[random() % 4];
  c.transposed = random() % 2, c.special = random() % 4 == 0, c.masked = random() % 3 == 0;
  if (random() % 3 == 0) {  // tiles of which sums with exponents serve most
    const auto from = [&](int least, int most) { return least + static_cast<int>(random() % (most - least)); };
    c.batches = 1, c.rows = from(30, 90), c.columns = from(30, 90), c.depth = from(40, 200);
    c.scale = 50, c.special = false, c.masked = random() % 6 == 0;
  }
  c.seed = static_cast<unsigned>(random());
  return c;
}

template <typename T>
class Trial {
 public:
  using Acc = typename Types<T>::Acc;
  explicit Trial(const Case& of)
      : c(of),
        random(of.seed),
        a(at_random(c.batches * c.rows * c.depth)),
        b(at_random(c.batches * c.depth * c.columns)) {
    const int64_t outputs = c.batches * c.rows * c.columns;
    for (int64_t i = 0; i < outputs; ++i) {
      const double u = std::uniform_real_distribution<double>()(random);
      uniforms.push_back(std::min(static_cast<Acc>(u), below(Acc(1))));
    }
    uniforms[0] = 0, uniforms.back() = below(Acc(1));
    values.resize(outputs), indices.resize(outputs);
    job.a = {a.data(), c.rows * c.depth, c.transposed ? 1 : c.depth, c.transposed ? c.rows : 1, c.rows};
    job.b = {b.data(), c.columns * c.depth, c.transposed ? c.depth : 1, c.transposed ? 1 : c.columns, c.columns};
    job.batches = c.batches, job.depth = c.depth, job.splits = 1, job.split_depth = c.depth;
    job.uniforms = uniforms.data(), job.values = values.data(), job.indices = indices.data();
    job.is_narrow = random() % 2;
    job.by_columns = Divisor(static_cast<uint32_t>(c.columns)), job.by_rows = Divisor(static_cast<uint32_t>(c.rows));
  }

  bool run() {
    const int64_t tiles = c.batches * ((c.rows + kTile - 1) / kTile) * ((c.columns + kTile - 1) / kTile);
    const auto go = [&](int64_t blocks, auto&& kernel) {
      emulation::launch(blocks, kTileThreads, 0, false, ++launches, [&] { kernel(job); });
    };
    const auto is_right = [&](const char* name, bool is_max) {
      const bool found = is_max ? largest_are_right(name) : samples_are_right(name);
      std::fill(values.begin(), values.end(), narrowed<T>(7.0)), std::fill(indices.begin(), indices.end(), -7);
      return found;
    };
    go(2, select_by_thread_kernel<T, MaxOp>);
    if (!is_right("max by thread", true)) return false;
    go(2, select_by_thread_kernel<T, SampleOp>);
    if (!is_right("sample by thread", false)) return false;
    go(3, max_by_warp_kernel<T>);
    if (!is_right("max by warp", true)) return false;
    go(3, sample_by_warp_kernel<T>);
    if (!is_right("sample by warp", false)) return false;
    go(tiles, select_tile_kernel<T, MaxOp, false>);
    if (!is_right("max tiles", true)) return false;
    go(tiles, select_tile_kernel<T, SampleOp, false>);
    if (!is_right("sample tiles", false)) return false;

    job.splits = c.splits;
    job.split_depth = ((c.depth + c.splits - 1) / c.splits + kTileDepth - 1) / kTileDepth * kTileDepth;
    std::vector<typename SelectJob<T>::Part> parts(indices.size() * c.splits);
    job.parts = parts.data();
    go(tiles * c.splits, select_tile_kernel<T, MaxOp, true>);
    go(3, merge_max_kernel<T>);
    if (!is_right("max in parts", true)) return false;
    go(tiles * c.splits, select_tile_kernel<T, LseOp, true>);
    go(3, merge_sample_kernel<T>);
    if (!is_right("sample in parts", false)) return false;
    if constexpr (std::is_same_v<T, float>) {
      if (!products(tiles) || !is_right("sample by products", false)) return false;
    }
    return true;
  }

 private:
  std::vector<T> at_random(int64_t size) {
    std::normal_distribution<double> normal;
    std::vector<T> data;
    const auto chance = [&](double p) { return std::uniform_real_distribution<double>()(random) < p; };
    for (int64_t i = 0; i < size; ++i) {
      double x = c.scale * normal(random);
      if (c.scale == 10) x = std::round(x / 5);  // many are equal
      if (c.masked && chance(0.6)) x = -INFINITY;
      if (c.special && chance(0.002)) x = chance(0.5) ? NAN : INFINITY;
      data.push_back(narrowed<T>(x));
    }
    return data;
  }
  Acc term(int64_t batch, int64_t i, int64_t j, int64_t k) const {
    return job.a.of_batch(batch).template at<Acc>(i, k) + job.b.of_batch(batch).template at<Acc>(j, k);
  }
  template <typename F>
  bool every(const F& f) const {
    for (int64_t at = 0; at < static_cast<int64_t>(indices.size()); ++at) {
      std::vector<Acc> terms;
      for (int k = 0; k < c.depth; ++k)
        terms.push_back(term(at / (c.rows * c.columns), at / c.columns % c.rows, at % c.columns, k));
      if (!f(at, terms)) return false;
    }
    return true;
  }
  bool largest_are_right(const char* name) const {
    return every([&](int64_t at, const std::vector<Acc>& terms) {
      int best = 0;
      for (int k = 1; k < c.depth; ++k)
        if (terms[k] > terms[best] || (terms[k] != terms[k] && terms[best] == terms[best])) best = k;
      const T wanted = narrowed<T>(terms[best]);
      const bool is_right = indices[at] == best && memcmp(&wanted, &values[at], sizeof(T)) == 0;
      return is_right || (terms[best] != terms[best] && indices[at] == best) || complain(name, at, best);
    });
  }
  bool samples_are_right(const char* name) const {
    return every([&](int64_t at, const std::vector<Acc>& terms) {
      const int64_t index = indices[at];
      Acc largest = -INFINITY;
      for (int k = 0; k < c.depth; ++k) {
        if (!(terms[k] < INFINITY)) return index == k || complain(name, at, k);
        largest = std::max(largest, terms[k]);
      }
      if (largest == -INFINITY) return index == -1 || complain(name, at, -1);
      if (index < 0 || index >= c.depth || terms[index] == -INFINITY) return complain(name, at, -2);
      double sum = 0, before = 0, after = 0;
      for (int k = 0; k < c.depth; ++k) {
        if (k == index) before = sum;
        sum += std::exp(static_cast<double>(terms[k]) - static_cast<double>(largest));
        if (k == index) after = sum;
      }
      const double target = uniforms[at] * sum, slack = sum * 64 * std::numeric_limits<Acc>::epsilon();
      return (before <= target + slack && after >= target - slack) || complain(name, at, -3);
    });
  }
  bool complain(const char* name, int64_t at, int64_t wanted) const {
    printf(
        "%s[%ld] is %ld for %ld, u %.9g: %ld x (%ld, %d, %ld), %d splits, scale %g, transposed %d, special %d, masked %d, "
        "%zu bytes, seed %u\n",
        name, at, static_cast<long>(indices[at]), wanted, static_cast<double>(uniforms[at]), c.batches, c.rows, c.depth,
        c.columns, c.splits, c.scale, c.transposed, c.special, c.masked, sizeof(T), c.seed);
    return false;
  }

  // The first step of a product, plainly.
  template <typename Vectors>
  void scale(const Vectors& from, const ScaledSums& sums, int64_t ld, std::vector<Peak<float>>& peaks,
      std::vector<float>& scaled) const {
    for (int64_t n = 0; n < c.batches * from.count; ++n) {
      PeakScan<float> scan;
      const auto x = [&](int k) { return from.of_batch(n / from.count).template at<float>(n % from.count, k); };
      for (int k = 0; k < c.depth; ++k) scan.see(x(k));
      peaks.push_back(scan.peak());
      for (int k = 0; k < ld; ++k)
        scaled.push_back(k < c.depth ? scaled_element(peaks.back(), x(k), sums.exponent, true) : 0.f);
    }
  }
  bool products(int64_t tiles) {
    const ScaledSums sums(c.depth);
    const int ld = (c.depth + 3) / 4 * 4;
    std::vector<Peak<float>> peaks_a, peaks_b;
    std::vector<float> scaled_a, scaled_b;
    scale(job.a, sums, ld, peaks_a, scaled_a), scale(job.b, sums, ld, peaks_b, scaled_b);
    const auto aligned = [](std::vector<float>& data) {  // to 16 bytes
      data.insert(data.end(), 8, NAN);
      float* const to = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(data.data()) + 15) / 16 * 16);
      memmove(to, data.data(), (data.size() - 8) * sizeof(float));
      return to;
    };
    const float *to_a = aligned(scaled_a), *to_b = aligned(scaled_b);
    const SampleProductJob product{job.a, job.b, c.batches, c.depth, ld, peaks_a.data(), peaks_b.data(), to_a, to_b,
        sums, uniforms.data(), indices.data()};
    return emulation::launch(tiles, kTileThreads, 0, false, ++launches, [&] { sample_product_kernel(product); });
  }

  const Case c;
  std::mt19937 random;
  const std::vector<T> a, b;
  std::vector<Acc> uniforms;
  std::vector<T> values;
  std::vector<int64_t> indices;
  SelectJob<T> job{};
  unsigned launches = 0;
};

}  // namespace

int main(int count, char** arguments) { return trials::run_seeded<Trial>(count, arguments, draw); }
