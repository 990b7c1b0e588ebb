"""What every op's checks are made of: one sentence each, `<op>: <argument> must ..., got ...`.

Exceptions are IndexError for an index that is out of range and RuntimeError for everything else, the types that come
through torch.compile. Sizes may be symbolic: a size that is not known yet passes, the kernel sees it.
"""

from __future__ import annotations

import numbers
from typing import Any, NoReturn

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEVICES = ("cpu", "cuda", "meta")


def fail(op: str, sentence: str) -> NoReturn:
    raise RuntimeError(f"{op}: {sentence}")


def known(condition: Any) -> bool:
    """Whether `condition`, perhaps on sizes that are symbols, is known to hold."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_floating(op: str, name: str, tensor: Tensor) -> None:
    check_floating_dtype(op, name, tensor.dtype)


def check_floating_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATING:
        fail(op, f"{name} must be float16, bfloat16, float32 or float64, got {dtype_name(dtype)}")


def check_device_type(op: str, name: str, tensor: Tensor) -> None:
    if tensor.device.type not in _DEVICES:
        fail(op, f"{name} must be on a CPU or CUDA device, got {tensor.device.type}")


def check_device(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        possessive = f"{other_name}'" if other_name.endswith("s") else f"{other_name}'s"
        fail(op, f"{name} must be on {possessive} device {other.device}, got {tensor.device}")


def check_dim(op: str, input: Tensor, dim: int) -> int:
    bound = max(input.dim(), 1)
    if not -bound <= dim < bound:
        raise IndexError(f"{op}: dim must be in [{-bound}, {bound - 1}] for a {input.dim()}-D input, got {dim}")
    return dim % bound


def check_integer(op: str, name: str, value: object) -> None:
    """NumPy's integers too; a schema takes its floats as well, and rounds them."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an integer, got {type(value).__name__}")


def is_flag(value: object) -> bool:
    """NumPy's bools too, and 0 and 1 as a schema takes them; it takes the truth of anything."""
    if isinstance(value, numbers.Integral):
        return value in (0, 1)
    return isinstance(value, torch.SymBool) or type(value).__name__ in ("bool", "bool_")  # of NumPy 2 and 1


def check_flag(op: str, name: str, value: object) -> None:
    if not is_flag(value):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")


def check_layouts(op: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
            fail(op, f"{name} must be a dense tensor, got the layout {str(tensor.layout).removeprefix('torch.')}")


def check_dense(op: str, **tensors: object) -> None:
    """`check_layouts`, and no nested tensors: no kernel is called with one. For what no kernel checks."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.is_nested:
            fail(op, f"{name} must be a dense tensor, got a nested one")
    check_layouts(op, **tensors)
