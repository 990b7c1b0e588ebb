// Eight rows abreast, whatever their gates, resets, lengths and addresses: batches of steps are turned into lines
// (transpose.h), a step of the recurrence is a few vectors, and the results are turned back. A row is summed step by
// step, so its bits are those of one multiply-add a step. Of few long rows, chunks go abreast as if they were rows.
#pragma once

#include "scan/row_view.h"
#include "scan/transpose.h"

namespace dcs::cpu {
namespace {

constexpr int64_t kLines = 64;  // of a batch: its operands stay in the first-level cache
constexpr int64_t kLanesOfBatch = kLines * kAbreast;
constexpr int kVectors = kAbreast / kWidth;

enum class Pass { kForward, kBackward, kFold };

// What the lines of a problem are scanned for. Only the scan itself is compiled for each of them.
struct Form {
  Pass pass;
  bool has_steps;  // one gate a step
  bool has_reset;
};

// How rows are numbered: those that go abreast lie `outer` or `inner` strides apart.
struct Grid {
  bool is_outer;
  int64_t abreast, others;
  int64_t groups;  // of kAbreast rows, in each of `others`

  explicit Grid(const ScanProblem& problem) {
    is_outer = problem.outer >= problem.inner;
    abreast = is_outer ? problem.outer : problem.inner;
    others = is_outer ? problem.inner : problem.outer;
    groups = (abreast + kAbreast - 1) / kAbreast;
  }
};

template <typename T>
struct Abreast {
  using Scan = void (Abreast::*)();

  const ScanProblem& problem;
  const Form form;
  const Scan scan_batch;  // `scan` of the form
  const Grid grid;
  const int64_t shift;      // how many steps on in scan order a gate acts
  const bool starts_empty;  // a row's first value is its input
  // The batch: lane l's first line is step first + l * lane_apart of its row in memory's order.
  int64_t outer = 0, inner = 0, rows = 0, first = 0, count = 0, lane_apart = 0;
  bool begins = false;  // lane 0, if chunks go abreast, else all
  // By lane.
  alignas(64) double carries[kLanesOfBatch];
  alignas(64) double row_gates[kLanesOfBatch];
  alignas(64) double first_gates[kLanesOfBatch];
  alignas(64) double sums[kLanesOfBatch];  // of gamma's gradient; of a fold: products of gates
  uint64_t cuts = 0;
  alignas(64) T x[kLanesOfBatch + kSpill * kAbreast];
  alignas(64) T gates[kLanesOfBatch + kSpill * kAbreast];
  alignas(64) T saved[kLanesOfBatch + kSpill * kAbreast];
  alignas(64) bool flags[kLanesOfBatch + kSpill * kAbreast];
  alignas(64) bool own_flags[kLanesOfBatch + kSpill * kAbreast];

  Abreast(const ScanProblem& given, Pass pass)
      : problem(given),
        form{pass, given.gamma_kind == GammaKind::kStep, given.reset != nullptr},
        scan_batch(scan_of(form)),
        grid(given),
        shift(given.shifted ? 1 : 0),
        starts_empty(given.shifted || given.initial == nullptr) {
    for (int64_t lane = 0; lane < together() * kAbreast; ++lane) {
      row_gates[lane] = given.gamma_value;
      carries[lane] = 0;
    }
  }

  // Groups of a batch.
  DCS_INLINE int64_t together() const { return problem.length < kLines ? kLines / problem.length : 1; }
  DCS_INLINE int64_t groups() const { return (rows + kAbreast - 1) / kAbreast; }
  DCS_INLINE bool is_chunked() const { return lane_apart != 0; }
  DCS_INLINE int64_t lane_stride(const Strides& strides) const {
    if (is_chunked()) return lane_apart * strides.time;
    return grid.is_outer ? strides.outer : strides.inner;
  }
  // Where lane 0 has step `step`, counted in memory's order.
  DCS_INLINE int64_t offset(const Strides& strides, int64_t step) const { return strides.at(outer, step, inner); }

  // One number a row, of type From, by lane.
  template <typename From>
  DCS_SHARED void read_lanes(const void* operand, const Strides& strides, double* values) const {
    const int64_t apart = is_chunked() ? 0 : lane_stride(strides);
    read_values(static_cast<const From*>(operand) + offset(strides, 0), apart, rows, values);
  }

  DCS_SHARED void read_row_gates() {
    if (problem.gamma_kind != GammaKind::kRow) return;
    const Strides& strides = problem.gamma_strides;
    switch (problem.gamma_dtype) {
      case ElementType::Half: return read_lanes<Half>(problem.gamma, strides, row_gates);
      case ElementType::BFloat16: return read_lanes<BFloat16>(problem.gamma, strides, row_gates);
      case ElementType::Float: return read_lanes<float>(problem.gamma, strides, row_gates);
      default: return read_lanes<double>(problem.gamma, strides, row_gates);
    }
  }

  // The batch's lines of an operand, `ahead` steps on in memory; `outside`: of steps that no row has.
  template <typename E>
  DCS_SHARED void gather(E* lines, const E* operand, const Strides& strides, int64_t ahead, E outside) const {
    const int64_t furthest = lane_apart * (rows - 1), below = furthest < 0 ? furthest : 0,
                  above = furthest > 0 ? furthest : 0;
    int64_t low = -ahead - first - below, high = first + above + count + ahead - problem.length;
    low = low < 0 ? 0 : low;
    high = high < 0 ? 0 : high;
    if (low + high < count) inside(lines, operand, strides, ahead, low, count - high);
    for (int64_t g = 0; g < groups(); ++g) {
      if (low > 0) edge(lines, operand, strides, ahead, outside, g, 0);
      if (high > 0) edge(lines, operand, strides, ahead, outside, g, count - 1);
    }
  }

  // A line that is not within every row: `ahead` is one step at most.
  template <typename E>
  DCS_SHARED void edge(
      E* lines, const E* operand, const Strides& strides, int64_t ahead, E outside, int64_t group, int64_t line) const {
    const int64_t apart = lane_stride(strides), from = offset(strides, first + line + ahead);
    for (int64_t r = 0; r < kAbreast; ++r) {
      const int64_t at = group * kAbreast + r, lane = at < rows ? at : rows - 1;
      const int64_t step = first + line + ahead + lane * lane_apart;
      const bool is_there = step >= 0 && step < problem.length;
      lines[(group * count + line) * kAbreast + r] = is_there ? operand[from + lane * apart] : outside;
    }
  }

  // Lines [from, to) of every group, all within their rows.
  template <typename E>
  void inside(E* lines, const E* operand, const Strides& strides, int64_t ahead, int64_t from, int64_t to) const {
    const int64_t apart = lane_stride(strides);
    const E* base = operand + offset(strides, first + ahead + from);
    constexpr int kBytes = sizeof(E);
    if (strides.time == 1) {
      const E* end = operand + strides.at(problem.outer - 1, problem.inner - 1) + problem.length;
      const RowBytes bytes{reinterpret_cast<const char*>(base), apart * kBytes, reinterpret_cast<const char*>(end)};
      return to_lines<kBytes>(reinterpret_cast<char*>(lines + from * kAbreast), count, bytes, rows, to - from);
    }
    for (int64_t g = 0; g < groups(); ++g, base += kAbreast * apart) {
      const int64_t left = rows - g * kAbreast < kAbreast ? rows - g * kAbreast : kAbreast;
      for (int64_t k = from; k < to; ++k)
        for (int64_t r = 0; r < kAbreast; ++r)
          lines[(g * count + k) * kAbreast + r] = base[(k - from) * strides.time + (r < left ? r : left - 1) * apart];
    }
  }

  DCS_SHARED void scatter(const T* lines, T* result, const Strides& strides) const {
    const int64_t apart = lane_stride(strides);
    T* base = result + offset(strides, first);
    constexpr int kBytes = sizeof(T);
    if (strides.time == 1)
      return from_lines<kBytes>(
          reinterpret_cast<const char*>(lines), count, reinterpret_cast<char*>(base), apart * kBytes, rows, count);
    for (int64_t g = 0; g < groups(); ++g, base += kAbreast * apart) {
      const int64_t left = rows - g * kAbreast < kAbreast ? rows - g * kAbreast : kAbreast;
      for (int64_t k = 0; k < count; ++k)
        for (int64_t r = 0; r < left; ++r) base[k * strides.time + r * apart] = lines[(g * count + k) * kAbreast + r];
    }
  }

  // Where a lane's first or last step in scan order is.
  DCS_INLINE int64_t line_of(int64_t lane, bool is_first) const {
    const int64_t line = is_first != problem.reverse ? 0 : count - 1;
    return (lane / kAbreast * count + line) * kAbreast + lane % kAbreast;
  }

  // What the batch reads. A row that begins without a carry has a gate of -0 there, so that -0 * 0 + x is x, -0 too.
  DCS_SHARED void stage(bool ends) {
    const int64_t back = problem.reverse ? shift : -shift, on = problem.reverse ? -1 : 1;
    const int64_t beginners = begins && starts_empty ? (is_chunked() ? 1 : rows) : 0;
    gather(x, static_cast<const T*>(problem.input), problem.input_strides, 0, T{});
    if (form.has_steps) {
      gather(gates, static_cast<const T*>(problem.gamma), problem.gamma_strides, back, T{});
      for (int64_t lane = 0; lane < beginners; ++lane) gates[line_of(lane, true)] = Element<T>::store(-0.0);
    } else if (begins) {
      for (int64_t lane = 0; lane < groups() * kAbreast; ++lane)
        first_gates[lane] = lane < beginners ? -0.0 : row_gates[lane];
    }
    if (form.has_reset) gather(flags, problem.reset, problem.reset_strides, back, false);
    if (form.pass == Pass::kBackward) {
      gather(saved, static_cast<const T*>(problem.saved), problem.saved_strides, on, T{});
      if (ends && problem.initial != nullptr) {
        alignas(64) double tails[kLanesOfBatch];
        read_lanes<T>(problem.initial, problem.initial_strides, tails);
        for (int64_t lane = is_chunked() ? rows - 1 : 0; lane < rows; ++lane)
          saved[line_of(lane, false)] = Element<T>::store(tails[lane]);
      }
      if (form.has_reset) gather(own_flags, problem.reset, problem.reset_strides, 0, false);
    }
  }

  // Scans the staged batch: outputs in `x`, gradients of gates in `saved`.
  template <Pass kPass, bool kStep, bool kReset>
  DCS_SHARED void scan() {
    constexpr bool kBackward = kPass == Pass::kBackward, kFold = kPass == Pass::kFold;
    constexpr bool kSums = kFold || (kBackward && !kStep);
    const int64_t lines = count, step = problem.reverse ? -kAbreast : kAbreast;
    for (int64_t lane = 0; lane < groups() * kAbreast; lane += kAbreast) {
      int64_t line = lane * lines + (problem.reverse ? (lines - 1) * kAbreast : 0);
      Vector carry[kVectors], sum[kVectors], gate[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        carry[v] = load(carries + lane + v * kWidth);
        if constexpr (!kStep) gate[v] = load((begins ? first_gates : row_gates) + lane + v * kWidth);
        if constexpr (kSums) sum[v] = load(sums + lane + v * kWidth);
      }
      const auto advance = [&]() __attribute__((always_inline)) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = line + v * kWidth;
          const Vector input = load(x + at);
          if constexpr (kStep) gate[v] = load(gates + at);
          carry[v] = multiply_add(gate[v], carry[v], input);
          if constexpr (kReset) carry[v] = select(flags + at, input, carry[v]);
          if constexpr (kFold) sum[v] = multiply(sum[v], gate[v]);
          else store(x + at, carry[v]);
          if constexpr (kBackward && kStep) {
            Vector term = multiply(carry[v], load(saved + at));
            if constexpr (kReset) term = select(own_flags + at, splat(0.0), term);
            store(saved + at, term);
          } else if constexpr (kBackward) {
            const Vector after = multiply_add(carry[v], load(saved + at), sum[v]);
            if constexpr (kReset) sum[v] = select(own_flags + at, sum[v], after);
            else sum[v] = after;
          }
        }
        if constexpr (kFold && kReset) {
          uint64_t eight;
          std::memcpy(&eight, flags + line, sizeof eight);
          cuts |= eight;
        }
        line += step;
      };
      int64_t k = 0;
      if constexpr (!kStep) {
        advance();
        for (int v = 0; v < kVectors; ++v) gate[v] = load(row_gates + lane + v * kWidth);
        k = 1;
      }
      for (; k < lines; ++k) advance();
      for (int v = 0; v < kVectors; ++v) {
        store(carries + lane + v * kWidth, carry[v]);
        if constexpr (kSums) store(sums + lane + v * kWidth, sum[v]);
      }
    }
  }

  template <Pass kPass>
  static Scan scan_with(const Form& form) {
    if (form.has_steps) return form.has_reset ? &Abreast::scan<kPass, true, true> : &Abreast::scan<kPass, true, false>;
    return form.has_reset ? &Abreast::scan<kPass, false, true> : &Abreast::scan<kPass, false, false>;
  }
  static Scan scan_of(const Form& form) {
    switch (form.pass) {
      case Pass::kForward: return scan_with<Pass::kForward>(form);
      case Pass::kBackward: return scan_with<Pass::kBackward>(form);
      default: return scan_with<Pass::kFold>(form);
    }
  }

  void batch(bool ends) {
    stage(ends);
    (this->*scan_batch)();
    if (form.pass == Pass::kFold) return;
    scatter(x, static_cast<T*>(problem.output), problem.output_strides);
    if (form.pass == Pass::kBackward && form.has_steps)
      scatter(saved, static_cast<T*>(problem.grad_gamma), problem.grad_gamma_strides);
  }

  // Steps [start, start + of) in scan order of lane 0's row, and as many of the others'.
  DCS_SHARED void segment(int64_t start, int64_t of) {
    // Parts of about one length: whole squares, all of them far longer than one.
    const int64_t parts = (of + kLines - 1) / kLines, each = ((of + parts - 1) / parts + 7) / 8 * 8;
    const int64_t furthest = start + of + (rows - 1) * (lane_apart < 0 ? -lane_apart : lane_apart);
    for (int64_t done = 0; done < of; done += each) {
      count = of - done < each ? of - done : each;
      first = problem.reverse ? problem.length - start - done - count : start + done;
      begins = start + done == 0;
      batch(done + count == of && furthest == problem.length);
    }
  }

  void whole_rows(int64_t begin, int64_t end) {
    const bool has_sums = form.pass == Pass::kBackward && !form.has_steps;
    for (int64_t group = begin, some; group < end; group += some) {
      const int64_t other = group / grid.groups, at = group % grid.groups * kAbreast;
      some = grid.groups - group % grid.groups;
      some = some < end - group ? some : end - group;
      some = some < together() ? some : together();
      outer = grid.is_outer ? at : other;
      inner = grid.is_outer ? other : at;
      rows = grid.abreast - at < some * kAbreast ? grid.abreast - at : some * kAbreast;
      for (int64_t lane = 0; lane < some * kAbreast; ++lane) carries[lane] = sums[lane] = 0;
      if (!starts_empty) read_lanes<T>(problem.initial, problem.initial_strides, carries);
      read_row_gates();
      segment(0, problem.length);
      for (int64_t lane = 0; has_sums && lane < rows; ++lane)
        write_partial<T>(problem, outer + (grid.is_outer ? lane : 0), inner + (grid.is_outer ? 0 : lane), sums[lane]);
    }
  }

  // Chunks [begin, end) of a row.
  void chunks_of(int64_t row, int64_t begin, int64_t end, Chunk* chunks) {
    const bool folds = form.pass == Pass::kFold;
    const int64_t steps = chunk_steps(problem);
    outer = row / problem.inner;
    inner = row % problem.inner;
    lane_apart = problem.reverse ? -steps : steps;
    for (int64_t chunk = begin; chunk < end; chunk += rows, chunks += rows) {
      const int64_t length = chunk_length(problem, chunk);
      rows = 1;
      while (rows < kAbreast && chunk + rows < end && chunk_length(problem, chunk + rows) == length) ++rows;
      read_row_gates();
      cuts = chunk == 0 ? 1 : 0;
      for (int64_t lane = 0; lane < kAbreast; ++lane) {
        carries[lane] = folds || lane >= rows ? 0.0 : chunks[lane].carry.re;
        sums[lane] = folds ? 1.0 : 0.0;
      }
      if (chunk == 0) carries[0] = starts_empty ? 0.0 : read_initial<T>(problem, outer, inner);
      segment(chunk * steps, length);
      for (int64_t lane = 0; lane < rows; ++lane) {
        Chunk& described = chunks[lane];
        if (folds) {
          keep(&described.sum, carries[lane]);
          keep(&described.product, sums[lane]);
          described.cut = (cuts >> (8 * lane) & 0xff) != 0;
        } else {
          keep(&described.partial, sums[lane]);
        }
      }
    }
  }
};

// Groups of rows [begin, end).
template <typename T>
void abreast_rows(const ScanProblem& problem, int64_t begin, int64_t end) {
  Abreast<T>(problem, problem.backward ? Pass::kBackward : Pass::kForward).whole_rows(begin, end);
}

template <typename T>
void abreast_fold(const ScanProblem& problem, int64_t row, int64_t begin, int64_t end, Chunk* chunks) {
  Abreast<T>(problem, Pass::kFold).chunks_of(row, begin, end, chunks);
}

template <typename T>
void abreast_chunks(const ScanProblem& problem, int64_t row, int64_t begin, int64_t end, Chunk* chunks) {
  Abreast<T>(problem, problem.backward ? Pass::kBackward : Pass::kForward).chunks_of(row, begin, end, chunks);
}

}  // namespace
}  // namespace dcs::cpu
