// The maximum over k and samples of k: term by term, for a block of columns at a time, in the order of k.
#pragma once

#include "log_bmm/operands.h"

namespace dcs::cpu {
namespace {

constexpr int64_t kSelected = 64;  // columns at a time: their running values stay in the first-level cache
constexpr int64_t kPositions = int64_t{1} << 30;  // k at a time: positions among them are 32 bits

// The arrays of a row (batch, i) and of its batch of b.
template <typename C>
struct SelectedRow {
  const C* a;
  const C* b;
  SelectedRow(const SelectProblem& problem, int64_t row)
      : a(static_cast<const C*>(problem.a) + row / problem.rows * problem.a_batch + row % problem.rows * problem.depth),
        b(static_cast<const C*>(problem.b) + row / problem.rows * problem.b_batch) {}
};

template <typename T>
void largest_rows(const SelectProblem& problem, int64_t begin, int64_t end) {
  using C = typename SumOf<T>::type;
  for (int64_t row = begin; row < end; ++row) {
    const SelectedRow<C> operands(problem, row);
    for (int64_t from = 0; from < problem.columns; from += kSelected) {
      const int64_t count = problem.columns - from < kSelected ? problem.columns - from : kSelected;
      C best[kSelected];
      int64_t* indices = problem.indices + row * problem.columns + from;
      for (int64_t j = 0; j < count; ++j) best[j] = kMinusInfinity<C>, indices[j] = 0;
      for (int64_t base = 0; base < problem.depth; base += kPositions) {
        const int64_t last = problem.depth - base < kPositions ? problem.depth - base : kPositions;
        int32_t positions[kSelected];
        for (int64_t j = 0; j < count; ++j) positions[j] = -1;
        for (int64_t k = 0; k < last; ++k) {
          const C a = operands.a[base + k];
          const C* b = operands.b + (base + k) * problem.columns + from;
          for (int64_t j = 0; j < count; ++j) {
            const C t = a + b[j];
            // A NaN wins over all but a NaN.
            const bool wins = (t > best[j]) | ((t != t) & (best[j] == best[j]));
            best[j] = wins ? t : best[j];
            positions[j] = wins ? static_cast<int32_t>(k) : positions[j];
          }
        }
        for (int64_t j = 0; j < count; ++j) indices[j] = positions[j] >= 0 ? base + positions[j] : indices[j];
      }
      convert(best, count, static_cast<T*>(problem.values) + row * problem.columns + from);
    }
  }
}

// For a sum that is not a positive number: the first term that is NaN or +inf, -1 if there is none.
template <typename C>
int64_t first_special(const C* a, const C* b, int64_t depth, int64_t stride) {
  for (int64_t k = 0; k < depth; ++k) {
    const C t = a[k] + b[k * stride];
    if (!(t < -kMinusInfinity<C>)) return k;
  }
  return -1;
}

template <typename C>
void sample_rows(const SelectProblem& problem, int64_t begin, int64_t end) {
  using S = Simd<C>;
  using Reg = typename S::Reg;
  constexpr int kVectors = 4;
  constexpr int64_t kLanes = kVectors * S::kWidth;
  const int64_t columns = problem.columns, depth = problem.depth;
  for (int64_t row = begin; row < end; ++row) {
    const SelectedRow<C> operands(problem, row);
    const C* uniforms = static_cast<const C*>(problem.uniforms.data) + row / problem.rows * problem.uniforms.batch +
        row % problem.rows * problem.uniforms.row;
    for (int64_t from = 0; from < columns; from += kLanes) {
      const int64_t count = columns - from < kLanes ? columns - from : kLanes;
      const auto terms = [&](int64_t k, int v) __attribute__((always_inline)) {
        const C* b = operands.b + k * columns + from + v * S::kWidth;
        const int64_t left = count - v * S::kWidth;
        const Reg values = left >= S::kWidth ? S::load(b) : load_part<C>(b, left, C(0));
        return S::add(S::splat(operands.a[k]), values);
      };
      Reg most[kVectors], totals[kVectors], sums[kVectors], targets[kVectors];
      for (int v = 0; v < kVectors; ++v) most[v] = S::splat(kMinusInfinity<C>), totals[v] = sums[v] = S::splat(C(0));
      for (int64_t k = 0; k < depth; ++k)
        for (int v = 0; v < kVectors; ++v) most[v] = S::max(terms(k, v), most[v]);
      for (int64_t k = 0; k < depth; ++k)
        for (int v = 0; v < kVectors; ++v) totals[v] = S::add(totals[v], exponential(S::sub(terms(k, v), most[v])));
      C total[kLanes], target[kLanes];
      int64_t chosen[kLanes];
      int64_t open = 0;
      for (int v = 0; v < kVectors; ++v) S::store(total + v * S::kWidth, totals[v]);
      for (int64_t j = 0; j < kLanes; ++j) {
        target[j] = j < count ? uniforms[(from + j) * problem.uniforms.column] * total[j] : C(0);
        const bool plain = j < count && total[j] > 0 && total[j] < -kMinusInfinity<C>;
        chosen[j] = plain || j >= count ? -1 : first_special(operands.a, operands.b + from + j, depth, columns);
        open += plain;
        // A sum is never above infinity: a lane that is closed stays so.
        target[j] = plain ? target[j] : -kMinusInfinity<C>;
      }
      for (int v = 0; v < kVectors; ++v) targets[v] = S::load(target + v * S::kWidth);
      const Reg nothing = S::splat(C(0)), one = S::splat(C(1)), closed = S::splat(-kMinusInfinity<C>);
      for (int64_t k = 0; open > 0 && k < depth; ++k) {
        for (int v = 0; v < kVectors; ++v) {
          sums[v] = S::add(sums[v], exponential(S::sub(terms(k, v), most[v])));
          const Reg above = S::where_less(targets[v], sums[v], one, nothing);
          for (unsigned lanes = S::equal_lanes(above, one); lanes != 0; lanes &= lanes - 1, --open)
            chosen[v * S::kWidth + __builtin_ctz(lanes)] = k;
          targets[v] = S::where_less(targets[v], sums[v], closed, targets[v]);
        }
      }
      // A uniform number of 1 or more, or NaN, is above every sum: the last term that is not 0.
      for (int64_t j = 0; j < count; ++j) {
        int64_t k = chosen[j];
        if (k < 0 && total[j] > 0) {
          C lanes[S::kWidth];
          const int v = static_cast<int>(j / S::kWidth);
          for (k = depth - 1; k > 0; --k) {
            S::store(lanes, exponential(S::sub(terms(k, v), most[v])));
            if (lanes[j % S::kWidth] > 0) break;
          }
        }
        problem.indices[row * columns + from + j] = k;
      }
    }
  }
}

}  // namespace
}  // namespace dcs::cpu
