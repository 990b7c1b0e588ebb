// What the driver (ops.cpp) asks of the kernels, which are compiled once for each instruction set.
//
// Both operands are taken as rows over k: a's are (I, K), b's the columns of b, (J, K). A result over (i, j) is the
// same of (j, i) with the operands exchanged, so that the sum over i is the sum over j of the exchanged problem. C is
// the dtype of the sums: double for double, else float.
#pragma once

#include <cstdint>

#include <torch/headeronly/core/ScalarType.h>

namespace dcs::cpu {

using torch::headeronly::ScalarType;

// Batches of matrices in memory; strides in elements.
struct MatrixView {
  const void* data = nullptr;
  int64_t batch = 0, row = 0, column = 0;
};

// How the forward keeps exponentials from underflowing: see certificate() in ops.cpp. The backward uses none of it.
struct Scaling {
  double power = 0;  // exponentials are times 2^power
  double floor = 0;  // of a row with -inf: the least that the exponential of a finite number is
};

// An operand: what it is made from, and the arrays of C that are made, dense (batches, rows, depth) or (batches, rows).
struct ShiftedRows {
  ScalarType dtype;
  MatrixView source;
  int64_t batches = 0;  // 1 where all batches are the same
  int64_t rows = 0, depth = 0;
  Scaling scaling;
  const void* values = nullptr;
  void* copied = nullptr;     // values, where source is not such an array itself
  void* largest = nullptr;    // of the row; 0 where that is -inf
  void* powers = nullptr;     // exp(value - largest), scaled
  uint8_t* masked = nullptr;  // 0: the row has no -inf, 1: some, 2: nothing else
};

// The right operand of a matrix product, as panels of columns over all of the depth: from rows (J, K) that are the
// columns (`transposed`), or from rows (J, K) as they are, K columns. `factors` multiplies, if there.
struct PanelsProblem {
  ScalarType dtype;
  const void* values = nullptr;
  bool shared = false;  // values are the same for all batches
  const void* factors = nullptr;
  int64_t batches = 0, rows = 0, depth = 0;
  bool transposed = false;
  void* panels = nullptr;
};

struct ForwardProblem {
  ScalarType dtype;
  int64_t batches = 0;
  const ShiftedRows* a = nullptr;
  const ShiftedRows* b = nullptr;
  const void* panels = nullptr;  // of b's powers, transposed
  double bound = 0,
         floor_bound = 0;  // scaled sums from here on are certified, and those with a floor under their exponentials
  void* log_s = nullptr;   // C
  void* out = nullptr;
};

// G = y / S, without the elements that are not certified.
struct WeightsProblem {
  ScalarType dtype;
  int64_t batches = 0, rows = 0, columns = 0;
  const void* log_s = nullptr;  // dense
  MatrixView y;
  double limit = 0;  // a larger |y| could overflow G's sums
  void* weights = nullptr;
  uint8_t* partial = nullptr;  // of a row: whether one of its elements is not certified
};

// sum_j W y z: `left` has the result's rows, `right` the ones that are summed over.
struct ProductProblem {
  ScalarType dtype;
  int64_t batches = 0;
  const ShiftedRows* left = nullptr;
  const ShiftedRows* right = nullptr;
  MatrixView log_s, y, weights;  // (left row, right row)
  double limit = 0;
  const uint8_t* partial = nullptr;
  bool partial_of_left = false;
  const void* panels = nullptr;  // of right's powers times z, as they are
  const void* z = nullptr;       // dense, like right's values; null: 1
  void* sums = nullptr;          // (batches, left rows, depth), scratch
  void* result = nullptr;
  int64_t result_row = 0, result_column = 0;
};

// sum_k W x z, over (i, j).
struct DotProblem {
  ScalarType dtype;
  int64_t batches = 0;
  const ShiftedRows* a = nullptr;
  const ShiftedRows* b = nullptr;
  const void* log_s = nullptr;
  const void* x = nullptr;  // dense, like the operands' values; null: 1
  const void* z = nullptr;
  const void* panels = nullptr;  // of b's powers times z, transposed
  void* sums = nullptr;          // (batches, I, J), scratch
  void* result = nullptr;
};

// The maximum over k, or a sample of k. Here b is (K, J), and both operands are arrays of C.
struct SelectProblem {
  ScalarType dtype;
  int64_t batches = 0, rows = 0, depth = 0, columns = 0;
  const void* a = nullptr;
  int64_t a_batch = 0;
  const void* b = nullptr;
  int64_t b_batch = 0;
  MatrixView uniforms;     // C
  void* values = nullptr;  // of `dtype`
  int64_t* indices = nullptr;
};

struct LogBmmKernels {
  const char* name;
  int float_columns, double_columns;  // of a panel
  int rows;                           // that a task multiplies: the tasks of a batch are so many rows each
  void (*shift)(const ShiftedRows&, int64_t begin, int64_t end);       // rows of all batches
  void (*pack)(const PanelsProblem&, int64_t begin, int64_t end);      // panels of all batches
  void (*forward)(const ForwardProblem&, int64_t begin, int64_t end);  // tasks
  void (*weights)(const WeightsProblem&, int64_t begin, int64_t end);  // rows of all batches
  void (*product)(const ProductProblem&, int64_t begin, int64_t end);  // tasks
  void (*dot)(const DotProblem&, int64_t begin, int64_t end);          // tasks
  void (*largest)(const SelectProblem&, int64_t begin, int64_t end);   // rows of all batches
  void (*sample)(const SelectProblem&, int64_t begin, int64_t end);    // rows of all batches
};

extern const LogBmmKernels kLogBmmDefault;
extern const LogBmmKernels kLogBmmAvx2;
extern const LogBmmKernels kLogBmmAvx512;

}  // namespace dcs::cpu
