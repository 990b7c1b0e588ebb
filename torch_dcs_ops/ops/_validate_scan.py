"""The scan ops' checks. csrc/include/dcs/validate.h says the same sentences in C++; a test compares the two.

Exceptions are IndexError for `dim` and RuntimeError for everything else, the types that come through torch.compile.
Sizes may be symbolic: a size that is not known yet passes, the kernel sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_DEVICES = ("cpu", "cuda", "meta")


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
    _check_layouts(op, input=input, gamma=gamma, initial=initial, reset=reset)
    if window is not None and known(window < 1):
        _fail(op, f"window must be at least 1, got {window}")
    if input.dtype not in _REAL + _COMPLEX and not (integers_allowed and input.dtype == torch.int64):
        _fail(op, f"input must be floating-point or complex, got {_name(input.dtype)}")
    if input.device.type not in _DEVICES:
        _fail(op, f"input must be on a CPU or CUDA device, got {input.device.type}")
    dim = check_dim(op, input, dim)
    if gamma is not None:
        _check_gamma(op, gamma, input, dim)
    if initial is not None:
        _check_initial(op, initial, input, dim)
    if reset is not None:
        if reset.dtype != torch.bool:
            _fail(op, f"reset must be bool, got {_name(reset.dtype)}")
        _check_device(op, "reset", reset, input)
        if reset.dim() != input.dim() or any(known(a != b) for a, b in zip(reset.shape, input.shape, strict=True)):
            _fail(op, f"reset must have input's shape {tuple(input.shape)}, got {tuple(reset.shape)}")
    return dim


def check_direction(op: str, direction: str) -> bool:
    """Returns whether the scan runs from the last step to the first."""
    if direction not in ("left", "right"):
        _fail(op, f'direction must be "left" or "right", got "{direction}"')
    return direction == "right"


def check_argument_types(op: str, input: object, dim: object, initial: object, reset: object, window: object) -> None:
    """What no schema says in a sentence. For the path of an error: it is never run on a call that succeeds."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: input must be a tensor, got {type(input).__name__}")
    for name, value in (("initial", initial), ("reset", reset)):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor or None, got {type(value).__name__}")
    _check_layouts(op, input=input, initial=initial, reset=reset)
    if not isinstance(dim, (int, torch.SymInt)):
        raise TypeError(f"{op}: dim must be an integer, got {type(dim).__name__}")
    if window is not None and not isinstance(window, (int, torch.SymInt)):
        raise TypeError(f"{op}: window must be an integer or None, got {type(window).__name__}")


def check_dim(op: str, input: Tensor, dim: int) -> int:
    bound = max(input.dim(), 1)
    if not -bound <= dim < bound:
        raise IndexError(f"{op}: dim must be in [{-bound}, {bound - 1}] for a {input.dim()}-D input, got {dim}")
    return dim % bound


def check_unshifted_initial(op: str, shifted: bool, initial: Tensor | None) -> None:
    if shifted and initial is not None:
        _fail(op, "initial must be None for a shifted scan, got a tensor")


def check_output(op: str, output: Tensor, grad: Tensor) -> None:
    """`_scan_backward` takes a scan's output beside its gradient."""
    same = output.dim() == grad.dim() and not any(known(a != b) for a, b in zip(output.shape, grad.shape, strict=True))
    if output.dtype != grad.dtype or not same:
        _fail(
            op,
            f"output must have grad's dtype and shape {tuple(grad.shape)}, got {_name(output.dtype)} "
            f"{tuple(output.shape)}",
        )
    _check_device(op, "output", output, grad)


def known(condition: Any) -> bool:
    """Whether `condition`, perhaps on sizes that are symbols, is known to hold."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _check_gamma(op: str, gamma: Tensor, input: Tensor, dim: int) -> None:
    if gamma.dtype not in _REAL + _COMPLEX:
        _fail(op, f"gamma must be a floating-point or complex tensor, got {_name(gamma.dtype)}")
    if gamma.is_complex() and not input.is_complex():
        _fail(op, f"gamma must be real for a real input of dtype {_name(input.dtype)}, got {_name(gamma.dtype)}")
    if not (gamma.dim() == 0 and gamma.device.type == "cpu"):
        _check_device(op, "gamma", gamma, input)
    ndim = input.dim()
    if gamma.dim() == 0:
        return
    if gamma.dim() > ndim:
        _fail(op, f"gamma must have at most input's number of dimensions ({ndim}), got {gamma.dim()}")
    if gamma.dim() == ndim:
        if not _broadcasts(gamma.shape, input.shape):
            _fail(op, f"gamma must broadcast to input's shape {tuple(input.shape)}, got {tuple(gamma.shape)}")
        return
    rows = _without(input.shape, dim)
    if not _broadcasts(gamma.shape, rows):
        _fail(
            op,
            f"gamma must broadcast to input's shape without dim {dim}, {rows}, to give one discount a row, got "
            f"{tuple(gamma.shape)}; a gamma for every step needs input's number of dimensions ({ndim})",
        )


def _check_initial(op: str, initial: Tensor, input: Tensor, dim: int) -> None:
    if initial.dtype != input.dtype:
        _fail(op, f"initial must have input's dtype {_name(input.dtype)}, got {_name(initial.dtype)}")
    _check_device(op, "initial", initial, input)
    rows = _without(input.shape, dim)
    if not _broadcasts(initial.shape, rows):
        _fail(
            op,
            f"initial must broadcast to input's shape without dim {dim}, {rows}, got {tuple(initial.shape)}",
        )


def _check_device(op: str, name: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.device != input.device:
        _fail(op, f"{name} must be on input's device {input.device}, got {tensor.device}")


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether `shape`, aligned at the right, broadcasts to exactly `target`."""
    if len(shape) > len(target):
        return False
    tail = target[len(target) - len(shape) :]
    return not any(known(a != b) and known(a != 1) for a, b in zip(shape, tail, strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fail(op: str, sentence: str) -> NoReturn:
    raise RuntimeError(f"{op}: {sentence}")


def _check_layouts(op: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
            _fail(op, f"{name} must be a dense tensor, got the layout {str(tensor.layout).removeprefix('torch.')}")
