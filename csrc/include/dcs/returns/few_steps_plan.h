// What a thread takes of columns of few steps (cuda/returns/few_steps). Host code without CUDA or torch types.
#pragma once

#include <cstdint>

#include "dcs/returns/tile_plan.h"

namespace dcs {

// Of a third result beside two operands a thread has no registers but where there are ratios.
inline ColumnForm few_form(const ReturnsProblem& p) {
  return p.is_gradient && p.pg_advantages.data ? ColumnForm::kAnyGradients : column_form(p);
}

// Columns of its widest words: of 16 bytes, of 8 where there are more tensors than registers have room for.
constexpr int few_returns_wide(int64_t bytes, ColumnForm form) {
  return static_cast<int>((has_factors(form) ? 8 : 16) / bytes);
}
// A thread's words: several of narrow ones, and twice as many of those of up to 4 bytes where there are two steps at
// most.
constexpr int few_returns_words(int64_t bytes, int wide, ColumnForm form, bool are_two = false) {
  const bool is_plain = !has_factors(form);
  const int words = wide == 1 ? (is_plain ? 3 : 2) : is_plain && bytes * wide == 4 ? 2 : 1;
  return are_two ? 2 * words : words;
}
constexpr int kMostFewReturnsWords = few_returns_words(2, 1, ColumnForm::kPlain, true);
// Their steps that it asks for at once.
constexpr int few_returns_steps(ColumnForm form, bool are_two) { return are_two ? 2 : has_all(form) ? 3 : 4; }

// Longer columns are taken step by step (serial_columns): with 9 to 16 they take as long, or 0.9 of it where columns
// are odd, and doubles at any number of steps (128 problems on an H200). Fewer threads a multiprocessor leave too much
// of the GPU idle; fewer columns side by side are too few for several words apart.
constexpr int64_t kMostFewReturns = 8, kFewReturnsThreads = 256, kFewReturnsColumns = 64;

// Columns of a word: as many as all operands have as neighbors.
inline int few_returns_word(const ReturnsProblem& p) {
  const int64_t bytes = bytes_of(p.dtype);
  const int widest = few_returns_wide(bytes, few_form(p));
  if (columns_make_words(p, widest)) return widest;
  return bytes == 2 && columns_pair(p) ? 2 : 1;
}

// Two steps at most, of so many narrow words that all of a multiprocessor's threads have twice as many. On an H200 643
// random problems of more than 2e6 elements take 0.73 of the time of half precision, 0.79 of float.
inline bool are_two_few_steps(const ReturnsProblem& p, int wide, int64_t multiprocessors) {
  const int64_t bytes = bytes_of(p.dtype), columns = wide * few_returns_words(bytes, wide, few_form(p), true);
  return bytes * wide <= 4 && p.length <= 2 && p.rows() >= 2 * kFewReturnsThreads * columns * multiprocessors;
}

// Of those of which takes_serial_columns(p). Rates of rows in double are more than arithmetic in float has room
// for.
inline bool takes_few_returns(const ReturnsProblem& p, int64_t multiprocessors) {
  const int64_t bytes = bytes_of(p.dtype);
  if (bytes == 8 || p.length > kMostFewReturns || p.inner < kFewReturnsColumns) return false;
  const int wide = few_returns_word(p);
  const auto has_room = [](const ReturnsDiscount& rate) {
    return rate.kind != GammaKind::kRow || rate.dtype != ElementType::Double;
  };
  // Bytes from a word to the next are 32-bit numbers in tensors of rows, too.
  bool are_near = true;
  each_row_strides(p, [&](const Strides& s) { are_near = are_near && s.inner < int64_t{1} << 24; });
  return are_near && has_room(p.gamma) && has_room(p.trace) &&
      p.rows() >= kFewReturnsThreads * wide * few_returns_words(bytes, wide, few_form(p)) * multiprocessors;
}

}  // namespace dcs
