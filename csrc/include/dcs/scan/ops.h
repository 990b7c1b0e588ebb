// The five scan ops over a backend: checks, operands (dcs/layout.h), outputs. A backend gives
//   static void run(const ScanProblem&, const Tensor& input)   input: for the stream, the device and workspaces
//   static int64_t partials(const ScanProblem&, const Tensor& input)  partial sums of gamma's gradient it will write
//   for each row (grad_gamma not yet set)
//   static Tensor sum(const Tensor& values)  of all elements
//   static Tensor row_sums(const Tensor& values)  over the last dimension of a contiguous tensor
#pragma once

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "dcs/allocate.h"
#include "dcs/layout.h"
#include "dcs/scan/problem.h"
#include "dcs/validate.h"

namespace dcs {

constexpr const char* kDiscountedCumsum = "discounted_cumsum";

inline ScalarType gamma_gradient_dtype(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 ? ScalarType::Float : dtype;
}

inline Tensor sum_of_all(const Tensor& values) {
  const ScalarType dtype = values.scalar_type();
  const ScalarType wide = dtype == ScalarType::ComplexFloat ? ScalarType::ComplexDouble
      : dtype == ScalarType::Float                          ? ScalarType::Double
                                                            : dtype;
  std::vector<int64_t> dims(values.dim());
  for (size_t d = 0; d < dims.size(); ++d) dims[d] = static_cast<int64_t>(d);
  const torch::headeronly::IntHeaderOnlyArrayRef all(dims.data(), dims.size());
  return torch::stable::to(torch::stable::sum(torch::stable::to(values, wide), all), dtype);
}

inline Tensor sum_of_rows(const Tensor& values) {
  const std::array<int64_t, 1> last{values.dim() - 1};
  return torch::stable::sum(values, torch::headeronly::IntHeaderOnlyArrayRef(last.data(), 1));
}

// Everything a call of the family says.
struct ScanCall {
  const char* op = kDiscountedCumsum;
  Tensor input;
  OptionalTensor gamma;
  double gamma_value = 1.0;
  int64_t dim = 0;
  bool reverse = false;
  bool shifted = false;
  OptionalTensor initial;
  OptionalTensor reset;
  int64_t window = 0;
};

inline void validate(ScanCall& call, bool integers_allowed) {
  const ScalarType dtype = call.input.scalar_type();
  const bool is_integer_sum = integers_allowed && dtype == ScalarType::Long && !call.gamma && call.gamma_value == 1.0;
  if (!is_floating_or_complex(dtype) && !is_integer_sum)
    fail(call.op, ": input must be floating-point or complex, got ", dtype_name(dtype));
  call.dim = check_dim(call.op, call.dim, call.input.dim());
  if (call.gamma) check_gamma(call.op, *call.gamma, call.input, call.dim);
  if (call.initial) check_initial(call.op, *call.initial, call.input, call.dim);
  if (call.reset) check_reset(call.op, *call.reset, call.input);
}

// A step gamma that a kernel cannot read as it is: a half input beside a wider gamma is computed in float32, other
// gammas take the input's dtype.
inline bool is_step_gamma(const ScanCall& call) {
  return call.gamma && call.gamma->dim() > 0 && call.gamma->dim() == call.input.dim();
}

inline bool widens_input(const ScanCall& call) {
  const ScalarType dtype = call.input.scalar_type();
  return is_step_gamma(call) && (dtype == ScalarType::Half || dtype == ScalarType::BFloat16) &&
      call.gamma->scalar_type() != dtype;
}

// Fills the problem's flags and gamma, and adds the operands that forward and backward share. Keeps converted tensors
// alive in `call`.
inline void describe(ScanCall& call, const Tensor& output, const Sizes& sizes, ScanProblem& problem, Layout& layout) {
  problem.dtype = element_type(call.input.scalar_type());
  problem.reverse = call.reverse;
  problem.shifted = call.shifted;
  problem.window = call.window;
  const int64_t width = element_size(problem.dtype);
  problem.output = output.mutable_data_ptr();
  layout.add(const_cast<const void**>(&problem.output), &problem.output_strides, width,
      strides_in(output, sizes, call.dim, false));
  problem.input = call.input.const_data_ptr();
  layout.add(&problem.input, &problem.input_strides, width, strides_in(call.input, sizes, call.dim, false));
  problem.gamma_value = call.gamma_value;
  if (call.gamma) {
    const bool is_step = is_step_gamma(call);
    if (is_step) convert(call.gamma, call.input.scalar_type());
    if (call.gamma->dim() == 0 && call.gamma->is_cpu() && !is_complex(call.gamma->scalar_type())) {
      problem.gamma_value = read_number(*call.gamma);
    } else {
      if (call.gamma->is_cpu() && !call.input.is_cpu())
        call.gamma = torch::stable::to(*call.gamma, call.input.device());
      problem.gamma = call.gamma->const_data_ptr();
      problem.gamma_dtype = element_type(call.gamma->scalar_type());
      problem.gamma_kind = is_step ? GammaKind::kStep : GammaKind::kRow;
      layout.add(&problem.gamma, &problem.gamma_strides, element_size(problem.gamma_dtype),
          strides_in(*call.gamma, sizes, call.dim, !is_step));
    }
  }
  if (call.initial) {
    problem.initial = call.initial->const_data_ptr();
    layout.add(&problem.initial, &problem.initial_strides, width, strides_in(*call.initial, sizes, call.dim, true));
  }
  if (call.reset) {
    problem.reset = static_cast<const bool*>(call.reset->const_data_ptr());
    layout.add(reinterpret_cast<const void**>(&problem.reset), &problem.reset_strides, 1,
        strides_in(*call.reset, sizes, call.dim, false));
  }
}

// A step gamma that does not vary along time is a row gamma.
inline void finish_kind(ScanProblem& problem, bool backward) {
  if (!backward && problem.gamma_kind == GammaKind::kStep && problem.gamma_strides.time == 0)
    problem.gamma_kind = GammaKind::kRow;
}

// The discount of a call without a gamma tensor, or whose gamma is a number on the CPU.
inline bool has_number_gamma(const ScanCall& call) {
  return !call.gamma || (call.gamma->dim() == 0 && call.gamma->is_cpu() && !is_complex(call.gamma->scalar_type()));
}

// A contiguous input with nothing beside it: no operands to align.
template <typename Backend>
Tensor run_dense_scan(const ScanCall& call) {
  const Tensor& input = call.input;
  const auto sizes = input.sizes();
  Tensor output = new_dense(input);
  ScanProblem problem;
  problem.dtype = element_type(input.scalar_type());
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d)
    (d < call.dim ? problem.outer : d == call.dim ? problem.length : problem.inner) *= sizes[d];
  if (problem.outer * problem.length * problem.inner == 0) return output;
  problem.input_strides = {problem.length * problem.inner, problem.inner, 1};
  if (problem.inner == 1) problem.input_strides.inner = 0;
  if (problem.outer == 1) problem.input_strides.outer = 0;
  problem.output_strides = problem.input_strides;
  problem.reverse = call.reverse;
  problem.shifted = call.shifted;
  problem.window = call.window;
  problem.gamma_value = call.gamma ? read_number(*call.gamma) : call.gamma_value;
  problem.input = input.const_data_ptr();
  problem.output = output.mutable_data_ptr();
  Backend::run(problem, input);
  return output;
}

template <typename Backend>
Tensor run_scan(ScanCall call, bool integers_allowed = false) {
  validate(call, integers_allowed);
  // One discount a row, written with a time dimension of size 1: a row gamma, used as precisely as it is given.
  if (is_step_gamma(call) && call.gamma->size(call.dim) == 1)
    call.gamma = torch::stable::squeeze(*call.gamma, call.dim);
  if (!call.initial && !call.reset && has_number_gamma(call) && call.input.is_contiguous())
    return run_dense_scan<Backend>(call);
  if (widens_input(call)) {
    const ScalarType dtype = call.input.scalar_type();
    call.input = torch::stable::to(call.input, ScalarType::Float);
    convert(call.initial, ScalarType::Float);
    return torch::stable::to(run_scan<Backend>(std::move(call)), dtype);
  }
  Tensor output = new_like(call.input);
  if (call.input.numel() == 0) return output;
  const Sizes sizes = sizes_of(call.input);
  ScanProblem problem;
  Layout layout(sizes, call.dim);
  describe(call, output, sizes, problem, layout);
  layout.for_each_problem(problem, [&](ScanProblem& each) {
    finish_kind(each, false);
    Backend::run(each, call.input);
  });
  return output;
}

template <typename Backend>
std::tuple<Tensor, Tensor> run_scan_gradients(ScanCall call, Tensor saved) {
  validate(call, false);
  if (saved.scalar_type() != call.input.scalar_type() || !same_sizes(saved, call.input))
    fail(call.op, ": output must have grad's dtype and shape ", shape_text(sizes_of(call.input)), ", got ",
        dtype_name(saved.scalar_type()), " ", shape_text(sizes_of(saved)));
  check_device(call.op, "output", saved, call.input);
  if (widens_input(call)) {
    const ScalarType dtype = call.input.scalar_type();
    call.input = torch::stable::to(call.input, ScalarType::Float);
    convert(call.initial, ScalarType::Float);
    auto [grad_input, grad_gamma] =
        run_scan_gradients<Backend>(std::move(call), torch::stable::to(saved, ScalarType::Float));
    return {torch::stable::to(grad_input, dtype), grad_gamma};
  }
  const Sizes sizes = sizes_of(call.input);
  const ScalarType dtype = call.input.scalar_type();
  const bool is_step = is_step_gamma(call), is_number = call.gamma && call.gamma->dim() == 0;
  const Sizes row_sizes = without_dim(sizes, call.dim);
  Tensor grad_input = new_like(call.input);
  if (call.input.numel() == 0) {
    if (is_step) return {grad_input, new_like(call.input)};
    return {
        grad_input, torch::stable::new_zeros(call.input, is_number ? Sizes() : row_sizes, gamma_gradient_dtype(dtype))};
  }
  ScanProblem problem;
  Layout layout(sizes, call.dim);
  describe(call, grad_input, sizes, problem, layout);
  problem.backward = true;
  problem.conjugate_gamma = true;
  problem.saved = saved.const_data_ptr();
  layout.add(&problem.saved, &problem.saved_strides, element_size(dtype), strides_in(saved, sizes, call.dim, false));
  Tensor grad_gamma = is_step ? new_like(call.input) : Tensor();
  if (is_step) {
    problem.grad_gamma = grad_gamma.mutable_data_ptr();
    layout.add(const_cast<const void**>(&problem.grad_gamma), &problem.grad_gamma_strides, element_size(dtype),
        strides_in(grad_gamma, sizes, call.dim, false));
    layout.for_each_problem(problem, [&](ScanProblem& each) { Backend::run(each, call.input); });
    return {grad_input, grad_gamma};
  }
  layout.for_each_problem(problem, [&](ScanProblem& each) { problem.partials = Backend::partials(each, call.input); });
  Sizes partial_sizes = row_sizes;
  if (problem.partials > 1) partial_sizes.push_back(problem.partials);
  grad_gamma = torch::stable::new_empty(call.input, partial_sizes, gamma_gradient_dtype(dtype));
  std::vector<int64_t> by_dim(sizes.size(), 0);
  int64_t stride = problem.partials;
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 1; d >= 0; --d) {
    if (d == call.dim) continue;
    by_dim[d] = sizes[d] == 1 ? 0 : stride;
    stride *= sizes[d];
  }
  problem.grad_gamma = grad_gamma.mutable_data_ptr();
  layout.add(const_cast<const void**>(&problem.grad_gamma), &problem.grad_gamma_strides,
      element_size(gamma_gradient_dtype(dtype)), by_dim);
  layout.for_each_problem(problem, [&](ScanProblem& each) { Backend::run(each, call.input); });
  if (is_number && grad_gamma.dim() > 0) return {grad_input, Backend::sum(grad_gamma)};
  if (problem.partials == 1) return {grad_input, grad_gamma};
  return {grad_input, Backend::row_sums(grad_gamma)};
}

template <typename Backend>
Tensor scan(Tensor input, OptionalTensor gamma, double gamma_value, int64_t dim, bool reverse, bool shifted,
    OptionalTensor initial, OptionalTensor reset, std::optional<int64_t> window) {
  if (window) check_window(kDiscountedCumsum, *window);
  if (shifted && initial) fail(kDiscountedCumsum, ": initial must be None for a shifted scan, got a tensor");
  return run_scan<Backend>({kDiscountedCumsum, std::move(input), std::move(gamma), gamma_value, dim, reverse, shifted,
                               std::move(initial), std::move(reset), window.value_or(0)},
      true);
}

template <typename Backend>
std::tuple<Tensor, Tensor> scan_gradients(Tensor grad, Tensor output, OptionalTensor gamma, double gamma_value,
    int64_t dim, bool reverse, OptionalTensor initial, OptionalTensor reset) {
  return run_scan_gradients<Backend>({kDiscountedCumsum, std::move(grad), std::move(gamma), gamma_value, dim, !reverse,
                                         true, std::move(initial), std::move(reset), 0},
      std::move(output));
}

template <typename Backend>
Tensor discounted_cumsum(Tensor input, OptionalTensor gamma, double gamma_value, int64_t dim,
    const std::string& direction, OptionalTensor initial, OptionalTensor reset, std::optional<int64_t> window) {
  const bool reverse = check_direction(kDiscountedCumsum, direction);
  if (window) check_window(kDiscountedCumsum, *window);
  return run_scan<Backend>({kDiscountedCumsum, std::move(input), std::move(gamma), gamma_value, dim, reverse, false,
      std::move(initial), std::move(reset), window.value_or(0)});
}

template <typename Backend>
Tensor discounted_cumsum_number(Tensor input, double gamma, int64_t dim, std::string direction, OptionalTensor initial,
    OptionalTensor reset, std::optional<int64_t> window) {
  return discounted_cumsum<Backend>(
      std::move(input), std::nullopt, gamma, dim, direction, std::move(initial), std::move(reset), window);
}

template <typename Backend>
Tensor discounted_cumsum_tensor(Tensor input, Tensor gamma, int64_t dim, std::string direction, OptionalTensor initial,
    OptionalTensor reset, std::optional<int64_t> window) {
  return discounted_cumsum<Backend>(
      std::move(input), std::move(gamma), 1.0, dim, direction, std::move(initial), std::move(reset), window);
}

template <typename Backend>
Tensor cumsum(Tensor input, int64_t dim, bool reverse, std::optional<ScalarType> dtype) {
  const ScalarType given = input.scalar_type();
  const ScalarType wanted = dtype ? *dtype : is_integer(given) ? ScalarType::Long : given;
  if (!is_integer(wanted) && !is_floating_or_complex(wanted))
    fail("cumsum: input must be floating-point or complex, got ", dtype_name(wanted));
  if (given != wanted) input = torch::stable::to(input, wanted);
  // An integer dtype asked for by name: wrapping int64 sums, narrowed, are the narrow sums.
  const bool narrow = is_integer(wanted) && wanted != ScalarType::Long;
  if (narrow) input = torch::stable::to(input, ScalarType::Long);
  Tensor output = run_scan<Backend>(
      {"cumsum", std::move(input), std::nullopt, 1.0, dim, reverse, false, std::nullopt, std::nullopt, 0}, true);
  return narrow ? torch::stable::to(output, wanted) : output;
}

template <typename Backend>
void register_scan_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("_scan", TORCH_BOX(&scan<Backend>));
  m.impl("_scan_unrecorded", TORCH_BOX(&scan<Backend>));
  m.impl("_scan_gradients", TORCH_BOX(&scan_gradients<Backend>));
  m.impl("discounted_cumsum", TORCH_BOX(&discounted_cumsum_number<Backend>));
  m.impl("discounted_cumsum.Tensor", TORCH_BOX(&discounted_cumsum_tensor<Backend>));
  m.impl("cumsum", TORCH_BOX(&cumsum<Backend>));
}

}  // namespace dcs
