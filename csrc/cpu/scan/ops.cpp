// The CPU backend: picks the kernels for this CPU and shares a problem out among torch's threads. How a problem is cut
// up depends on its sizes alone, never on the number of threads, wherever the cut shows in the bits.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "dcs/scan/ops.h"
#include "common/dispatch.h"
#include "common/huge_pages.h"
#include "scan/kernels.h"
#include "scan/short_runs.h"

namespace dcs {
namespace cpu {
namespace {

// Steps that are summed and then scanned together, while the input is still in a cache, by one thread and by several,
// to which a round's two ends cost more: as floats they are 256 KiB and 4 MiB.
constexpr int64_t kStepsOfThread = 16 * kChunk, kStepsTogether = 256 * kChunk;

// Every CPU with AVX2 has F16C.
const Kernels& kernels() {
  static const Kernels& chosen = best_table(kKernelsAvx512, kKernelsAvx2, kKernelsDefault);
  return chosen;
}

// Half a vector of columns: the 256-bit kernels take a vector a step, and no sums across lanes. Of many elements chunks
// of time, which several threads share, are faster.
constexpr int64_t kMostOfHalfVectors = 200000, kManyOuter = 64;

const Kernels& kernels_of_columns(const ScanProblem& problem) {
  const bool has_wider = &kernels() == &kKernelsAvx512 && problem.inner < kWidestVector && !problem.backward;
  const bool is_small = problem.rows() * problem.length <= kMostOfHalfVectors || problem.outer >= kManyOuter;
  return has_wider && is_small && kKernelsAvx2.by_columns(problem) ? kKernelsAvx2 : kernels();
}

// share_out for scans: below 1e5 elements a scan takes less than waking a thread may.
constexpr int64_t kLeastParallel = 100000;

template <typename Run>
void share_scan(int64_t count, int64_t elements, const Run& run) {
  if (elements <= kLeastParallel) return run(int64_t{0}, count);
  share_out(count, elements, run);
}

void by_columns(const ScanProblem& problem, const Kernels& table) {
  // Every column stands for itself, so how they are cut up shows in no bit. Two blocks a thread, one after the other:
  // with one, neighboring threads would write to the cache line where their blocks meet at the same time in every step
  // (640 x 1000 float: 4 times slower than one thread).
  const int64_t shares = 2 * torch::stable::get_num_threads();
  const int64_t wanted = (problem.rows() + shares - 1) / shares;
  const int64_t width = std::min(kColumns, std::max<int64_t>(32, (wanted + 15) / 16 * 16));
  const int64_t blocks = column_blocks(problem.inner, width);
  share_scan(problem.outer * blocks, problem.rows() * problem.length, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t inner = block % blocks * width;
      const bool is_last = block % blocks == blocks - 1;
      table.columns(problem, block / blocks, inner, is_last ? problem.inner - inner : width);
    }
  });
}

void by_rows(const ScanProblem& problem) {
  share_scan(kernels().sets(problem), problem.rows() * problem.length,
      [&](int64_t begin, int64_t end) { kernels().rows(problem, begin, end); });
}

// `joined`: the problem without_runs.
void by_short_runs(const ScanProblem& problem, const ScanProblem& joined, const Kernels& table) {
  share_scan(column_blocks(joined.inner, run_columns(problem)), joined.inner * joined.length,
      [&](int64_t begin, int64_t end) { scan_short_runs(problem, joined, table, begin, end); });
}

// calls(row, begin, end) for the ranges of [begin, end), numbered row * per_row + item.
template <typename Call>
void for_each_row(int64_t begin, int64_t end, int64_t per_row, const Call& call) {
  while (begin < end) {
    const int64_t row = begin / per_row, stop = std::min(end, (row + 1) * per_row);
    call(row, begin - row * per_row, stop - row * per_row);
    begin = stop;
  }
}

// by_chunks by one thread: each chunk is read once.
void by_chunks_in_order(const ScanProblem& problem) {
  const Kernels& table = kernels();
  const int64_t chunks = (problem.length + kChunk - 1) / kChunk, joined = table.together(problem);
  const bool has_sums = problem.backward && problem.gamma_kind != GammaKind::kStep;
  std::vector<Chunk> described(joined);
  for (int64_t row = 0; row < problem.rows(); row += joined) {
    std::vector<Value> carries(joined, Value{0, 0}), sums(joined, Value{0, 0});
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t c = 0; c < joined; ++c) described[c].carry = carries[c];
      table.scan_and_aggregate(problem, row, chunk, described.data());
      for (int64_t c = 0; c < joined; ++c) {
        if (chunk + 1 < chunks) table.carry(problem, row + c, chunk, chunk + 1, &described[c], &carries[c]);
        if (has_sums) table.add_partials(problem, chunk, chunk + 1, &described[c], &sums[c]);
      }
    }
    if (has_sums)
      for (int64_t c = 0; c < joined; ++c) table.store_partial(problem, row + c, &sums[c]);
  }
}

void by_chunks(const ScanProblem& problem) {
  const Kernels& table = kernels();
  if (torch::stable::get_num_threads() == 1 && table.takes_one_pass(problem)) return by_chunks_in_order(problem);
  const int64_t rows = problem.rows(), steps = table.chunk_steps(problem), abreast = table.abreast(problem);
  const int64_t in_cache = torch::stable::get_num_threads() == 1 ? kStepsOfThread : kStepsTogether;
  const int64_t chunks = (problem.length + steps - 1) / steps, most = in_cache / steps / rows / abreast * abreast;
  const int64_t together = std::min(chunks, std::max(abreast, most));
  std::vector<Chunk> described(rows * together);
  std::vector<Value> carries(rows, Value{0, 0}), sums(rows, Value{0, 0});
  const int64_t joined = table.together(problem), groups = rows / joined;
  // run(row, begin, end) for the first `some` chunks of every group of rows, as many at a time as go abreast.
  const auto share = [&](int64_t some, const auto& run) {
    const int64_t sets = (some + abreast - 1) / abreast;
    share_scan(groups * sets, rows * some * steps, [&](int64_t begin, int64_t end) {
      for_each_row(begin, end, sets, [&](int64_t group, int64_t from, int64_t to) {
        run(group * joined, from * abreast, std::min(to * abreast, some));
      });
    });
  };
  for (int64_t first = 0; first < chunks; first += together) {
    const int64_t count = std::min(together, chunks - first);
    // What the row's last chunk ends in, nobody asks.
    const int64_t summed = first + count == chunks ? count - 1 : count;
    if (summed > 0)
      share(summed, [&](int64_t row, int64_t from, int64_t to) {
        table.aggregate(problem, row, first + from, first + to, &described[row * together + from], together);
      });
    for (int64_t row = 0; row < rows; ++row) {
      table.carry(problem, row, first, first + summed, &described[row * together], &carries[row]);
      if (summed < count) described[row * together + summed].carry = carries[row];
    }
    share(count, [&](int64_t row, int64_t from, int64_t to) {
      table.scan_chunks(problem, row, first + from, first + to, &described[row * together + from], together);
    });
    if (problem.backward && problem.gamma_kind != GammaKind::kStep)
      for (int64_t row = 0; row < rows; ++row)
        table.add_partials(problem, first, first + count, &described[row * together], &sums[row]);
  }
  if (problem.backward && problem.gamma_kind != GammaKind::kStep)
    for (int64_t row = 0; row < rows; ++row) table.store_partial(problem, row, &sums[row]);
}

void by_window(const ScanProblem& problem) {
  const int64_t elements = problem.length + (problem.initial != nullptr ? 1 : 0);
  const int64_t blocks = (elements + problem.window - 1) / problem.window;
  share_scan(problem.rows() * blocks, problem.rows() * elements, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<Value[]> scratch(new Value[problem.window]);
    for_each_row(begin, end, blocks,
        [&](int64_t row, int64_t from, int64_t to) { kernels().window(problem, row, from, to, scratch.get()); });
  });
}

// Steps that lie apart in the input, each as far from the next one, and side by side in the output. Of few rows, which
// do not fill vectors that have a step of each, and of few steps a copy without gaps and its scan take half of the
// time. Of up to so many bytes.
constexpr int64_t kMostClosed = 1 << 20, kFewClosedRows = 4, kFewClosedSteps = 4;

bool has_steps_apart(const ScanProblem& p) {
  const Strides &from = p.input_strides, &to = p.output_strides;
  return p.inner == 1 && (p.outer <= kFewClosedRows || p.length <= kFewClosedSteps) && p.length > 1 && !p.backward &&
      std::abs(from.time) > 1 && to.time == 1 &&
      (p.outer == 1 || (from.outer == p.length * from.time && to.outer == p.length)) &&
      p.rows() * p.length * element_size(p.dtype) <= kMostClosed;
}

void run(const ScanProblem& problem);

void by_closed_steps(const ScanProblem& problem) {
  const int64_t bytes = element_size(problem.dtype), count = problem.rows() * problem.length,
                apart = problem.input_strides.time * bytes;
  const std::unique_ptr<char[]> steps(new char[static_cast<size_t>(count * bytes)]);
  share_scan(count, count, [&](int64_t begin, int64_t end) {
    const char* const from = static_cast<const char*>(problem.input) + begin * apart;
    copy_runs(steps.get() + begin * bytes, from, end - begin, apart, bytes);
  });
  ScanProblem closed = problem;
  closed.input = steps.get();
  closed.input_strides = problem.output_strides;
  run(closed);
}

void run(const ScanProblem& problem) {
  const auto advise = [&](const void* result, const Strides& strides) {
    advise_huge_pages(result, strides, problem.outer, problem.length, problem.inner, element_size(problem.dtype));
  };
  advise(problem.output, problem.output_strides);
  if (problem.backward && problem.gamma_kind == GammaKind::kStep)
    advise(problem.grad_gamma, problem.grad_gamma_strides);
  // A window that reaches beyond the first element cuts nothing.
  const bool windowed = problem.window > 0 && problem.window < problem.length + (problem.initial != nullptr ? 1 : 0);
  if (windowed) return by_window(problem);
  if (has_steps_apart(problem)) return by_closed_steps(problem);
  if (has_short_runs(problem)) {
    const ScanProblem joined = without_runs(problem);
    const Kernels& of_runs = kernels_of_columns(joined);
    if (of_runs.by_columns(joined)) return by_short_runs(problem, joined, of_runs);
  }
  const Kernels& of_columns = kernels_of_columns(problem);
  if (of_columns.by_columns(problem)) return by_columns(problem, of_columns);
  if (kernels().by_chunks(problem)) return by_chunks(problem);
  by_rows(problem);
}

}  // namespace
}  // namespace cpu

struct Cpu {
  static void run(const ScanProblem& problem, const Tensor&) { cpu::run(problem); }
  // One sum a row: rows are summed up whole.
  static int64_t partials(const ScanProblem&, const Tensor&) { return 1; }
  static Tensor sum(const Tensor& values) { return sum_of_all(values); }
  static Tensor row_sums(const Tensor& values) { return sum_of_rows(values); }
};

}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CPU, m) { dcs::register_scan_ops<dcs::Cpu>(m); }
