// `_returns_gradients` over a backend: checks, the (outer, time, inner) view of every operand, outputs. A backend gives
//   static void run_gradients(const ReturnsGradientsProblem&, const Tensor& like)   for the stream and the device
#pragma once

#include <algorithm>
#include <tuple>
#include <utility>

#include "dcs/returns/gradients_plan.h"
#include "dcs/returns/ops.h"

namespace dcs {

constexpr const char* kReturnsGradients = "_returns_gradients";

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> returns_gradients(OptionalTensor of_advantages, OptionalTensor of_targets,
    OptionalTensor of_pg, OptionalTensor ends, OptionalTensor lacks_after, OptionalTensor gamma, double gamma_value,
    OptionalTensor trace, double trace_value, OptionalTensor rhos, double clip_rho, double clip_c, double clip_pg,
    int64_t dim, std::optional<int64_t> n, bool has_own_values, bool has_next_values, bool need_rewards,
    bool need_values, bool need_next_values, bool need_bootstrap_value) {
  const char* const op = kReturnsGradients;
  const OptionalTensor& first = of_advantages ? of_advantages : of_targets ? of_targets : of_pg;
  if (!first) fail(op, ": the gradient of a result must be given, got None");
  const Tensor like = *first;
  check_real_floating(op, "the gradient", like);
  dim = check_dim(op, dim, like.dim());
  const auto check = [&](const char* name, const OptionalTensor& tensor, bool is_flag) {
    if (tensor) check_reward_like(op, name, *tensor, like, is_flag);
  };
  check("of_advantages", of_advantages, false);
  check("of_targets", of_targets, false);
  check("of_pg", of_pg, false);
  check("rhos", rhos, false);
  for (const OptionalTensor* flag : {&ends, &lacks_after}) {
    check(flag == &ends ? "ends" : "lacks_after", *flag, true);
    if (*flag && (*flag)->scalar_type() != ScalarType::Bool)
      fail(op, ": ", flag == &ends ? "ends" : "lacks_after", " must be bool, got ", dtype_name((*flag)->scalar_type()));
  }
  if (gamma) check_discount(op, "gamma", *gamma, like, dim);
  if (trace) check_discount(op, "lambda_", *trace, like, dim);
  if (n && *n < 1) fail(op, ": n must be at least 1, got ", *n);

  const Sizes sizes = sizes_of(like);
  const auto make = [&](bool wanted) { return wanted ? new_like(like) : new_contiguous(like, {0}); };
  Tensor rewards = make(need_rewards), values = make(need_values), next_values = make(need_next_values);
  Tensor bootstrap_value = new_contiguous(like, need_bootstrap_value ? without_dim(sizes, dim) : Sizes{0});
  if (like.numel() == 0) torch::stable::zero_(bootstrap_value);
  std::tuple<Tensor, Tensor, Tensor, Tensor> results{rewards, values, next_values, bootstrap_value};
  if (like.numel() == 0 || !(need_rewards || need_values || need_next_values || need_bootstrap_value)) return results;

  ReturnsGradientsProblem problem;
  problem.dtype = element_type(like.scalar_type());
  problem.clip_rho = clip_rho;
  problem.clip_c = clip_c;
  problem.clip_pg = clip_pg;
  problem.steps = n ? std::min<int64_t>(*n, like.size(dim)) : 0;  // a window of all steps is as long
  problem.has_own_values = has_own_values;
  problem.has_next_values = has_next_values;
  Layout layout(sizes, dim);
  ReturnsOperands operands(like, dim, layout);
  if (need_rewards) operands.output(problem.rewards, rewards);
  if (need_values) operands.output(problem.values, values);
  if (need_next_values) operands.output(problem.next_values, next_values);
  if (need_bootstrap_value) operands.output(problem.bootstrap_value, bootstrap_value, true);
  operands.input(problem.of_advantages, of_advantages);
  operands.input(problem.of_targets, of_targets);
  operands.input(problem.of_pg, of_pg);
  operands.input(problem.ends, ends);
  operands.input(problem.lacks_after, lacks_after);
  operands.input(problem.rhos, rhos);
  operands.discount(problem.gamma, gamma, gamma_value);
  operands.discount(problem.trace, trace, trace_value);
  layout.for_each_problem(problem, [&](const auto& each) { Backend::run_gradients(each, like); });
  return results;
}

template <typename Backend>
void register_returns_gradients(torch::stable::detail::StableLibrary& m) {
  m.impl("_returns_gradients", TORCH_BOX(&returns_gradients<Backend>));
}

}  // namespace dcs
