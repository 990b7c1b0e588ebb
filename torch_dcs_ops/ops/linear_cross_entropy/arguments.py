"""The types of the public functions' arguments, in sentences. No schema gives one: its own words name no function."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from .._common.validate import check_dense

_INTEGERS = (int, torch.SymInt, numbers.Integral)
_NUMBERS = (*_INTEGERS, float, torch.SymFloat, numbers.Real)
_NONE = type(None)
# What a keyword takes, in types and in words.
_KINDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "reduction": ((str,), "a string"),
    "label_smoothing": (_NUMBERS, "a number"),
    "softcap": ((*_NUMBERS, _NONE), "a number or None"),
    "logit_scale": ((*_NUMBERS, Tensor), "a number or a tensor of one"),
    "z_loss": (_NUMBERS, "a number"),
    "shift": (_INTEGERS, "an integer or a bool"),
    "grad_filter_eps": ((*_NUMBERS, _NONE), "a number or None"),
    "ignore_index": ((*_INTEGERS, _NONE), "an integer or None"),
    "memory_budget": ((*_INTEGERS, _NONE), "an integer or None"),
    "accumulate_dtype": ((torch.dtype, _NONE), "a torch.dtype or None"),
}


def check_argument_types(op: str, tensors: dict[str, object], keywords: dict[str, Any]) -> None:
    """A TypeError for what is no tensor or no number. For the path of an error: it is never run on a good call.

    `tensors` must be such; keywords that the table lacks are tensors or None.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    optional = {name: value for name, value in keywords.items() if name not in _KINDS}
    for name, value in optional.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor or None, got {type(value).__name__}")
    check_dense(op, **tensors, **optional)
    check_keyword_types(op, {name: value for name, value in keywords.items() if name in _KINDS})


def check_keyword_types(op: str, keywords: dict[str, Any]) -> None:
    for name, value in keywords.items():
        types, words = _KINDS[name]
        if not isinstance(value, types):
            raise TypeError(f"{op}: {name} must be {words}, got {type(value).__name__}")
