// What the plans of scans ask of a problem and its device. Host code without CUDA or torch types.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "dcs/limits.h"
#include "dcs/scan/problem.h"
#include "dcs/scan/plan/tuning.h"

namespace dcs {

inline int64_t bytes_of(ElementType dtype) {
  switch (dtype) {
    case ElementType::Half:
    case ElementType::BFloat16: return 2;
    case ElementType::Float: return 4;
    case ElementType::ComplexDouble: return 16;
    default: return 8;
  }
}

inline int64_t wide_bytes_of(ElementType dtype) {
  return dtype == ElementType::ComplexFloat || dtype == ElementType::ComplexDouble ? 16 : 8;
}

inline bool is_floating(ElementType dtype) { return bytes_of(dtype) <= 4 || dtype == ElementType::Double; }

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes;  // that one block can have
  int cluster;       // blocks that a cluster can have; 0: there are none

  // Blocks up to which a scan's launch begins as the one before it ends (cuda/common/ptx/dependent_launch.cuh), which
  // what has clusters can do, too. It saves half a microsecond, so it is for short scans; many blocks come and go
  // slower so.
  int64_t dependent_blocks(const ScanProblem& p) const {
    const bool is_short = p.outer * p.inner * p.length <= kMostDependentElements;
    return cluster > 0 && is_short ? kDependentBlocks * multiprocessors : 0;
  }
};

// All rows have the same gamma, or one for each step.
inline bool has_one_gamma(const ScanProblem& problem) {
  return problem.gamma_kind != GammaKind::kRow ||
      (problem.gamma_strides.outer == 0 && problem.gamma_strides.inner == 0);
}

// Whether segments can be folded by powers of gamma: those of larger numbers could leave float64 where their sums
// cancel.
inline bool powers_fold(const ScanProblem& problem) {
  return problem.gamma_kind != GammaKind::kNumber || std::abs(problem.gamma_value) <= kMostFoldedGamma;
}

// Whether small problems are scanned in float (lines/float_lines.cuh): not by a number above 1, whose powers could
// leave float where sums cancel, nor by one so small that float has not what is left of its digits (`split_gamma`).
inline bool scans_in_float(const ScanProblem& p) {
  const double size = std::abs(p.gamma_value);
  return bytes_of(p.dtype) <= 4 && p.gamma_kind == GammaKind::kNumber && size <= 1.0 &&
      (size == 0.0 || size >= 0x1p-89) && !p.reset && !p.backward;
}

// A window that does not reach beyond a row's first step, or its initial value, is none.
inline bool is_windowed(const ScanProblem& p) {
  return p.window > 0 && p.window < p.length + (p.initial && !p.backward ? 1 : 0);
}

// Tensors that are read with a value for every step, without the flags.
inline int tensors_of(const ScanProblem& problem) {
  return 1 + (problem.gamma_kind == GammaKind::kStep ? 1 : 0) + (problem.backward ? 1 : 0);
}

// Visits the operands with a value for every step: pointer, strides, bytes of an element. True where `test` is for all.
template <typename Test>
bool all_operands(const ScanProblem& p, const Test& test) {
  const int64_t bytes = bytes_of(p.dtype);
  const bool step = p.gamma_kind == GammaKind::kStep;
  return test(p.input, p.input_strides, bytes) && test(p.output, p.output_strides, bytes) &&
      (!step || test(p.gamma, p.gamma_strides, bytes)) && (!p.reset || test(p.reset, p.reset_strides, int64_t{1})) &&
      (!p.backward || test(p.saved, p.saved_strides, bytes)) &&
      (!(p.backward && step) || test(p.grad_gamma, p.grad_gamma_strides, bytes));
}

// Whether all rows of every operand lie one behind the other.
inline bool rows_are_contiguous(const ScanProblem& p) {
  return all_operands(p, [&p](const void*, const Strides& s, int64_t) {
    return (p.inner == 1 || s.inner == p.length) && (p.outer == 1 || s.outer == p.inner * p.length);
  });
}

// Whether rows lie one behind the other, from an aligned address on.
template <typename Problem>
bool is_flat(const Problem& p, const void* pointer, const Strides& strides) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && (p.length == 1 || strides.time == 1) &&
      (p.inner == 1 || strides.inner == p.length) && (p.outer == 1 || strides.outer == p.inner * p.length);
}

// Rows of contiguous time with gaps between them, of so few steps that a copy to shared memory is not worth while: such
// rows of up to 4 steps take 0.45 to 0.87 of the time without in 10 of 12 random scans on an H200, of 7 steps 1.22.
inline bool has_gaps_between_tiny_rows(const ScanProblem& p) {
  return p.length <= kFewestSteps && p.input_strides.time == 1 && p.output_strides.time == 1 &&
      p.rows() < int64_t{1} << 31 && !rows_are_contiguous(p);
}

// Rows of less than 16 bytes that have gammas, initial values or sums of gamma's gradient of their own: in a vector of
// contiguous time more than one of them could start. Or that have gaps between them.
inline bool has_tiny_rows(const ScanProblem& p) {
  if (p.length * bytes_of(p.dtype) >= 16) return false;
  const bool sums = p.backward && p.gamma_kind != GammaKind::kStep;
  return !has_one_gamma(p) || p.initial || sums || has_gaps_between_tiny_rows(p);
}

// Whether an operand's offsets are numbers of 31 bits.
template <typename Problem>
bool is_near(const Problem& p, const Strides& s) {
  return (p.outer - 1) * std::abs(s.outer) + (p.inner - 1) * std::abs(s.inner) + (p.length - 1) * std::abs(s.time) <
      int64_t{1} << 30;
}

// An outer row's steps lie one behind the other, each with all of its columns.
inline bool steps_are_dense(const ScanProblem& p, const Strides& s) { return s.inner == 1 && s.time == p.inner; }

// So many neighboring columns make a word in all operands; in pairs, flags need not.
inline bool columns_make_words(const ScanProblem& p, int64_t unit) {
  return p.inner % unit == 0 && all_operands(p, [unit](const void* pointer, const Strides& s, int64_t bytes) {
    return (bytes == 1 && unit == 2) ||
        (s.inner == 1 && reinterpret_cast<uintptr_t>(pointer) % (unit * bytes) == 0 && s.time % unit == 0 &&
            s.outer % unit == 0);
  });
}
inline bool columns_pair(const ScanProblem& p) { return columns_make_words(p, 2); }

}  // namespace dcs
