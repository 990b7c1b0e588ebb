"""Lowers the scan ops to Inductor's own scans, so that they fuse with the pointwise operations around them.

Which scans, and to what; the pairs that they are over, in which precision, are in `scan_values`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .. import _registry
from ..ops._common.validate import FLOATING
from ..ops.returns import temporal_difference
from ..reference.scan import gate_gradient_dtype
from .inductor import codegen, configuration, lowering, tracing
from .inductor.lowering import Index, Value, ops
from .passes.build import hint
from .scan_values import (
    Scan,
    gate_loader,
    is_first,
    join_sums,
    join_with_gates,
    previous_loader,
    reset_loader,
    row_loader,
    value_loader,
)

# Inductor gives a row of a scan over tuples to one block; the library's kernels cut long rows, and look back. Alone, on
# an H200 (float32, a shared gamma), as fractions of a copy, generated / the library's: 16 rows of 1048576 steps
# 0.05 / 0.77, 256 of 65536 0.51 / 0.86. As operations around it move twice the traffic of a fused scan, that pays from
# about half of the library's speed on.
FEW_ROWS = 128
LONG_ROW = 8192
# With time as an outer dimension a warp takes 64 columns; of fewer, threads have to share the steps: GAE of 1024 steps
# by 4096 columns 0.31 of its traffic, 0.50 by the library's scan and two kernels around it, 0.94 where blocks hold
# whole columns.
FEW_COLUMNS = 8192
LONG_COLUMN = 512

_SUMS = (*FLOATING, torch.int64)


def lowers_to_scan(scan: Scan) -> bool:
    """Whether a scan becomes part of a generated kernel; what does not is a call of the library's own."""
    input, size = scan.input, scan.size
    tensors = [tensor for tensor in (scan.gamma, scan.initial, scan.reset) if tensor is not None]
    if not size or any(tensor.get_device() != input.get_device() for tensor in tensors):
        return False
    if input.get_dtype() not in (_SUMS if scan.is_sum else FLOATING):
        return False
    if scan.gamma is not None and scan.gamma.get_dtype() not in FLOATING:
        return False
    if scan.number is not None and not math.isfinite(scan.number):
        return False
    if not lowering.generates_scans(input.get_device()):
        return False
    # Alone the library's kernels are at least as fast: they know that a scalar gamma is the same at every step.
    sizes = [codegen.size_hint(size) for size in scan.size]
    if _has_few_long_rows(sizes, scan.axis) and not _takes_whole_columns(scan, sizes):
        return False
    return not _is_degenerate(scan) and lowering.has_work_to_fuse()


def fuses_temporal_differences(rewards: torch.Tensor, dim: int) -> bool:
    """Whether `_temporal_difference_scan` is traced as pointwise operations around a scan that becomes a part of their
    kernel; else the library's kernel is called, which is the whole of it too.
    """
    if not tracing.is_traced() or rewards.device.type not in lowering.GENERATED_DEVICES:
        return False
    sizes = [hint(size) for size in rewards.shape]
    return (
        configuration.lowers_scans()
        and not (0 in sizes or sizes[dim] == 1)
        and not _has_few_long_rows(sizes, dim % len(sizes))
    )


def _is_degenerate(scan: Scan) -> bool:
    length = scan.size[scan.axis]
    return lowering.is_known_to_equal(length, 1) or any(lowering.is_known_to_equal(n, 0) for n in scan.size)


def _has_few_long_rows(sizes: list[int], axis: int) -> bool:
    length = sizes[axis]
    rows = math.prod(sizes) // max(length, 1)
    if math.prod(sizes[axis + 1 :]) == 1:
        return rows < FEW_ROWS and length > LONG_ROW
    return rows < FEW_COLUMNS and length > LONG_COLUMN


def _takes_whole_columns(scan: Scan, sizes: list[int]) -> bool:
    rows = math.prod(sizes) // max(sizes[scan.axis], 1)
    if math.prod(sizes[scan.axis + 1 :]) == 1 or not codegen.scans_in_columns(scan.dtype, scan.column_gamma):
        return False
    return codegen.holds_whole_columns(scan.size[scan.axis], rows)


def lower_discounted_cumsum(
    input: Any,
    gamma: Any,
    *,
    dim: int = -1,
    direction: str = "right",
    initial: Any = None,
    reset: Any = None,
    window: Any = None,
) -> Any:
    """Both overloads: gamma is a tensor or a number."""
    rates, number = (gamma, 1.0) if lowering.is_tensor(gamma) else (None, gamma)
    return lower_scan(input, rates, number, dim, direction == "right", False, initial, reset, window)


def lower_cumsum(input: Any, dim: int = -1, *, reverse: bool = False, dtype: torch.dtype | None = None) -> Any:
    source = input.get_dtype()
    wanted = dtype or (source if source.is_floating_point or source.is_complex else torch.int64)
    if wanted not in _SUMS or source.is_complex:
        return None
    return lower_scan(lowering.to_dtype(input, wanted), None, 1.0, dim, reverse, False, None, None, None)


def lower_scan(
    input: Any,
    gamma: Any,
    gamma_value: float,
    dim: int,
    reverse: bool,
    shifted: bool,
    initial: Any,
    reset: Any,
    window: Any,
) -> Any:
    """`_scan` as a generated kernel, or None."""
    axis = dim % max(len(input.get_size()), 1)
    scan = Scan(input, gamma, gamma_value, axis, reverse, shifted, initial, reset)
    return _build(scan) if window is None and lowers_to_scan(scan) else None


def lower_scan_gradients(
    grad: Any, output: Any, gamma: Any, gamma_value: float, dim: int, reverse: bool, initial: Any, reset: Any
) -> Any:
    """`_scan_gradients` as a generated kernel, or None: the adjoint scan, and the gate gradient as a product of it."""
    axis = dim % max(len(grad.get_size()), 1)
    adjoint = Scan(grad, gamma, gamma_value, axis, not reverse, True, None, reset)
    forward = Scan(output, gamma, gamma_value, axis, reverse, False, initial, reset)
    if not lowers_to_scan(adjoint):
        return None
    grad_input = _build(adjoint)
    return grad_input, _gate_gradient(grad_input, forward)


def _gate_gradient(grad_input: Any, forward: Scan) -> Any:
    """``grad_input[t]·y[prev(t)]``, 0 where reset[t]; summed over time, unless gamma has an axis of it, or over all."""
    dtype = torch.promote_types(grad_input.get_dtype(), torch.float32)
    grad_at, initial_at, reset_at = (
        grad_input.make_loader(),
        row_loader(forward, forward.initial),
        reset_loader(forward),
    )
    previous_at = previous_loader(forward, forward.input.make_loader(), 0.0, dtype)

    def product_at(index: Index) -> Value:
        previous = previous_at(index)
        if initial_at is not None:
            previous = ops.where(is_first(forward, index), ops.to_dtype(initial_at(index), dtype), previous)
        product = ops.mul(ops.to_dtype(grad_at(index), dtype), previous)
        return product if reset_at is None else ops.where(reset_at(index), ops.constant(0.0, dtype), product)

    product = lowering.pointwise(grad_input, dtype, product_at)
    has_axis = forward.gamma is not None and len(forward.gamma.get_size()) == len(forward.size)
    meta_gamma = None if forward.gamma is None else torch.empty((), dtype=forward.gamma.get_dtype(), device="meta")
    if has_axis:
        assert meta_gamma is not None
        meta_gamma = meta_gamma.expand((1,) * len(forward.size))
    else:
        product = lowering.sum_over(product, [forward.axis])
        if forward.gamma is not None and not forward.gamma.get_size():
            product = lowering.sum_over(product, list(range(len(forward.size) - 1)))
    return lowering.to_dtype(product, gate_gradient_dtype(grad_input.get_dtype(), meta_gamma, len(forward.size)))


def _build(scan: Scan) -> Any:
    if scan.is_sum:
        return lowering.directed_scan(
            scan.input, (scan.dtype,), (value_loader(scan),), scan.axis, join_sums, scan.reverse
        )
    is_bounded = scan.number is not None and abs(scan.number) <= 1
    return lowering.directed_scan(
        scan.input,
        (scan.dtype, scan.dtype),
        (gate_loader(scan), value_loader(scan)),
        scan.axis,
        join_with_gates(scan.dtype, is_bounded, scan.reset is not None),
        scan.reverse,
        scan.column_gamma,
    )


LOWERINGS: dict[Any, Callable[..., Any]] = {
    _registry.discounted_cumsum_tensor: lower_discounted_cumsum,
    _registry.discounted_cumsum_number: lower_discounted_cumsum,
    _registry.cumsum: lower_cumsum,
    _registry.scan: lower_scan,
    _registry.scan_gradients: lower_scan_gradients,
}


def install() -> None:
    """Registers the lowerings, once a process."""
    lowering.register(tuple(LOWERINGS.items()))
    temporal_difference.fuses_in_compiled_code = fuses_temporal_differences
