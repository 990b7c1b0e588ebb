"""`dcs::_cross_entropy_rows_`: rows of logits to losses and, in place, to their gradient. The private ops' kernel.

Here: validation, the fake, and the Python kernels: the reference, Triton's where the compiled library is missing. It is
no function of autograd's: `_linear_cross_entropy_forward` and `_linear_cross_entropy_backward` call it below autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy import rows as reference
from ...reference.linear_cross_entropy.rows import RowsCall
from .._common.autograd import any_requires_grad, below
from .._common.triton import TRITON_KEYS, launchers
from .._common.validate import check_device, check_floating, check_layouts, dtype_name, fail, known

_OP = "_cross_entropy_rows_"
_Results = tuple[Tensor, Tensor, Tensor, Tensor]
_COUNT = len(RowsCall._fields)


def check_rows(call: RowsCall) -> None:
    logits, target = call.logits, call.target
    tensors = {"linear_bias": call.linear_bias, "weight": call.weight, "grad_loss": call.grad_loss,
               "grad_lse": call.grad_lse, "grad_entropy": call.grad_entropy}  # fmt: skip
    check_layouts(_OP, logits=logits, target=target, **tensors)
    check_floating(_OP, "logits", logits)
    if logits.dim() != 2 or known(logits.size(1) < 1):
        fail(_OP, f"logits must have the shape (rows, classes) with one class at least, got {tuple(logits.shape)}")
    if known(logits.size(0) > 1) and known(logits.stride(0) < logits.size(1)):
        fail(_OP, f"logits must have rows that do not overlap, got the strides {logits.stride()}")
    if known(logits.size(1) > 1) and known(logits.stride(1) != 1):
        fail(_OP, f"logits must have a last dimension of stride 1, got the strides {logits.stride()}")
    rows, classes = logits.shape
    dtype = reference.row_dtype(logits.dtype)
    if target.is_floating_point():
        _check_tensor(logits, "target", target, dtype, (rows, classes))
    else:
        _check_tensor(logits, "target", target, torch.int64, (rows,))
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name.startswith("grad") and known(tensor.numel() == 1):
            _check_tensor(logits, name, tensor, dtype, (1,))
        else:
            _check_tensor(logits, name, tensor, dtype, (rows,) if name.startswith("grad") else (classes,))


def _check_tensor(logits: Tensor, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype:
        fail(_OP, f"{name} must be {dtype_name(dtype)} for {dtype_name(logits.dtype)} logits, got "
                  f"{dtype_name(tensor.dtype)}")  # fmt: skip
    check_device(_OP, name, tensor, "logits", logits)
    if tensor.dim() != len(shape) or any(known(a != b) for a, b in zip(tensor.shape, shape, strict=True)):
        fail(_OP, f"{name} must have the shape {shape}, got {tuple(tensor.shape)}")


def _checked(args: tuple[Any, ...]) -> RowsCall:
    """The arguments without the slices for a second copy of the gradient, which only the CUDA kernels write to."""
    call = RowsCall(*args[:_COUNT])
    check_rows(call)
    if any(value is not None for value in args[_COUNT : _COUNT + 2]):
        fail(_OP, "within and beside must be None for these kernels, got tensors")
    return call


def _reference(*args: Any) -> _Results:
    return reference.cross_entropy_rows_(_checked(args))


def _triton(*args: Any) -> _Results:
    module = launchers("linear_cross_entropy.rows")
    if module is None:
        return _reference(*args)
    rows: _Results = module.cross_entropy_rows_(_checked(args))
    return rows


def _fake(*args: Any, **keywords: Any) -> _Results:
    call = RowsCall(*args[:_COUNT], **{name: value for name, value in keywords.items() if name in RowsCall._fields})
    check_rows(call)
    logits = call.logits
    rows, dtype = logits.size(0), reference.row_dtype(logits.dtype)
    return (
        logits.new_empty(rows, dtype=dtype),
        logits.new_empty(rows, dtype=dtype),
        logits.new_empty(rows if call.predictions else 0, dtype=torch.int64),
        logits.new_empty(rows if call.entropy else 0, dtype=dtype),
    )


def _autograd(keyset: torch._C.DispatchKeySet, logits: Tensor, *args: Tensor | None) -> tuple[Tensor, ...]:
    if any_requires_grad(logits, *args):
        fail(_OP, "logits must not require a gradient: linear_cross_entropy is the differentiable op")
    rows: tuple[Tensor, ...] = below(_registry.cross_entropy_rows_, keyset, logits, *args)
    return rows


_registry.LIBRARY.impl("_cross_entropy_rows_", _reference, "CompositeExplicitAutograd")
for _key in TRITON_KEYS:
    _registry.LIBRARY.impl("_cross_entropy_rows_", _triton, _key)
torch.library.register_fake("dcs::_cross_entropy_rows_", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl("_cross_entropy_rows_", _autograd, "Autograd", with_keyset=True)
