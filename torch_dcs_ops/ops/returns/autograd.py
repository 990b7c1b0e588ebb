"""The nodes of returns in autograd's graph where only what they are linear in has a gradient.

Rewards, values, next values and the bootstrap value are what eager programs differentiate through. Then the forward
stays one kernel and the backward is one scan the other way and a few pointwise operations, which are differentiable
themselves. All else, ratios and discounts with a gradient, forward mode, torch.func and graphs, takes formulas.py.

With u the gradients of the results and e_t 0 where nothing is carried to step t (symbols: reference/returns.py):

    s_t       = u(A)_t + u(target)_t + c_{t-1}·e_{t-1}·s_{t-1} + gamma_{t-1}·lambda_{t-1}·e_{t-1}·p_{t-1}
    p_t       = min(clip_pg, rho_t)·u(pg)_t
    b_t       = min(clip_rho, rho_t)·s_t + p_t
    rewards   : b_t
    values    : u(target)_t - b_t
    v'        : gamma_t·b_t, 0 where v' is not read; without own values (gamma_t - c_t·e_t)·b_t

Returns over n steps are a scan of differences over a window, plus the values of the steps' own states (formulas.py):
there s is the scan of u(target) over the window the other way, and the own state's value has u(target)_t - s_t.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _registry
from ...reference.returns import NStepCall, TemporalDifferenceCall
from ...reference.scan import ScanCall
from .._common.autocast import widened
from .._common.autograd import Node, is_plain_call
from ..scan.derivatives import adjoint
from .formulas import Discounts, discounts_of, filled, masks_of, next_step, or_last, step_before

_OPERANDS = ("rewards", "values", "next_values", "bootstrap_value")
_Call = TemporalDifferenceCall | NStepCall
_Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


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


class _Gradients(NamedTuple):
    """Of rewards, of own values, and of the values of next states."""

    rewards: Tensor
    own: Tensor | None
    after: Tensor


class _Steps(NamedTuple):
    """The masks, made in the forward so that flags may change after it, and the discounts."""

    ends: Tensor | None
    lacks_after: Tensor | None
    discounts: Discounts


def _kept(*tensors: Tensor | None) -> list[Tensor | None]:
    """What a node may save: tensors of inference mode are copied."""
    return [tensor.clone() if tensor is not None and tensor.is_inference() else tensor for tensor in tensors]


def _adjoint(grad: Tensor, gate: float | Tensor, ends: Tensor | None, dim: int, window: int | None = None) -> Tensor:
    """Of a scan from the last step back."""
    rates, number = (gate, 1.0) if isinstance(gate, Tensor) else (None, gate)
    return adjoint(grad, ScanCall(rates, number, dim, True, False, None, ends, window))


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
        ctx.args, ctx.dtype = [None if isinstance(arg, Tensor) else arg for arg in args], call.rewards.dtype
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(TemporalDifferenceCall._fields)
        ends, lacks_after, gamma, trace, rhos = ctx.saved_tensors
        call = TemporalDifferenceCall(*ctx.args)._replace(gamma=gamma, trace=trace, rhos=rhos)
        widths = (widened(grads[0]), widened(grads[1]), widened(grads[2]))
        like = next(grad for grad in widths if grad is not None)
        steps = _Steps(ends, lacks_after, discounts_of(call, like))
        gradients = _gradients(call, widths, steps, ctx.has_own_values)
        return _of_arguments(ctx, gradients, call)


class NStepFunction(Node):
    """The same for returns over n steps."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        call = NStepCall(*args)
        with torch._C._AutoDispatchBelowAutograd():
            targets: Tensor = _registry.n_step_returns(*call)
        ctx.save_for_backward(*_kept(*masks_of(call), call.gamma, call.trace))
        ctx.operands = _shapes(call)
        ctx.args, ctx.dtype = [None if isinstance(arg, Tensor) else arg for arg in args], call.rewards.dtype
        return targets

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ends, lacks_after, gamma, trace = ctx.saved_tensors
        call, grad = NStepCall(*ctx.args)._replace(gamma=gamma, trace=trace), widened(grad)
        gradients = _n_step_gradients(call, grad, _Steps(ends, lacks_after, discounts_of(call, grad)), ctx.operands)
        return _of_arguments(ctx, gradients, call)


def _gradients(call: TemporalDifferenceCall, grads: _Grads, steps: _Steps, has_own_values: bool) -> _Gradients:
    of_advantages, of_targets, of_pg = grads
    ends, lacks_after, discounts = steps
    dim = call.dim
    rho = None if call.rhos is None else widened(call.rhos)
    direct = _sum(of_advantages, of_targets)
    policy = of_pg if of_pg is None or rho is None else rho.clamp(max=call.clip_pg) * of_pg
    if policy is not None:
        direct = _sum(direct, step_before(filled(discounts.product * policy, ends), dim))
    assert direct is not None
    s = _adjoint(direct, discounts.gate if rho is None else discounts.product * rho.clamp(max=call.clip_c), ends, dim)
    if not has_own_values:
        cuts = or_last(ends, s, dim)
        after = torch.where(cuts, discounts.gamma * s, (discounts.gamma - discounts.product) * s)
        return _Gradients(s, None, filled(after, lacks_after))
    base = _sum(s if rho is None else rho.clamp(max=call.clip_rho) * s, policy)
    assert base is not None
    own = -base if of_targets is None else of_targets - base
    return _Gradients(base, own, filled(discounts.gamma * base, lacks_after))


def _n_step_gradients(call: NStepCall, grad: Tensor, steps: _Steps, shapes: _Operands) -> _Gradients:
    ends, lacks_after, discounts = steps
    s = _adjoint(grad, discounts.gate, ends, call.dim, call.n)
    own, after = grad - s, filled(discounts.gamma * s, lacks_after)
    if shapes.values is not None:
        return _Gradients(s, own, after)
    # A state is the next one of the step before.
    return _Gradients(s, None, after + filled(next_step(own, call.dim), ends))


def _of_arguments(ctx: Any, gradients: _Gradients, call: _Call) -> tuple[Tensor | None, ...]:
    found: list[Tensor | None] = [None] * len(call)
    for name, gradient in zip(_OPERANDS, _of_operands(gradients, call.dim, ctx.operands), strict=True):
        index = call._fields.index(name)
        if gradient is not None and ctx.needs_input_grad[index]:
            found[index] = gradient.to(ctx.dtype)
    return tuple(found)


def _of_operands(gradients: _Gradients, dim: int, shapes: _Operands) -> tuple[Tensor | None, ...]:
    rewards, own, after = gradients
    if shapes.next_values is not None:
        return rewards, own, after, None
    values = own if shapes.values is None else _sum(own, step_before(after, dim))
    if shapes.bootstrap_value is None:
        return rewards, values, None, None
    if after.size(dim) == 0:
        return rewards, values, None, after.new_zeros(shapes.bootstrap_value)
    return rewards, values, None, after.select(dim, after.size(dim) - 1).sum_to_size(shapes.bootstrap_value)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return first if second is None else second if first is None else first + second
