// `_temporal_difference_scan` and `_n_step_returns` over a backend: checks, the (outer, time, inner) view of every
// operand, outputs. A backend gives
//   static void run(const ReturnsProblem&, const Tensor& rewards)   rewards: for the stream and the device
//   static constexpr bool kReadsNarrowRates                         whether its scan reads ReturnsDiscount::is_narrow()
// The sentences are those of torch_dcs_ops/ops/returns/validate.py (a test compares the two).
#pragma once

#include <tuple>
#include <utility>

#include <torch/csrc/stable/library.h>

#include "dcs/allocate.h"
#include "dcs/layout.h"
#include "dcs/returns/problem.h"

namespace dcs {

constexpr const char *kReturns = "_temporal_difference_scan", *kNStep = "_n_step_returns";

inline void check_reward_like(
    const char* op, const char* name, const Tensor& tensor, const Tensor& rewards, bool is_flag) {
  const ScalarType dtype = rewards.scalar_type(), have = tensor.scalar_type();
  if (is_flag ? have != ScalarType::Bool && have != dtype : have != dtype)
    fail(op, ": ", name, " must ", is_flag ? "be bool or have" : "have", " rewards' dtype ", dtype_name(dtype),
        ", got ", dtype_name(have));
  if (!same_device(tensor, rewards))
    fail(op, ": ", name, " must be on rewards' device ", device_text(rewards), ", got ", device_text(tensor));
  if (!same_sizes(tensor, rewards))
    fail(op, ": ", name, " must have rewards' shape ", shape_text(sizes_of(rewards)), ", got ",
        shape_text(sizes_of(tensor)));
}

inline void check_bootstrap(const char* op, const Tensor& tensor, const Tensor& rewards, int64_t dim) {
  if (tensor.scalar_type() != rewards.scalar_type())
    fail(op, ": bootstrap_value must have rewards' dtype ", dtype_name(rewards.scalar_type()), ", got ",
        dtype_name(tensor.scalar_type()));
  if (!same_device(tensor, rewards))
    fail(op, ": bootstrap_value must be on rewards' device ", device_text(rewards), ", got ", device_text(tensor));
  const Sizes rows = without_dim(sizes_of(rewards), dim), have = sizes_of(tensor);
  if (!broadcasts_to(have, rows))
    fail(op, ": bootstrap_value must broadcast to rewards' shape without dim ", dim, ", ", shape_text(rows), ", got ",
        shape_text(have));
}

inline void check_discount(const char* op, const char* name, const Tensor& rate, const Tensor& rewards, int64_t dim) {
  if (!is_real_floating(rate.scalar_type()))
    fail(op, ": ", name, " must be a floating-point tensor, got ", dtype_name(rate.scalar_type()));
  if (!(rate.dim() == 0 && rate.is_cpu()) && !same_device(rate, rewards))
    fail(op, ": ", name, " must be on rewards' device ", device_text(rewards), ", got ", device_text(rate));
  const Sizes have = sizes_of(rate), full = sizes_of(rewards), rows = without_dim(full, dim);
  const int64_t ndim = rewards.dim();
  if (rate.dim() > ndim)
    fail(op, ": ", name, " must have at most rewards' number of dimensions (", ndim, "), got ", rate.dim());
  if (rate.dim() == ndim) {
    if (!broadcasts_to(have, full))
      fail(op, ": ", name, " must broadcast to rewards' shape ", shape_text(full), ", got ", shape_text(have));
    return;
  }
  if (!broadcasts_to(have, rows))
    fail(op, ": ", name, " must broadcast to rewards' shape without dim ", dim, ", ", shape_text(rows),
        ", to be per row, got ", shape_text(have), "; per step it needs rewards' number of dimensions (", ndim, ")");
}

// Everything a call says; converted tensors are kept alive here.
struct ReturnsCall {
  const char* op;
  Tensor rewards;
  OptionalTensor values, next_values, bootstrap_value, terminated, truncated, gamma;
  double gamma_value;
  OptionalTensor trace;
  double trace_value;
  OptionalTensor rhos;
  double clip_rho, clip_c, clip_pg;
  int64_t dim;
  bool need_advantages, need_targets, need_pg;
  std::optional<int64_t> n;  // of `_n_step_returns`
};

inline void validate(ReturnsCall& call) {
  const Tensor& rewards = call.rewards;
  const char* const op = call.op;
  check_real_floating(op, "rewards", rewards);
  const int64_t ndim = rewards.dim();
  if (ndim == 0) fail(op, ": rewards must have a dimension of time, got a 0-D tensor");
  if (call.dim < -ndim || call.dim >= ndim)
    fail_index(op, ": time_dim must be in [", -ndim, ", ", ndim - 1, "] for ", ndim, "-D rewards, got ", call.dim);
  if (call.dim < 0) call.dim += ndim;
  const auto check = [&](const char* name, const OptionalTensor& tensor, bool is_flag) {
    if (tensor) check_reward_like(op, name, *tensor, rewards, is_flag);
  };
  check("values", call.values, false);
  check("next_values", call.next_values, false);
  check("terminated", call.terminated, true);
  check("truncated", call.truncated, true);
  check("rhos", call.rhos, false);
  if (call.next_values && call.bootstrap_value) fail(op, ": bootstrap_value must be None with next_values, got both");
  if (call.bootstrap_value) check_bootstrap(op, *call.bootstrap_value, rewards, call.dim);
  if (call.gamma) check_discount(op, "gamma", *call.gamma, rewards, call.dim);
  if (call.trace) check_discount(op, "lambda_", *call.trace, rewards, call.dim);
  if (!call.values && (call.rhos || call.need_advantages || call.need_pg))
    fail(op, ": values must be given for all but lambda-returns, got None");
  if (call.n && *call.n < 1) fail(op, ": n must be at least 1, got ", *call.n);
}

inline ScalarType arithmetic_dtype(ScalarType dtype) { return dtype == ScalarType::Double ? dtype : ScalarType::Float; }

// Points the problem's operands at the tensors of a validated call.
class ReturnsOperands {
 public:
  // `rewards`, or a tensor of their shape and dtype. `narrow_rates`: discounts of that dtype, one a step, are not
  // converted to the one of the arithmetic.
  ReturnsOperands(const Tensor& rewards, int64_t dim, Layout& layout, bool narrow_rates = false)
      : layout_(layout),
        sizes_(sizes_of(rewards)),
        dim_(dim),
        arithmetic_(arithmetic_dtype(rewards.scalar_type())),
        narrowest_(narrow_rates ? rewards.scalar_type() : arithmetic_) {}

  void output(ReturnsOutput& output, const Tensor& tensor, bool is_row = false) {
    output.data = tensor.mutable_data_ptr();
    layout_.add(const_cast<const void**>(&output.data), &output.strides, width(tensor),
        strides_in(tensor, sizes_, dim_, is_row));
  }
  void input(ReturnsInput& input, const OptionalTensor& tensor, bool is_row = false) {
    if (!tensor) return;
    input.data = tensor->const_data_ptr();
    layout_.add(&input.data, &input.strides, width(*tensor), strides_in(*tensor, sizes_, dim_, is_row));
  }
  void flag(ReturnsInput& flag, bool& is_bool, const OptionalTensor& tensor) {
    input(flag, tensor);
    if (tensor) is_bool = tensor->scalar_type() == ScalarType::Bool;
  }
  void discount(ReturnsDiscount& discount, OptionalTensor& rate, double number) {
    discount.value = number;
    if (!rate) return;
    if (rate->dim() == 0 && rate->is_cpu()) {
      discount.value = read_number(*rate);
      return;
    }
    bool is_step = rate->dim() == static_cast<int64_t>(sizes_.size());
    if (is_step && rate->size(dim_) == 1) {
      // One a row, written with an axis of time: used as precisely as it is given.
      rate = torch::stable::squeeze(*rate, dim_);
      is_step = false;
    }
    if (is_step && rate->scalar_type() != narrowest_) convert(rate, arithmetic_);
    discount.kind = is_step ? GammaKind::kStep : GammaKind::kRow;
    discount.dtype = element_type(rate->scalar_type());
    input(discount.tensor, rate, !is_step);
  }

 private:
  static int64_t width(const Tensor& tensor) { return element_size(tensor.scalar_type()); }

  Layout& layout_;
  Sizes sizes_;
  int64_t dim_;
  ScalarType arithmetic_, narrowest_;  // of discounts that are one a step
};

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> run_returns(ReturnsCall call) {
  validate(call);
  const auto make = [&](bool wanted) { return wanted ? new_like(call.rewards) : new_contiguous(call.rewards, {0}); };
  Tensor advantages = make(call.need_advantages), targets = make(call.need_targets), pg_advantages = make(call.need_pg);
  if (call.rewards.numel() == 0 || !(call.need_advantages || call.need_targets || call.need_pg))
    return {advantages, targets, pg_advantages};

  ReturnsProblem problem;
  problem.dtype = element_type(call.rewards.scalar_type());
  problem.clip_rho = call.clip_rho;
  problem.clip_c = call.clip_c;
  problem.clip_pg = call.clip_pg;
  // Over all steps it is the scan.
  if (call.n && *call.n < call.rewards.size(call.dim)) problem.steps = *call.n;
  Layout layout(sizes_of(call.rewards), call.dim);
  ReturnsOperands operands(call.rewards, call.dim, layout, Backend::kReadsNarrowRates && !problem.steps);
  if (call.need_advantages) operands.output(problem.advantages, advantages);
  if (call.need_targets) operands.output(problem.targets, targets);
  if (call.need_pg) operands.output(problem.pg_advantages, pg_advantages);
  operands.input(problem.rewards, call.rewards);
  // Targets alone contain no value of their own step: one that is not finite must not get in.
  problem.values_are_next = call.values && !call.next_values && !call.rhos && !call.need_advantages && !call.need_pg;
  operands.input(problem.values, call.values);
  operands.input(problem.next_values, call.next_values);
  operands.input(problem.bootstrap_value, call.bootstrap_value, true);
  operands.input(problem.rhos, call.rhos);
  operands.flag(problem.terminated, problem.terminated_is_bool, call.terminated);
  operands.flag(problem.truncated, problem.truncated_is_bool, call.truncated);
  operands.discount(problem.gamma, call.gamma, call.gamma_value);
  operands.discount(problem.trace, call.trace, call.trace_value);
  layout.for_each_problem(problem, [&](const ReturnsProblem& each) { Backend::run(each, call.rewards); });
  return {advantages, targets, pg_advantages};
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> temporal_difference_scan(Tensor rewards, OptionalTensor values,
    OptionalTensor next_values, OptionalTensor bootstrap_value, OptionalTensor terminated, OptionalTensor truncated,
    OptionalTensor gamma, double gamma_value, OptionalTensor trace, double trace_value, OptionalTensor rhos,
    double clip_rho, double clip_c, double clip_pg, int64_t dim, bool need_advantages, bool need_targets,
    bool need_pg) {
  return run_returns<Backend>(
      {kReturns, std::move(rewards), std::move(values), std::move(next_values), std::move(bootstrap_value),
          std::move(terminated), std::move(truncated), std::move(gamma), gamma_value, std::move(trace), trace_value,
          std::move(rhos), clip_rho, clip_c, clip_pg, dim, need_advantages, need_targets, need_pg, std::nullopt});
}

template <typename Backend>
Tensor n_step_returns(Tensor rewards, OptionalTensor values, OptionalTensor next_values, OptionalTensor bootstrap_value,
    OptionalTensor terminated, OptionalTensor truncated, OptionalTensor gamma, double gamma_value, OptionalTensor trace,
    double trace_value, int64_t dim, int64_t n) {
  // `values` are those of the next states alone.
  if (next_values) values = std::nullopt;
  return std::get<1>(run_returns<Backend>({kNStep, std::move(rewards), std::move(values), std::move(next_values),
      std::move(bootstrap_value), std::move(terminated), std::move(truncated), std::move(gamma), gamma_value,
      std::move(trace), trace_value, std::nullopt, 1.0, 1.0, 1.0, dim, false, true, false, n}));
}

template <typename Backend>
void register_returns(torch::stable::detail::StableLibrary& m) {
  m.impl("_temporal_difference_scan", TORCH_BOX(&temporal_difference_scan<Backend>));
  m.impl("_n_step_returns", TORCH_BOX(&n_step_returns<Backend>));
}

}  // namespace dcs
