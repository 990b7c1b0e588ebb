"""The discounted scan in plain PyTorch, for every dtype and device.

Without a window this is the recurrence itself, one step after the other (Blelloch, "Prefix sums and their
applications", 1990, section 1.4, shows that it is a scan; the kernels use that, this file does not). With a window of
K steps it takes O(T log K) by doubling, and `windowed_scan` is differentiable any number of times, which is how
d/dgamma of a windowed scan is formed of a per-step gamma, or where it is differentiated again.

Everything is computed in float64, complex128 or int64 and rounded once at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_REAL_DTYPES = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_HALF_DTYPES = (torch.float16, torch.bfloat16)


class ScanCall(NamedTuple):
    """The arguments of `_scan` behind input, in the order of its schema.

    A gamma of None: `gamma_value` is the discount of every step.
    """

    gamma: Tensor | None
    gamma_value: float
    dim: int
    reverse: bool
    shifted: bool
    initial: Tensor | None
    reset: Tensor | None
    window: int | None


def scan(input: Tensor, call: ScanCall) -> Tensor:
    """``y[t] = x[t] + g[t]·y[prev(t)]``; with `shifted`, ``y[t] = x[t] + g[prev(t)]·y[prev(t)]``.

    prev(t) is t + 1 with `reverse` (a "right" scan), else t - 1. Before the first step y is `initial` (0 without one).
    A reset at the step whose gate is used discards what is carried. Arguments are validated already.
    """
    return torch.empty_like(input).copy_(_scan_wide(input, call))


def scan_gradients(grad: Tensor, output: Tensor, call: ScanCall) -> tuple[Tensor, Tensor]:
    """Gradients of an unshifted `scan` without a window, from its `output` and the gradient of it.

    Returns grad_input like `grad`, and ``grad_gamma[t] = grad_input[t]·conj(output[prev(t)])``: for a gamma of every
    step elementwise in input's shape; else summed over time, in input's shape without `dim`, and for a 0-D gamma over
    all of it.
    """
    gamma, dim, initial, reset = call.gamma, call.dim, call.initial, call.reset
    adjoint = call._replace(reverse=not call.reverse, shifted=True, initial=None)
    grad_input = _scan_wide(grad, adjoint, conjugate=True)
    wide_output = output.to(grad_input.dtype)
    wide_initial = None if initial is None else initial.to(grad_input.dtype)
    grad_gamma = grad_input * previous_step(wide_output, wide_initial, dim, call.reverse).conj()
    if reset is not None:
        grad_gamma = torch.where(reset, 0, grad_gamma)
    narrow_input = torch.empty_like(grad).copy_(grad_input)
    dtype = gate_gradient_dtype(grad.dtype, gamma, grad.dim())
    if has_step_gates(gamma, grad.dim()):
        return narrow_input, torch.empty_like(grad, dtype=dtype).copy_(grad_gamma)
    sums = sum_over_steps(grad_gamma, gamma, dim)
    return narrow_input, sums.new_empty(sums.shape, dtype=dtype).copy_(sums)


def has_step_gates(gamma: Tensor | None, ndim: int) -> bool:
    """Whether gamma has input's number of dimensions, and with that an entry for every step."""
    return gamma is not None and 0 < gamma.dim() == ndim


def sum_over_steps(gate_gradient: Tensor, gamma: Tensor | None, dim: int) -> Tensor:
    """`scan_gradients`'s second result from the gradient of every gate, for a gamma that is not per-step."""
    if gamma is not None and not gamma.dim():
        return gate_gradient.sum()
    return gate_gradient.sum(dim) if gate_gradient.dim() else gate_gradient


def gate_gradient_dtype(dtype: torch.dtype, gamma: Tensor | None, ndim: int) -> torch.dtype:
    """dtype of `scan_gradients`'s second result, for a gradient of `dtype`.

    Sums over time are kept in float32 for a half-precision input; so is the gradient of a gamma wider than a
    half-precision input.
    """
    if dtype in _HALF_DTYPES and not (has_step_gates(gamma, ndim) and gamma is not None and gamma.dtype == dtype):
        return torch.float32
    return dtype


def previous_step(output: Tensor, initial: Tensor | None, dim: int, reverse: bool) -> Tensor:
    """``output[prev(t)]``, with `initial` (or 0) before the first step. Differentiable; for every length, 0 too."""
    if output.dim() == 0:
        return torch.zeros_like(output) if initial is None else initial
    length = output.size(dim)
    shape = list(output.shape)
    shape[dim] = 1
    if initial is None:
        first = output.new_zeros(shape)
    else:
        rows = output.shape[:dim] + output.shape[dim + 1 :]
        first = initial.expand(rows).unsqueeze(dim)
    if reverse:
        return torch.cat((output, first), dim).narrow(dim, 1, length)
    return torch.cat((first, output), dim).narrow(dim, 0, length)


def align_gates(gamma: Tensor, ndim: int, dim: int) -> Tensor:
    """`gamma` with the axis of time put in where it has none, so that it broadcasts against input."""
    if gamma.dim() == ndim:
        return gamma
    position = gamma.dim() - (ndim - 1 - dim)
    return gamma.unsqueeze(position) if position > 0 else gamma


def windowed_scan(input: Tensor, call: ScanCall) -> Tensor:
    """`scan` with a window, of differentiable operations only."""
    return _scan_wide(input, call).to(input.dtype)


def _scan_wide(input: Tensor, call: ScanCall, *, conjugate: bool = False) -> Tensor:
    """`scan` in the wide dtype; `conjugate` takes the conjugates of the gates."""
    if input.dim() == 0:
        # One step: its gate only meets `initial`.
        return _scan_wide(input.unsqueeze(0), one_step(call), conjugate=conjugate).squeeze(0)
    gamma, gamma_value, dim, reverse, shifted, initial, reset, window = call
    values = input.to(_wide_dtype(input.dtype))
    if initial is not None:
        initial = initial.to(values.dtype)
    gates = wide_gates(input, gamma, gamma_value, dim)
    if conjugate:
        gates = gates.conj()
    if window is None:
        return _recurrence(values, gates, dim, reverse, shifted, initial, reset)
    if reverse:
        values = values.flip(dim)
        gates = gates.flip(dim)
        reset = None if reset is None else reset.flip(dim)
    output = _doubling(values, gates, dim, shifted, initial, reset, window)
    return output.flip(dim) if reverse else output


def one_step(call: ScanCall) -> ScanCall:
    """The call on a sequence of one step that stands for a call on a 0-D input."""
    return call._replace(dim=0, reset=None if call.reset is None else call.reset.unsqueeze(0))


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def wide_gates(input: Tensor, gamma: Tensor | None, gamma_value: float, dim: int) -> Tensor:
    """The gates in a wide dtype, broadcastable against `input`; their size along `dim` is 1 or input's."""
    if gamma is None:
        dtype = torch.float64 if input.is_floating_point() or input.is_complex() else torch.int64
        return torch.full((1,) * input.dim(), gamma_value, dtype=dtype, device=input.device)
    gates = align_gates(gamma.to(input.device), input.dim(), dim)
    gates = gates.reshape((1,) * (input.dim() - gates.dim()) + gates.shape)
    if has_step_gates(gamma, input.dim()) and gamma.size(dim) != 1:
        # A per-row gamma is used as exactly as it is given; a per-step gamma takes input's precision.
        narrow = torch.float32 if input.dtype in _HALF_DTYPES and gamma.dtype != input.dtype else input.dtype
        gates = gates.to(narrow if gates.is_complex() else _REAL_DTYPES.get(narrow, narrow))
    return gates.to(torch.complex128 if gates.is_complex() else torch.float64)


def _recurrence(
    values: Tensor,
    gates: Tensor,
    dim: int,
    reverse: bool,
    shifted: bool,
    initial: Tensor | None,
    reset: Tensor | None,
) -> Tensor:
    length = values.size(dim)
    if length == 0:
        return values.clone()
    steps = values.unbind(dim)
    step_gates = gates.unbind(dim) if gates.size(dim) == length else (gates.select(dim, 0),) * length
    step_resets = None if reset is None else reset.unbind(dim)
    output: list[Tensor] = [values] * length
    carry = initial
    previous = 0
    for t in reversed(range(length)) if reverse else range(length):
        link = previous if shifted else t
        value = steps[t]
        if carry is not None:
            value = value + step_gates[link] * carry
            if step_resets is not None:
                value = torch.where(step_resets[link], steps[t], value)
        output[t] = carry = value
        previous = t
    # `initial` never widens a row, so every entry but a first one without a carry has the shape of a step already.
    return torch.stack(output, dim)


def _doubling(
    values: Tensor,
    gates: Tensor,
    dim: int,
    shifted: bool,
    initial: Tensor | None,
    reset: Tensor | None,
    window: int,
) -> Tensor:
    """A left scan over the last `window` steps, by the binary digits of `window`.

    With sums S_m(t) over the m nearest steps, products A_m(t) of the m gates that lead back from t, and C_m(t)
    whether a reset is among them: S_{m+k}(t) = S_m(t) + A_m(t)·S_k(t - m), nothing where C_m(t).
    """
    length = values.size(dim)
    gates = gates.expand(values.shape)
    cuts = reset
    if shifted:
        # The first step's entries are never used: nothing comes before it.
        gates = gates.roll(1, dim)
        cuts = None if cuts is None else cuts.roll(1, dim)
    if initial is not None:
        rows = values.shape[:dim] + values.shape[dim + 1 :]
        first = initial.expand(rows).unsqueeze(dim)
        values = torch.cat((first, values), dim)
        gates = torch.cat((torch.ones_like(first, dtype=gates.dtype), gates), dim)
        cuts = None if cuts is None else torch.cat((torch.zeros_like(first, dtype=torch.bool), cuts), dim)
    total = values.size(dim)
    remaining = min(window, total)
    sums, result, span = values, None, 1
    while remaining:
        if remaining & 1:
            result = sums if result is None else _join(sums, gates, cuts, result, dim, span)
        remaining >>= 1
        if remaining:
            sums = _join(sums, gates, cuts, sums, dim, span)
            near, far = gates.narrow(dim, span, total - span), gates.narrow(dim, 0, total - span)
            gates = torch.cat((gates.narrow(dim, 0, span), _bounded_product(near, far)), dim)
            if cuts is not None:
                later = cuts.narrow(dim, span, total - span) | cuts.narrow(dim, 0, total - span)
                cuts = torch.cat((cuts.narrow(dim, 0, span), later), dim)
            span *= 2
    output = values.clone() if result is None else result
    return output.narrow(dim, total - length, length)


def _join(near: Tensor, gates: Tensor, cuts: Tensor | None, far: Tensor, dim: int, span: int) -> Tensor:
    """``near[t] + gates[t]·far[t - span]``, nothing added where ``cuts[t]``."""
    count = near.size(dim) - span
    if count <= 0:
        return near
    gates, far = gates.narrow(dim, span, count), far.narrow(dim, 0, count)
    if cuts is not None:
        # Both factors are cleared, so that no NaN comes through in the derivatives either.
        cuts = cuts.narrow(dim, span, count)
        gates, far = torch.where(cuts, 0, gates), torch.where(cuts, 0, far)
    later = near.narrow(dim, span, count) + gates * far
    return torch.cat((near.narrow(dim, 0, span), later), dim)


def _bounded_product(a: Tensor, b: Tensor) -> Tensor:
    """``a·b``, and the largest finite number where finite factors overflow: inf·0 would be a NaN of our making."""
    product = a * b
    overflow = a.isfinite() & b.isfinite() & ~product.isfinite()
    largest = torch.finfo(product.dtype).max
    bound = torch.full_like(product, largest) if product.is_complex() else largest * product.detach().sign()
    return torch.where(overflow, bound, product)
