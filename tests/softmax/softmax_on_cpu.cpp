// Random problems through the softmax kernels (csrc/cuda/softmax) on a CPU, against softmax in long double:
// `softmax_on_cpu CASES SEED`. Prints what is wrong; the exit status says whether anything was.
#include "emulation.h"
#include "trials.h"

#include <numeric>

namespace {

unsigned launch_seed = 0, most_together = 96;
int64_t most_shared = 0;  // bytes of a block, of those that a launch asks for

template <typename Kernel, typename Params>
cudaError_t launch_emulated(const cudaLaunchConfig_t& config, Kernel kernel, const Params& params) {
  int cluster = 1;
  bool together = false;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = static_cast<int>(config.attrs[i].val.clusterDim.x);
    together = together || config.attrs[i].id == cudaLaunchAttributeCooperative;
  }
  if (together && config.gridDim.x > most_together) return cudaErrorCooperativeLaunchTooLarge;
  if (static_cast<int64_t>(config.dynamicSmemBytes) > most_shared) return cudaErrorInvalidValue;
  const bool is_done = emulation::launch(
      config.gridDim.x, static_cast<int>(config.blockDim.x), static_cast<int64_t>(config.dynamicSmemBytes), together,
      ++launch_seed, [&] { kernel(params); }, cluster);
  return is_done ? cudaSuccess : cudaErrorLaunchTimeout;
}

}  // namespace

#define cudaLaunchKernelEx(config, kernel, params) launch_emulated(*(config), kernel, params)
#define cudaFuncSetAttribute(...) cudaSuccess
// Half of the time the device has room for clusters of 16.
#define cudaOccupancyMaxActiveClusters(clusters, ...) (*(clusters) = launch_seed % 2 ? 64 : 0, cudaSuccess)
#define cudaGetLastError() cudaSuccess
#define cudaStreamIsCapturing(stream, status) \
  (*(status) = launch_seed % 3 ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive, cudaSuccess)
#define cudaMemsetAsync(to, value, bytes, stream) memset(to, value, bytes)
#include "common/runs.cu"
#include "softmax/launch.cuh"

namespace dcs {
uint64_t new_tag() {
  static std::mt19937_64 random(1);
  return random();
}
// A captured launch has a counter half of the time, else its words are cleared.
uint32_t* new_launch_counter(bool captured) {
  static uint32_t counter = 0;
  return captured && launch_seed % 2 ? &counter : nullptr;
}
}  // namespace dcs

using namespace dcs;
using trials::narrowed, trials::widened;

namespace {

struct Case {
  int64_t outer, length, inner;
  bool backward, in_place, special;
  int multiprocessors, cluster, shared;  // `shared`: KB of a multiprocessor
  int64_t run, gap, offset;  // of the input, as Runs has them, and from a vector's begin; run 0: as the output's
  int of_sum = 8;            // units of rounding of a sum

  int64_t elements() const { return outer * length * inner; }
  int64_t place(int64_t index) const { return offset + index + (run > 0 ? index / run * gap : 0); }
  // Elements of memory that the input lies in.
  int64_t extent() const {
    int64_t most = 0;
    for (int64_t i = 0; i < elements(); ++i) most = std::max(most, place(i));
    return most + 1;
  }
};

// `size` elements, between others that must stay as they are.
template <typename T>
class Memory {
 public:
  explicit Memory(int64_t size) : size_(size), bytes_(static_cast<size_t>(size + 2 * kGuard) * sizeof(T) + 16) {
    T* const begin = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(bytes_.data()) + 15) / 16 * 16);
    data = begin + kGuard;
    std::fill(begin, data + size + kGuard, narrowed<T>(7.0));
  }
  bool is_intact() const {
    for (int64_t i = 0; i < kGuard; ++i)
      if (widened(data[-1 - i]) != 7.0 || widened(data[size_ + i]) != 7.0) return false;
    return true;
  }
  T* data;

 private:
  static constexpr int64_t kGuard = 16;
  int64_t size_;
  std::vector<char> bytes_;
};

// Of all launches the same memory, with what those before left there.
class Workspace final : public SoftmaxWorkspace {
 public:
  void* allocate(int64_t bytes) override {
    static std::vector<char> memory(1 << 24, '\xff');
    if (bytes > (1 << 24) - 16) std::abort();
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
  }
};

template <typename T>
class Trial {
 public:
  Trial(const Case& of, unsigned seed)
      : c(of), random(seed), size(c.elements()), extent(c.extent()), input(extent), saved(size), output(size) {
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < extent; ++i) input.data[i] = narrowed<T>(4 * normal(random));
    for (int64_t i = 0; i < size; ++i) {
      saved.data[i] = narrowed<T>(normal(random));
      output.data[i] = narrowed<T>(NAN);
    }
    const double most = sizeof(T) == 8 ? DBL_MAX : std::is_same_v<T, __half> ? 65504 : 3.38e38;
    const double kSpecial[] = {INFINITY, -INFINITY, NAN, 1e30, -1e30, most, -most};
    if (c.special && !c.backward) {
      for (int i = 0; i < 3; ++i) input.data[at_random(extent)] = narrowed<T>(kSpecial[random() % 7]);
      const int64_t outer = at_random(c.outer), column = at_random(c.inner);
      for (int64_t step = 0; step < c.length; ++step)
        input.data[c.place(at(outer, step, column))] = narrowed<T>(-INFINITY);
    }
  }

  // False where something is wrong.
  bool run() {
    std::vector<T> before(input.data, input.data + extent);
    T* const to = c.in_place ? input.data : output.data;
    words_are_of_tensors = true;
    tensors = {{input.data + c.offset, (extent - c.offset) * static_cast<int64_t>(sizeof(T))},
        {saved.data, size * static_cast<int64_t>(sizeof(T))}};
    SoftmaxProblem problem;
    problem.outer = c.outer, problem.length = c.length, problem.inner = c.inner;
    problem.backward = c.backward;
    if (c.run > 0) tensors.push_back({to, size * static_cast<int64_t>(sizeof(T))});
    problem.run = c.run, problem.gap = c.gap;
    problem.input = input.data + (c.run > 0 ? c.offset : 0), problem.saved = c.backward ? saved.data : nullptr;
    problem.output = to;
    Device device;
    device.multiprocessors = c.multiprocessors, device.cluster = c.cluster;
    device.shared_per_multiprocessor = c.shared << 10;
    most_shared = device.shared_per_block - 1024;
    Workspace workspace;
    if (SoftmaxLaunch<T>(problem, device, workspace, nullptr).run() != cudaSuccess) return complain("launch", 0, 0, 0);
    if (!input.is_intact() || !saved.is_intact() || !output.is_intact()) return complain("beyond", 0, 0, 0);
    for (int64_t outer = 0; outer < c.outer; ++outer)
      for (int64_t column = 0; column < c.inner; ++column)
        if (!check(before, to, outer, column)) return false;
    return true;
  }

 private:
  int64_t at_random(int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
  int64_t at(int64_t outer, int64_t step, int64_t column) const { return (outer * c.length + step) * c.inner + column; }

  bool check(const std::vector<T>& before, const T* to, int64_t outer, int64_t column) const {
    const auto x = [&](int64_t step) -> long double { return widened(before[c.place(at(outer, step, column))]); };
    const auto y = [&](int64_t step) -> long double { return widened(saved.data[at(outer, step, column)]); };
    long double largest = -INFINITY, sum = 0, magnitude = 0;
    for (int64_t step = 0; step < c.length; ++step) largest = std::max(largest, x(step));
    for (int64_t step = 0; step < c.length; ++step) {
      sum += c.backward ? x(step) * y(step) : std::exp(x(step) - largest);
      magnitude += std::abs(x(step) * y(step));
    }
    constexpr bool kIsHalf = std::is_same_v<T, __half>;
    constexpr long double kOfHalves = kIsHalf ? 0x1p-11L : 0x1p-8L, kLeast = sizeof(T) == 8 ? 0x1p-1021L : 0x1p-125L;
    const long double unit = sizeof(T) == 8 ? 0x1p-53L : 0x1p-24L, rounding = sizeof(T) == 2 ? kOfHalves : 0,
                      least = kIsHalf ? 0x1p-24L : kLeast;  // what is less may be 0
    for (int64_t step = 0; step < c.length; ++step) {
      const long double wanted = c.backward ? (x(step) - sum) * y(step) : std::exp(x(step) - largest) / sum,
                        found = widened(to[at(outer, step, column)]);
      const long double error = c.backward ? 40 * unit * (std::abs(x(step)) + magnitude) * std::abs(y(step))
                                           : unit * (c.of_sum + 2 * std::min(largest - x(step), 1000.0L)) * wanted;
      if (std::isnan(wanted) ? !std::isnan(found)
                             : !(std::abs(found - wanted) <= error + rounding * std::abs(wanted) + least))
        return complain("y", at(outer, step, column), found, wanted);
    }
    return true;
  }
  bool complain(const char* what, int64_t index, long double found, long double wanted) const {
    printf(
        "%s[%ld] is %Lg for %Lg: (%ld, %ld, %ld), %zu bytes, backward %d, in place %d, special %d, multiprocessors %d, "
        "clusters of %d, runs of %ld with %ld between, from %ld on\n",
        what, index, found, wanted, c.outer, c.length, c.inner, sizeof(T), c.backward, c.in_place, c.special,
        c.multiprocessors, c.cluster, c.run, c.gap, c.offset);
    return false;
  }

  const Case c;
  std::mt19937 random;
  const int64_t size, extent;
  Memory<T> input, saved, output;
};

// The largest up to `most`.
int64_t divisor_of(int64_t number, int64_t most) {
  while (number % most) --most;
  return most;
}

// Of every third input: rows, slabs, some of them, all of it, or a few elements to a run, that overlap or have gaps,
// some of them large. Runs are whole.
void draw_runs(Case& c, std::mt19937& random) {
  if (random() % 3) return;
  const int64_t runs[] = {c.length, c.inner, c.length * c.inner, c.elements(),
      divisor_of(c.elements(), 1 + static_cast<int64_t>(random() % 40))};
  c.in_place = false;
  c.run = runs[random() % 5];
  if (random() % 2) c.run *= divisor_of(c.elements() / c.run, 1 + static_cast<int64_t>(random() % 6));
  c.gap = random() % 4 ? static_cast<int64_t>(random() % 40) : -std::min<int64_t>(c.run, random() % 40);
  if (random() % 5 == 0) c.gap = static_cast<int64_t>(random() % static_cast<uint64_t>(2 * c.run));
  if (random() % 6 == 0) c.gap = static_cast<int64_t>(random() % 2) - c.run;
  c.offset = random() % 2 ? 0 : random() % 20;
}

int draw_multiprocessors(std::mt19937& random) {
  constexpr int kCounts[] = {4, 9, 40};
  return kCounts[random() % 3];
}

int draw_cluster(std::mt19937& random) {
  constexpr int kBlocks[] = {1, 1, 8, 16};
  return kBlocks[random() % 4];
}

// Sizes whose product is about a number of elements, most of them in a slab; a half with one column.
Case draw(std::mt19937& random) {
  std::uniform_real_distribution<double> uniform;
  const double most = random() % 6 ? 30000.0 : 300000.0, elements = 500.0 * std::pow(most / 500.0, uniform(random));
  const double part = std::sqrt(uniform(random)), other = uniform(random);  // of a slab, and of a step in it
  Case c{};
  c.inner = random() % 2 ? 1 : std::lround(std::pow(elements, part * other));
  c.length = std::max<int64_t>(1, std::lround(std::pow(elements, part) / static_cast<double>(c.inner)));
  c.outer = std::max<int64_t>(1, std::lround(elements / static_cast<double>(c.inner * c.length)));
  if (random() % 4 == 0) std::swap(c.outer, c.inner);
  c.backward = random() % 2;
  c.in_place = random() % 3 == 0;
  c.special = random() % 3 == 0;
  c.multiprocessors = random() % 2 ? 1 : draw_multiprocessors(random);
  c.cluster = draw_cluster(random);
  c.shared = 100;
  draw_runs(c, random);
  return c;
}

// Long lines of all kinds, which random ones are too seldom: (outer, length, inner).
constexpr int64_t kLong[][3] = {{1, 66001, 3}, {2, 40001, 1}, {1, 1100, 40}, {2, 300, 515}, {1, 600, 67}, {1, 1500, 36},
    {3, 9000, 2}, {1, 2, 40008}, {5, 7, 1000}, {3, 8, 2056}, {2, 5, 10003}};
constexpr int kLongCount = sizeof kLong / sizeof kLong[0];

Case long_case(int index, std::mt19937& random) {
  Case c{kLong[index][0], kLong[index][1], kLong[index][2], random() % 2 == 0, false, random() % 2 == 0,
      draw_multiprocessors(random), draw_cluster(random), 100, 0, 0, 0};
  draw_runs(c, random);
  return c;
}

// Tiles of one column and of more that groups of blocks hold together, several of them one after the other.
Case together_case(int index, std::mt19937& random) {
  constexpr int64_t kTiles[][3] = {
      {14, 33001, 1}, {3, 70001, 1}, {9, 33600, 1}, {13, 1601, 7}, {20, 9001, 2}, {1, 30001, 5}};
  const auto& tile = kTiles[index % 6];
  return {tile[0], tile[1], tile[2], random() % 2 == 0, random() % 2 == 0, random() % 2 == 0, random() % 2 ? 9 : 12, 1,
      random() % 2 ? 100 : 200, 0, 0, 0};
}
constexpr int kTogetherCount = 36;

// Of what threads add up hundreds of steps of in turn.
constexpr int kLongSum = 32;

// Columns of more steps than a cluster holds: windows of them, a third in views of padded steps, or slabs of which
// each block joins some columns.
Case long_windows_case(std::mt19937& random) {
  const bool is_slab = random() % 4 == 0;
  const int64_t unit = random() % 3 ? 1 : 8,
                inner = (is_slab ? 90 + random() % 160 : 257 + random() % (random() % 2 ? 64 : 500)) / unit * unit,
                length = (130'000 + random() % 150'000) / inner, outer = random() % 3 ? 1 : 2;
  Case c{outer, length, inner, random() % 2 == 0, random() % 4 == 0, random() % 2 == 0, random() % 3 ? 12 : 9, 1,
      is_slab || random() % 3 == 0 ? 200 : 100, 0, 0, 0};
  c.of_sum = kLongSum;
  if (random() % 3) return c;
  c.in_place = false, c.backward = random() % 4 == 0;
  c.run = inner, c.gap = random() % 20, c.offset = random() % 2 ? 0 : random() % 9;
  return c;
}
constexpr int kLongWindowsCount = 40;

// Few padded columns of more steps than the device holds.
Case padded_slab_case(std::mt19937& random) {
  constexpr int64_t kUnits[] = {1, 2, 2, 8};
  const int64_t unit = kUnits[random() % 4], most = 1 + random() % (random() % 2 ? 8 : 120),
                inner = std::max<int64_t>(2, most / unit * unit) + random() % 2 * unit,
                length = (200'000 + random() % 150'000) / inner, outer = random() % 3 ? 1 : 2,
                gap = random() % static_cast<uint64_t>(inner + 1) / unit * unit;
  return {outer, length, inner, random() % 8 == 0, false, random() % 2 == 0, random() % 2 ? 3 : 4, 1, 100, inner, gap,
      random() % 8 ? 0 : random() % 9, kLongSum};
}
constexpr int kPaddedSlabCount = 30;

// Slabs of one column, of a few, or of so many that a block reads a strip of them, in whole vectors or not; one slab,
// or some in one round or in more. The device does not hold them. Some are padded.
Case streamed_case(std::mt19937& random) {
  constexpr int64_t kMostInner[] = {1, 40, 300, 1000};
  const int kind = random() % 4;
  const int64_t inner = kMostInner[kind] - random() % static_cast<uint64_t>(kMostInner[kind] / 2 + 1),
                outer = kind < 2 && random() % 2 ? 7 + random() % 14 : 1,
                elements = (kind < 3 ? 200'000 : 600'000) + random() % 300'000, length = elements / (inner * outer);
  Case c{outer, length, random() % 4 ? inner : (inner + 7) / 8 * 8, random() % 2 == 0, random() % 4 == 0,
      random() % 2 == 0, 1 + static_cast<int>(random() % (kind < 3 ? 4 : 2)), 1, random() % 2 ? 100 : 200, 0, 0, 0,
      kLongSum};
  if (random() % 3) return c;
  c.in_place = false, c.backward = random() % 8 == 0;
  c.run = c.length * c.inner, c.gap = random() % 20, c.offset = random() % 2 ? 0 : random() % 9;
  return c;
}
constexpr int kStreamedCount = 40;

// Few long columns of few elements, of which a block, or a cluster, has some or one.
Case narrow_case(std::mt19937& random) {
  const int64_t inner = 2 + random() % 39, length = 300 + random() % (300'000 / static_cast<uint64_t>(inner));
  Case c{1, length, inner, random() % 2 == 0, false, random() % 2 == 0, 132, random() % 3 ? 16 : 8, 227, 0, 0, 0};
  if (random() % 3 == 0) c.run = inner, c.gap = random() % 8;
  return c;
}
constexpr int kNarrowCount = 20;

// A row, or a few, whose clusters of 16 blocks run at once.
Case few_rows_case(std::mt19937& random) {
  std::uniform_real_distribution<double> uniform;
  const auto length = static_cast<int64_t>(66'000 * std::pow(9.0, uniform(random)));
  Case c{static_cast<int64_t>(1 + random() % 2), length, 1, random() % 2 == 0, random() % 4 == 0, random() % 2 == 0,
      132, 16, 227, 0, 0, 0};
  if (random() % 3 == 0) c.in_place = false, c.run = length, c.gap = random() % 9;
  return c;
}
constexpr int kFewRowsCount = 10;

// Small tensors of any number of columns and steps, of which threads take some, in one block or in a cluster, and whose
// input may be any view.
Case small_case(std::mt19937& random) {
  const int64_t inner = 2 + random() % (random() % 4 ? 64 : 400), outer = random() % 3 ? 1 : 1 + random() % 9,
                most = 60'000 / (inner * outer),
                length = 1 + random() % static_cast<uint64_t>(std::max<int64_t>(1, most));
  Case c{outer, length, inner, random() % 2 == 0, random() % 4 == 0, random() % 2 == 0,
      random() % 3 ? 132 : draw_multiprocessors(random), draw_cluster(random), 227, 0, 0, 0};
  draw_runs(c, random);
  return c;
}
constexpr int kSmallCount = 60;

// Few steps of more columns than are small, whose steps, gaps and begin are multiples of one, two or eight elements:
// contiguous, padded or overlapping steps, slabs, or parts of a step.
Case few_steps_case(std::mt19937& random) {
  constexpr int64_t kUnits[] = {1, 1, 2, 8}, kOuters[] = {1, 1, 3, 60, 300};
  const int64_t unit = kUnits[random() % 4], length = 1 + random() % (random() % 3 ? 8 : 17),
                outer = kOuters[random() % 5], least = std::max<int64_t>(64, 33'000 / (outer * length)),
                inner = least / unit * unit + unit * (1 + random() % 9);
  Case c{outer, length, inner, random() % 2 == 0, false, random() % 3 == 0, 1, 1, 100, 0, 0, 0};
  c.in_place = random() % 8 == 0;
  if (c.in_place || random() % 4 == 0) return c;
  const int64_t parts = divisor_of(inner / unit, 1 + random() % 40);
  const int64_t runs[] = {inner, inner, length * inner, length * inner * divisor_of(outer, 20), inner / parts};
  c.run = runs[random() % 5];
  c.gap = unit * static_cast<int64_t>(random() % 20);
  if (random() % 5 == 0) c.gap = -std::min(c.run, c.gap);
  c.offset = random() % 2 ? 0 : unit * static_cast<int64_t>(random() % 9);
  return c;
}
constexpr int kFewStepsCount = 60;

}  // namespace

int main(int count, char** arguments) {
  const auto draw_or_take = [](int i, std::mt19937& random) {
    if (i < kLongCount) return long_case(i, random);
    if ((i -= kLongCount) < kTogetherCount) return together_case(i, random);
    if ((i -= kTogetherCount) < kLongWindowsCount) return long_windows_case(random);
    if ((i -= kLongWindowsCount) < kPaddedSlabCount) return padded_slab_case(random);
    if ((i -= kPaddedSlabCount) < kStreamedCount) return streamed_case(random);
    if ((i -= kStreamedCount) < kNarrowCount) return narrow_case(random);
    if ((i -= kNarrowCount) < kFewRowsCount) return few_rows_case(random);
    if ((i -= kFewRowsCount) < kSmallCount) return small_case(random);
    if ((i -= kSmallCount) < kFewStepsCount) return few_steps_case(random);
    return i % 2 ? draw(random) : small_case(random);
  };
  return trials::run_all<true>(count, arguments, draw_or_take, [](const Case& c, auto type, std::mt19937& random) {
    return Trial<typename decltype(type)::type>(c, static_cast<unsigned>(random())).run();
  });
}
