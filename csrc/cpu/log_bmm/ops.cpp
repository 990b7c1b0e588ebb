// The log-semiring family on the CPU: scratch memory, and each op's stages on torch's threads. No bit depends on how.
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "dcs/log_bmm/ops.h"
#include "common/dispatch.h"
#include "log_bmm/kernels.h"

namespace dcs {
namespace cpu {
namespace {

const LogBmmKernels& kernels() {
  static const LogBmmKernels& chosen = best_table(kLogBmmAvx512, kLogBmmAvx2, kLogBmmDefault);
  return chosen;
}

Tensor empty(const Tensor& like, const Sizes& shape, ScalarType dtype) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()), dtype);
}

// Memory for the length of a call.
class Scratch {
 public:
  explicit Scratch(const Tensor& like) : like_(like), dtype_(sum_dtype(like.scalar_type())) {}
  void* numbers(int64_t count) { return add(empty(like_, {count}, dtype_)); }
  uint8_t* bytes(int64_t count) { return static_cast<uint8_t*>(add(empty(like_, {count}, ScalarType::Byte))); }

 private:
  void* add(Tensor tensor) {
    tensors_.push_back(tensor);
    return tensors_.back().mutable_data_ptr();
  }
  const Tensor& like_;
  const ScalarType dtype_;
  std::vector<Tensor> tensors_;
};

MatrixView view(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}
MatrixView transposed(const MatrixView& matrix) { return {matrix.data, matrix.batch, matrix.column, matrix.row}; }

int64_t ceil_log2(int64_t value) {
  int64_t bits = 0;
  while (bits < 62 && (int64_t{1} << bits) < value) ++bits;
  return bits;
}

// How far the exponentials can be scaled, and from which sums on what underflowed does not show.
//
// With E' = 2^s exp(a - R) and F' alike, K E' F' stays below 2^126. What is lost of either is below 2^-126, and the
// other at most 2^s: a sum of K such losses is below 2^-24 of S' where S' >= K 2^(s - 126 + 24), 4 K below. With a
// floor f under E' and F', to tell sums of nothing from sums that underflowed (f^2 is a normal number), f takes the
// place of 2^-126.
struct Certificate {
  Scaling scaling;
  double bound, floor_bound;
};
Certificate certificate(ScalarType sums, int64_t depth) {
  const bool wide = sums == ScalarType::Double;
  const int exponents = wide ? 1022 : 126, digits = wide ? 53 : 24, floor = wide ? 500 : 60;
  const int power = static_cast<int>((exponents - ceil_log2(depth)) / 2);
  const double terms = 4.0 * static_cast<double>(depth > 0 ? depth : 1);
  return {{static_cast<double>(power), std::ldexp(1.0, -floor)}, std::ldexp(terms, power - exponents + digits),
      std::ldexp(terms, power - floor + digits)};
}

// A larger upstream gradient could overflow the sums of G = y / S, as 1 / S is 2^93 (double: 2^924) at most.
double largest_y(ScalarType sums, int64_t terms) {
  return std::ldexp(1.0, sums == ScalarType::Double ? 97 : 34) / static_cast<double>(terms > 0 ? terms : 1);
}

// The largest |z| of `count` finite ones, at least 1: the sums of G F z grow with it. 1 beside an infinity or a NaN,
// which is in the sums anyway.
template <typename C>
double largest_factor(const void* z, int64_t count) {
  const C* values = static_cast<const C*>(z);
  double most = 1, strange = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double value = std::fabs(static_cast<double>(values[i]));
    strange += value - value;  // NaN from here on
    most = value > most ? value : most;
  }
  return strange == 0 ? most : 1;
}

int panel_columns(ScalarType sums) {
  return sums == ScalarType::Double ? kernels().double_columns : kernels().float_columns;
}

// (batches, rows, depth) of C from any memory; without `with_powers` nothing but that.
ShiftedRows rows_of(Scratch& scratch, ScalarType dtype, MatrixView source, int64_t batches, int64_t rows, int64_t depth,
    bool may_share, const Scaling* scaling) {
  ShiftedRows result;
  result.dtype = dtype;
  result.source = source;
  result.batches = may_share && source.batch == 0 ? 1 : batches;
  result.rows = rows;
  result.depth = depth;
  const int64_t count = result.batches * rows;
  const bool dense = dtype == sum_dtype(dtype) && (source.column == 1 || depth == 1) &&
      (source.row == depth || rows == 1) && (source.batch == rows * depth || result.batches == 1);
  if (dense) {
    result.values = source.data;
  } else {
    result.values = result.copied = scratch.numbers(count * depth);
  }
  if (scaling != nullptr) {
    result.scaling = *scaling;
    result.largest = scratch.numbers(count);
    result.powers = scratch.numbers(count * depth);
    result.masked = scratch.bytes(count);
  }
  if (!dense || scaling != nullptr)
    share_out(count, count * depth, [&](int64_t begin, int64_t end) { kernels().shift(result, begin, end); });
  return result;
}

// Both operands as rows over k.
struct Operands {
  ShiftedRows a, b;
};
Operands operands_of(Scratch& scratch, const Tensor& a, const Tensor& b, const Scaling& scaling) {
  const ScalarType dtype = a.scalar_type();
  return {rows_of(scratch, dtype, view(a), a.size(0), a.size(1), a.size(2), true, &scaling),
      rows_of(scratch, dtype, transposed(view(b)), b.size(0), b.size(2), b.size(1), true, &scaling)};
}

// An operand of a product that goes with a (B, I, K), or transposed with b; null where there is none.
const void* factors_of(Scratch& scratch, const std::optional<Tensor>& tensor, bool is_like_b) {
  if (!tensor) return nullptr;
  const MatrixView source = view(*tensor);
  return rows_of(scratch, tensor->scalar_type(), is_like_b ? transposed(source) : source, tensor->size(0),
      tensor->size(is_like_b ? 2 : 1), tensor->size(is_like_b ? 1 : 2), false, nullptr)
      .values;
}

const void* panels_of(
    Scratch& scratch, const ShiftedRows& rows, const void* factors, int64_t batches, bool is_transposed) {
  PanelsProblem problem;
  problem.dtype = rows.dtype;
  problem.values = rows.powers;
  problem.shared = rows.batches == 1;
  problem.factors = factors;
  problem.batches = factors == nullptr ? rows.batches : batches;
  problem.rows = rows.rows;
  problem.depth = rows.depth;
  problem.transposed = is_transposed;
  const int64_t columns = is_transposed ? rows.rows : rows.depth, depth = is_transposed ? rows.depth : rows.rows;
  const int64_t width = panel_columns(sum_dtype(rows.dtype)), panels = (columns + width - 1) / width * problem.batches;
  problem.panels = scratch.numbers(panels * width * depth);
  share_out(panels, panels * width * depth, [&](int64_t begin, int64_t end) { kernels().pack(problem, begin, end); });
  return problem.panels;
}

// run(begin, end) over the tasks of `batches` products of (rows, depth) and (depth, columns).
template <typename Run>
void multiply(int64_t batches, int64_t rows, int64_t depth, int64_t columns, const Run& run) {
  const int64_t tasks = batches * ((rows + kernels().rows - 1) / kernels().rows);
  // A multiply-add takes an eighth of what the element of a scan does.
  share_out(tasks, batches * rows * columns * (depth / 8 + 8), run);
}

bool is_contiguous_sum(const Tensor& tensor) {
  return tensor.scalar_type() == sum_dtype(tensor.scalar_type()) && tensor.is_contiguous();
}

// log_s, which the kernels read densely.
const void* dense_log_s(Scratch& scratch, const Tensor& log_s) {
  if (log_s.is_contiguous()) return log_s.const_data_ptr();
  return rows_of(scratch, log_s.scalar_type(), view(log_s), log_s.size(0), log_s.size(1), log_s.size(2), false, nullptr)
      .values;
}

MatrixView ones(ScalarType dtype) {
  static const uint16_t half = 0x3c00, bfloat16 = 0x3f80;
  static const float single = 1;
  static const double wide = 1;
  switch (dtype) {
    case ScalarType::Half: return {&half, 0, 0, 0};
    case ScalarType::BFloat16: return {&bfloat16, 0, 0, 0};
    case ScalarType::Float: return {&single, 0, 0, 0};
    default: return {&wide, 0, 0, 0};
  }
}

// The sums over i and over j, from one array of weights. `factor`: the largest |z| that goes with it, or 1.
class Products {
 public:
  Products(Scratch& scratch, const Operands& operands, const Tensor& log_s, const MatrixView& y, double factor = 1)
      : scratch_(scratch), operands_(operands), batches_(log_s.size(0)), rows_(log_s.size(1)), columns_(log_s.size(2)) {
    WeightsProblem problem;
    problem.dtype = operands.a.dtype;
    problem.batches = batches_;
    problem.rows = rows_;
    problem.columns = columns_;
    problem.log_s = dense_log_s(scratch, log_s);
    problem.y = y;
    problem.limit = largest_y(sum_dtype(problem.dtype), std::max(rows_, columns_)) / factor;
    problem.weights = scratch.numbers(batches_ * rows_ * columns_);
    problem.partial = scratch.bytes(batches_ * rows_);
    share_out(batches_ * rows_, batches_ * rows_ * columns_,
        [&](int64_t begin, int64_t end) { kernels().weights(problem, begin, end); });
    weights_ = problem;
  }

  // Over j, with z as rows of b's kind; like a.
  Tensor over_j(const Tensor& a, const void* z) {
    Tensor result = empty(a, {batches_, rows_, a.size(2)}, a.scalar_type());
    ProductProblem problem = make(operands_.a, operands_.b, z, result);
    problem.log_s = {weights_.log_s, rows_ * columns_, columns_, 1};
    problem.weights = {weights_.weights, rows_ * columns_, columns_, 1};
    problem.y = weights_.y;
    problem.partial_of_left = true;
    problem.result_row = a.size(2);
    problem.result_column = 1;
    run(problem, result);
    return result;
  }

  // Over i, with x as rows of a's kind; like b.
  Tensor over_i(const Tensor& b, const void* x) {
    Tensor result = empty(b, {batches_, b.size(1), columns_}, b.scalar_type());
    ProductProblem problem = make(operands_.b, operands_.a, x, result);
    problem.log_s = {weights_.log_s, rows_ * columns_, 1, columns_};
    problem.weights = {weights_.weights, rows_ * columns_, 1, columns_};
    problem.y = transposed(weights_.y);
    problem.partial_of_left = false;
    problem.result_row = 1;
    problem.result_column = columns_;
    run(problem, result);
    return result;
  }

 private:
  ProductProblem make(const ShiftedRows& left, const ShiftedRows& right, const void* z, const Tensor& result) {
    ProductProblem problem;
    problem.dtype = weights_.dtype;
    problem.batches = batches_;
    problem.left = &left;
    problem.right = &right;
    problem.limit = weights_.limit;
    problem.partial = weights_.partial;
    problem.z = z;
    problem.panels = panels_of(scratch_, right, z, batches_, false);
    problem.result = result.mutable_data_ptr();
    return problem;
  }

  void run(ProductProblem& problem, const Tensor& result) {
    if (result.numel() == 0) return;
    const bool in_place = problem.result_column == 1 && is_contiguous_sum(result);
    problem.sums = in_place ? problem.result : scratch_.numbers(result.numel());
    multiply(batches_, problem.left->rows, problem.right->rows, problem.left->depth,
        [&](int64_t begin, int64_t end) { kernels().product(problem, begin, end); });
  }

  Scratch& scratch_;
  const Operands& operands_;
  const int64_t batches_, rows_, columns_;
  WeightsProblem weights_;
};

std::tuple<Tensor, Tensor> log_bmm(Tensor a, Tensor b, std::string precision) {
  check_matrices("_log_bmm", a, b);
  check_precision("_log_bmm", precision);
  const ScalarType sums = sum_dtype(a.scalar_type());
  Tensor out = empty(a, products_shape(a, b), a.scalar_type()), log_s = empty(a, products_shape(a, b), sums);
  if (out.numel() == 0) return {out, log_s};
  const Certificate certified = certificate(sums, a.size(2));
  Scratch scratch(a);
  const Operands operands = operands_of(scratch, a, b, certified.scaling);
  ForwardProblem problem;
  problem.dtype = a.scalar_type();
  problem.batches = a.size(0);
  problem.a = &operands.a;
  problem.b = &operands.b;
  problem.panels = panels_of(scratch, operands.b, nullptr, a.size(0), true);
  problem.bound = certified.bound;
  problem.floor_bound = certified.floor_bound;
  problem.log_s = log_s.mutable_data_ptr();
  problem.out = out.mutable_data_ptr();
  multiply(a.size(0), a.size(1), a.size(2), b.size(2),
      [&](int64_t begin, int64_t end) { kernels().forward(problem, begin, end); });
  return {out, log_s};
}

std::tuple<Tensor, Tensor> log_bmm_backward(
    Tensor grad, Tensor a, Tensor b, Tensor log_s, std::string precision, bool need_a, bool need_b) {
  constexpr const char* op = "_log_bmm_backward";
  check_matrices(op, a, b);
  check_precision(op, precision);
  check_beside_a(op, "grad", grad, a, a.scalar_type(), products_shape(a, b));
  check_beside_a(op, "log_s", log_s, a, sum_dtype(a.scalar_type()), products_shape(a, b));
  Scratch scratch(a);
  const Operands operands = operands_of(scratch, a, b, {});
  Products products(scratch, operands, log_s, view(grad));
  return {need_a ? products.over_j(a, nullptr) : empty(a, {0}, a.scalar_type()),
      need_b ? products.over_i(b, nullptr) : empty(b, {0}, b.scalar_type())};
}

Tensor log_bmm_product(Tensor a, Tensor b, Tensor log_s, std::optional<Tensor> x, std::optional<Tensor> y,
    std::optional<Tensor> z, int64_t over) {
  constexpr const char* op = "_log_bmm_product";
  check_matrices(op, a, b);
  if (over < 0 || over > 2) fail(op, ": over must be 0, 1 or 2, got ", over);
  check_beside_a(op, "log_s", log_s, a, sum_dtype(a.scalar_type()), products_shape(a, b));
  if (x) check_beside_a(op, "x", *x, a, a.scalar_type(), sizes_of(a));
  if (y) check_beside_a(op, "y", *y, a, a.scalar_type(), products_shape(a, b));
  if (z) check_beside_a(op, "z", *z, a, a.scalar_type(), sizes_of(b));
  Scratch scratch(a);
  const Operands operands = operands_of(scratch, a, b, {});
  if (over != 1) {
    const void* factors = over == 2 ? factors_of(scratch, z, true) : factors_of(scratch, x, false);
    const int64_t count = factors == nullptr ? 0 : (over == 2 ? b : a).numel();
    const bool wide = sum_dtype(a.scalar_type()) == ScalarType::Double;
    const double factor = wide ? largest_factor<double>(factors, count) : largest_factor<float>(factors, count);
    Products products(scratch, operands, log_s, y ? view(*y) : ones(a.scalar_type()), factor);
    return over == 2 ? products.over_j(a, factors) : products.over_i(b, factors);
  }
  Tensor result = empty(a, products_shape(a, b), a.scalar_type());
  if (result.numel() == 0) return result;
  DotProblem problem;
  problem.dtype = a.scalar_type();
  problem.batches = a.size(0);
  problem.a = &operands.a;
  problem.b = &operands.b;
  problem.log_s = dense_log_s(scratch, log_s);
  problem.x = factors_of(scratch, x, false);
  problem.z = factors_of(scratch, z, true);
  problem.panels = panels_of(scratch, operands.b, problem.z, a.size(0), true);
  problem.result = result.mutable_data_ptr();
  problem.sums = is_contiguous_sum(result) ? problem.result : scratch.numbers(result.numel());
  multiply(a.size(0), a.size(1), a.size(2), b.size(2),
      [&](int64_t begin, int64_t end) { kernels().dot(problem, begin, end); });
  return result;
}

// a as rows of K numbers and b as rows of J.
SelectProblem select_problem(Scratch& scratch, const Tensor& a, const Tensor& b, const Tensor& indices) {
  SelectProblem problem;
  const ScalarType dtype = problem.dtype = a.scalar_type();
  problem.batches = a.size(0);
  problem.rows = a.size(1);
  problem.depth = a.size(2);
  problem.columns = b.size(2);
  const ShiftedRows first = rows_of(scratch, dtype, view(a), a.size(0), a.size(1), a.size(2), true, nullptr);
  const ShiftedRows second = rows_of(scratch, dtype, view(b), b.size(0), b.size(1), b.size(2), true, nullptr);
  problem.a = first.values;
  problem.a_batch = first.batches == 1 ? 0 : problem.rows * problem.depth;
  problem.b = second.values;
  problem.b_batch = second.batches == 1 ? 0 : problem.depth * problem.columns;
  problem.indices = static_cast<int64_t*>(indices.mutable_data_ptr());
  return problem;
}

std::tuple<Tensor, Tensor> max_bmm(Tensor a, Tensor b) {
  check_matrices("_max_bmm", a, b);
  check_not_empty("_max_bmm", a);
  Tensor values = empty(a, products_shape(a, b), a.scalar_type()),
         indices = empty(a, products_shape(a, b), ScalarType::Long);
  if (values.numel() == 0) return {values, indices};
  Scratch scratch(a);
  SelectProblem problem = select_problem(scratch, a, b, indices);
  problem.values = values.mutable_data_ptr();
  share_out(problem.batches * problem.rows, values.numel() * problem.depth,
      [&](int64_t begin, int64_t end) { kernels().largest(problem, begin, end); });
  return {values, indices};
}

Tensor sample_bmm(Tensor a, Tensor b, Tensor uniforms) {
  check_matrices("_sample_bmm", a, b);
  check_beside_a("_sample_bmm", "uniforms", uniforms, a, sum_dtype(a.scalar_type()), products_shape(a, b));
  Tensor indices = empty(a, products_shape(a, b), ScalarType::Long);
  if (indices.numel() == 0) return indices;
  Scratch scratch(a);
  SelectProblem problem = select_problem(scratch, a, b, indices);
  problem.uniforms = view(uniforms);
  share_out(problem.batches * problem.rows, indices.numel() * problem.depth,
      [&](int64_t begin, int64_t end) { kernels().sample(problem, begin, end); });
  return indices;
}

}  // namespace
}  // namespace cpu
}  // namespace dcs

STABLE_TORCH_LIBRARY_IMPL(dcs, CPU, m) {
  m.impl("_log_bmm", TORCH_BOX(&dcs::cpu::log_bmm));
  m.impl("_log_bmm_backward", TORCH_BOX(&dcs::cpu::log_bmm_backward));
  m.impl("_log_bmm_product", TORCH_BOX(&dcs::cpu::log_bmm_product));
  m.impl("_max_bmm", TORCH_BOX(&dcs::cpu::max_bmm));
  m.impl("_sample_bmm", TORCH_BOX(&dcs::cpu::sample_bmm));
}
