"""The scan ops' checks. csrc/include/dcs/validate.h says the same sentences in C++; a test compares the two.

Exceptions are IndexError for `dim` and RuntimeError for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._common.validate import (
    FLOATING,
    check_dense,
    check_device,
    check_device_type,
    check_dim,
    check_integer,
    check_layouts,
    dtype_name,
    fail,
    known,
)

_COMPLEX = (torch.complex64, torch.complex128)


def check_scan(
    op: str,
    input: Tensor,
    gamma: Tensor | None,
    dim: int,
    initial: Tensor | None,
    reset: Tensor | None,
    window: int | None,
    *,
    integers_allowed: bool = False,
) -> int:
    """Raises a sentence that names the wrong argument; returns `dim` as a non-negative index."""
    check_layouts(op, input=input, gamma=gamma, initial=initial, reset=reset)
    _check_window(op, window)
    if input.dtype not in FLOATING + _COMPLEX and not (integers_allowed and input.dtype == torch.int64):
        fail(op, f"input must be floating-point or complex, got {dtype_name(input.dtype)}")
    check_device_type(op, "input", input)
    dim = check_dim(op, input, dim)
    if gamma is not None:
        _check_gamma(op, gamma, input, dim)
    if initial is not None:
        _check_initial(op, initial, input, dim)
    if reset is not None:
        if reset.dtype != torch.bool:
            fail(op, f"reset must be bool, got {dtype_name(reset.dtype)}")
        check_device(op, "reset", reset, "input", input)
        if reset.dim() != input.dim() or any(known(a != b) for a, b in zip(reset.shape, input.shape, strict=True)):
            fail(op, f"reset must have input's shape {tuple(input.shape)}, got {tuple(reset.shape)}")
    return dim


def check_direction(op: str, direction: str) -> bool:
    """Returns whether the scan runs from the last step to the first."""
    if not isinstance(direction, str):
        raise TypeError(f'{op}: direction must be "left" or "right", got {type(direction).__name__}')
    if direction not in ("left", "right"):
        fail(op, f'direction must be "left" or "right", got "{direction}"')
    return direction == "right"


def check_argument_types(
    op: str, input: object, gamma: object, dim: object, initial: object, reset: object, window: object
) -> None:
    """What no schema says in a sentence. Run where a call has failed, and first if offsets of sequences are given."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: input must be a tensor, got {type(input).__name__}")
    for name, value in (("initial", initial), ("reset", reset)):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor or None, got {type(value).__name__}")
    check_dense(op, input=input, gamma=gamma, initial=initial, reset=reset)
    check_integer(op, "dim", dim)
    if isinstance(dim, int):
        check_dim(op, input, dim)
    if window is not None and not isinstance(window, (int, torch.SymInt)):
        raise TypeError(f"{op}: window must be an integer or None, got {type(window).__name__}")
    if isinstance(window, int) and window >= 2**63:
        fail(op, f"window must be below 2**63, got {window}")
    _check_window(op, window)


def check_unshifted_initial(op: str, shifted: bool, initial: Tensor | None) -> None:
    if shifted and initial is not None:
        fail(op, "initial must be None for a shifted scan, got a tensor")


def check_output(op: str, output: Tensor, grad: Tensor) -> None:
    """`_scan_gradients` takes a scan's output beside its gradient."""
    same = output.dim() == grad.dim() and not any(known(a != b) for a, b in zip(output.shape, grad.shape, strict=True))
    if output.dtype != grad.dtype or not same:
        fail(
            op,
            f"output must have grad's dtype and shape {tuple(grad.shape)}, got {dtype_name(output.dtype)} "
            f"{tuple(output.shape)}",
        )
    check_device(op, "output", output, "input", grad)


def _check_window(op: str, window: int | torch.SymInt | None) -> None:
    if window is not None and known(window < 1):
        fail(op, f"window must be at least 1, got {window}")


def _check_gamma(op: str, gamma: Tensor, input: Tensor, dim: int) -> None:
    if gamma.dtype not in FLOATING + _COMPLEX:
        fail(op, f"gamma must be a floating-point or complex tensor, got {dtype_name(gamma.dtype)}")
    if gamma.is_complex() and not input.is_complex():
        fail(
            op, f"gamma must be real for a real input of dtype {dtype_name(input.dtype)}, got {dtype_name(gamma.dtype)}"
        )
    if not (gamma.dim() == 0 and gamma.device.type == "cpu"):
        check_device(op, "gamma", gamma, "input", input)
    ndim = input.dim()
    if gamma.dim() == 0:
        return
    if gamma.dim() > ndim:
        fail(op, f"gamma must have at most input's number of dimensions ({ndim}), got {gamma.dim()}")
    if gamma.dim() == ndim:
        if not broadcasts(gamma.shape, input.shape):
            fail(op, f"gamma must broadcast to input's shape {tuple(input.shape)}, got {tuple(gamma.shape)}")
        return
    rows = without(input.shape, dim)
    if not broadcasts(gamma.shape, rows):
        fail(
            op,
            f"gamma must broadcast to input's shape without dim {dim}, {rows}, to give one discount a row, got "
            f"{tuple(gamma.shape)}; a per-step gamma needs input's number of dimensions ({ndim})",
        )


def _check_initial(op: str, initial: Tensor, input: Tensor, dim: int) -> None:
    if initial.dtype != input.dtype:
        fail(op, f"initial must have input's dtype {dtype_name(input.dtype)}, got {dtype_name(initial.dtype)}")
    check_device(op, "initial", initial, "input", input)
    rows = without(input.shape, dim)
    if not broadcasts(initial.shape, rows):
        fail(
            op,
            f"initial must broadcast to input's shape without dim {dim}, {rows}, got {tuple(initial.shape)}",
        )


def without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether `shape`, aligned at the right, broadcasts to exactly `target`."""
    if len(shape) > len(target):
        return False
    tail = target[len(target) - len(shape) :]
    return not any(known(a != b) and known(a != 1) for a, b in zip(shape, tail, strict=True))
