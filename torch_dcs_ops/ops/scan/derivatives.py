"""The formulas behind the derivatives of a scan, made of differentiable operations.

With y[t] = x[t] + g[t]·y[prev(t)] and u the gradient of y:

* input:   the adjoint v, the scan of u in the other direction with the gates conjugated and `shifted` flipped;
* gamma:   v[t]·conj(y[prev(t)]), 0 where reset[t] (shifted: v[next(t)]·conj(y[t])), summed to gamma's shape;
* initial: conj(g[first])·v[first], 0 where reset[first]; with a window of K, v over the first K - 1 steps alone;
* forward mode: the scan of dx[t] + dg[t]·y[prev(t)], which starts from the tangent of initial.

The gradient of gamma through a window has no such form. A per-row gamma takes scans of blocks of time instead, unless
it must itself be differentiated; that, and a per-step gamma, goes through the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from ... import _registry
from ...reference import scan as reference
from ...reference.scan import ScanCall
from .._common.validate import known


def adjoint(grad: Tensor, call: ScanCall, scan: Callable[..., Tensor] = _registry.scan) -> Tensor:
    """Gradient of a scan's input, by `scan`."""
    gamma = _row_gamma(call.gamma, grad.dim(), call.dim)
    if gamma is not None and gamma.is_complex():
        gamma = gamma.conj_physical()
    return scan(
        grad, gamma, call.gamma_value, call.dim, not call.reverse, not call.shifted, None, call.reset, call.window
    )


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
    """Gradient of every gate, in input's shape (half-precision inputs: in float32, as sums over it follow)."""
    dtype = torch.promote_types(output.dtype, torch.float32)
    grad_input, output = grad_input.to(dtype), output.to(dtype)
    if call.shifted:
        product = reference.previous_step(grad_input, None, call.dim, not call.reverse) * output.conj()
    else:
        initial = None if call.initial is None else call.initial.to(dtype)
        product = grad_input * reference.previous_step(output, initial, call.dim, call.reverse).conj()
    return product if call.reset is None else torch.where(call.reset, 0, product)


def windowed_gamma_gradient(grad: Tensor, input: Tensor, call: ScanCall) -> Tensor:
    """Gradient of gamma through a window."""
    assert call.gamma is not None
    assert call.window is not None
    if known(call.window == 1):
        return torch.zeros_like(call.gamma)  # No gate is part of it.
    create_graph = torch.is_grad_enabled()
    moved = call.shifted and call.reset is not None
    if not create_graph and not moved and grad.dim() and not known(grad.numel() == 0):
        gamma = _row_gamma(call.gamma, grad.dim(), call.dim)
        if not reference.has_step_gates(gamma, grad.dim()):
            return _like_gamma(_windowed_rate_gradient(grad, input, call), call.gamma, gamma)
    if is_compiling():
        # Compiled autograd traces a backward, and no torch.autograd.grad in it.
        pullback = torch.func.vjp(lambda g: reference.windowed_scan(input, call._replace(gamma=g)), call.gamma)[1]
        traced: tuple[Tensor] = pullback(grad)
        return traced[0]
    with torch.enable_grad():
        # A new node for gamma: input and initial may depend on gamma as well, and that is not ours to add.
        gamma = call.gamma.view_as(call.gamma) if create_graph else call.gamma.detach().requires_grad_()
        output = reference.windowed_scan(input, call._replace(gamma=gamma))
        if not output.requires_grad:  # A sequence of one step uses no gate either.
            return torch.zeros_like(gamma)
        (grad_gamma,) = torch.autograd.grad(
            output, gamma, grad, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
    return grad_gamma


def _windowed_rate_gradient(grad: Tensor, input: Tensor, call: ScanCall) -> Tensor:
    """Gradient of a row's rate: the sum over t and 0 < k < K of ``u[t]·conj(k·rate^(k-1)·x[t - k])``.

    Time is cut into blocks of K steps, so that a window lies in two of them (van Herk, "A fast algorithm for local
    minimum and maximum filters on rectangular and octagonal kernels", Pattern Recognition Letters 13, 1992): in its own
    block it is the derivative of a scan, in the block before a sum from one of its steps to its end. No sum takes away
    what another put in.
    """
    assert call.gamma is not None
    assert call.window is not None
    dim, wide = call.dim, torch.complex128 if input.is_complex() else torch.float64

    def in_order(tensor: Tensor) -> Tensor:
        tensor = tensor.movedim(dim, -1)
        return tensor.flip(-1) if call.reverse else tensor

    values, upstream = in_order(input).to(wide), in_order(grad).to(wide)
    cuts = None if call.reset is None else in_order(call.reset)
    if call.initial is not None:
        first = call.initial.to(wide).expand(values.shape[:-1]).unsqueeze(-1)
        values, upstream = torch.cat((first, values), -1), pad(upstream, (1, 0))
        cuts = None if cuts is None else pad(cuts, (1, 0))
    total = values.size(-1)
    span = _smaller(call.window, total)
    blocks = (total + span - 1) // span

    def cut_up(tensor: Tensor) -> Tensor:
        padded: Tensor = pad(tensor, (0, blocks * span - total))
        return padded.reshape(*padded.shape[:-1], blocks, span)

    values = cut_up(values)
    cuts = None if cuts is None else cut_up(cuts)
    rate = reference.wide_gates(input, call.gamma, call.gamma_value, dim).movedim(dim, -1)
    rates = rate.expand(values.shape[:-1])

    in_blocks = ScanCall(rates, 1.0, -1, reverse=False, shifted=False, initial=None, reset=cuts, window=None)

    def scan(terms: Tensor) -> Tensor:
        output: Tensor = _registry.scan(terms, *in_blocks)
        return output

    def sum_to_end(terms: Tensor) -> Tensor:
        output: Tensor = _registry.scan(terms, *in_blocks._replace(gamma=None, reverse=True, reset=None))
        return output

    # rate^(j + 1), rate^j, and at a distance of n steps from the block's end rate^n and n·rate^(n - 1).
    ahead = rate.unsqueeze(-1).expand(*rate.shape, span).cumprod(-1)
    if not ahead.is_complex():
        largest = torch.finfo(ahead.dtype).max
        ahead = torch.where(rate.unsqueeze(-1).isfinite(), ahead.clamp(-largest, largest), ahead)
    here = pad(ahead[..., :-1], (1, 0), value=1.0)
    steps = torch.arange(span, device=input.device)
    to_end, slope_to_end = here.flip(-1), pad(here.flip(-1)[..., 1:], (0, 1)) * steps.flip(0)
    far, far_slope = values * to_end, values * slope_to_end
    own = pad(scan(values), (1, 0))[..., :-1]
    if cuts is not None:
        own = torch.where(cuts, 0, own)
        seen = cuts.cumsum(-1)
        reaches_end = seen == seen[..., -1:]
        far, far_slope = torch.where(reaches_end, far, 0), torch.where(reaches_end, far_slope, 0)
    own = scan(own)
    # A step's window begins one step further on in the block before.
    far, far_slope = (pad(sum_to_end(terms)[..., :-1, 1:], (0, 1, 1, 0)) for terms in (far, far_slope))
    far = here * (steps + 1) * far + ahead * far_slope
    if cuts is not None:
        far = torch.where(seen == 0, far, 0)
    slope = (own + far).flatten(-2)[..., :total]
    return reference.sum_over_steps(upstream * slope.conj(), call.gamma, -1)


def initial_gradient(grad: Tensor, grad_input: Tensor | None, call: ScanCall) -> Tensor:
    """Gradient of initial; `grad_input` is the gradient of input without a window."""
    assert call.initial is not None
    initial, dim, ndim = call.initial, call.dim, grad.dim()
    length = grad.size(dim) if ndim else 1
    reach = length if call.window is None else _smaller(call.window - 1, length)
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


def _smaller(a: int, b: int) -> int:
    """Of two sizes that may be symbols. In a graph of torch 2.11 torch.sym_min takes no two numbers."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)
