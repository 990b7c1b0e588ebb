"""`dcs::linear_log_probs.full` and `dcs::_linear_log_probs_backward`: kernels, fakes, autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy import log_probs as reference
from ...reference.linear_cross_entropy.log_probs import HeadOptions
from ...reference.linear_cross_entropy.loss import Needs, Options
from ...reference.linear_cross_entropy.rows import check_target_range, row_dtype
from .._common import autocast, flops
from .._common.autograd import Node, apply, below, in_forward_mode, is_direct_call, pull_back, run_below, tracked
from .._common.validate import fail, known
from . import ids as driver
from .compiled import keeps_logits, tied_to_operand
from .ids import IdUpstream
from .kernel_ops import gemm_flops
from .loss import autocast_operands
from .scale import may_form_gradients, scaled_rows
from .valid_rows import Learned
from .validate import check_head, check_ids, check_options, check_upstream, normal_ignore_index

OP = "linear_log_probs"
_OPTIONS = len(HeadOptions._fields)
Results = tuple[Tensor, ...]


def checked(
    op: str,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
) -> HeadOptions:
    check_head(op, input, linear_weight, linear_bias)
    options = HeadOptions(softcap, logit_scale, normal_ignore_index(ignore_index), memory_budget, logits_dtype)
    shared = options._asdict()
    del shared["ignore_index"]
    check_options(op, Options(**shared), input.dtype)
    return options


def check_call(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, options: HeadOptions
) -> None:
    checked(OP, input, linear_weight, linear_bias, **options._asdict())
    check_ids(OP, target, input)


def with_ids(input: Tensor, target: Tensor) -> tuple[Tensor, bool]:
    """target (..., K), and whether it has been (...)."""
    is_single = target.dim() < input.dim()
    return (target.unsqueeze(-1) if is_single else target), is_single


def _full(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    need_entropy: bool = True,
    need_predictions: bool = False,
    **keywords: Any,
) -> Results:
    options = checked(OP, input, linear_weight, linear_bias, **keywords)
    check_ids(OP, target, input)
    return _run_full(input, linear_weight, target, linear_bias, options, need_entropy, need_predictions)


def _run_full(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    options: HeadOptions,
    need_entropy: bool,
    need_predictions: bool,
    learned: Learned | None = None,
) -> Results:
    """`_full` with checked arguments."""
    ids, is_single = with_ids(input, target)
    with torch._C._AutoDispatchBelowAutograd():
        log_probs, *rest = driver.forward(
            input, linear_weight, ids, linear_bias, options, need_entropy, need_predictions, learned=learned
        )
    return (log_probs.view(target.shape) if is_single else log_probs, *rest)


def full_fake(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    need_entropy: bool = True,
    need_predictions: bool = False,
    **keywords: Any,
) -> Results:
    checked(OP, input, linear_weight, linear_bias, **keywords)
    check_ids(OP, target, input)
    lead, dtype = input.shape[:-1], row_dtype(input.dtype)
    return (
        input.new_empty(target.shape, dtype=dtype),
        input.new_empty(lead if need_entropy else 0, dtype=dtype),
        input.new_empty(lead, dtype=dtype),
        input.new_empty(lead if need_predictions else 0, dtype=torch.int64),
        input.new_empty(lead if need_predictions else 0, dtype=dtype),
    )


def _full_autograd(
    keyset: torch._C.DispatchKeySet,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    need_entropy: bool = True,
    need_predictions: bool = False,
    **keywords: Any,
) -> Any:
    needs = {"need_entropy": need_entropy, "need_predictions": need_predictions}
    if not tracked(input, linear_weight, linear_bias):
        return below(
            _registry.linear_log_probs_full, keyset, input, linear_weight, target, linear_bias=linear_bias, **needs,
            **keywords,
        )  # fmt: skip
    options = checked(OP, input, linear_weight, linear_bias, **keywords)
    check_ids(OP, target, input)
    if not in_forward_mode():
        return apply(IdsFunction, keyset, input, linear_weight, linear_bias, target, options, needs)
    ids, is_single = with_ids(input, target)
    _check_plain_ids(target, options, linear_weight.size(0))
    log_probs, entropy, lse, predictions, best = reference.linear_log_probs(
        input, linear_weight, ids, linear_bias, options
    )
    none = input.new_empty(0, dtype=row_dtype(input.dtype))
    return (
        log_probs.squeeze(-1) if is_single else log_probs,
        entropy if need_entropy else none,
        lse,
        predictions if need_predictions else none.long(),
        best if need_predictions else none.clone(),
    )


def _check_plain_ids(target: Tensor, options: HeadOptions, classes: int) -> None:
    # Under a transform or a mode there are no values to look at: the reference's gather does.
    if not (torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()):
        check_target_range(target, options.ignore_index, classes, OP)


class IdsFunction(Node):
    """Log-probabilities at ids; the largest one is that of one more id, which forward has found.

    Where input alone has a gradient, and one id a row, forward saves that of every log-probability. A compiled graph
    may keep the logits (saved_logits.py).
    """

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        options: HeadOptions,
        needs: dict[str, bool],
    ) -> Results:
        ctx.needs, unit = Needs(*ctx.needs_input_grad[1:4]), None
        ids, _ = with_ids(input, target)
        logits, ctx.learned = None, None
        tensors = input, linear_weight, target, linear_bias
        # The arguments have been checked: the GPU waits for the first product.
        is_direct = is_direct_call(*tensors)
        if ctx.needs == Needs(input=True) and not any(needs.values()) and known(ids.size(-1) == 1) and (
            may_form_gradients(input, linear_weight, linear_bias, target)
        ):  # fmt: skip
            with torch._C._AutoDispatchBelowAutograd():
                if is_direct:
                    log_probs, lse, unit = driver.forward_with_gradient(input, linear_weight, ids, linear_bias, options)
                    log_probs = log_probs.view(target.shape)
                else:
                    log_probs, lse, unit = _registry.linear_log_probs_forward(*tensors, *options)
            none = [lse.new_empty(0) for _ in range(3)]
            results: Results = (log_probs, none[0], lse, none[1].long(), none[2])
        elif keeps_logits(input, linear_weight, target, options):
            with torch._C._AutoDispatchBelowAutograd():
                *found, logits = _registry.linear_log_probs_logits(*tensors, *options, *needs.values())
            results = tuple(found)
        elif is_direct:
            ctx.learned = Learned()
            results = _run_full(*tensors, options, needs["need_entropy"], needs["need_predictions"], ctx.learned)
        else:
            results = run_below(
                _registry.linear_log_probs_full, keyset, input, linear_weight, target, linear_bias=linear_bias,
                **options._asdict(), **needs,
            )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.options = options
        unused = [results[3]] if needs["need_predictions"] else [results[3], results[4]]
        ctx.mark_non_differentiable(*unused, *([] if needs["need_entropy"] else [results[1]]))
        ctx.save_for_backward(input, linear_weight, linear_bias, target, results[3], unit, logits)
        return results

    @staticmethod
    def backward(
        ctx: Any,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_lse: Tensor | None,
        _: Any,
        grad_best: Tensor | None,
    ) -> tuple[Any, ...]:
        input, linear_weight, linear_bias, target, predictions, unit, logits = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None and grad_lse is None and grad_best is None:
            return (None,) * 7
        if unit is not None and grad_log_probs is not None and grad_lse is None and not torch.is_grad_enabled():
            factors = tied_to_operand(grad_log_probs.reshape(input.shape[:-1]), (input,))
            return (None, scaled_rows(unit, factors), *(None,) * 5)
        ids, is_single = with_ids(input, target)
        if grad_log_probs is not None and is_single:
            grad_log_probs = grad_log_probs.unsqueeze(-1)
        if grad_best is not None:
            ignored = ctx.options.ignore_index
            best = torch.where((ids != ignored).any(-1), predictions, ignored).unsqueeze(-1)
            if grad_log_probs is None:
                grad_log_probs = torch.zeros_like(ids, dtype=grad_best.dtype)
            ids = torch.cat((ids, best), -1)
            grad_log_probs = torch.cat((grad_log_probs, grad_best.unsqueeze(-1)), -1)
        upstream, rest = (grad_log_probs, grad_entropy, grad_lse), (input, linear_weight, ids, linear_bias)
        if ctx.learned is not None and not torch.is_grad_enabled() and is_direct_call(*upstream, *rest):
            with torch._C._AutoDispatchBelowAutograd():
                computed = driver.backward(IdUpstream(*upstream), *rest, ctx.options, ctx.needs, learned=ctx.learned)
        elif logits is None or torch.is_grad_enabled():
            computed = _registry.linear_log_probs_backward(*upstream, *rest, *ctx.options, *ctx.needs)
        else:
            computed = _registry.linear_log_probs_of_logits(*upstream, logits, *rest, *ctx.options, *ctx.needs)
        found = [gradient if need else None for gradient, need in zip(computed, ctx.needs, strict=True)]
        return (None, *found, None, None, None)


class IdGradientFunction(Node):
    """The gradients of log-probabilities at ids, differentiable in the upstream gradients and the operands."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_lse: Tensor | None,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        ids: Tensor,
        options: HeadOptions,
        needs: Needs,
    ) -> Results:
        gradients: Results = run_below(
            _registry.linear_log_probs_backward, keyset, grad_log_probs, grad_entropy, grad_lse, input, linear_weight,
            ids, linear_bias, *options, *needs,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.options, ctx.needs = options, needs
        ctx.mark_non_differentiable(*(g for g, need in zip(gradients, needs, strict=True) if not need))
        ctx.save_for_backward(grad_log_probs, grad_entropy, grad_lse, input, linear_weight, linear_bias, ids)
        return gradients

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        *operands, ids = ctx.saved_tensors

        def gradients_of(values: Sequence[Any], needs: tuple[bool, ...]) -> Results:
            grad_log_probs, grad_entropy, grad_lse, input, linear_weight, bias = values
            results = grad_log_probs, grad_entropy, grad_lse
            return reference.linear_log_probs_gradients(
                *results, input, linear_weight, ids, bias, ctx.options, Needs(*needs)
            )

        return (None, *pull_back(ctx, operands, cotangents, gradients_of), None, None, None)


def check_backward(
    upstream: IdUpstream,
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None,
    options: HeadOptions,
) -> None:
    checked(OP, input, linear_weight, linear_bias, **options._asdict())
    check_ids(OP, ids, input)
    if ids.dim() != input.dim():
        fail(OP, f"target must have a dimension of ids for the gradient, got the shape {tuple(ids.shape)}")
    check_upstream(OP, "grad_log_probs", upstream.log_probs, ids.shape, input)
    check_upstream(OP, "grad_entropy", upstream.entropy, input.shape[:-1], input)
    check_upstream(OP, "grad_lse", upstream.lse, input.shape[:-1], input)


def _backward(*args: Any) -> Results:
    upstream, (input, linear_weight, ids, linear_bias), options, needs = _split(args)
    check_backward(upstream, input, linear_weight, ids, linear_bias, options)
    with torch._C._AutoDispatchBelowAutograd():
        return driver.backward(upstream, input, linear_weight, ids, linear_bias, options, needs)


def backward_fake(*args: Any) -> Results:
    upstream, (input, linear_weight, ids, linear_bias), options, needs = _split(args)
    check_backward(upstream, input, linear_weight, ids, linear_bias, options)
    bias_dtype = row_dtype(input.dtype) if linear_bias is None else linear_bias.dtype
    return (
        input.new_empty(input.shape if needs.input else 0),
        input.new_empty(linear_weight.shape if needs.linear_weight else 0),
        input.new_empty(linear_weight.size(0) if needs.linear_bias else 0, dtype=bias_dtype),
    )


def _backward_autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
    upstream, (input, linear_weight, ids, linear_bias), options, needs = _split(args)
    if not tracked(*upstream, input, linear_weight, linear_bias):
        return below(_registry.linear_log_probs_backward, keyset, *args)
    if in_forward_mode():
        return reference.linear_log_probs_gradients(*upstream, input, linear_weight, ids, linear_bias, options, needs)
    return apply(IdGradientFunction, keyset, *upstream, input, linear_weight, linear_bias, ids, options, needs)


def _split(args: tuple[Any, ...]) -> tuple[IdUpstream, tuple[Any, ...], HeadOptions, Needs]:
    options = HeadOptions(*args[7 : 7 + _OPTIONS])
    return IdUpstream(*args[:3]), args[3:7], options, Needs(*args[7 + _OPTIONS :])


def _backward_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    needs = Needs(*args[-3:])
    return (1 + needs.input + needs.linear_weight) * gemm_flops(args[3], args[4])


for _name, _kernel, _fake, _autograd in (
    ("linear_log_probs.full", _full, full_fake, _full_autograd),
    ("_linear_log_probs_backward", _backward, backward_fake, _backward_autograd),
):
    _registry.LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcs::{_name}", _fake, lib=_registry.LIBRARY)
    _registry.LIBRARY.impl(_name, _autograd, "Autograd", with_keyset=True)
autocast.register_cast("linear_log_probs.full", _registry.linear_log_probs_full, autocast_operands)
flops.register(torch.ops.dcs._linear_log_probs_backward, _backward_flops)
