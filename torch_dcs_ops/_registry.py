"""The one ``Library("dcs", "DEF")`` and every schema string.

The C++ libraries only add implementations to these schemas, so this module is imported before any of them is loaded.
The library object lives at module scope: the registrations end with it.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("dcs", "DEF")

# The Tensor overload comes first: in the other order the dispatcher turns a 0-D or one-element tensor gamma into a
# float, which drops its gradient and reads it back from the GPU.
_LINEAR_CROSS_ENTROPY = (
    "(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, Tensor? weight=None, "
    "str reduction='mean', int? ignore_index=-100, float label_smoothing=0., float? softcap=None, "
    "float logit_scale=1., float z_loss=0., int shift=0, float? grad_filter_eps=None, int? memory_budget=None, "
    "ScalarType? accumulate_dtype=None, ScalarType? logits_dtype=None, bool zero_if_empty=False)"
)
_HEAD_AND_TARGET = (
    "(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, float? softcap=None, "
    "float logit_scale=1., int? ignore_index=-100, int? memory_budget=None, ScalarType? logits_dtype=None"
)
_TWO_HEADS = (
    "Tensor input, Tensor linear_weight, Tensor teacher_input, Tensor teacher_weight, Tensor? linear_bias=None, "
    "Tensor? teacher_bias=None, Tensor? target=None, *, str direction='forward', float beta=0.5, float temperature=1., "
    "float? softcap=None, float logit_scale=1., float? teacher_softcap=None, float teacher_logit_scale=1., "
    "int? ignore_index=-100, int? memory_budget=None"
)
_TWO_HEADS_PRIVATE = (
    "Tensor input, Tensor linear_weight, Tensor teacher_input, Tensor teacher_weight, Tensor? linear_bias, "
    "Tensor? teacher_bias, Tensor? target, str direction, float beta, float temperature, float? softcap, "
    "float logit_scale, float? teacher_softcap, float teacher_logit_scale, int ignore_index, int? memory_budget"
)
_NEEDS_OF_TWO_HEADS = (
    "bool need_input_grad, bool need_weight_grad, bool need_teacher_input_grad, bool need_teacher_weight_grad, "
    "bool need_bias_grad, bool need_teacher_bias_grad"
)
_VOCAB_PARALLEL = (
    "int ignore_index, float label_smoothing, float? softcap, float logit_scale, float z_loss, int? memory_budget, "
    "ScalarType? accumulate_dtype, ScalarType grad_input_dtype, str input_sum, int first_class, int classes, "
    "str group, int ranks, int rank, bool need_input_grad, bool need_weight_grad, bool need_bias_grad"
)
_SCHEMAS = (
    "discounted_cumsum.Tensor(Tensor input, Tensor gamma, *, int dim=-1, str direction='right', Tensor? initial=None, "
    "Tensor? reset=None, SymInt? window=None) -> Tensor",
    "discounted_cumsum(Tensor input, float gamma, *, int dim=-1, str direction='right', Tensor? initial=None, "
    "Tensor? reset=None, SymInt? window=None) -> Tensor",
    "cumsum(Tensor input, int dim=-1, *, bool reverse=False, ScalarType? dtype=None) -> Tensor",
    # What the kernels compute; the ops above are fronts of it. gamma None: gamma_value is the discount of every step.
    "_scan(Tensor input, Tensor? gamma, float gamma_value, int dim, bool reverse, bool shifted, Tensor? initial, "
    "Tensor? reset, SymInt? window) -> Tensor",
    # The same for eager calls with nothing to record, of which callers make sure: it records nothing.
    "_scan_unrecorded(Tensor input, Tensor? gamma, float gamma_value, int dim, bool reverse, bool shifted, "
    "Tensor? initial, Tensor? reset, SymInt? window) -> Tensor",
    # (grad_input, grad_gamma) of an unshifted _scan without a window, in one pass. grad_gamma has input's shape for a
    # gamma of every step, none for a 0-D gamma, else input's without `dim`.
    "_scan_gradients(Tensor grad, Tensor output, Tensor? gamma, float gamma_value, int dim, bool reverse, "
    "Tensor? initial, Tensor? reset) -> (Tensor, Tensor)",
    # Which CUDA kernel a scan of contiguous operands takes, as JSON (csrc/include/dcs/scan/plan/describe.h). gamma:
    # "number", "row" or "step". window 0: none. The last three are the GPU's limits; cluster 0: it has none.
    "scan_plan(int[] shape, ScalarType dtype, int dim, str gamma, bool reset, bool initial, bool reverse, int window, "
    "int multiprocessors, int shared_bytes, int cluster) -> str",
    f"linear_cross_entropy{_LINEAR_CROSS_ENTROPY} -> Tensor",
    # (loss, lse, predictions)
    f"linear_cross_entropy.aux{_LINEAR_CROSS_ENTROPY} -> (Tensor, Tensor, Tensor)",
    # (log_probs, entropy)
    f"linear_log_probs{_HEAD_AND_TARGET}) -> (Tensor, Tensor)",
    # (log_probs, entropy, lse, predictions, argmax_log_prob) for target (...) or (..., K). What is not needed comes
    # back with no elements.
    f"linear_log_probs.full{_HEAD_AND_TARGET}, bool need_entropy=True, bool need_predictions=False) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # (log_probs, lse, gradient): for one id a row, with the gradient of input where that of every log-probability is 1.
    "_linear_log_probs_forward(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, float? softcap, "
    "float logit_scale, int ignore_index, int? memory_budget, ScalarType? logits_dtype) -> (Tensor, Tensor, Tensor)",
    # linear_log_probs.full's results and all logits (N, V), for a backward that is compiled with it
    # (linear_cross_entropy/saved_logits.py); and that backward's gradients, from a copy of them.
    "_linear_log_probs_logits(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, float? softcap, "
    "float logit_scale, int ignore_index, int? memory_budget, ScalarType? logits_dtype, bool need_entropy, "
    "bool need_predictions) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "_linear_log_probs_of_logits(Tensor? grad_log_probs, Tensor? grad_entropy, Tensor? grad_lse, Tensor logits, "
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, float? softcap, float logit_scale, "
    "int ignore_index, int? memory_budget, ScalarType? logits_dtype, bool need_input_grad, bool need_weight_grad, "
    "bool need_bias_grad) -> (Tensor, Tensor, Tensor)",
    # (grad_input, grad_weight, grad_bias) from the gradients of log_probs (..., K), entropy and lse.
    "_linear_log_probs_backward(Tensor? grad_log_probs, Tensor? grad_entropy, Tensor? grad_lse, Tensor input, "
    "Tensor linear_weight, Tensor target, Tensor? linear_bias, float? softcap, float logit_scale, int ignore_index, "
    "int? memory_budget, ScalarType? logits_dtype, bool need_input_grad, bool need_weight_grad, "
    "bool need_bias_grad) -> (Tensor, Tensor, Tensor)",
    # (log_probs, indices) of the k largest logits.
    "linear_top_k(Tensor input, Tensor linear_weight, SymInt k, *, Tensor? linear_bias=None, float? softcap=None, "
    "float logit_scale=1., int? memory_budget=None, ScalarType? logits_dtype=None) -> (Tensor, Tensor)",
    # The divergence of every row; defined in reference/linear_cross_entropy/kl_div.py.
    f"linear_kl_div({_TWO_HEADS}) -> Tensor",
    # Their mean or sum.
    f"linear_kl_div.reduced({_TWO_HEADS}, str reduction='mean', bool zero_if_empty=False) -> Tensor",
    # The rows' divergences, and the gradients of their mean or sum from the same pass over the logits.
    f"_linear_kl_div_forward({_TWO_HEADS_PRIVATE}, bool is_mean, {_NEEDS_OF_TWO_HEADS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # Gradients of the six operands; those that are not needed have no elements.
    f"_linear_kl_div_backward(Tensor grad, {_TWO_HEADS_PRIVATE}, {_NEEDS_OF_TWO_HEADS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # (loss, lse, predictions, entropy, grad_input, grad_weight, grad_bias, grad_scale): the loss and, for reduction
    # 'mean' or 'sum', its gradients from the same pass over the logits. What is not needed comes back with no elements.
    # grad_scale (1,): a factor that the gradients of float16 input still lack.
    "_linear_cross_entropy_forward(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, "
    "Tensor? weight, str reduction, int ignore_index, float label_smoothing, float? softcap, float logit_scale, "
    "float z_loss, float? grad_filter_eps, int? memory_budget, ScalarType? accumulate_dtype, ScalarType? logits_dtype, "
    "bool need_input_grad, bool need_weight_grad, bool need_bias_grad, bool need_predictions, bool need_entropy) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # (grad_input, grad_weight, grad_bias) from the gradients of loss, lse and entropy, by making the logits again.
    "_linear_cross_entropy_backward(Tensor? grad_loss, Tensor? grad_lse, Tensor? grad_entropy, Tensor input, "
    "Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, str reduction, int ignore_index, "
    "float label_smoothing, float? softcap, float logit_scale, float z_loss, float? grad_filter_eps, "
    "int? memory_budget, ScalarType? accumulate_dtype, ScalarType? logits_dtype, bool need_input_grad, "
    "bool need_weight_grad, bool need_bias_grad) -> (Tensor, Tensor, Tensor)",
    # (loss, lse, predictions, entropy, logits_gradient): the forward of a compiled graph whose backward makes the
    # gradients of the operands from the logits' (linear_cross_entropy/compiled.py).
    "_linear_cross_entropy_logits(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, "
    "Tensor? weight, str reduction, int ignore_index, float label_smoothing, float? softcap, float logit_scale, "
    "float z_loss, float? grad_filter_eps, int? memory_budget, ScalarType? accumulate_dtype, ScalarType? logits_dtype, "
    "bool need_predictions, bool need_entropy) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # (loss, lse, predictions, entropy) of every row; with `gradient` the logits become their own gradient.
    # softcap 0: none. within, beside: for a second copy of the gradient, of the CUDA kernels
    # (linear_cross_entropy/weight_gradient.py).
    "_cross_entropy_rows_(Tensor(a!) logits, Tensor target, Tensor? linear_bias, Tensor? weight, Tensor? grad_loss, "
    "Tensor? grad_lse, Tensor? grad_entropy, int ignore_index, float label_smoothing, float softcap, "
    "float logit_scale, float z_loss, bool gradient, bool predictions, bool entropy, Tensor(b!)? within=None, "
    "Tensor(c!)? beside=None, int first_row=0, int kept_rows=0, int width=0, int inner=0, int slices=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    # out[..., i, j] = logsumexp_k(a[..., i, k] + b[..., k, j]); batch dimensions and 1-D operands as in torch.matmul.
    "log_bmm(Tensor a, Tensor b) -> Tensor",
    # (values, indices) of the maximum over k.
    "max_bmm(Tensor a, Tensor b) -> (Tensor, Tensor)",
    # Of every (i, j) one k, drawn from the softmax over k by inversion of its cumulative sum at `uniforms`.
    "sample_bmm(Tensor a, Tensor b, Tensor uniforms) -> Tensor",
    # What the kernels compute, on a (B, I, K) and b (B, K, J). (out, log_s): log_s = out - max_k a - max_k b, in
    # float32 at least. precision: torch.get_float32_matmul_precision().
    "_log_bmm(Tensor a, Tensor b, str precision) -> (Tensor, Tensor)",
    # (grad_a, grad_b). What is not needed comes back with no elements.
    "_log_bmm_backward(Tensor grad, Tensor a, Tensor b, Tensor log_s, str precision, bool need_a, bool need_b) "
    "-> (Tensor, Tensor)",
    # The sum of W[i, j, k] x[i, k] y[i, j] z[k, j] over one of i (0), k (1), j (2); W is the softmax over k, an operand
    # that is None is 1, and the operand that the result has the place of is not read.
    "_log_bmm_product(Tensor a, Tensor b, Tensor log_s, Tensor? x, Tensor? y, Tensor? z, int over) -> Tensor",
    "_max_bmm(Tensor a, Tensor b) -> (Tensor, Tensor)",
    "_sample_bmm(Tensor a, Tensor b, Tensor uniforms) -> Tensor",
    # (advantages, targets, pg_advantages): what torch_dcs_ops.returns is made of. Defined step by step in
    # reference/returns.py. Temporal differences, their scan from the last step back, and what is formed of it, in one
    # pass; what is not needed comes back with the shape (0,).
    "_temporal_difference_scan(Tensor rewards, Tensor? values, Tensor? next_values, Tensor? bootstrap_value, "
    "Tensor? terminated, Tensor? truncated, Tensor? gamma, float gamma_value, Tensor? trace, float trace_value, "
    "Tensor? rhos, float clip_rho, float clip_c, float clip_pg, int dim, bool need_advantages, bool need_targets, "
    "bool need_pg) -> (Tensor, Tensor, Tensor)",
    # Returns over n steps and then a value, in one pass (reference/returns.py). n beyond the data: all of it.
    "_n_step_returns(Tensor rewards, Tensor? values, Tensor? next_values, Tensor? bootstrap_value, Tensor? terminated, "
    "Tensor? truncated, Tensor? gamma, float gamma_value, Tensor? trace, float trace_value, int dim, SymInt n) "
    "-> Tensor",
    # (rewards, values, next_values, bootstrap_value): gradients of what both are linear in, from those of the results
    # (ops/returns/gradients.py). n: of _n_step_returns. What is not needed comes back with the shape (0,); that of
    # bootstrap_value has rewards' shape without `dim`.
    "_returns_gradients(Tensor? of_advantages, Tensor? of_targets, Tensor? of_pg, Tensor? ends, Tensor? lacks_after, "
    "Tensor? gamma, float gamma_value, Tensor? trace, float trace_value, Tensor? rhos, float clip_rho, float clip_c, "
    "float clip_pg, int dim, SymInt? n, bool has_own_values, bool has_next_values, bool need_rewards, "
    "bool need_values, bool need_next_values, bool need_bootstrap_value) -> (Tensor, Tensor, Tensor, Tensor)",
    # A linear layer's softmax whose classes are shared out among the ranks of `group` (distributed/):
    # (loss, log_probs, predictions, statistics, grad_input, grad_weight, grad_bias) of input (N, D), target (N, K) and
    # this rank's rows of linear_weight, the gradients of the losses' sum times `scale`. grad_input is this rank's part,
    # or its sum over the ranks (distributed/linear_cross_entropy/input_sums.py).
    "_vocab_parallel_forward(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, "
    f"Tensor? weight_sum, Tensor? scale, {_VOCAB_PARALLEL}, bool need_predictions, bool need_entropy) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # (grad_input, grad_weight, grad_bias) from the gradients of loss (N,) or (1,), log_probs, lse and entropy.
    "_vocab_parallel_backward(Tensor? grad_loss, Tensor? grad_log_probs, Tensor? grad_lse, Tensor? grad_entropy, "
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, Tensor? weight_sum, "
    f"Tensor statistics, {_VOCAB_PARALLEL}) -> (Tensor, Tensor, Tensor)",
    # Of two linear heads whose classes are shared out: (rows (N,), statistics (6, N), and the gradients of the operands
    # but target), with `grad` (N,) or (1,) those of the rows. With `statistics` the ranks exchange nothing.
    "_vocab_parallel_kl_div(Tensor? grad, Tensor input, Tensor linear_weight, Tensor teacher_input, "
    "Tensor teacher_weight, Tensor? linear_bias, Tensor? teacher_bias, Tensor? target, Tensor? statistics, "
    "str direction, float beta, float temperature, float? softcap, float logit_scale, float? teacher_softcap, "
    "float teacher_logit_scale, int ignore_index, int? memory_budget, ScalarType grad_input_dtype, "
    "ScalarType grad_teacher_dtype, str input_sum, int classes, str group, int ranks, int rank, bool need_input_grad, "
    "bool need_weight_grad, bool need_teacher_input_grad, bool need_teacher_weight_grad, bool need_bias_grad, "
    "bool need_teacher_bias_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # A copy of value that a compiled backward cannot make without operand (linear_cross_entropy/compiled.py).
    "_tied(Tensor value, Tensor operand) -> Tensor",
    # output = input·factor·other·number, rounded once; output may be input.
    "_scale(Tensor input, Tensor? factor, Tensor(a!) output, Tensor? other=None, float number=1.) -> ()",
    # (3,): what a mean of the rows' losses divides by; what the logits' gradient is multiplied by, the reciprocal or,
    # where that is finite, a boost other than 0; and what it lacks then.
    "_mean_factors(Tensor target, Tensor? weight, int ignore_index, float boost, Tensor(a!) factors) -> ()",
    # mean = sum(values) / divisor.
    "_mean(Tensor values, Tensor divisor, Tensor(a!) mean) -> ()",
    "softmax(Tensor input, int dim=-1) -> Tensor",
    # softmax's derivative, in either mode: (grad - sum(grad·output))·output.
    "_softmax_backward(Tensor grad, Tensor output, int dim) -> Tensor",
)

for _schema in _SCHEMAS:
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

discounted_cumsum_tensor = torch.ops.dcs.discounted_cumsum.Tensor
discounted_cumsum_number = torch.ops.dcs.discounted_cumsum.default
cumsum = torch.ops.dcs.cumsum.default
scan = torch.ops.dcs._scan.default
scan_unrecorded = torch.ops.dcs._scan_unrecorded.default
scan_gradients = torch.ops.dcs._scan_gradients.default
scan_plan = torch.ops.dcs.scan_plan.default
linear_cross_entropy = torch.ops.dcs.linear_cross_entropy.default
linear_cross_entropy_aux = torch.ops.dcs.linear_cross_entropy.aux
linear_log_probs = torch.ops.dcs.linear_log_probs.default
linear_log_probs_full = torch.ops.dcs.linear_log_probs.full
linear_log_probs_forward = torch.ops.dcs._linear_log_probs_forward.default
linear_log_probs_logits = torch.ops.dcs._linear_log_probs_logits.default
linear_log_probs_of_logits = torch.ops.dcs._linear_log_probs_of_logits.default
linear_log_probs_backward = torch.ops.dcs._linear_log_probs_backward.default
linear_top_k = torch.ops.dcs.linear_top_k.default
linear_kl_div = torch.ops.dcs.linear_kl_div.default
linear_kl_div_reduced = torch.ops.dcs.linear_kl_div.reduced
linear_kl_div_forward = torch.ops.dcs._linear_kl_div_forward.default
linear_kl_div_backward = torch.ops.dcs._linear_kl_div_backward.default
linear_cross_entropy_forward = torch.ops.dcs._linear_cross_entropy_forward.default
linear_cross_entropy_backward = torch.ops.dcs._linear_cross_entropy_backward.default
linear_cross_entropy_logits = torch.ops.dcs._linear_cross_entropy_logits.default
cross_entropy_rows_ = torch.ops.dcs._cross_entropy_rows_.default
log_bmm = torch.ops.dcs.log_bmm.default
max_bmm = torch.ops.dcs.max_bmm.default
sample_bmm = torch.ops.dcs.sample_bmm.default
log_bmm_kernel = torch.ops.dcs._log_bmm.default
log_bmm_backward = torch.ops.dcs._log_bmm_backward.default
log_bmm_product = torch.ops.dcs._log_bmm_product.default
max_bmm_kernel = torch.ops.dcs._max_bmm.default
sample_bmm_kernel = torch.ops.dcs._sample_bmm.default
temporal_difference_scan = torch.ops.dcs._temporal_difference_scan.default
n_step_returns = torch.ops.dcs._n_step_returns.default
returns_gradients = torch.ops.dcs._returns_gradients.default
vocab_parallel_forward = torch.ops.dcs._vocab_parallel_forward.default
vocab_parallel_backward = torch.ops.dcs._vocab_parallel_backward.default
vocab_parallel_kl_div = torch.ops.dcs._vocab_parallel_kl_div.default
tied = torch.ops.dcs._tied.default
scale = torch.ops.dcs._scale.default
mean_factors = torch.ops.dcs._mean_factors.default
mean = torch.ops.dcs._mean.default
softmax = torch.ops.dcs.softmax.default
softmax_backward = torch.ops.dcs._softmax_backward.default
