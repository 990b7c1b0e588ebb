"""The nodes of returns in autograd's graph where only what they are linear in has a gradient.

Rewards, values, next values and the bootstrap value are what eager programs differentiate through. Then the forward
stays one kernel and the backward is one op on CUDA, elsewhere one scan the other way and a few pointwise operations
(gradients.py), which are differentiable themselves. All else, ratios and discounts with a gradient, forward mode,
torch.func and graphs, takes formulas.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _registry
from ...reference.returns import NStepCall, TemporalDifferenceCall
from .._common.autograd import Node, is_plain_call
from .call import ON_POLICY
from .formulas import masks_of
from .gradients import returns_gradients

_OPERANDS = ("rewards", "values", "next_values", "bootstrap_value")
_Call = TemporalDifferenceCall | NStepCall


def takes(call: _Call) -> bool:
    """Whether the nodes below may record this call, which autograd has something to record of."""
    operands = (getattr(call, name) for name in _OPERANDS)
    factors = (call.gamma, call.trace, getattr(call, "rhos", None))
    if any(map(_requires_grad, factors)) or not any(map(_requires_grad, operands)):
        return False
    return is_plain_call(*call)


def _requires_grad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


class _Operands(NamedTuple):
    """The shapes of those that the results are linear in, None where one is not given."""

    rewards: torch.Size
    values: torch.Size | None
    next_values: torch.Size | None
    bootstrap_value: torch.Size | None


def _kept(*tensors: Tensor | None) -> list[Tensor | None]:
    """What a node may save: tensors of inference mode are copied."""
    return [tensor.clone() if tensor is not None and tensor.is_inference() else tensor for tensor in tensors]


def _shapes(call: _Call) -> _Operands:
    def of(tensor: Tensor | None) -> torch.Size | None:
        return None if tensor is None else tensor.shape

    return _Operands(call.rewards.shape, of(call.values), of(call.next_values), of(call.bootstrap_value))


class ReturnsFunction(Node):
    """Saves masks, discounts and ratios, and no operand that the results are linear in."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        call = TemporalDifferenceCall(*args)
        with torch._C._AutoDispatchBelowAutograd():
            results: tuple[Tensor, Tensor, Tensor] = _registry.temporal_difference_scan(*call)
        needs = (call.need_advantages, call.need_targets, call.need_pg)
        ctx.mark_non_differentiable(*(result for result, need in zip(results, needs, strict=True) if not need))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*_kept(*masks_of(call), call.gamma, call.trace, call.rhos))
        ctx.operands, ctx.has_own_values = _shapes(call), call.has_own_values
        ctx.args = [None if isinstance(arg, Tensor) else arg for arg in args]
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(TemporalDifferenceCall._fields)
        *masks, gamma, trace, rhos = ctx.saved_tensors
        call = TemporalDifferenceCall(*ctx.args)._replace(gamma=gamma, trace=trace, rhos=rhos)
        bounds = (call.clip_rho, call.clip_c, call.clip_pg)
        return _of_operands(ctx, call, grads, masks, (rhos, *bounds), None, ctx.has_own_values)


class NStepFunction(Node):
    """The same for returns over n steps."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        call = NStepCall(*args)
        with torch._C._AutoDispatchBelowAutograd():
            targets: Tensor = _registry.n_step_returns(*call)
        ctx.save_for_backward(*_kept(*masks_of(call), call.gamma, call.trace))
        ctx.operands = _shapes(call)
        ctx.args = [None if isinstance(arg, Tensor) else arg for arg in args]
        return targets

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *masks, gamma, trace = ctx.saved_tensors
        call = NStepCall(*ctx.args)._replace(gamma=gamma, trace=trace)
        return _of_operands(ctx, call, (None, grad, None), masks, ON_POLICY, call.n, ctx.operands.values is not None)


def _of_operands(
    ctx: Any,
    call: _Call,
    grads: tuple[Tensor | None, ...],
    masks: Sequence[Tensor | None],
    ratios: tuple[Tensor | None, float, float, float],
    n: int | None,
    has_own_values: bool,
) -> tuple[Tensor | None, ...]:
    shapes: _Operands = ctx.operands
    indices = [call._fields.index(name) for name in _OPERANDS]
    needs = [ctx.needs_input_grad[index] for index in indices]
    needs[1] = needs[1] and (has_own_values or shapes.next_values is None)
    found: list[Tensor | None] = [None] * len(call)
    gradients = returns_gradients(
        *grads, *masks, call.gamma, call.gamma_value, call.trace, call.trace_value, *ratios, call.dim, n,
        has_own_values, shapes.next_values is not None, *needs,
    )  # fmt: skip
    for index, need, gradient in zip(indices, needs, gradients, strict=True):
        if need:
            found[index] = gradient
    if needs[3]:
        assert shapes.bootstrap_value is not None
        found[indices[3]] = gradients[3].sum_to_size(shapes.bootstrap_value)
    return tuple(found)
