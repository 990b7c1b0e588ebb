// A matrix product in blocks: the left operand a tile of rows at a time, the right one in panels of columns that are
// packed once for all rows. Every element is summed over k in one order, whatever the threads do. (Goto, van de Geijn,
// "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3), 2008.)
#pragma once

#include "log_bmm/operands.h"

namespace dcs::cpu {
namespace {

// Of the registers (32 with AVX-512, else 16) all but a few hold the tile's sums.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileVectors = 2;
constexpr int kBlockRows = 48;        // rows that a task multiplies: what a panel is read for
constexpr int64_t kBlockDepth = 192;  // a slice of a panel is 24 KiB of float

template <typename C>
constexpr int kPanel = kTileVectors * Simd<C>::kWidth;

// Left operand of a product.
template <typename C>
struct Left {
  const C* data;
  const C* factors;  // or null
  int64_t row, column;
};

// out (kTileRows x kPanel, rows `stride` apart) = or += a (depth x kTileRows) by b (depth x kPanel)
template <typename C>
DCS_INLINE void multiply_tile(const C* a, const C* b, int64_t depth, C* out, int64_t stride, bool add) {
  using S = Simd<C>;
  typename S::Reg sums[kTileRows][kTileVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) sums[r][v] = S::splat(C(0));
  for (int64_t k = 0; k < depth; ++k) {
    typename S::Reg columns[kTileVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) columns[v] = S::load(b + k * kPanel<C> + v * S::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const typename S::Reg factor = S::splat(a[k * kTileRows + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) sums[r][v] = S::fma(factor, columns[v], sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      C* to = out + r * stride + v * S::kWidth;
      S::store(to, add ? S::add(S::load(to), sums[r][v]) : sums[r][v]);
    }
}

// `count` <= kTileRows rows by columns [from, from + depth) of the left operand, as depth x kTileRows.
template <typename C>
void pack_rows(const Left<C>& left, int64_t count, int64_t from, int64_t depth, C* to) {
  for (int64_t r = 0; r < kTileRows; ++r) {
    const C* row = left.data + r * left.row + from * left.column;
    const C* factors = left.factors == nullptr ? nullptr : left.factors + r * left.row + from * left.column;
    if (r >= count)
      for (int64_t k = 0; k < depth; ++k) to[k * kTileRows + r] = 0;
    else if (factors != nullptr)
      for (int64_t k = 0; k < depth; ++k) to[k * kTileRows + r] = row[k * left.column] * factors[k * left.column];
    else
      for (int64_t k = 0; k < depth; ++k) to[k * kTileRows + r] = row[k * left.column];
  }
}

// out (rows <= kBlockRows by columns, rows `columns` apart) = left (rows x depth) by the panels.
template <typename C>
void multiply_block(const Left<C>& left, int64_t rows, const C* panels, int64_t columns, int64_t depth, C* out) {
  alignas(64) C packed[kBlockRows * kBlockDepth];
  alignas(64) C edge[kTileRows * kPanel<C>];
  for (int64_t from = 0; from < depth; from += kBlockDepth) {
    const int64_t slice = depth - from < kBlockDepth ? depth - from : kBlockDepth;
    for (int64_t r = 0; r < rows; r += kTileRows)
      pack_rows(Left<C>{left.data + r * left.row, left.factors == nullptr ? nullptr : left.factors + r * left.row,
                    left.row, left.column},
          rows - r < kTileRows ? rows - r : kTileRows, from, slice, packed + r * kBlockDepth);
    for (int64_t column = 0; column < columns; column += kPanel<C>) {
      const C* panel = panels + column * depth + from * kPanel<C>;
      const int64_t width = columns - column < kPanel<C> ? columns - column : kPanel<C>;
      for (int64_t r = 0; r < rows; r += kTileRows) {
        const int64_t height = rows - r < kTileRows ? rows - r : kTileRows;
        C* to = out + r * columns + column;
        if (height == kTileRows && width == kPanel<C>) {
          multiply_tile(packed + r * kBlockDepth, panel, slice, to, columns, from > 0);
          continue;
        }
        multiply_tile(packed + r * kBlockDepth, panel, slice, edge, kPanel<C>, false);
        for (int64_t i = 0; i < height; ++i)
          for (int64_t j = 0; j < width; ++j)
            to[i * columns + j] = from > 0 ? to[i * columns + j] + edge[i * kPanel<C> + j] : edge[i * kPanel<C> + j];
      }
    }
  }
  if (depth == 0)
    for (int64_t i = 0; i < rows * columns; ++i) out[i] = 0;
}

// Panels [begin, end) of all batches, depth x kPanel each; columns that are not there are 0.
template <typename C>
void pack_panels(const PanelsProblem& problem, int64_t begin, int64_t end) {
  const int64_t columns = problem.transposed ? problem.rows : problem.depth,
                depth = problem.transposed ? problem.depth : problem.rows;
  const int64_t count = (columns + kPanel<C> - 1) / kPanel<C>, step = problem.transposed ? depth : columns;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t first = index % count * kPanel<C>, width = columns - first < kPanel<C> ? columns - first : kPanel<C>;
    const int64_t batch = index / count * problem.rows * problem.depth,
                  start = problem.transposed ? first * step : first;
    const C* values = static_cast<const C*>(problem.values) + (problem.shared ? 0 : batch) + start;
    const C* factors = problem.factors == nullptr ? nullptr : static_cast<const C*>(problem.factors) + batch + start;
    C* panel = static_cast<C*>(problem.panels) + index * depth * kPanel<C>;
    const auto value = [&](int64_t at) __attribute__((always_inline)) {
      return factors == nullptr ? values[at] : values[at] * factors[at];
    };
    if (!problem.transposed) {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t j = 0; j < kPanel<C>; ++j) panel[k * kPanel<C> + j] = j < width ? value(k * step + j) : C(0);
      continue;
    }
    for (int64_t from = 0; from < depth; from += kSquare) {
      const int64_t to = depth - from < kSquare ? depth : from + kSquare;
      for (int64_t j = 0; j < kPanel<C>; ++j)
        for (int64_t k = from; k < to; ++k) panel[k * kPanel<C> + j] = j < width ? value(j * step + k) : C(0);
    }
  }
}

}  // namespace
}  // namespace dcs::cpu
