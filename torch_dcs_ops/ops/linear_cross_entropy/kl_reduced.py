"""`dcs::linear_kl_div.reduced`, a mean or a sum, whose gradients form in `dcs::_linear_kl_div_forward`.

So they do in eager calls and in graphs that are compiled: four products with a frozen teacher. Under torch.func, for
float16, whose range sums may leave, and for DTensors the reduced op is a composition: the rows' divergences, and
their sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.kl_div import Divergence
from ...reference.linear_cross_entropy.loss import zeroed_if_empty
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common import autocast, flops
from .._common.autograd import Node, any_requires_grad, apply, below, tracked
from .._common.validate import fail
from . import kl_chunks as driver
from .compiled import tied_to_operand
from .kl_ops import (
    OP,
    OPTIONS,
    TENSORS,
    Operands,
    backward_flops,
    checked,
    empty_gradients,
    fake,
    lead_of,
    lowered,
    of_heads,
    of_operands,
    options_of,
    padded,
)
from .scale import buffers_may_be_private, graph_is_being_freed, may_form_gradients, scaled


class Reduction(NamedTuple):
    name: str
    zero_if_empty: bool


def reduced(rows: Tensor, target: Tensor | None, reduction: Reduction, ignore_index: int) -> Tensor:
    """The divergences of rows, as they are asked for."""
    if reduction.name == "none":
        return rows
    if reduction.name == "sum":
        return rows.sum()
    if target is None:
        target = torch.full_like(rows, ignore_index + 1, dtype=torch.int64)
    mean = rows.sum() / (target != ignore_index).sum()
    return zeroed_if_empty(mean, target, ignore_index) if reduction.zero_if_empty else mean


def _reduced_kernel(
    *tensors: Tensor | None, reduction: str = "mean", zero_if_empty: bool = False, **keywords: Any
) -> Tensor:
    _, target = padded(tensors)
    rows: Tensor = _registry.linear_kl_div(*tensors, **keywords)
    return reduced(rows, target, _checked_reduction(reduction, zero_if_empty), options_of(keywords).ignore_index)


def _checked_reduction(reduction: str, zero_if_empty: bool) -> Reduction:
    if reduction not in ("mean", "sum"):
        fail(OP, f'reduction must be "mean" or "sum" here, got "{reduction}"')
    return Reduction(reduction, zero_if_empty)


def _reduced_fake(
    *tensors: Tensor | None, reduction: str = "mean", zero_if_empty: bool = False, **keywords: Any
) -> Tensor:
    _checked_reduction(reduction, zero_if_empty)
    rows = fake(*tensors, **keywords)
    return rows.new_empty(())


def _reduced_autograd(
    keyset: torch._C.DispatchKeySet,
    *tensors: Tensor | None,
    reduction: str = "mean",
    zero_if_empty: bool = False,
    **keywords: Any,
) -> Any:
    operands, target = padded(tensors)
    how = _checked_reduction(reduction, zero_if_empty)
    if not tracked(*operands):
        numbers = {"reduction": reduction, "zero_if_empty": zero_if_empty}
        return below(_registry.linear_kl_div_reduced, keyset, *tensors, **numbers, **keywords)
    if _forms_gradients(operands):
        options = options_of(keywords)
        checked(operands, target, options)
        return apply(ReducedDivergenceFunction, *operands, target, options, how)
    rows: Tensor = _registry.linear_kl_div(*tensors, **keywords)
    return reduced(rows, target, how, options_of(keywords).ignore_index)


def _forms_gradients(operands: Operands) -> bool:
    """Whether a reduced loss does so in forward: not in float16, which sums may leave."""
    return may_form_gradients(*operands) and all(
        t.dtype != torch.float16 for t in operands if isinstance(t, Tensor) and t.requires_grad
    )


class ReducedDivergenceFunction(Node):
    """A sum or a mean. Saves its gradients, and the operands for those who differentiate a gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, target, options, reduction = args
        ctx.options, ctx.reduction, ctx.needs = options, reduction, tuple(ctx.needs_input_grad[:TENSORS])
        with torch._C._AutoDispatchBelowAutograd():
            rows, *gradients = _registry.linear_kl_div_forward(
                *operands, target, *options, reduction.name == "mean", *ctx.needs
            )
            loss = reduced(rows, target, reduction, options.ignore_index)
        ctx.private = buffers_may_be_private()
        ctx.save_for_backward(*operands, target, *gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        operands, target = ctx.saved_tensors[:TENSORS], ctx.saved_tensors[TENSORS]
        gradients = ctx.saved_tensors[TENSORS + 1 :]
        if torch.is_grad_enabled():
            # Differentiable in turn. Aliases keep an operand that was computed from another one apart from that.
            every = [t.view_as(t) if need else t for t, need in zip(operands, ctx.needs, strict=True)]
            rows = _registry.linear_kl_div(*every, target, **ctx.options._asdict())
            loss = reduced(rows, target, ctx.reduction, ctx.options.ignore_index)
            wanted = [t for t, need in zip(every, ctx.needs, strict=True) if need]
            differentiable = iter(torch.autograd.grad(loss, wanted, grad, create_graph=True))
            found = [next(differentiable) if need else None for need in ctx.needs]
        else:
            grad = tied_to_operand(grad, (operands[1], operands[0], *operands[2:]))
            may_overwrite = ctx.private and graph_is_being_freed()
            found = [
                scaled(gradient, grad.to(row_dtype(t.dtype)), t.dtype, may_overwrite) if need else None
                for t, gradient, need in zip(operands, gradients, ctx.needs, strict=True)
            ]
        return (*found, None, None, None)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    operands, target, options, is_mean, needs = _split_forward(args)
    checked(operands, target, options)
    one = args[0].new_ones(1, dtype=row_dtype(args[0].dtype))
    if is_mean:
        rows = lead_of(operands).numel()
        one = one / (rows if target is None else (target != options.ignore_index).sum())
    with torch._C._AutoDispatchBelowAutograd():
        found, *gradients = driver.run(one, operands, target, options, of_heads(needs))
    return found, *of_operands(*gradients)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    operands, target, options, _, needs = _split_forward(args)
    checked(operands, target, options)
    rows = args[0].new_empty(lead_of(operands), dtype=row_dtype(args[0].dtype))
    return rows, *empty_gradients(operands, needs)


def _forward_autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
    if any_requires_grad(*args):
        fail(OP, "tensors must not require a gradient here: linear_kl_div is the differentiable op")
    return below(_registry.linear_kl_div_forward, keyset, *args)


def _split_forward(args: tuple[Any, ...]) -> tuple[Operands, Tensor | None, Divergence, bool, tuple[bool, ...]]:
    tensors, rest = args[:TENSORS], args[1 + TENSORS :]
    return tensors, args[TENSORS], Divergence(*rest[:OPTIONS]), rest[OPTIONS], tuple(rest[OPTIONS + 1 :])


def _forward_flops(*args: Any, out_shape: Any = None, **keywords: Any) -> int:
    return backward_flops(None, *args)


for _name, _of, _its_fake, _its_autograd in (
    ("linear_kl_div.reduced", _reduced_kernel, _reduced_fake, _reduced_autograd),
    ("_linear_kl_div_forward", _forward, _forward_fake, _forward_autograd),
):
    _registry.LIBRARY.impl(_name, _of, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcs::{_name}", _its_fake, lib=_registry.LIBRARY)
    _registry.LIBRARY.impl(_name, _its_autograd, "Autograd", with_keyset=True)
flops.register(torch.ops.dcs._linear_kl_div_forward, _forward_flops)
autocast.register_cast("linear_kl_div.reduced", _registry.linear_kl_div_reduced, lowered)
