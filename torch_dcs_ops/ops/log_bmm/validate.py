"""The checks of log_bmm, max_bmm and sample_bmm. csrc/include/dcs/log_bmm/ops.h says those of the private ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...reference.log_bmm import sum_dtype
from .._common.validate import (
    check_dense,
    check_device,
    check_device_type,
    check_floating,
    check_layouts,
    dtype_name,
    fail,
    known,
)

_PRECISIONS = ("highest", "high", "medium")


def check_operands(op: str, a: Tensor, b: Tensor) -> None:
    """What the public ops ask of a and b."""
    _check_pair(op, a, b)
    check_shapes(op, a, b)


def check_shapes(op: str, a: Tensor, b: Tensor) -> None:
    """Those that torch.matmul takes."""
    for name, operand in (("a", a), ("b", b)):
        if operand.dim() == 0:
            fail(op, f"{name} must have at least one dimension, got a 0-D tensor")
    _check_depth(op, a, b)
    lead_a, lead_b = a.shape[:-2], b.shape[:-2]
    if any(known(m != n) and known(m != 1) and known(n != 1) for m, n in zip(lead_a[::-1], lead_b[::-1], strict=False)):
        fail(op, f"b must have batch dimensions that broadcast against a's {tuple(lead_a)}, got {tuple(lead_b)}")


def check_matrices(op: str, a: Tensor, b: Tensor) -> None:
    """What the private ops ask of a (B, I, K) and b (B, K, J)."""
    _check_pair(op, a, b)
    for name, operand in (("a", a), ("b", b)):
        if operand.dim() != 3:
            fail(op, f"{name} must have three dimensions, got the shape {tuple(operand.shape)}")
    if known(a.size(0) != b.size(0)):
        fail(op, f"b must have a's batch size {a.size(0)}, got {b.size(0)}")
    _check_depth(op, a, b)


def check_beside(op: str, name: str, tensor: Tensor, a: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """What goes with a: `dtype`, the given shape, a's device."""
    check_layouts(op, **{name: tensor})
    if tensor.dtype != dtype:
        fail(op, f"{name} must be {dtype_name(dtype)} for {dtype_name(a.dtype)} a, got {dtype_name(tensor.dtype)}")
    check_device(op, name, tensor, "a", a)
    if tensor.dim() != len(shape) or any(known(m != n) for m, n in zip(tensor.shape, shape, strict=True)):
        fail(op, f"{name} must have the shape {tuple(shape)}, got {tuple(tensor.shape)}")


def check_uniforms(op: str, uniforms: Tensor, a: Tensor, shape: Sequence[int]) -> None:
    check_beside(op, "uniforms", uniforms, a, sum_dtype(a.dtype), shape)


def check_precision(op: str, precision: str) -> None:
    if precision not in _PRECISIONS:
        fail(op, f'precision must be "highest", "high" or "medium", got "{precision}"')


def check_not_empty(op: str, a: Tensor) -> None:
    """A maximum needs a k."""
    if known(a.size(-1) == 0):
        fail(op, f"a must have at least one column to take the maximum over, got the shape {tuple(a.shape)}")


def check_argument_types(op: str, **tensors: object) -> None:
    """What no schema says in a sentence. For the path of an error: it is never run on a call that succeeds."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    check_dense(op, **tensors)


def _check_pair(op: str, a: Tensor, b: Tensor) -> None:
    check_layouts(op, a=a, b=b)
    check_floating(op, "a", a)
    if b.dtype != a.dtype:
        fail(op, f"b must have a's dtype {dtype_name(a.dtype)}, got {dtype_name(b.dtype)}")
    check_device_type(op, "a", a)
    check_device(op, "b", b, "a", a)


def _check_depth(op: str, a: Tensor, b: Tensor) -> None:
    rows = b.size(0) if b.dim() == 1 else b.size(-2)
    if known(a.size(-1) != rows):
        fail(
            op,
            f"b must have as many rows as a has columns, {a.size(-1)}, got {rows} (a is {tuple(a.shape)}, b is "
            f"{tuple(b.shape)})",
        )
