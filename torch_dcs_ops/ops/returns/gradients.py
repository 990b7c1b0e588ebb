"""`dcs::_returns_gradients`: gradients of what returns are linear in, from those of the results.

With u the gradients of the results and e_t 0 where nothing is carried to step t (symbols: reference/returns.py):

    s_t       = u(A)_t + u(target)_t + c_{t-1}·e_{t-1}·s_{t-1} + gamma_{t-1}·lambda_{t-1}·e_{t-1}·p_{t-1}
    p_t       = min(clip_pg, rho_t)·u(pg)_t
    b_t       = min(clip_rho, rho_t)·s_t + p_t
    rewards   : b_t
    values    : u(target)_t - b_t
    v'        : gamma_t·b_t, 0 where v' is not read; without own values (gamma_t - c_t·e_t)·b_t

Returns over n steps are a scan of differences over a window, plus the values of the steps' own states (formulas.py):
there s is the scan of u(target) over the window the other way, and the own state's value has u(target)_t - s_t.

The CUDA library makes them by one kernel, or by a kernel, a scan and another kernel; here are the same formulas of
torch's operations, which are differentiable themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.returns import GradientsCall
from ...reference.scan import ScanCall
from .._common import flops
from .._common.autocast import widened
from .._common.autograd import below, is_plain_call, tracked
from .._common.validate import check_dim, check_floating, fail
from ..scan.derivatives import adjoint
from ..scan.validate import without
from .formulas import discounts_of, filled, next_step, or_last, step_before

_OP = "_returns_gradients"
_op = _registry.returns_gradients
_Results = tuple[Tensor, Tensor, Tensor, Tensor]
_MOST_ELEMENTS = 2**31 - 1024  # of the CUDA kernels


def _first(call: GradientsCall) -> Tensor:
    """A gradient that is given."""
    given = [grad for grad in (call.of_advantages, call.of_targets, call.of_pg) if grad is not None]
    if not given:
        fail(_OP, "the gradient of a result must be given, got None")
    return given[0]


def _checked(args: tuple[Any, ...]) -> GradientsCall:
    """The arguments, `dim` as a non-negative index."""
    call = GradientsCall(*args)
    first = _first(call)
    check_floating(_OP, "the gradient", first)
    return call._replace(dim=check_dim(_OP, first, call.dim))


def _formulas(call: GradientsCall) -> _Results:
    first, dim = _first(call), call.dim
    of_targets, ends = widened(call.of_targets), call.ends
    discounts = discounts_of(call, widened(first))
    rho = widened(call.rhos)
    policy = widened(call.of_pg)
    if policy is not None and rho is not None:
        policy = rho.clamp(max=call.clip_pg) * policy
    direct = _sum(widened(call.of_advantages), of_targets)
    if policy is not None:
        direct = _sum(direct, step_before(filled(discounts.product * policy, ends), dim))
    assert direct is not None
    gate = discounts.gate if rho is None else discounts.product * rho.clamp(max=call.clip_c)
    rates, number = (gate, 1.0) if isinstance(gate, Tensor) else (None, gate)
    s = adjoint(direct, ScanCall(rates, number, dim, True, False, None, ends, call.n))
    base = _sum(s if rho is None else rho.clamp(max=call.clip_rho) * s, policy)
    assert base is not None

    own = -base if of_targets is None else of_targets - base
    if call.n is not None or call.has_own_values:
        after = filled(discounts.gamma * base, call.lacks_after)
        if not call.has_own_values:
            # A state is the next one of the step before.
            after = after + filled(next_step(own, dim), ends)
    else:
        cuts = or_last(ends, s, dim)
        after = filled(
            torch.where(cuts, discounts.gamma * s, (discounts.gamma - discounts.product) * s), call.lacks_after
        )
    values = own if call.has_own_values else None
    if not call.has_next_values:
        values = _sum(values, step_before(after, dim))
    return _needed(call, base, values, after)


def _needed(call: GradientsCall, rewards: Tensor, values: Tensor | None, after: Tensor) -> _Results:
    first, dim = _first(call), call.dim
    last = None
    if call.need_bootstrap_value:
        rows = without(after.shape, dim)
        known = after.select(dim, -1) if after.size(dim) else after.new_zeros(rows)
        last = known.clone(memory_format=torch.contiguous_format)
    needs = (call.need_rewards, call.need_values, call.need_next_values, call.need_bootstrap_value)
    found = (
        gradient.to(first.dtype) if need and gradient is not None else first.new_empty(0)
        for gradient, need in zip((rewards, values, after, last), needs, strict=True)
    )
    return tuple(found)  # type: ignore[return-value]


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return first if second is None else second if first is None else first + second


def _reference(*args: Any) -> _Results:
    return _formulas(_checked(args))


def _composite(*args: Any) -> _Results:
    """The formulas, and results laid out as the kernels' are."""
    call = _checked(args)
    first = _first(call)
    strides = torch.empty_like(first).stride()
    found = (
        gradient
        if gradient.shape != first.shape or gradient.stride() == strides
        else torch.empty_like(first).copy_(gradient)
        for gradient in _formulas(call)
    )
    return tuple(found)  # type: ignore[return-value]


def _fake(*args: Any) -> _Results:
    call = _checked(args)
    first = _first(call)
    needs = (call.need_rewards, call.need_values, call.need_next_values)
    a, b, c = (torch.empty_like(first) if need else first.new_empty(0) for need in needs)
    shape = without(first.shape, call.dim) if call.need_bootstrap_value else (0,)
    return a, b, c, first.new_empty(shape)


def returns_gradients(*args: Any) -> _Results:
    """By the kernels where nothing is to see the call; else by the formulas, which need no op around them."""
    first = _first(GradientsCall(*args))
    is_plain = is_plain_call(*args) and not tracked(*args)
    if not (is_plain and first.is_cuda and first.numel() <= _MOST_ELEMENTS):
        return _reference(*args)
    with torch._C._AutoDispatchBelowAutograd():
        results: _Results = _op(*args)
    return results


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> _Results:
    if tracked(*args) or _first(GradientsCall(*args)).numel() > _MOST_ELEMENTS:
        return _reference(*args)
    results: _Results = below(_op, keyset, *args)
    return results


def _vmap(keyset: torch._C.DispatchKeySet, *args: Any) -> _Results:
    return _reference(*args)


def _flops_of(*shapes: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # A scan's product and sum, and a product and a sum of the values' gradients.
    given = next(shape for shape in shapes if shape is not None)
    return 4 * int(torch.Size(given).numel())


_registry.LIBRARY.impl(_OP, _composite, "CompositeExplicitAutograd")
torch.library.register_fake(f"dcs::{_OP}", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl(_OP, _autograd, "Autograd", with_keyset=True)
_registry.LIBRARY.impl(_OP, _vmap, "FuncTorchBatched", with_keyset=True)
flops.register(torch.ops.dcs._returns_gradients, _flops_of)
