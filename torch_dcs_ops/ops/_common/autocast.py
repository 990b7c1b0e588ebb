"""Autocast kernels: the ops' own, as neither list of autocast knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import _registry

_HALF = (torch.float16, torch.bfloat16)
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCPU
)


def widened(value: Any) -> Any:
    """A half-precision tensor in float32, anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def autocast_operands(first: Tensor, *others: Any) -> tuple[Any, ...]:
    """What autocast makes of the operands, for functions that are more than one op."""
    device = first.device.type
    # Of a device that has no autocast, a meta tensor's, torch refuses the question.
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return first, *others
    return tuple(map(widened, (first, *others)))


def lowered(value: Any) -> Any:
    """What autocast makes of an operand of a matrix product: its own dtype, unless it is float64 or no float."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(torch.get_autocast_dtype(value.device.type))
    return value


def register(name: str, op: Any) -> None:
    """Gives `op` (its schema name is `name`) an autocast kernel on CPU and CUDA that widens half-precision tensors.

    So it is for scans: like torch.cumsum, a half-precision input is summed in float32 and gives a float32 result.
    """

    def widen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(widened, args)), {key: widened(value) for key, value in kwargs.items()}

    register_cast(name, op, widen)


def register_cast(
    name: str, op: Any, cast: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
) -> None:
    """Gives `op` an autocast kernel on CPU and CUDA that calls it with what `cast` makes of the arguments."""

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            args, kwargs = cast(args, kwargs)
            return op(*args, **kwargs)

    for key in ("AutocastCPU", "AutocastCUDA"):
        _registry.LIBRARY.impl(name, kernel, key, with_keyset=True)
