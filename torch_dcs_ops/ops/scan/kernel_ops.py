"""`dcs::_scan` and `dcs::_scan_gradients`, the private family that discounted_cumsum and cumsum are fronts of.

Here: kernels of the Python backends, fakes, autocast, FLOPs. Autograd is in autograd.py, vmap in vmap.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.scan import ScanCall, gate_gradient_dtype, has_step_gates
from .._common import autocast, flops
from . import vmap  # noqa: F401  (vmap registers)
from .autograd import gradients_call
from .backends import BACKENDS, Backend
from .validate import check_output, check_scan, check_unshifted_initial

_OP = "discounted_cumsum"


def _checked(input: Tensor, args: tuple[Any, ...]) -> ScanCall:
    """The arguments behind input, `dim` as a non-negative index."""
    call = ScanCall(*args)
    check_unshifted_initial(_OP, call.shifted, call.initial)
    # Integers are summed (cumsum), never discounted.
    is_integer_sum = input.dtype == torch.int64 and call.gamma is None and call.gamma_value == 1.0
    dim = check_scan(
        _OP, input, call.gamma, call.dim, call.initial, call.reset, call.window, integers_allowed=is_integer_sum
    )
    return call if dim == call.dim else call._replace(dim=dim)


def _checked_backward(grad: Tensor, output: Tensor, args: tuple[Any, ...]) -> ScanCall:
    call = gradients_call(args)
    dim = check_scan(_OP, grad, call.gamma, call.dim, call.initial, call.reset, None)
    check_output(_OP, output, grad)
    return call if dim == call.dim else call._replace(dim=dim)


def _register(backend: Backend) -> None:
    def scan(input: Tensor, *args: Any) -> Tensor:
        return backend.scan(input, _checked(input, args))

    def scan_gradients(grad: Tensor, output: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return backend.scan_gradients(grad, output, _checked_backward(grad, output, args))

    _registry.LIBRARY.impl("_scan", scan, backend.dispatch_key)
    _registry.LIBRARY.impl("_scan_unrecorded", scan, backend.dispatch_key)
    _registry.LIBRARY.impl("_scan_gradients", scan_gradients, backend.dispatch_key)


def _scan_fake(input: Tensor, *args: Any) -> Tensor:
    _checked(input, args)
    return torch.empty_like(input)


def _scan_gradients_fake(grad: Tensor, output: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    gamma, _, dim, *_ = _checked_backward(grad, output, args)
    dtype = gate_gradient_dtype(grad.dtype, gamma, grad.dim())
    if has_step_gates(gamma, grad.dim()):
        return torch.empty_like(grad), torch.empty_like(grad, dtype=dtype)
    sums = () if gamma is not None and not gamma.dim() else (*grad.shape[:dim], *grad.shape[dim + 1 :])
    return torch.empty_like(grad), grad.new_empty(sums, dtype=dtype)


for _backend in BACKENDS:
    _register(_backend)
torch.library.register_fake("dcs::_scan", _scan_fake, lib=_registry.LIBRARY)
torch.library.register_fake("dcs::_scan_unrecorded", _scan_fake, lib=_registry.LIBRARY)
torch.library.register_fake("dcs::_scan_gradients", _scan_gradients_fake, lib=_registry.LIBRARY)
autocast.register("_scan", _registry.scan)


def scan_flops(input_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """A multiplication and an addition an element."""
    return 2 * int(torch.Size(input_shape).numel())


def _scan_gradients_flops(grad_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # The adjoint scan, then a product and a sum for gamma.
    return 2 * scan_flops(grad_shape)


flops.register(torch.ops.dcs._scan, scan_flops)
flops.register(torch.ops.dcs._scan_gradients, _scan_gradients_flops)
