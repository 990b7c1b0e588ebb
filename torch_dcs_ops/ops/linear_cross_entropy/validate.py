"""The checks of linear_cross_entropy and linear_log_probs, the same for the fakes and for every kernel entry."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ...reference.linear_cross_entropy.loss import Options
from .._common.validate import (
    FLOATING,
    check_device,
    check_device_type,
    check_floating,
    check_layouts,
    dtype_name,
    fail,
    known,
)

_REDUCTIONS = ("none", "mean", "sum")
_DEFAULT_IGNORE_INDEX = -100


def check_call(
    op: str,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: Options,
    *,
    shift: int = 0,
) -> None:
    """Raises a sentence that names the wrong argument."""
    check_layouts(op, target=target, weight=weight)
    check_head(op, input, linear_weight, linear_bias)
    _check_target(op, target, input, linear_weight.size(0))
    _check_classes(op, "weight", weight, linear_weight)
    if weight is not None and weight.dtype not in FLOATING:
        fail(op, f"weight must be floating-point, got {dtype_name(weight.dtype)}")
    check_shift(op, shift)
    if shift and (input.dim() < 2 or known(input.size(-2) < shift)):
        fail(op, f"input must have the shape (..., T, D) with T >= {shift} for shift={shift}, got "
                 f"{tuple(input.shape)}")  # fmt: skip
    check_options(op, options, input.dtype)
    if target.is_floating_point() and options.ignore_index >= 0:
        fail(op, f"ignore_index must be negative or None for class probabilities, got {options.ignore_index}")


def check_head(op: str, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, whose: str = "") -> None:
    """The operands of the logits; `whose` is "teacher_" where their names begin so."""
    names = (
        f"{whose}input",
        f"{whose}weight" if whose else "linear_weight",
        f"{whose}bias" if whose else "linear_bias",
    )
    check_layouts(op, **dict(zip(names, (input, linear_weight, linear_bias), strict=True)))
    _check_input(op, input, names[0])
    _check_linear_weight(op, linear_weight, input, names[1], names[0])
    _check_classes(op, names[2], linear_bias, linear_weight)
    if linear_bias is not None and linear_bias.dtype != input.dtype:
        fail(op, f"{names[2]} must have {names[0]}'s dtype {dtype_name(input.dtype)}, got "
                 f"{dtype_name(linear_bias.dtype)}")  # fmt: skip


def check_rows_target(op: str, name: str, lead: torch.Size, input: Tensor) -> None:
    if _differs(lead, input.shape[:-1]):
        raise ValueError(f"{op}: {name} must have input's leading shape {tuple(input.shape[:-1])}, got {tuple(lead)}")


def check_options_of_head(
    op: str, softcap: float | None, logit_scale: float, memory_budget: int | None, whose: str = ""
) -> None:
    if softcap is not None and not 0 < softcap < math.inf:
        fail(op, f"{whose}softcap must be a positive number or None, got {softcap}")
    if not math.isfinite(logit_scale):
        fail(op, f"{whose}logit_scale must be finite, got {logit_scale}")
    if memory_budget is not None and memory_budget < 1:
        fail(op, f"memory_budget must be at least 1 byte, got {memory_budget}")


def check_ids(op: str, target: Tensor, input: Tensor) -> None:
    """One id a row, or K of them."""
    check_layouts(op, target=target)
    check_device(op, "target", target, "input", input)
    if target.dtype != torch.int64:
        fail(op, f"target must be int64 (class indices), got {dtype_name(target.dtype)}")
    lead, sizes = input.shape[:-1], target.shape
    if target.dim() == input.dim():
        sizes = sizes[:-1]
        if known(target.size(-1) < 1):
            fail(op, f"target must have one id a row at least, got the shape {tuple(target.shape)}")
    if _differs(sizes, lead):
        raise ValueError(f"{op}: target must have the shape {tuple(lead)}, or a last dimension more for several ids a "
                         f"row, got {tuple(target.shape)}")  # fmt: skip


def check_shift(op: str, shift: int) -> None:
    if shift < 0:
        fail(op, f"shift must be a number of steps >= 0, got {shift}")
    # What torch.distributed.tensor.experimental.context_parallel puts in its place while steps of time are elsewhere.
    attention = getattr(functional.scaled_dot_product_attention, "__module__", None) or ""
    if shift and attention.startswith("torch.distributed."):
        fail(op, f"shift must be 0 inside context_parallel, where the next step may be another rank's, got {shift}: "
                 "shift the targets before, as torch_dcs_ops.distributed.context_parallel_targets does")  # fmt: skip


def check_dtypes(op: str, accumulate_dtype: torch.dtype | None, logits_dtype: torch.dtype | None) -> None:
    """Without input's dtype."""
    for name, dtype, accepted in (
        ("accumulate_dtype", accumulate_dtype, (torch.bfloat16, torch.float32, torch.float64)),
        ("logits_dtype", logits_dtype, FLOATING),
    ):
        if dtype is not None and dtype not in accepted:
            fail(op, f"{name} must be None or {' or '.join(map(dtype_name, accepted))}, got {dtype_name(dtype)}")


def check_options(op: str, options: Options, dtype: torch.dtype) -> None:
    check_numbers(op, options)
    allowed = {torch.bfloat16: (torch.bfloat16, torch.float32), torch.float64: (torch.float64,)}
    accepted = allowed.get(dtype, (torch.float32,))
    if options.accumulate_dtype is not None and options.accumulate_dtype not in accepted:
        fail(
            op,
            f"accumulate_dtype must be None or {' or '.join(map(dtype_name, accepted))} for {dtype_name(dtype)} "
            f"input, got {dtype_name(options.accumulate_dtype)}",
        )
    if options.logits_dtype in (None, dtype):
        return
    is_half = dtype in (torch.float16, torch.bfloat16)
    if not is_half or options.logits_dtype != torch.float32:
        fail(op, f"logits_dtype must be None or {'float32' if is_half else dtype_name(dtype)} for {dtype_name(dtype)} "
                 f"input, got {dtype_name(options.logits_dtype)}")  # fmt: skip
    if options.grad_filter_eps:
        fail(op, f"logits_dtype must be None with grad_filter_eps, got {dtype_name(options.logits_dtype)}")


def check_numbers(op: str, options: Options) -> None:
    """What needs no tensor to look at. ValueError where torch.nn.functional has it."""
    check_reduction(op, options.reduction)
    if not 0 <= options.label_smoothing <= 1:
        fail(op, f"label_smoothing must be in [0, 1], got {options.label_smoothing}")
    check_options_of_head(op, options.softcap, options.logit_scale, options.memory_budget)
    if not 0 <= options.z_loss < math.inf:
        fail(op, f"z_loss must be a number >= 0, got {options.z_loss}")
    if options.grad_filter_eps is not None and not 0 <= options.grad_filter_eps < 1:
        fail(op, f"grad_filter_eps must be None or a number >= 0 and < 1, got {options.grad_filter_eps}")


def check_reduction(op: str, reduction: object) -> None:
    """A ValueError whatever it is, as torch.nn.functional's."""
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        found = f'"{reduction}"' if isinstance(reduction, str) else reduction
        raise ValueError(f'{op}: reduction must be "none", "mean" or "sum", got {found}')


def check_upstream(op: str, name: str, grad: Tensor | None, shape: torch.Size, input: Tensor) -> None:
    """The private backward takes a gradient for the loss, and for the lse and the entropy of every row."""
    if grad is None:
        return
    check_layouts(op, **{name: grad})
    if not grad.is_floating_point():
        fail(op, f"{name} must be floating-point, got {dtype_name(grad.dtype)}")
    check_device(op, name, grad, "input", input)
    if _differs(grad.shape, shape):
        fail(op, f"{name} must have the shape {tuple(shape)}, got {tuple(grad.shape)}")


def normal_ignore_index(ignore_index: int | None) -> int:
    return _DEFAULT_IGNORE_INDEX if ignore_index is None else ignore_index


def _check_input(op: str, input: Tensor, name: str) -> None:
    check_floating(op, name, input)
    check_device_type(op, name, input)
    if input.dim() < 1:
        fail(op, f"{name} must have the shape (..., D), got a 0-D tensor")


def _check_linear_weight(op: str, linear_weight: Tensor, input: Tensor, name: str, input_name: str) -> None:
    features = input.size(-1)
    if linear_weight.dim() != 2 or known(linear_weight.size(1) != features):
        fail(op, f"{name} must have the shape (V, D) with D = {features} as in {input_name}, got "
                 f"{tuple(linear_weight.shape)}")  # fmt: skip
    if known(linear_weight.size(0) < 1):
        fail(op, f"{name} must have one class at least, got none")
    if linear_weight.dtype != input.dtype:
        fail(op, f"{name} must have {input_name}'s dtype {dtype_name(input.dtype)}, got "
                 f"{dtype_name(linear_weight.dtype)}")  # fmt: skip
    check_device(op, name, linear_weight, input_name, input)


def _check_target(op: str, target: Tensor, input: Tensor, classes: int) -> None:
    lead = input.shape[:-1]
    check_device(op, "target", target, "input", input)
    if target.is_floating_point():
        if _differs(target.shape, (*lead, classes)):
            # A ValueError for another number of rows, as torch.nn.functional's.
            error = (
                RuntimeError if target.dim() == len(lead) + 1 and not _differs(target.shape[:-1], lead) else ValueError
            )
            raise error(f"{op}: target must have the shape {(*lead, classes)} for class probabilities, got "
                        f"{tuple(target.shape)}")  # fmt: skip
    elif target.dim() == len(lead) + 1 and not _differs(target.shape, (*lead, classes)):
        fail(op, f"target must be floating-point for class probabilities, (..., V), got {dtype_name(target.dtype)}")
    elif target.dtype != torch.int64:
        fail(op, "target must be int64 (class indices) or floating-point (class probabilities), got "
                 f"{dtype_name(target.dtype)}")  # fmt: skip
    elif _differs(target.shape, lead):
        raise ValueError(f"{op}: target must have input's shape without its last dimension, {tuple(lead)}, got "
                         f"{tuple(target.shape)}")  # fmt: skip


def _check_classes(op: str, name: str, tensor: Tensor | None, linear_weight: Tensor) -> None:
    if tensor is None:
        return
    check_device(op, name, tensor, "input", linear_weight)
    if _differs(tensor.shape, linear_weight.shape[:1]):
        fail(op, f"{name} must have the shape ({linear_weight.size(0)},), one entry a class, got {tuple(tensor.shape)}")


def _differs(shape: torch.Size | tuple[int, ...], wanted: torch.Size | tuple[int, ...]) -> bool:
    return len(shape) != len(wanted) or any(known(a != b) for a, b in zip(shape, wanted, strict=True))
