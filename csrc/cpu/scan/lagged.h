// Short rows and few columns, and rows with a gate or a flag for every step: y[i] = x[i] + g[i] * y[i - lag] over the
// elements as they follow each other in memory, with a gate of 0 where a row begins or a reset cuts. Within a vector,
// log2(width / lag) steps of v += g * (v moved up by 2^k * lag lanes), g *= (g moved up) give the scan from a carry of
// 0. Products of gates may overflow or underflow, and inf * 0 is NaN: a piece with a result that is not finite is run
// through again step by step.
#pragma once

#include "scan/lanes.h"
#include "scan/staging.h"

namespace dcs::cpu {
namespace {

constexpr int kMostLag = kWidth > 2 ? kWidth - 1 : 1;

// Scans `count` elements (padded to whole vectors) from `carries`, one a column; false if a value is not finite. With
// kFold, `products` are those of the gates from the piece's beginning on, times `first_products`.
template <int kLag, bool kFold>
bool scan_lagged(const double* x, const double* gates, double* y, double* products, int64_t count, int levels,
    const double* carries, const double* first_products) {
  double lanes[kWidth];
  for (int i = 0; i < kWidth; ++i) lanes[i] = carries[i % kLag];
  Vector carry = load(lanes), product = splat(1.0);
  if constexpr (kFold) {
    for (int i = 0; i < kWidth; ++i) lanes[i] = first_products[i % kLag];
    product = load(lanes);
  }
  const Vector zeros = splat(0.0), ones = splat(1.0);
  bool special = false;
  for (int64_t i = 0; i < count; i += kWidth) {
    Vector v = load(x + i), g = load(gates + i);
    if constexpr (kLag < kWidth) {
      v = multiply_add(g, move_up<kLag>(v, zeros), v);
      g = multiply(g, move_up<kLag>(g, ones));
    }
    if constexpr (2 * kLag < kWidth) {
      if (levels > 1) {
        v = multiply_add(g, move_up<2 * kLag>(v, zeros), v);
        g = multiply(g, move_up<2 * kLag>(g, ones));
      }
    }
    if constexpr (4 * kLag < kWidth) {
      if (levels > 2) {
        v = multiply_add(g, move_up<4 * kLag>(v, zeros), v);
        g = multiply(g, move_up<4 * kLag>(g, ones));
      }
    }
    v = multiply_add(g, carry, v);
    store(y + i, v);
    special |= has_special(v);
    carry = repeat_last<kLag>(v);
    if constexpr (kFold) {
      const Vector q = multiply(g, product);
      store(products + i, q);
      product = repeat_last<kLag>(q);
    }
  }
  return !special;
}

// call(lag as a constant).
template <int kLag, typename Call>
DCS_INLINE void with_lag(int64_t lag, const Call& call) {
  if (lag == kLag) return call(Number<kLag>{});
  if constexpr (kLag < kMostLag) with_lag<kLag + 1>(lag, call);
}

template <typename T>
struct LaggedScan {
  const ScanProblem& problem;
  const Groups groups;
  const int64_t lag, shift;  // shift: how many places on in scan order a gate acts
  const bool starts_empty;   // a row's first value is its input
  int levels = 1;
  bool begins = false, is_kept = false;  // is_kept: the gates are those of the piece before
  double carries[kMostLag], sums[kMostLag];
  double held_gates[kMostLag];  // of the step before the piece
  bool held_flags[kMostLag];
  double x[kPiece + kWidth], y[kPiece + kWidth], gates[kPiece + 2 * kWidth], next[kPiece + 2 * kWidth];
  bool flags[kPiece + kWidth], flag_room[kPiece];
  T room[kPiece];

  explicit LaggedScan(const ScanProblem& given)
      : problem(given), groups(given), lag(groups.lag), shift(given.shifted ? groups.lag : 0),
        starts_empty(given.shifted || given.initial == nullptr) {
    for (int64_t reach = 2; reach * lag < kWidth && reach < problem.length; reach *= 2) ++levels;
    for (int c = 0; c < kMostLag; ++c) {
      carries[c] = sums[c] = held_gates[c] = 0;
      held_flags[c] = false;
    }
  }

  // Column c in scan order, as it lies in memory.
  DCS_INLINE int64_t column(int64_t c) const { return problem.reverse ? lag - 1 - c : c; }
  DCS_INLINE int64_t group_at(const Piece& piece, int64_t k) const {
    return piece.group + (problem.reverse ? piece.groups - 1 - k : k);
  }
  DCS_INLINE double initial(int64_t group, int64_t c) const {
    return read_initial<T>(problem, groups.outer(problem, group), groups.inner(problem, group) + column(c));
  }
  DCS_INLINE bool is_short() const { return groups.size <= kPiece; }

  void stage_gates(const Piece& piece, int64_t count) {
    double* to = gates + shift;
    if (problem.gamma_kind == GammaKind::kStep) {
      const T* from =
          gathered(problem, groups, static_cast<const T*>(problem.gamma), problem.gamma_strides, piece, room);
      return widen(to, from, count, problem.reverse);
    }
    if (problem.gamma_kind == GammaKind::kNumber) {
      for (int64_t i = 0; i < count; ++i) to[i] = problem.gamma_value;
      return;
    }
    const int64_t of_group = piece.steps * lag;
    for (int64_t k = 0; k < piece.groups; ++k, to += of_group) {
      const int64_t group = group_at(piece, k);
      const int64_t outer = groups.outer(problem, group), inner = groups.inner(problem, group);
      for (int64_t c = 0; c < lag; ++c) {
        const double gate = read_gate<double>(problem, outer, inner + column(c));
        for (int64_t i = c; i < of_group; i += lag) to[i] = gate;
      }
    }
  }

  // Everything that the scan of a piece reads. `begins`: whether rows begin here.
  void stage(const Piece& piece, int64_t count) {
    widen(x, gathered(problem, groups, static_cast<const T*>(problem.input), problem.input_strides, piece, room), count,
        problem.reverse);
    for (int i = 0; i < kWidth; ++i) x[count + i] = 0;
    if (is_kept) return;
    for (int64_t c = 0; c < shift; ++c) gates[c] = held_gates[c];
    stage_gates(piece, count);
    if (problem.reset != nullptr) {
      for (int64_t c = 0; c < shift; ++c) flags[c] = held_flags[c];
      copy_flags(flags + shift, gathered(problem, groups, problem.reset, problem.reset_strides, piece, flag_room), count,
          problem.reverse);
      zero_where(gates + shift, flags + shift, count);
      for (int64_t c = 0; c < shift; ++c) held_flags[c] = flags[count + c];
    }
    for (int64_t c = 0; c < shift; ++c) held_gates[c] = gates[count + c];
    if (begins) begin_rows(piece);
    for (int i = 0; i < kWidth; ++i) gates[count + i] = 0;
  }

  // An initial value enters the first step's input; of a long row it is the carry.
  void begin_rows(const Piece& piece) {
    for (int64_t k = 0; k < piece.groups; ++k) {
      const int64_t at = k * groups.size;
      for (int64_t c = 0; c < lag; ++c) {
        if (!starts_empty && !(problem.reset != nullptr && flags[at + c]))
          x[at + c] = multiply_add(gates[at + c], initial(group_at(piece, k), c), x[at + c]);
        gates[at + c] = 0;
      }
    }
  }

  DCS_INLINE bool is_cut(int64_t i) const {
    return (begins && i % groups.size < lag) || (problem.reset != nullptr && flags[i]);
  }

  // Scans what is staged. kFold: `next` gets the products of gates.
  template <bool kFold>
  void scan(int64_t count, const double* products) {
    bool is_finite = true;
    with_lag<1>(lag, [&](auto constant) {
      is_finite = scan_lagged<decltype(constant)::value, kFold>(
          x, gates, y, next, (count + kWidth - 1) / kWidth * kWidth, levels, carries, products);
    });
    if (!is_finite)
      for (int64_t i = 0; i < count; ++i)
        y[i] = is_cut(i) ? x[i] : multiply_add(gates[i], i < lag ? carries[i] : y[i - lag], x[i]);
    for (int64_t c = 0; c < lag; ++c) carries[c] = y[count - lag + c];
  }

  void write(T* result, const Strides& strides, const Piece& piece, int64_t count) {
    T* to = target(problem, groups, result, strides, piece, room);
    narrow(to, y, count, problem.reverse);
    if (to == room) scatter(problem, groups, result, strides, piece, room);
  }

  // y becomes output * saved[next step]; `ends`: the rows' last step is here.
  void gradients(const Piece& piece, int64_t count, bool ends) {
    const T* saved = static_cast<const T*>(problem.saved);
    widen(next, gathered(problem, groups, saved, problem.saved_strides, piece, room), count, problem.reverse);
    if (ends) {
      const int64_t of_group = piece.steps * lag;
      for (int64_t k = 0; k < piece.groups; ++k)
        for (int64_t c = 0; c < lag; ++c) next[(k + 1) * of_group + c] = initial(group_at(piece, k), c);
    } else {
      const Piece after{piece.group, 1, problem.reverse ? piece.time - 1 : piece.time + piece.steps, 1};
      widen(next + count, gathered(problem, groups, saved, problem.saved_strides, after, room), lag, problem.reverse);
    }
    for (int64_t i = 0; i < count; ++i) y[i] *= next[i + lag];
    if (problem.reset != nullptr) zero_where(y, flags + shift, count);
    if (problem.gamma_kind == GammaKind::kStep)
      return write(static_cast<T*>(problem.grad_gamma), problem.grad_gamma_strides, piece, count);
    const int64_t of_group = piece.steps * lag;
    for (int64_t k = 0; k < piece.groups; ++k)
      for (int64_t c = 0; c < lag; ++c) {
        const double* terms = y + k * of_group + c;
        double sum = is_short() ? 0.0 : sums[c];
        for (int64_t i = 0; i < of_group; i += lag) sum += terms[i];
        if (is_short()) write_sum(group_at(piece, k), c, sum);
        else sums[c] = sum;
      }
  }

  DCS_INLINE void write_sum(int64_t group, int64_t c, double sum) const {
    write_partial<T>(problem, groups.outer(problem, group), groups.inner(problem, group) + column(c), sum);
  }

  void output(const Piece& piece, int64_t count, bool ends) {
    write(static_cast<T*>(problem.output), problem.output_strides, piece, count);
    if (problem.backward) gradients(piece, count, ends);
  }

  // Groups [begin, end) of short rows, several a piece.
  void short_rows(int64_t begin, int64_t end) {
    const int64_t most = kPiece / groups.size;
    const bool keeps = problem.gamma_kind == GammaKind::kNumber && problem.reset == nullptr && starts_empty;
    begins = true;
    for (int64_t group = begin; group < end; group += most) {
      const int64_t left = end - group;
      // In a reverse scan as in a forward one, pieces go up in memory.
      const Piece piece{group, left < most ? left : most, 0, problem.length};
      const int64_t count = piece.groups * groups.size;
      is_kept = keeps && group > begin && left >= most;
      for (int c = 0; c < kMostLag; ++c) carries[c] = 0;
      stage(piece, count);
      scan<false>(count, nullptr);
      output(piece, count, true);
    }
  }

  // Steps [first, stop) of a group, in scan order. kFold: from `carries` to the last values, and the products of gates.
  template <bool kFold>
  void stretch(int64_t group, int64_t first, int64_t stop, double* products) {
    const int64_t most = kPiece / lag;
    if (shift > 0 && first > 0) {
      const Piece before{group, 1, problem.reverse ? problem.length - first : first - 1, 1};
      stage_gates(before, lag);
      if (problem.reset != nullptr)
        copy_flags(held_flags, gathered(problem, groups, problem.reset, problem.reset_strides, before, flag_room), lag,
            problem.reverse);
      for (int64_t c = 0; c < lag; ++c) held_gates[c] = held_flags[c] ? 0.0 : gates[shift + c];
    }
    for (int64_t step = first; step < stop; step += most) {
      const int64_t steps = stop - step < most ? stop - step : most;
      const Piece piece{group, 1, problem.reverse ? problem.length - step - steps : step, steps};
      begins = step == 0 && starts_empty;
      if (step == 0 && !starts_empty)
        for (int64_t c = 0; c < lag; ++c) carries[c] = initial(group, c);
      stage(piece, steps * lag);
      scan<kFold>(steps * lag, products);
      if constexpr (kFold)
        for (int64_t c = 0; c < lag; ++c) products[c] = next[(steps - 1) * lag + c];
      else output(piece, steps * lag, step + steps == problem.length);
    }
  }
};

DCS_INLINE int64_t lag_of(const ScanProblem& problem) { return Groups(problem).lag; }

// Whole rows [begin, end): whole groups.
template <typename T>
void lagged_rows(const ScanProblem& problem, int64_t begin, int64_t end) {
  LaggedScan<T> scan(problem);
  if (scan.is_short()) return scan.short_rows(begin / scan.lag, end / scan.lag);
  for (int64_t group = begin / scan.lag; group < end / scan.lag; ++group) {
    for (int64_t c = 0; c < scan.lag; ++c) scan.carries[c] = scan.sums[c] = 0;
    scan.template stretch<false>(group, 0, problem.length, nullptr);
    if (problem.backward && problem.gamma_kind != GammaKind::kStep)
      for (int64_t c = 0; c < scan.lag; ++c) scan.write_sum(group, c, scan.sums[c]);
  }
}

// Chunks [begin, end) of the group that begins with `row`, column by column `stride` descriptions apart.
template <typename T>
void lagged_fold(
    const ScanProblem& problem, int64_t row, int64_t begin, int64_t end, Chunk* chunks, int64_t stride) {
  LaggedScan<T> scan(problem);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    double products[kMostLag];
    for (int64_t c = 0; c < scan.lag; ++c) {
      scan.carries[c] = 0;
      products[c] = 1;
    }
    const int64_t first = chunk * kChunk;
    scan.template stretch<true>(row / scan.lag, first, first + chunk_length(problem, chunk), products);
    for (int64_t c = 0; c < scan.lag; ++c) {
      Chunk& described = chunks[scan.column(c) * stride + chunk - begin];
      keep(&described.sum, scan.carries[c]);
      keep(&described.product, products[c]);
      described.cut = chunk == 0;
    }
  }
}

template <typename T>
void lagged_chunks(
    const ScanProblem& problem, int64_t row, int64_t begin, int64_t end, Chunk* chunks, int64_t stride) {
  LaggedScan<T> scan(problem);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    for (int64_t c = 0; c < scan.lag; ++c) {
      scan.sums[c] = 0;
      if (chunk > 0) scan.carries[c] = chunks[scan.column(c) * stride + chunk - begin].carry.re;
    }
    const int64_t first = chunk * kChunk;
    scan.template stretch<false>(row / scan.lag, first, first + chunk_length(problem, chunk), nullptr);
    for (int64_t c = 0; c < scan.lag; ++c)
      keep(&chunks[scan.column(c) * stride + chunk - begin].partial, scan.sums[c]);
  }
}

}  // namespace
}  // namespace dcs::cpu
