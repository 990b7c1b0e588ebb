"""Autocast for scans: like torch.cumsum, a half input is summed in float32 and gives a float32 result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _registry

_HALF = (torch.float16, torch.bfloat16)
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCPU
)


def widened(value: Any) -> Any:
    """A half tensor in float32, anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def register(name: str, op: Any) -> None:
    """Gives `op` (its schema name is `name`) an autocast kernel on CPU and CUDA that widens every half tensor."""

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return op(*map(widened, args), **{key: widened(value) for key, value in kwargs.items()})

    for key in ("AutocastCPU", "AutocastCUDA"):
        _registry.LIBRARY.impl(name, kernel, key, with_keyset=True)
