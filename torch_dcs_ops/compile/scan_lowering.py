"""Lowers the scan ops to Inductor's own scans, so that they fuse with the pointwise operations around them.

A first-order recurrence is a scan over pairs (gate, value) (Blelloch, "Prefix sums and their applications", 1990,
section 1.4): a segment of steps is the product of its gates and its value from a carry of zero, and two segments join
to ``(g1·g2, x2 + g2·x1)``.

**Precision.** A discount that is one number a row multiplies itself thousands of times, and rounding it to float32 is
then the largest error by far (1.3e-2 at gamma = 0.999 and 10000 ones). Such pairs are float64, the values too: in the
small tiles that suit time-major data a float32 carry would stagnate short of its limit (by as much as half an ulp of y
over ``1 - gamma^steps`` of a tile), and splitting gates and values into two float32 each takes 4 members and 18
operations a join where float64 takes 2 and 2. A gate a step is input's own dtype (float32 for half inputs), as in the
kernels of the library. Half inputs accumulate in float32 or wider and are rounded once.

**Resets.** A reset must select the carry away, so that a NaN in it does not come through, and yet not cost the tuple
another member: its gate is NaN, which products keep and the join tests for. Genuine gates are made finite for that:
where one is not, it is the value that becomes NaN.

**Overflow.** Products of gates above 1 overflow where the recurrence itself may be all zeros, and inf·0 would be a NaN
of our making: they are cut to the largest finite number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext

from .. import _registry
from ..ops._common.validate import FLOATING
from ..ops.returns import temporal_difference
from ..reference.scan import gate_gradient_dtype
from .inductor import codegen, lowering
from .inductor.lowering import Combine, Index, Loader, Value, ops
from .passes.build import hint

# Inductor gives a row of a scan over tuples to one block; the library's kernels cut long rows, and look back. Alone, on
# an H200 (float32, one gamma), as fractions of a copy, generated / the library's: 16 rows of 1048576 steps 0.05 / 0.77,
# 256 of 65536 0.51 / 0.86. As operations around it move twice the traffic of a fused scan, that pays from about half of
# the library's speed on.
FEW_ROWS = 128
LONG_ROW = 8192
# With time as an outer dimension a warp takes 64 columns; of fewer, threads have to share the steps: GAE of 1024 steps
# by 4096 columns 0.31 of its traffic, 0.50 by the library's scan and two kernels around it, 0.94 where blocks hold
# whole columns.
FEW_COLUMNS = 8192
LONG_COLUMN = 512

_SUMS = (*FLOATING, torch.int64)


@dataclass(frozen=True)
class Scan:
    """A scan to lower: the arguments of `_scan`, with `axis` not negative."""

    input: Any
    gamma: Any
    gamma_value: float
    axis: int
    reverse: bool
    shifted: bool
    initial: Any
    reset: Any

    @property
    def size(self) -> list[Any]:
        return list(self.input.get_size())

    @functools.cached_property
    def number(self) -> float | None:
        """The discount, where it is one number that is known while compiling."""
        if self.gamma is None:
            return self.gamma_value
        return lowering.constant_value(self.gamma) if not self.gamma.get_size() else None

    @property
    def is_sum(self) -> bool:
        return self.number == 1 and self.reset is None

    @property
    def has_step_gates(self) -> bool:
        if self.gamma is None or len(self.gamma.get_size()) != len(self.size):
            return False
        return not lowering.is_known_to_equal(self.gamma.get_size()[self.axis], 1)

    @property
    def dtype(self) -> torch.dtype:
        """What gates and values accumulate in."""
        dtype: torch.dtype = self.input.get_dtype()
        if dtype == torch.int64:
            return dtype
        return torch.promote_types(dtype, torch.float32) if self.is_sum or self.has_step_gates else torch.float64

    @property
    def column_gamma(self) -> float | None:
        """The discount, where steps in float32 and carries in float64 are enough and no power of it overflows."""
        is_narrow = self.dtype == torch.float64 and self.input.get_dtype() != torch.float64
        return self.number if is_narrow and self.number is not None and abs(self.number) <= 1 else None


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
    if not lowering.generates_scans(input.get_device(), scan.reverse):
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
    if TracingContext.try_get() is None or rewards.device.type not in lowering.GENERATED_DEVICES:
        return False
    sizes = [hint(size) for size in rewards.shape]
    return lowering.active() and not (0 in sizes or sizes[dim] == 1) and not _has_few_long_rows(sizes, dim % len(sizes))


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
        _row_loader(forward, forward.initial),
        _reset_loader(forward),
    )
    previous_at = _previous_loader(forward, forward.input.make_loader(), 0.0, dtype)

    def product_at(index: Index) -> Value:
        previous = previous_at(index)
        if initial_at is not None:
            previous = ops.where(_is_first(forward, index), ops.to_dtype(initial_at(index), dtype), previous)
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
            scan.input, (scan.dtype,), (_value_loader(scan),), scan.axis, _join_sums, scan.reverse
        )
    is_bounded = scan.number is not None and abs(scan.number) <= 1
    return lowering.directed_scan(
        scan.input,
        (scan.dtype, scan.dtype),
        (_gate_loader(scan), _value_loader(scan)),
        scan.axis,
        _join_with_gates(scan.dtype, is_bounded, scan.reset is not None),
        scan.reverse,
        scan.column_gamma,
    )


def _join_sums(near: tuple[Value, ...], far: tuple[Value, ...]) -> tuple[Value, ...]:
    return (ops.add(near[0], far[0]),)


def _join_with_gates(dtype: torch.dtype, is_bounded: bool, has_resets: bool) -> Combine:
    """Joins an earlier and a later segment, earlier and later in the order of the scan."""
    largest = torch.finfo(dtype).max

    def join(earlier: tuple[Value, ...], later: tuple[Value, ...]) -> tuple[Value, ...]:
        (earlier_gate, earlier_value), (gate, value) = earlier, later
        product = ops.mul(earlier_gate, gate)
        if not is_bounded:
            # Comparisons are false for NaN, the mark of a reset.
            bound, negative_bound = ops.constant(largest, dtype), ops.constant(-largest, dtype)
            product = ops.where(ops.gt(product, bound), bound, product)
            product = ops.where(ops.lt(product, negative_bound), negative_bound, product)
        joined = ops.add(value, ops.mul(gate, earlier_value))
        if has_resets:
            joined = ops.where(ops.ne(gate, gate), value, joined)
        return product, joined

    return join


def _gate_loader(scan: Scan) -> Loader:
    raw_at, reset_at = _raw_gate_loader(scan), _reset_loader(scan)

    def gate_at(index: Index) -> Value:
        gate = raw_at(index)
        if scan.number is None:
            gate = ops.where(_is_finite(gate, scan.dtype), gate, ops.constant(0.0, scan.dtype))
        if reset_at is not None:
            gate = ops.where(reset_at(index), ops.constant(math.nan, scan.dtype), gate)
        return gate

    return gate_at


def _value_loader(scan: Scan) -> Loader:
    """What a step adds: input, and at the first step `initial` with its gate."""
    load = scan.input.make_loader()
    raw_at, reset_at, initial_at = _raw_gate_loader(scan), _reset_loader(scan), _row_loader(scan, scan.initial)
    needs_finite_gates = scan.number is None

    def value_at(index: Index) -> Value:
        value = ops.to_dtype(load(index), scan.dtype)
        if initial_at is not None:
            carried = ops.add(value, ops.mul(raw_at(index), ops.to_dtype(initial_at(index), scan.dtype)))
            value = ops.where(_and_not(_is_first(scan, index), reset_at, index), carried, value)
        if needs_finite_gates:
            is_lost = _and_not(ops.logical_not(_is_finite(raw_at(index), scan.dtype)), reset_at, index)
            if initial_at is None:
                is_lost = ops.logical_and(is_lost, ops.logical_not(_is_first(scan, index)))
            value = ops.where(is_lost, ops.constant(math.nan, scan.dtype), value)
        return value

    return value_at


def _raw_gate_loader(scan: Scan) -> Loader:
    """The gate that multiplies what is carried to a step, as it is given."""
    if scan.number is not None:
        number = scan.number
        return lambda index: ops.constant(number, scan.dtype)
    if not scan.has_step_gates:
        row_at = _row_loader(scan, scan.gamma)
        assert row_at is not None
        return lambda index: ops.to_dtype(row_at(index), scan.dtype)
    step_at = _broadcast_loader(scan.gamma)
    if scan.shifted:
        return _previous_loader(scan, step_at, 0.0, scan.dtype)
    return lambda index: ops.to_dtype(step_at(index), scan.dtype)


def _reset_loader(scan: Scan) -> Callable[[Index], Value] | None:
    """Whether what is carried to a step is discarded."""
    if scan.reset is None:
        return None
    reset_at: Loader = scan.reset.make_loader()
    return _previous_loader(scan, reset_at, False, torch.bool) if scan.shifted else reset_at


def _row_loader(scan: Scan, tensor: Any) -> Loader | None:
    """Loads from a tensor that broadcasts against input's shape without the axis of time, or has size 1 there."""
    if tensor is None:
        return None
    load = _broadcast_loader(tensor)
    if len(tensor.get_size()) == len(scan.size):
        return load
    return lambda index: load([*index[: scan.axis], *index[scan.axis + 1 :]])


def _broadcast_loader(tensor: Any) -> Loader:
    """Loads by an index into a shape that the tensor broadcasts to, aligned at the right."""
    load: Loader = tensor.make_loader()
    size = tensor.get_size()
    is_broadcast = [lowering.is_known_to_equal(n, 1) for n in size]

    def load_at(index: Index) -> Value:
        own = index[len(index) - len(size) :]
        return load([0 if broadcast else i for i, broadcast in zip(own, is_broadcast, strict=True)])

    return load_at


def _previous_loader(scan: Scan, load: Loader, other: float | bool, dtype: torch.dtype) -> Loader:
    """Loads from the step before, in the order of the scan, and `other` at the first step."""

    def load_at(index: Index) -> Value:
        time = index[scan.axis] + (1 if scan.reverse else -1)
        before = [*index[: scan.axis], time, *index[scan.axis + 1 :]]
        exists = ops.logical_not(_is_first(scan, index))
        return ops.masked(exists, lambda: ops.to_dtype(load(before), dtype), other)

    return load_at


def _is_first(scan: Scan, index: Index) -> Value:
    first = scan.size[scan.axis] - 1 if scan.reverse else 0
    return ops.eq(lowering.index_value(index[scan.axis]), lowering.index_value(first))


def _is_finite(value: Value, dtype: torch.dtype) -> Value:
    return ops.le(ops.abs(value), ops.constant(torch.finfo(dtype).max, dtype))


def _and_not(condition: Value, other_at: Callable[[Index], Value] | None, index: Index) -> Value:
    return condition if other_at is None else ops.logical_and(condition, ops.logical_not(other_at(index)))


LOWERINGS: dict[Any, Callable[..., Any]] = {
    _registry.discounted_cumsum_tensor: lower_discounted_cumsum,
    _registry.discounted_cumsum_number: lower_discounted_cumsum,
    _registry.cumsum: lower_cumsum,
    _registry.scan: lower_scan,
    _registry.scan_gradients: lower_scan_gradients,
}


def install() -> bool:
    """Registers the lowerings, once a process. Returns False, having warned once, where torch is not a tested one."""
    if not lowering.register(tuple(LOWERINGS.items())):
        return False
    temporal_difference.fuses_in_compiled_code = fuses_temporal_differences
    return True
