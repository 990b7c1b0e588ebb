"""Packed sequences: many of them one behind the other along one dimension, given by their offsets (`cu_seqlens`).

A scan of them is one scan with a reset where a sequence begins, in the scan's order. What enters a sequence enters its
first step: ``x[first] + gamma[first]·initial``. Nothing is read back from a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...reference.scan import align_gates
from .._common.validate import check_device, check_layouts, dtype_name, fail, known
from .validate import broadcasts, check_direction, check_scan

_HALF = (torch.float16, torch.bfloat16)


def joined(
    op: str,
    input: Tensor,
    gamma: float | Tensor,
    dim: int,
    direction: str,
    initial: Tensor | None,
    reset: Tensor | None,
    window: int | None,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """(input, reset) of one scan for all sequences; half-precision input in float32 where `initial` is part of it."""
    reverse = check_direction(op, direction)
    dim = check_scan(op, input, gamma if isinstance(gamma, Tensor) else None, dim, None, reset, window)
    if input.dim() == 0:
        fail(op, "input must have a dimension of time with cu_seqlens, got a 0-D tensor")
    check_cu_seqlens(op, cu_seqlens, "input", input, dim)
    cuts = first_steps(cu_seqlens, input, dim, reverse)
    if initial is not None:
        if window is not None:
            fail(op, "window must be None with initial and cu_seqlens, got all of them")
        check_of_sequences(op, "initial", initial, "input", input, dim, cu_seqlens)
        if not known(input.size(dim) == 0):
            at, used = entries(cu_seqlens, input, dim, reverse)
            entering = gamma
            if isinstance(gamma, Tensor):
                gates = align_gates(gamma.to(input.device), input.dim(), dim)
                is_step = gates.dim() == input.dim() and not known(gates.size(dim) == 1)
                entering = gates.index_select(dim, at) if is_step else gates
            if reset is not None:
                used = used & ~reset.index_select(dim, at)
            input = input.float() if input.dtype in _HALF else input
            input = added_at(input, dim, at, used, initial * entering)
    return input, cuts if reset is None else cuts | reset


def first_steps(cu_seqlens: Tensor, like: Tensor, dim: int, reverse: bool) -> Tensor:
    """Where a sequence's first step is (reverse: its last one), of `like`'s shape."""
    length = like.size(dim)
    marks = torch.zeros(length + 1, dtype=torch.bool, device=like.device).index_fill(0, cu_seqlens.long(), True)
    marks = marks.narrow(0, 1 if reverse else 0, length)
    return marks.view(_along(like, dim)).expand(like.shape)


def entries(cu_seqlens: Tensor, like: Tensor, dim: int, reverse: bool) -> tuple[Tensor, Tensor]:
    """Of every sequence the index of its first step (reverse: its last one), and whether it has one."""
    starts, stops = cu_seqlens[:-1], cu_seqlens[1:]
    at = (stops - 1 if reverse else starts).clamp(min=0).clamp(max=like.size(dim) - 1)
    return at, (stops > starts).view(_along(like, dim))


def added_at(tensor: Tensor, dim: int, at: Tensor, used: Tensor, values: Tensor) -> Tensor:
    """`tensor` with values, one a sequence, added at their indices; a sequence that is not `used` adds 0."""
    shape = (*tensor.shape[:dim], at.size(0), *tensor.shape[dim + 1 :])
    values = torch.where(used, values.to(tensor.dtype), torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    return tensor.index_add(dim, at, values.expand(shape))


def check_cu_seqlens(op: str, cu_seqlens: Any, name: str, tensor: Tensor, dim: int) -> None:
    """Offsets that a GPU has are not looked at: one that is out of range is a device assertion there."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{op}: cu_seqlens must be a tensor or None, got {type(cu_seqlens).__name__}")
    check_layouts(op, cu_seqlens=cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        fail(op, f"cu_seqlens must be int32 or int64, got {dtype_name(cu_seqlens.dtype)}")
    if cu_seqlens.dim() != 1 or known(cu_seqlens.size(0) == 0):
        fail(op, f"cu_seqlens must be 1-D with at least one element, got the shape {tuple(cu_seqlens.shape)}")
    check_device(op, "cu_seqlens", cu_seqlens, name, tensor)
    if cu_seqlens.device.type != "cpu" or is_compiling() or _is_traced(cu_seqlens):
        return
    if cu_seqlens[0] != 0:
        fail(op, f"cu_seqlens must begin with 0, got {int(cu_seqlens[0])}")
    if cu_seqlens[-1] != tensor.size(dim):
        fail(op, f"cu_seqlens must end with the size along dim {dim}, {tensor.size(dim)}, got {int(cu_seqlens[-1])}")
    drops = cu_seqlens[1:] < cu_seqlens[:-1]
    if drops.any():
        where = int(drops.int().argmax())
        fail(op, f"cu_seqlens must not decrease, got {int(cu_seqlens[where + 1])} behind {int(cu_seqlens[where])}")


def check_of_sequences(
    op: str, name: str, values: Tensor, other_name: str, other: Tensor, dim: int, cu_seqlens: Tensor
) -> None:
    """One value a sequence: the dimension of time is that of sequences."""
    possessive = f"{other_name}'" if other_name.endswith("s") else f"{other_name}'s"
    if values.dtype != other.dtype:
        fail(op, f"{name} must have {possessive} dtype {dtype_name(other.dtype)}, got {dtype_name(values.dtype)}")
    check_device(op, name, values, other_name, other)
    shape = (*other.shape[:dim], cu_seqlens.size(0) - 1, *other.shape[dim + 1 :])
    if not broadcasts(values.shape, shape):
        fail(op, f"{name} must broadcast to {possessive} shape with one for each sequence at dim {dim}, "
                 f"{tuple(shape)}, got {tuple(values.shape)}")  # fmt: skip


def _along(like: Tensor, dim: int) -> list[int]:
    return [-1 if axis == dim else 1 for axis in range(like.dim())]


def _is_traced(tensor: Tensor) -> bool:
    """Whether it has no values to look at: a mode, a subclass or a transform is there."""
    return type(tensor) is not Tensor or bool(
        torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    )
