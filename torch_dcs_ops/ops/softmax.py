"""`dcs::softmax`, and `dcs::_softmax_backward`, its derivative in both modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import _registry
from ..reference import softmax as reference
from ._common import autocast, flops
from ._common.autograd import (
    Node,
    apply,
    below,
    in_forward_mode,
    levels_below,
    past_autograd,
    primals,
    run_below,
    tracked,
    watched,
)
from ._common.triton import TRITON_KEYS, launchers
from ._common.validate import (
    check_dense,
    check_device,
    check_device_type,
    check_dim,
    check_floating,
    check_floating_dtype,
    check_integer,
    check_layouts,
    dtype_name,
    fail,
    known,
)
from ._common.vmap import BATCHED, Batch

_OP = "softmax"
_BACKWARD_OP = "_softmax_backward"
_op = _registry.softmax
_backward_op = _registry.softmax_backward
_is_grad_enabled = torch.is_grad_enabled


def softmax(input: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax along `dim`, with the values of :func:`torch.softmax`: ``exp(x - max) / Σ exp(x - max)``.

    On CUDA every element is read once and written once, whatever the width: a row stays in the registers of some lanes,
    of a block, or of a cluster of blocks that exchange their maxima and sums through distributed shared memory (only
    rows that no cluster holds, of 1 to 2 MB and more, are read twice). On a CPU this is torch's own softmax.

    Args:
        input: any shape, 0-D and empty ones too; float16, bfloat16, float32 or float64; any strides.
        dim: the dimension along which the results add up to 1.
        dtype: what input, then of any dtype, is converted to first, as in torch.softmax; the result has it, under
            autocast too.

    Returns:
        A new tensor of input's shape and dtype (`dtype`, where it is given), with the strides of
        ``torch.empty_like(input)``. float16 and bfloat16 are computed in float32 and rounded once. A row with a NaN,
        with a +inf, or of nothing but -inf is NaN.

    The same bits from run to run; on a CPU, as with torch.softmax, for one number of threads: along a dimension that is
    not the last, the threads' shares decide which steps are vectors. Differentiable any number of times, in both modes;
    the backward saves the output alone. Works under torch.func, torch.compile, torch.export. Under autocast a half
    input gives float32, as torch.softmax does on CUDA. The sums over parts of a row are joined as in Milakov and
    Gimelshein, "Online normalizer calculation for softmax" (2018).

    Raises:
        IndexError: `dim` is out of range.
        TypeError: an argument is of another type.
        RuntimeError: input is of another dtype, or on a device that is neither a CPU nor CUDA.

    Example::

        >>> torch_dcs_ops.softmax(torch.tensor([0.0, 1.0, float("-inf")]))
        tensor([0.2689, 0.7311, 0.0000])
    """
    try:
        output: Tensor
        if type(dim) is not int and not is_compiling():
            check_integer(_OP, "dim", dim)
        if dtype is None and not is_compiling() and not watched(input):
            # Past the kernel at the Autograd key, which is Python.
            if _is_grad_enabled() and input.requires_grad:
                return _recorded(None, input, dim)
            with torch._C._AutoDispatchBelowAutograd():
                output = _op(input, dim)
        elif dtype is None:
            output = _op(input, dim)
        else:
            check_floating_dtype(_OP, "dtype", dtype)
            output = _op(input.to(dtype), dim).to(dtype)
    except (AttributeError, RuntimeError, TypeError):
        _check_argument_types(input, dim, dtype)
        raise
    return output


def _check_argument_types(input: object, dim: object, dtype: object) -> None:
    """What no schema says in a sentence. For the path of an error: it is never run on a call that succeeds."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{_OP}: input must be a tensor, got {type(input).__name__}")
    check_dense(_OP, input=input)
    check_integer(_OP, "dim", dim)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{_OP}: dtype must be a torch.dtype or None, got {type(dtype).__name__}")


def _check(op: str, name: str, input: Tensor, dim: int) -> int:
    """Raises a sentence that names the wrong argument; returns `dim` as a non-negative index."""
    check_layouts(op, **{name: input})
    check_floating(op, name, input)
    check_device_type(op, name, input)
    return check_dim(op, input, dim)


def _check_backward(grad: Tensor, output: Tensor, dim: int) -> int:
    dim = _check(_BACKWARD_OP, "grad", grad, dim)
    check_layouts(_BACKWARD_OP, output=output)
    same = output.dim() == grad.dim() and not any(known(a != b) for a, b in zip(output.shape, grad.shape, strict=True))
    if output.dtype != grad.dtype or not same:
        fail(
            _BACKWARD_OP,
            f"output must have grad's dtype and shape {dtype_name(grad.dtype)} {tuple(grad.shape)}, got "
            f"{dtype_name(output.dtype)} {tuple(output.shape)}",
        )
    check_device(_BACKWARD_OP, "output", output, "grad", grad)
    return dim


def _reference(input: Tensor, dim: int = -1) -> Tensor:
    return reference.softmax(input, _check(_OP, "input", input, dim))


def _reference_backward(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    return reference.softmax_backward(grad, output, _check_backward(grad, output, dim))


def _triton(input: Tensor, dim: int = -1) -> Tensor:
    module = launchers("softmax")
    if module is None:
        return _reference(input, dim)
    output: Tensor = module.softmax(input, _check(_OP, "input", input, dim))
    return output


def _triton_backward(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    module = launchers("softmax")
    if module is None:
        return _reference_backward(grad, output, dim)
    grad_input: Tensor = module.softmax_backward(grad, output, _check_backward(grad, output, dim))
    return grad_input


def _fake(input: Tensor, dim: int = -1) -> Tensor:
    _check(_OP, "input", input, dim)
    return torch.empty_like(input)


def _fake_backward(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    _check_backward(grad, output, dim)
    return torch.empty_like(output)


class SoftmaxFunction(Node):
    """One softmax as a node of autograd's graph; saves the output."""

    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet | None, input: Tensor, dim: int) -> Tensor:
        output: Tensor = run_below(_op, keyset, input, dim)
        ctx.dim = dim
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output)
        if in_forward_mode():
            ctx.save_for_forward(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None
        (output,) = ctx.saved_tensors
        with past_autograd(grad):
            return None, _backward_op(grad, output, ctx.dim), None

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor | None, __: Any) -> Tensor:
        with levels_below():
            (output,) = primals(ctx.saved_tensors)
            # The Jacobian is symmetric.
            return torch.zeros_like(output) if tangent is None else _backward_op(tangent, output, ctx.dim)


# An attribute of the C++ base class, which the stubs leave out.
_recorded: Callable[..., Tensor] = SoftmaxFunction.apply  # type: ignore[attr-defined]


def _autograd(keyset: torch._C.DispatchKeySet, input: Tensor, dim: int = -1) -> Tensor:
    output: Tensor
    if tracked(input):
        # A dtype that has no gradient is refused in a sentence here already.
        _check(_OP, "input", input, dim)
        output = apply(SoftmaxFunction, keyset, input, dim)
    else:
        output = below(_op, keyset, input, dim)
    return output


def _autograd_backward(keyset: torch._C.DispatchKeySet, grad: Tensor, output: Tensor, dim: int) -> Tensor:
    """Where it is itself differentiated, it is taken apart into operations that autograd knows."""
    if tracked(grad, output):
        return reference.differentiable_backward(grad, output, _check_backward(grad, output, dim))
    grad_input: Tensor = below(_backward_op, keyset, grad, output, dim)
    return grad_input


def _vmap(keyset: Any, input: Tensor, dim: int = -1) -> Tensor:
    return _vmapped(_op, input.dim(), _check(_OP, "input", input, dim), input)


def _vmap_backward(keyset: Any, grad: Tensor, output: Tensor, dim: int) -> Tensor:
    return _vmapped(_backward_op, grad.dim(), _check_backward(grad, output, dim), grad, output)


def _vmapped(op: Any, ndim: int, dim: int, *tensors: Tensor) -> Tensor:
    """The batch in front of every operand, `dim` one to the right; a 0-D sample is a row of one element."""
    batch = Batch(*tensors)
    with torch._C._ExcludeDispatchKeyGuard(BATCHED):
        if not batch.is_batched:
            result: Tensor = op(*tensors, dim)
            return result
        fronts = [operand.front(batch.size) for operand in batch.operands if operand is not None]
        if ndim == 0:
            return batch.wrap(op(*(front.unsqueeze(1) for front in fronts), 1).squeeze(1))
        return batch.wrap(op(*fronts, dim + 1))


def _count(input_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Maximum, difference, exponential, sum, quotient."""
    return 5 * int(torch.Size(input_shape).numel())


def _count_backward(grad_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 4 * int(torch.Size(grad_shape).numel())


_registry.LIBRARY.impl(_OP, _reference, "CompositeExplicitAutograd")
_registry.LIBRARY.impl(_BACKWARD_OP, _reference_backward, "CompositeExplicitAutograd")
for _key in TRITON_KEYS:
    _registry.LIBRARY.impl(_OP, _triton, _key)
    _registry.LIBRARY.impl(_BACKWARD_OP, _triton_backward, _key)
torch.library.register_fake("dcs::softmax", _fake, lib=_registry.LIBRARY)
torch.library.register_fake("dcs::_softmax_backward", _fake_backward, lib=_registry.LIBRARY)
_registry.LIBRARY.impl(_OP, _autograd, "Autograd", with_keyset=True)
_registry.LIBRARY.impl(_BACKWARD_OP, _autograd_backward, "Autograd", with_keyset=True)
_registry.LIBRARY.impl(_OP, _vmap, "FuncTorchBatched", with_keyset=True)
_registry.LIBRARY.impl(_BACKWARD_OP, _vmap_backward, "FuncTorchBatched", with_keyset=True)
autocast.register(_OP, _op)
flops.register(torch.ops.dcs.softmax, _count)
flops.register(torch.ops.dcs._softmax_backward, _count_backward)
