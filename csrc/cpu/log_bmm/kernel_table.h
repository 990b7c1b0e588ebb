// log_bmm and the sums of its derivatives: products of exponentials, with the elements that are not certified term by
// term (terms.h). Included by one file an instruction set, which defines DCS_KERNELS (the table's name) and DCS_ISA
// (its name in messages).
#pragma once

#include "log_bmm/gemm.h"
#include "log_bmm/select.h"
#include "log_bmm/terms.h"

namespace dcs::cpu {
namespace {

constexpr int64_t kChunk = 64;  // elements of a row that are finished together

// From this log S on, nothing that underflowed in the exponentials shows in a weight (a lost term is below 2^-34 of
// it), and 1 / S is 2^93 at most.
template <typename C>
constexpr C kCertified = -64;
template <>
constexpr double kCertified<double> = -640;

// Whether an element of a derivative is made term by term. A masked one is 0.
template <typename C>
DCS_INLINE bool is_partial(C log_s) {
  return !(log_s > kCertified<C>) && log_s != kMinusInfinity<C>;
}
template <typename C>
DCS_INLINE bool is_partial(C log_s, C y, C limit) {
  return log_s != kMinusInfinity<C> && !(log_s > kCertified<C> && y <= limit && y >= -limit);
}

struct Task {
  int64_t batch, first, count;
  Task(int64_t index, int64_t rows) {
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    batch = index / blocks;
    first = index % blocks * kBlockRows;
    count = rows - first < kBlockRows ? rows - first : kBlockRows;
  }
};

template <typename C>
DCS_INLINE const C* panels_of(const void* panels, int64_t batches, int64_t batch, int64_t columns, int64_t depth) {
  const int64_t padded = (columns + kPanel<C> - 1) / kPanel<C> * kPanel<C>;
  return static_cast<const C*>(panels) + (batches == 1 ? 0 : batch) * padded * depth;
}

// One row of sums, in log_s, to log_s and out.
template <typename T, typename C>
void finish_row(const ForwardProblem& problem, int64_t batch, int64_t i, C* log_s, T* out) {
  const int64_t columns = problem.b->rows, a_row = (problem.a->batches == 1 ? 0 : batch) * problem.a->rows + i;
  const int64_t b_row = (problem.b->batches == 1 ? 0 : batch) * columns;
  const C* largest = static_cast<const C*>(problem.b->largest) + b_row;
  const uint8_t* masked = problem.b->masked + b_row;
  const C own = static_cast<const C*>(problem.a->largest)[a_row];
  const uint8_t own_mask = problem.a->masked[a_row];
  const C bound = static_cast<C>(problem.bound), floor_bound = static_cast<C>(problem.floor_bound);
  const C power = static_cast<C>(2 * problem.a->scaling.power);
  for (int64_t from = 0; from < columns; from += kChunk) {
    const int64_t count = columns - from < kChunk ? columns - from : kChunk;
    C sums[kChunk], whole[kChunk], rest[kChunk], results[kChunk];
    for (int64_t j = 0; j < count; ++j) sums[j] = log_s[from + j];
    split_logarithms(sums, count, power, whole, rest);
    for (int64_t j = 0; j < count; ++j) {
      const double log_sum = static_cast<double>(whole[j]) * 0.69314718055994531 + static_cast<double>(rest[j]);
      log_s[from + j] = static_cast<C>(log_sum);
      results[j] = static_cast<C>(static_cast<double>(own) + static_cast<double>(largest[from + j]) + log_sum);
    }
    const auto fails = [&](int64_t j) __attribute__((always_inline)) {
      return !(sums[j] >= ((own_mask | masked[from + j]) != 0 ? floor_bound : bound));
    };
    int failures = 0;
    for (int64_t j = 0; j < count; ++j) failures += fails(j);
    for (int64_t j = 0; failures != 0 && j < count; ++j) {
      if (!fails(j)) continue;
      // With a floor under both operands' exponentials, a sum of 0 says that no term is finite.
      const uint8_t mask = masked[from + j];
      if (sums[j] == 0 && ((own_mask != 0 && mask != 0) || own_mask == 2 || mask == 2)) {
        log_s[from + j] = results[j] = kMinusInfinity<C>;
        continue;
      }
      const auto exact = pair_of<C>(*problem.a, *problem.b, batch, i, from + j).logsumexp();
      log_s[from + j] = exact.log_s;
      results[j] = exact.out;
    }
    convert(results, count, out + from);
  }
}

template <typename T>
void forward_tasks(const ForwardProblem& problem, int64_t begin, int64_t end) {
  using C = typename SumOf<T>::type;
  const ShiftedRows &a = *problem.a, &b = *problem.b;
  for (int64_t index = begin; index < end; ++index) {
    const Task task(index, a.rows);
    const int64_t at = task.batch * a.rows + task.first,
                  a_row = (a.batches == 1 ? 0 : task.batch) * a.rows + task.first;
    C* log_s = static_cast<C*>(problem.log_s) + at * b.rows;
    T* out = static_cast<T*>(problem.out) + at * b.rows;
    multiply_block(Left<C>{row_of<C>(a.powers, a_row, a.depth), nullptr, a.depth, 1}, task.count,
        panels_of<C>(problem.panels, b.batches, task.batch, b.rows, b.depth), b.rows, b.depth, log_s);
    for (int64_t r = 0; r < task.count; ++r)
      finish_row<T, C>(problem, task.batch, task.first + r, log_s + r * b.rows, out + r * b.rows);
  }
}

template <typename T>
void weight_rows(const WeightsProblem& problem, int64_t begin, int64_t end) {
  using C = typename SumOf<T>::type;
  using S = Simd<C>;
  const C limit = static_cast<C>(problem.limit);
  for (int64_t row = begin; row < end; ++row) {
    const C* log_s = row_of<C>(problem.log_s, row, problem.columns);
    const T* y = static_cast<const T*>(problem.y.data) + row / problem.rows * problem.y.batch +
        row % problem.rows * problem.y.row;
    C* weights = static_cast<C*>(problem.weights) + row * problem.columns;
    uint8_t any = 0;
    for (int64_t from = 0; from < problem.columns; from += kChunk) {
      const int64_t count = problem.columns - from < kChunk ? problem.columns - from : kChunk;
      C factors[kChunk], inverse[kChunk] = {};
      for (int64_t j = 0; j < count; ++j) {
        const C value = number(y[(from + j) * problem.y.column]), sum = log_s[from + j];
        const uint8_t partial = is_partial(sum, value, limit);
        const bool left_out = partial || sum == kMinusInfinity<C>;
        any |= partial;
        factors[j] = left_out ? C(0) : value;
        inverse[j] = left_out ? C(0) : -sum;
      }
      for (int64_t j = 0; j < count; j += S::kWidth) S::store(inverse + j, exponential(S::load(inverse + j)));
      for (int64_t j = 0; j < count; ++j) weights[from + j] = factors[j] * inverse[j];
    }
    problem.partial[row] = any;
  }
}

// `count` rows of sums to the result: rows of it, or columns.
template <typename T, typename C>
void store_rows(const C* sums, int64_t count, int64_t depth, T* result, int64_t row, int64_t column) {
  if (column == 1) {
    for (int64_t r = 0; r < count; ++r) convert(sums + r * depth, depth, result + r * row);
    return;
  }
  C line[kBlockRows];
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t r = 0; r < count; ++r) line[r] = sums[r * depth + k];
    if (row == 1) {
      convert(line, count, result + k * column);
    } else {
      for (int64_t r = 0; r < count; ++r) convert(line + r, 1, result + r * row + k * column);
    }
  }
}

template <typename T>
void product_tasks(const ProductProblem& problem, int64_t begin, int64_t end) {
  using C = typename SumOf<T>::type;
  const ShiftedRows &left = *problem.left, &right = *problem.right;
  const int64_t depth = left.depth;
  for (int64_t index = begin; index < end; ++index) {
    const Task task(index, left.rows);
    const int64_t row = (left.batches == 1 ? 0 : task.batch) * left.rows + task.first,
                  at = task.batch * left.rows + task.first;
    C* sums = static_cast<C*>(problem.sums) + at * depth;
    const C* weights = static_cast<const C*>(problem.weights.data) + task.batch * problem.weights.batch +
        task.first * problem.weights.row;
    multiply_block(Left<C>{weights, nullptr, problem.weights.row, problem.weights.column}, task.count,
        panels_of<C>(
            problem.panels, problem.z == nullptr ? right.batches : problem.batches, task.batch, depth, right.rows),
        depth, right.rows, sums);
    const C* powers = row_of<C>(left.powers, row, depth);
    for (int64_t i = 0; i < task.count * depth; ++i) sums[i] *= powers[i];

    const T* y = static_cast<const T*>(problem.y.data) + task.batch * problem.y.batch + task.first * problem.y.row;
    const C* log_s =
        static_cast<const C*>(problem.log_s.data) + task.batch * problem.log_s.batch + task.first * problem.log_s.row;
    const uint8_t* partial = problem.partial + task.batch * (problem.partial_of_left ? left.rows : right.rows);
    const auto add = [&](int64_t r, int64_t j) {
      const C sum = log_s[r * problem.log_s.row + j * problem.log_s.column],
              value = number(y[r * problem.y.row + j * problem.y.column]);
      if (!is_partial(sum, value, static_cast<C>(problem.limit))) return;
      const C* z = problem.z == nullptr ? nullptr : row_of<C>(problem.z, task.batch * right.rows + j, depth);
      pair_of<C>(left, right, task.batch, task.first + r, j).add_weighted(sum, value, z, sums + r * depth);
    };
    if (problem.partial_of_left) {
      for (int64_t r = 0; r < task.count; ++r)
        for (int64_t j = 0; partial[task.first + r] != 0 && j < right.rows; ++j) add(r, j);
    } else {
      for (int64_t j = 0; j < right.rows; ++j)
        for (int64_t r = 0; partial[j] != 0 && r < task.count; ++r) add(r, j);
    }
    T* result = static_cast<T*>(problem.result) + task.batch * left.rows * depth + task.first * problem.result_row;
    if (static_cast<const void*>(sums) != result)
      store_rows<T, C>(sums, task.count, depth, result, problem.result_row, problem.result_column);
  }
}

template <typename T>
void dot_tasks(const DotProblem& problem, int64_t begin, int64_t end) {
  using C = typename SumOf<T>::type;
  using S = Simd<C>;
  const ShiftedRows &a = *problem.a, &b = *problem.b;
  const int64_t columns = b.rows, depth = a.depth;
  for (int64_t index = begin; index < end; ++index) {
    const Task task(index, a.rows);
    const int64_t row = (a.batches == 1 ? 0 : task.batch) * a.rows + task.first, at = task.batch * a.rows + task.first;
    C* sums = static_cast<C*>(problem.sums) + at * columns;
    const C* x = problem.x == nullptr ? nullptr : row_of<C>(problem.x, at, depth);
    multiply_block(Left<C>{row_of<C>(a.powers, row, depth), x, depth, 1}, task.count,
        panels_of<C>(problem.panels, problem.z == nullptr ? b.batches : problem.batches, task.batch, columns, depth),
        columns, depth, sums);
    for (int64_t r = 0; r < task.count; ++r) {
      const C* log_s = row_of<C>(problem.log_s, at + r, columns);
      for (int64_t from = 0; from < columns; from += kChunk) {
        const int64_t count = columns - from < kChunk ? columns - from : kChunk;
        C* results = sums + r * columns + from;
        C inverse[kChunk] = {};
        for (int64_t j = 0; j < count; ++j) inverse[j] = log_s[from + j] > kCertified<C> ? -log_s[from + j] : C(0);
        for (int64_t j = 0; j < count; j += S::kWidth) S::store(inverse + j, exponential(S::load(inverse + j)));
        for (int64_t j = 0; j < count; ++j) {
          const C sum = log_s[from + j];
          results[j] = sum == kMinusInfinity<C> ? C(0) : results[j] * inverse[j];
          if (!is_partial(sum)) continue;
          const C* z = problem.z == nullptr ? nullptr : row_of<C>(problem.z, task.batch * columns + from + j, depth);
          results[j] = pair_of<C>(a, b, task.batch, task.first + r, from + j)
                           .dot(sum, x == nullptr ? nullptr : x + r * depth, z);
        }
      }
    }
    T* result = static_cast<T*>(problem.result) + at * columns;
    if (static_cast<const void*>(sums) != result) convert(sums, task.count * columns, result);
  }
}

#define DCS_BY_DTYPE(run, dtype, ...)                             \
  switch (dtype) {                                                \
    case ScalarType::Half: return run<Half>(__VA_ARGS__);         \
    case ScalarType::BFloat16: return run<BFloat16>(__VA_ARGS__); \
    case ScalarType::Float: return run<float>(__VA_ARGS__);       \
    default: return run<double>(__VA_ARGS__);                     \
  }

void pack(const PanelsProblem& problem, int64_t begin, int64_t end) {
  problem.dtype == ScalarType::Double ? pack_panels<double>(problem, begin, end)
                                      : pack_panels<float>(problem, begin, end);
}
void forward(const ForwardProblem& problem, int64_t begin, int64_t end) {
  DCS_BY_DTYPE(forward_tasks, problem.dtype, problem, begin, end)
}
void weights(const WeightsProblem& problem, int64_t begin, int64_t end) {
  DCS_BY_DTYPE(weight_rows, problem.dtype, problem, begin, end)
}
void product(const ProductProblem& problem, int64_t begin, int64_t end) {
  DCS_BY_DTYPE(product_tasks, problem.dtype, problem, begin, end)
}
void dot(const DotProblem& problem, int64_t begin, int64_t end) {
  DCS_BY_DTYPE(dot_tasks, problem.dtype, problem, begin, end)
}
void largest(const SelectProblem& problem, int64_t begin, int64_t end) {
  DCS_BY_DTYPE(largest_rows, problem.dtype, problem, begin, end)
}
void sample(const SelectProblem& problem, int64_t begin, int64_t end) {
  problem.dtype == ScalarType::Double ? sample_rows<double>(problem, begin, end)
                                      : sample_rows<float>(problem, begin, end);
}

}  // namespace

extern const LogBmmKernels DCS_KERNELS = {
    DCS_ISA, kPanel<float>, kPanel<double>, kBlockRows, shift, pack, forward, weights, product, dot, largest, sample};

}  // namespace dcs::cpu
