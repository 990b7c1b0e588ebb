"""What the integrations share: whether a library's function is the one that is known, and NumPy arrays in and out."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

    Arrays = Tensor | np.ndarray[Any, Any]
    Array = TypeVar("Array", Tensor, np.ndarray[Any, Any])


def version(library: str) -> str:
    return str(getattr(importlib.import_module(library), "__version__", "of an unknown version"))


def checked(library: str, name: str, original: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """The library's function or method of this name, if it takes what ours takes."""
    got = None if original is None else list(inspect.signature(getattr(original, "py_func", original)).parameters)
    wanted = list(inspect.signature(ours).parameters)
    if original is None or got != wanted:
        raise RuntimeError(
            f"{library}.enable: {name} of {library} {version(library)} must have the parameters {wanted}, got {got}"
        )
    function: Callable[..., Any] = original
    return function


def as_tensor(array: Any) -> Tensor:
    """A NumPy array, or anything like it, as a tensor that shares its memory where it can."""
    return array if isinstance(array, Tensor) else torch.as_tensor(array)


def like(result: Tensor, given: Array) -> Array:
    """`result` as what was given was: a tensor, or else a NumPy array."""
    return result if isinstance(given, Tensor) else result.detach().cpu().numpy()
