"""`dcs::cumsum`: the cumulative sum in either direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ... import _registry
from ...reference.scan import ScanCall
from .._common import autocast, flops
from .._common.autograd import below, watched
from .._common.validate import check_flag, check_integer, dtype_name, fail
from .autograd import differentiable_scan, recorded_scan, tracked, unrecorded_scan
from .backends import BACKENDS, Backend
from .validate import check_argument_types, check_scan

_op = _registry.cumsum
_is_grad_enabled = torch.is_grad_enabled

_INTEGERS = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def cumsum(input: Tensor, dim: int = -1, *, reverse: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Cumulative sum along `dim`, like :func:`torch.cumsum`, from the first step or, with `reverse`, from the last.

    ``y[t] = x[0] + ... + x[t]``; with `reverse` ``y[t] = x[t] + ... + x[T-1]``, which is summed from the end and not
    formed as a difference of a total and a prefix (that would lose small tails).

    Args:
        input: any shape, 0-D and empty ones too; floating-point, complex, integer or bool; any strides.
        dim: the dimension to sum along.
        reverse: sum from the last step to the first.
        dtype: input is converted to it first. Without it, integers and bools are summed in int64, other dtypes in
            their own: float16 and bfloat16 accumulate in float32 and are rounded once, float32 on a CPU in float64.

    Returns:
        A new tensor of input's shape, with the strides of ``torch.empty_like(input)``.

    Deterministic bit for bit. Differentiable any number of times, in both modes; works under torch.func, torch.compile,
    torch.export. Under autocast a half-precision input is summed in float32, as with torch.cumsum.

    Raises:
        IndexError: `dim` is out of range.
        TypeError: an argument is of another type.
        RuntimeError: input is of another dtype, or on a device that is neither a CPU nor CUDA.

    Example::

        >>> torch_dcs_ops.cumsum(torch.tensor([1, 2, 3]), reverse=True)
        tensor([6, 5, 3])
    """
    output: Tensor
    if is_compiling():
        output = _op(input, dim, reverse=reverse, dtype=dtype)
        return output
    if type(dim) is not int:
        check_integer("cumsum", "dim", dim)
    if reverse is not True and reverse is not False:
        check_flag("cumsum", "reverse", reverse)
    try:
        if dtype is None and not watched(input) and _is_inexact(input.dtype):
            try:
                if _is_grad_enabled() and input.requires_grad:
                    return recorded_scan(None, input, None, 1.0, dim, reverse, False, None, None, None)
                return unrecorded_scan(input, None, 1.0, dim, reverse, False, None, None, None)
            except (IndexError, RuntimeError, TypeError):
                pass  # The public op says what is wrong, in its name.
        output = _op(input, dim, reverse=reverse, dtype=dtype)
    except (AttributeError, RuntimeError, TypeError):
        check_argument_types("cumsum", input, None, dim, None, None, None)
        if not isinstance(dtype, (torch.dtype, type(None))):
            raise TypeError(f"cumsum: dtype must be a torch.dtype or None, got {type(dtype).__name__}") from None
        for name, kind in (("input", input.dtype), ("dtype", dtype)):
            if kind is not None and not (_is_inexact(kind) or kind in _INTEGERS):
                fail("cumsum", f"{name} must be floating-point, complex, integer or bool, got {dtype_name(kind)}")
        raise
    return output


def _result_dtype(input: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return input.dtype if _is_inexact(input.dtype) else torch.int64


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _register(backend: Backend) -> None:
    def kernel(input: Tensor, dim: int = -1, *, reverse: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        wanted = _result_dtype(input, dtype)
        # An integer dtype asked for by name: int64 sums, narrowed, are the narrow sums.
        values = input.to(wanted if _is_inexact(wanted) else torch.int64)
        dim = check_scan("cumsum", values, None, dim, None, None, None, integers_allowed=True)
        output = backend.scan(values, ScanCall(None, 1.0, dim, reverse, False, None, None, None))
        return output.to(wanted)

    _registry.LIBRARY.impl("cumsum", kernel, backend.dispatch_key)


def _fake(input: Tensor, dim: int = -1, *, reverse: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    wanted = _result_dtype(input, dtype)
    values = torch.empty_like(input, dtype=wanted)
    check_scan(
        "cumsum", values if _is_inexact(wanted) else values.long(), None, dim, None, None, None, integers_allowed=True
    )
    return values


def _autograd(
    keyset: torch._C.DispatchKeySet,
    input: Tensor,
    dim: int = -1,
    *,
    reverse: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    wanted = _result_dtype(input, dtype)
    if not (_is_inexact(wanted) and tracked(input, None, None)):
        output: Tensor = below(_op, keyset, input, dim, reverse=reverse, dtype=dtype)
        return output
    values = input.to(wanted)
    return differentiable_scan(
        lambda: below(_op, keyset, values, dim, reverse=reverse),
        values, None, 1.0, dim, reverse, False, None, None, None,
    )  # fmt: skip


def _count(input_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(torch.Size(input_shape).numel())


for _backend in BACKENDS:
    _register(_backend)
torch.library.register_fake("dcs::cumsum", _fake, lib=_registry.LIBRARY)
_registry.LIBRARY.impl("cumsum", _autograd, "Autograd", with_keyset=True)
autocast.register("cumsum", _op)
flops.register(torch.ops.dcs.cumsum, _count)
