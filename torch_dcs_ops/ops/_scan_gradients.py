"""The formulas behind the derivatives of a scan, made of differentiable operations.

With y[t] = x[t] + g[t]·y[prev(t)] and u the gradient of y:

* input:   the adjoint v, the scan of u in the other direction with the gates conjugated and `shifted` flipped;
* gamma:   v[t]·conj(y[prev(t)]), 0 where reset[t] (shifted: v[next(t)]·conj(y[t])), summed to gamma's shape;
* initial: conj(g[first])·v[first], 0 where reset[first]; with a window of K, v over the first K - 1 steps alone;
* forward mode: the scan of dx[t] + dg[t]·y[prev(t)], which starts from the tangent of initial.

The gradient of gamma through a window has no such form: it goes through the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _registry
from ..reference import scan as reference
from ._validate import known


class ScanCall(NamedTuple):
    """Arguments of `_scan` without input; `dim` is not negative."""

    gamma: Tensor | None
    gamma_value: float
    dim: int
    reverse: bool
    shifted: bool
    initial: Tensor | None
    reset: Tensor | None
    window: int | None


def adjoint(grad: Tensor, call: ScanCall) -> Tensor:
    """Gradient of a scan's input."""
    gamma = _row_gamma(call.gamma, grad.dim(), call.dim)
    if gamma is not None and gamma.is_complex():
        gamma = gamma.conj_physical()
    output: Tensor = _registry.scan(
        grad, gamma, call.gamma_value, call.dim, not call.reverse, not call.shifted, None, call.reset, call.window
    )
    return output


def fused_gradients(grad: Tensor, output: Tensor, call: ScanCall) -> tuple[Tensor, Tensor]:
    """Gradients of input and gamma in one kernel, for an unshifted scan without a window."""
    assert call.gamma is not None
    gamma = _row_gamma(call.gamma, grad.dim(), call.dim)
    grad_input, gate_gradient = _registry.scan_gradients(
        grad, output, gamma, call.gamma_value, call.dim, call.reverse, call.initial, call.reset
    )
    return grad_input, _like_gamma(gate_gradient, call.gamma, gamma)


def gamma_gradient(grad_input: Tensor, output: Tensor, call: ScanCall) -> Tensor:
    """Gradient of gamma from the gradient of input, without a window."""
    assert call.gamma is not None
    gamma = _row_gamma(call.gamma, output.dim(), call.dim)
    elementwise = gate_gradient(grad_input, output, call)
    if not reference.has_step_gates(gamma, output.dim()):
        elementwise = reference.sum_over_steps(elementwise, gamma, call.dim)
    return _like_gamma(elementwise, call.gamma, gamma)


def gate_gradient(grad_input: Tensor, output: Tensor, call: ScanCall) -> Tensor:
    """Gradient of every gate, in input's shape (half inputs: in float32, as sums over it follow)."""
    dtype = torch.promote_types(output.dtype, torch.float32)
    grad_input, output = grad_input.to(dtype), output.to(dtype)
    if call.shifted:
        product = reference.previous_step(grad_input, None, call.dim, not call.reverse) * output.conj()
    else:
        initial = None if call.initial is None else call.initial.to(dtype)
        product = grad_input * reference.previous_step(output, initial, call.dim, call.reverse).conj()
    return product if call.reset is None else torch.where(call.reset, 0, product)


def windowed_gamma_gradient(grad: Tensor, input: Tensor, call: ScanCall) -> Tensor:
    """Gradient of gamma through a window, by differentiating the reference."""
    assert call.gamma is not None
    assert call.window is not None
    if known(call.window == 1):
        return torch.zeros_like(call.gamma)  # No gate is part of it.
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # A new node for gamma: input and initial may depend on gamma as well, and that is not ours to add.
        gamma = call.gamma.view_as(call.gamma) if create_graph else call.gamma.detach().requires_grad_()
        output = reference.windowed_scan(
            input,
            gamma,
            call.gamma_value,
            call.dim,
            call.reverse,
            call.shifted,
            call.initial,
            call.reset,
            call.window,
        )
        if not output.requires_grad:  # A sequence of one step uses no gate either.
            return torch.zeros_like(gamma)
        (grad_gamma,) = torch.autograd.grad(
            output, gamma, grad, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
    return grad_gamma


def initial_gradient(grad: Tensor, grad_input: Tensor | None, call: ScanCall) -> Tensor:
    """Gradient of initial; `grad_input` is the gradient of input without a window."""
    assert call.initial is not None
    initial, dim, ndim = call.initial, call.dim, grad.dim()
    length = grad.size(dim) if ndim else 1
    reach = length if call.window is None else torch.sym_min(call.window - 1, length)
    if known(reach == 0):
        return torch.zeros_like(initial)
    first = length - 1 if call.reverse else 0

    def at_first(tensor: Tensor) -> Tensor:
        return tensor.select(dim, first) if ndim else tensor

    if call.window is not None or grad_input is None:
        near, near_call = grad, call._replace(window=None)
        if ndim:
            start = length - reach if call.reverse else 0
            near = grad.narrow(dim, start, reach)
            near_call = near_call._replace(
                gamma=_narrow_gates(call.gamma, ndim, dim, start, reach),
                reset=None if call.reset is None else call.reset.narrow(dim, start, reach),
            )
        grad_near = adjoint(near, near_call)
        grad_first = grad_near.select(dim, reach - 1 if call.reverse else 0) if ndim else grad_near
    else:
        grad_first = at_first(grad_input)
    gamma = _row_gamma(call.gamma, ndim, dim)
    if gamma is None:
        product = call.gamma_value * grad_first
    else:
        gate = at_first(gamma.expand(grad.shape)) if reference.has_step_gates(gamma, ndim) else gamma
        product = gate.conj() * grad_first
    if call.reset is not None:
        product = torch.where(at_first(call.reset), 0, product)
    return product.sum_to_size(initial.shape).to(initial.dtype)


def tangent(
    tangent_input: Tensor | None,
    tangent_gamma: Tensor | None,
    tangent_initial: Tensor | None,
    output: Tensor,
    call: ScanCall,
) -> Tensor:
    """Forward-mode derivative of the output; `tangent_gamma` goes without a window."""
    source = torch.zeros_like(output) if tangent_input is None else tangent_input
    if tangent_gamma is not None:
        gates = reference.align_gates(tangent_gamma, output.dim(), call.dim)
        if call.shifted:
            moved = gates * output
        else:
            moved = gates * reference.previous_step(output, call.initial, call.dim, call.reverse)
        if call.reset is not None:
            moved = torch.where(call.reset, 0, moved)
        if call.shifted:
            moved = reference.previous_step(moved, None, call.dim, call.reverse)
        source = (source + moved).to(output.dtype)
    scanned: Tensor = _registry.scan(source, *call._replace(initial=tangent_initial))
    return scanned


def _row_gamma(gamma: Tensor | None, ndim: int, dim: int) -> Tensor | None:
    """`gamma` without an axis of time of size 1: then its gradient is summed in the kernel."""
    if gamma is not None and 0 < gamma.dim() == ndim and known(gamma.size(dim) == 1):
        return gamma.squeeze(dim)
    return gamma


def _narrow_gates(gamma: Tensor | None, ndim: int, dim: int, start: int, count: int) -> Tensor | None:
    gamma = _row_gamma(gamma, ndim, dim)
    if gamma is not None and reference.has_step_gates(gamma, ndim):
        return gamma.narrow(dim, start, count)
    return gamma


def _like_gamma(gradient: Tensor, gamma: Tensor, row_gamma: Tensor | None) -> Tensor:
    """Sums a gradient over what `gamma` was broadcast along. A real gamma gets the real part."""
    assert row_gamma is not None
    if gradient.is_complex() and not gamma.is_complex():
        gradient = gradient.real
    if gradient.dim() != row_gamma.dim() or row_gamma.dim():
        gradient = gradient.sum_to_size(row_gamma.shape)  # to no dimensions it is a launch even from none
    gradient = gradient.reshape(gamma.shape)
    return gradient.to(dtype=gamma.dtype, device=gamma.device)
