"""The types of the public functions' arguments, in sentences. No schema gives one: its own words name no function."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._common.validate import FLOATING, check_dense, check_device, dtype_name, fail, is_flag
from .validate import check_reduction

# What a caller may scale the logits by.
Scale = float | Tensor

_INTEGERS = (int, torch.SymInt, numbers.Integral)
_NUMBERS = (*_INTEGERS, float, torch.SymFloat, numbers.Real)
_FLAG = (object,)  # see is_flag
_NONE = type(None)
# What a keyword takes, in types and in words.
_KINDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "label_smoothing": (_NUMBERS, "a number"),
    "softcap": ((*_NUMBERS, _NONE), "a number or None"),
    "logit_scale": ((*_NUMBERS, Tensor), "a number or a tensor of one"),
    "z_loss": (_NUMBERS, "a number"),
    "need_entropy": (_FLAG, "a bool"),
    "return_statistics": (_FLAG, "a bool"),
    "return_lse": (_FLAG, "a bool"),
    "return_predictions": (_FLAG, "a bool"),
    "return_argmax_log_prob": (_FLAG, "a bool"),
    "return_z_loss": (_FLAG, "a bool"),
    "zero_if_empty": (_FLAG, "a bool"),
    "sequence_parallel": (_FLAG, "a bool"),
    "bias": (_FLAG, "a bool"),
    "in_features": (_INTEGERS, "an integer"),
    "num_classes": (_INTEGERS, "an integer"),
    "direction": ((str,), "a string"),
    "beta": (_NUMBERS, "a number"),
    "temperature": (_NUMBERS, "a number"),
    "teacher_softcap": ((*_NUMBERS, _NONE), "a number or None"),
    "teacher_logit_scale": ((*_NUMBERS, Tensor), "a number or a tensor of one"),
    "shift": (_INTEGERS, "an integer or a bool"),
    "grad_filter_eps": ((*_NUMBERS, _NONE), "a number or None"),
    "k": (_INTEGERS, "an integer"),
    "ignore_index": ((*_INTEGERS, _NONE), "an integer or None"),
    "memory_budget": ((*_INTEGERS, _NONE), "an integer or None"),
    "accumulate_dtype": ((torch.dtype, _NONE), "a torch.dtype or None"),
    "logits_dtype": ((torch.dtype, _NONE), "a torch.dtype or None"),
}


def apply_scale(
    op: str, input: Tensor, linear_bias: Tensor | None, logit_scale: Scale, name: str = "logit_scale"
) -> tuple[Tensor, Tensor | None, float]:
    """The operands of logits that are scaled by a number: a tensor is a factor of input and linear_bias instead.

    So it is differentiable as they are, and nothing waits for its value. Half-precision operands are rounded once more.
    """
    if not isinstance(logit_scale, Tensor):
        return input, linear_bias, logit_scale
    check_scale(op, logit_scale, name)
    scale = logit_scale.reshape(())
    if isinstance(input, Tensor) and scale.device.type != "cpu":
        check_device(op, name, scale, "input", input)
    return _times(input, scale), _times(linear_bias, scale), 1.0


def _times(operand: Any, scale: Tensor) -> Any:
    """What is no floating-point tensor is refused later, as it is."""
    return operand * scale if isinstance(operand, Tensor) and operand.is_floating_point() else operand


def check_scale(op: str, logit_scale: Scale, name: str = "logit_scale") -> None:
    if not isinstance(logit_scale, Tensor):
        return
    check_dense(op, **{name: logit_scale})
    if logit_scale.dtype not in FLOATING:
        fail(op, f"{name} must be a number or a floating-point tensor, got {dtype_name(logit_scale.dtype)}")
    if logit_scale.numel() != 1:
        fail(op, f"{name} must be a number or a tensor of one element, got the shape {tuple(logit_scale.shape)}")


def check_argument_types(op: str, tensors: Mapping[str, object], keywords: dict[str, Any]) -> None:
    """A TypeError for what is no tensor or no number. For the path of an error: it is never run on a good call.

    `tensors` must be such; keywords that the table lacks are tensors or None. A reduction is a ValueError, as of
    torch.nn.functional.
    """
    if "reduction" in keywords:
        keywords = dict(keywords)
        check_reduction(op, keywords.pop("reduction"))
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
        if not (is_flag(value) if types is _FLAG else isinstance(value, types)):
            raise TypeError(f"{op}: {name} must be {words}, got {_shown(value, types)}")


def check_flags(op: str, **flags: object) -> None:
    """What no schema sees, or sees as the truth of anything. On the path of every call."""
    for name, value in flags.items():
        if value is not True and value is not False:
            check_keyword_types(op, {name: value})


def _shown(value: object, types: tuple[Any, ...]) -> str:
    return str(value) if types is _FLAG and isinstance(value, _INTEGERS) else type(value).__name__


def class_indices(target: Tensor) -> Tensor:
    """uint8 ones are taken, as by torch.nn.functional, and int64 from here on."""
    return target.long() if isinstance(target, Tensor) and target.dtype == torch.uint8 else target


def named(op: str, error: IndexError) -> IndexError:
    """The error of a target out of range, which a shared kernel has raised, in the name of the function called."""
    sentence = str(error)
    before, found, after = sentence.partition(": target must be in ")
    return IndexError(f"{op}{found}{after}") if found and before.startswith("linear_") else error
