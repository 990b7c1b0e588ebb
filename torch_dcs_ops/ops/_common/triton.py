"""The Triton kernels as the ops see them: the devices that get them, and their launchers."""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

from torch import Tensor

from ... import _native

# The dispatch keys of the devices that get the Triton kernels.
TRITON_KEYS = tuple(key for key, kernels in (("CPU", _native.CPU), ("CUDA", _native.CUDA)) if kernels.kind == "triton")


@functools.cache
def launchers(name: str) -> ModuleType | None:
    """A module of triton_kernels, None where it cannot be imported."""
    # Imported at the first call: importing the package does not import triton.
    try:
        return importlib.import_module(f"{_native.__package__}.triton_kernels.{name}")
    except ImportError as error:
        warnings.warn(f"the Triton kernels cannot be imported, what runs without them is slower: {error}", stacklevel=2)
        return None


def launchers_for(tensor: Tensor, name: str) -> ModuleType | None:
    """Of what no compiled library has, so that Triton is in use wherever a GPU has kernels."""
    has_kernels = _native.CUDA.kind != "reference" if tensor.is_cuda else _native.CPU.kind == "triton"
    return launchers(name) if has_kernels else None
