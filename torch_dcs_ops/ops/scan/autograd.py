"""The scan family's node in autograd's graph, for both modes and any number of derivatives.

The adjoint of a scan in its input is the scan in the other direction with `shifted` flipped, so the family is closed: a
backward that must itself be differentiated is made of the ops again, and only one that must not be is fused.

The ops' kernels at the Autograd key (see _common/autograd.py) call `differentiable_scan` where `tracked` says so and
redispatch otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import _registry
from ...reference import scan as reference
from ...reference.scan import ScanCall
from .._common.autograd import (
    PLAIN,
    Node,
    apply,
    below,
    boxed,
    in_forward_mode,
    is_quiet_backward,
    levels_below,
    past_autograd,
    primals,
)
from .._common.validate import known
from . import derivatives as gradients
from .validate import check_scan

_is_grad_enabled = torch.is_grad_enabled
_function_mode = torch._C._is_torch_function_mode_enabled
_jit_tracing = torch._C._is_tracing
_unrecorded = boxed(_registry.scan_unrecorded)
_functorch_active = torch._C._are_functorch_transforms_active


def tracked(input: Tensor, gamma: Tensor | None, initial: Tensor | None) -> bool:
    """Whether autograd has anything to record of a call, in either mode."""
    if _is_grad_enabled() and (
        input.requires_grad
        or (gamma is not None and gamma.requires_grad)
        or (initial is not None and initial.requires_grad)
    ):
        return True
    return in_forward_mode() and (input.is_floating_point() or input.is_complex())


def differentiable_scan(run: Callable[[], Tensor] | None, input: Tensor, *args: Any) -> Tensor:
    """The scan as a node of autograd's graph; `run` computes it below autograd (None: by `_scan`).

    `args` are the fields of a ScanCall: to make one takes 0.2 us, 2 % of an eager call.
    """
    if forward_ad._current_level >= 0 or _functorch_active():
        call = ScanCall(*args)
        gamma, window = call.gamma, call.window
        if window is not None and gamma is not None and not known(window == 1):
            # The one derivative that is not made of scans again: left to the reference's own graph.
            dim = check_scan("discounted_cumsum", input, gamma, call.dim, call.initial, call.reset, window)
            return reference.windowed_scan(input, call._replace(dim=dim))
    scanned: Tensor = apply(ScanFunction, run, input, *args)
    return scanned


def unrecorded_scan(
    input: Tensor,
    gamma: Tensor | None,
    number: float,
    dim: int,
    reverse: bool,
    shifted: bool,
    initial: Tensor | None,
    reset: Tensor | None,
    window: int | None,
) -> Tensor:
    """`_scan` of a plain `input` where nothing is to be recorded.

    The Python kernel at the Autograd key costs more than the C++ one, and a guard that excludes the key 1 us: hence an
    op of its own. Function modes, `torch.jit.trace` and subclasses of the other operands see `_scan`.
    """
    output: Tensor
    if (
        (gamma is None or type(gamma) in PLAIN)
        and (initial is None or type(initial) in PLAIN)
        and (reset is None or type(reset) in PLAIN)
        and not _function_mode()
        and not _jit_tracing()
    ):
        output = _unrecorded(input, gamma, number, dim, reverse, shifted, initial, reset, window)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            output = _registry.scan(input, gamma, number, dim, reverse, shifted, initial, reset, window)
    return output


class ScanFunction(Node):
    """One scan. Saves gamma, initial, reset and, only where gamma has a derivative, the output."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor] | None, input: Tensor, *args: Any) -> Tensor:
        # The fields of a ScanCall one by one: autograd finds no tensors inside one.
        gamma, gamma_value, dim, reverse, shifted, initial, reset, window = args
        if run is None:
            output = unrecorded_scan(input, *args)
        elif _functorch_active():
            # The levels further down record what they need themselves.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                output = run()
        else:
            output = run()
        ctx.numbers = (gamma_value, dim, reverse, shifted, window)
        gamma_tracked = gamma is not None and ctx.needs_input_grad[2]
        windowed_input = input if gamma_tracked and window is not None else None
        if in_forward_mode():
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(windowed_input, gamma, initial, reset, output)
            ctx.save_for_forward(windowed_input, gamma, initial, reset, output)
        else:
            ctx.save_for_backward(windowed_input, gamma, initial, reset, output if gamma_tracked else None)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 10
        input, output, call = _saved_call(ctx, grad.dim())
        _, need_input, need_gamma, _, _, _, _, need_initial, _, _ = ctx.needs_input_grad
        grad_input: Any = None
        grad_gamma: Any = None
        grad_initial: Any = None
        if need_gamma and call.window is None and not call.shifted and not _is_grad_enabled():
            with past_autograd(grad):
                grad_input, grad_gamma = gradients.fused_gradients(grad, output, call)
        else:
            if need_input or call.window is None:
                scan = unrecorded_scan if is_quiet_backward(grad) else _registry.scan
                grad_input = gradients.adjoint(grad, call, scan)
            if need_gamma and call.window is None:
                grad_gamma = gradients.gamma_gradient(grad_input, output, call)
            elif need_gamma:
                grad_gamma = gradients.windowed_gamma_gradient(grad, input, call)
        if need_initial:
            grad_initial = gradients.initial_gradient(grad, grad_input, call)
        return None, grad_input if need_input else None, grad_gamma, None, None, None, None, grad_initial, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        _, tangent_input, tangent_gamma, _, _, _, _, tangent_initial, _, _ = tangents
        output = ctx.saved_tensors[4]
        _, _, call = _saved_call(ctx, output.dim())
        if call.window is not None:
            tangent_gamma = None  # The window is of one step, which no gate is part of.
        with levels_below():
            output, gamma, initial = primals((output, call.gamma, call.initial))
            call = call._replace(gamma=gamma, initial=initial)
            return gradients.tangent(tangent_input, tangent_gamma, tangent_initial, output, call)


# differentiable_scan of a plain call. An attribute of the C++ base class, which the stubs leave out.
recorded_scan: Callable[..., Tensor] = ScanFunction.apply  # type: ignore[attr-defined]


def _saved_call(ctx: Any, ndim: int) -> tuple[Any, Any, ScanCall]:
    input, gamma, initial, reset, output = ctx.saved_tensors
    gamma_value, dim, reverse, shifted, window = ctx.numbers
    call = ScanCall(gamma, gamma_value, dim % max(ndim, 1), reverse, shifted, initial, reset, window)
    return input, output, call


def gradients_call(args: tuple[Any, ...]) -> ScanCall:
    """The scan that `_scan_gradients` is of, from its arguments behind output."""
    gamma, gamma_value, dim, reverse, initial, reset = args
    return ScanCall(gamma, gamma_value, dim, reverse, False, initial, reset, None)


def scan_autograd(keyset: torch._C.DispatchKeySet, input: Tensor, *args: Any) -> Tensor:
    """`_scan` at the Autograd key."""
    gamma, _, _, _, _, initial, _, _ = args
    if tracked(input, gamma, initial):
        return differentiable_scan(lambda: below(_registry.scan, keyset, input, *args), input, *args)
    output: Tensor = below(_registry.scan, keyset, input, *args)
    return output


def scan_gradients_autograd(
    keyset: torch._C.DispatchKeySet, grad: Tensor, output: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    """`_scan_gradients` at the Autograd key: where it is differentiated, it is taken apart."""
    call = gradients_call(args)
    gamma = call.gamma
    if not (tracked(grad, gamma, call.initial) or tracked(output, None, None)):
        fused: tuple[Tensor, Tensor] = below(_registry.scan_gradients, keyset, grad, output, *args)
        return fused
    dim = check_scan("discounted_cumsum", grad, gamma, call.dim, call.initial, call.reset, None)
    call = call._replace(dim=dim)
    grad_input = gradients.adjoint(grad, call)
    gate_gradient = gradients.gate_gradient(grad_input, output, call)
    if not reference.has_step_gates(gamma, grad.dim()):
        gate_gradient = reference.sum_over_steps(gate_gradient, gamma, dim)
    return grad_input, gate_gradient.to(reference.gate_gradient_dtype(grad.dtype, gamma, grad.dim()))


_registry.LIBRARY.impl("_scan", scan_autograd, "Autograd", with_keyset=True)
_registry.LIBRARY.impl("_scan_unrecorded", torch.library.fallthrough_kernel, "Autograd")
_registry.LIBRARY.impl("_scan_gradients", scan_gradients_autograd, "Autograd", with_keyset=True)
