"""The pairs (gate, value) that a scan is over: what a step adds, what multiplies the carry, how two segments join.

A first-order recurrence is a scan over such pairs (Blelloch, "Prefix sums and their applications", 1990, section 1.4):
a segment of steps is the product of its gates and its value from a carry of zero, and two segments join to
``(g1·g2, x2 + g2·x1)``.

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

from .inductor import lowering
from .inductor.lowering import Combine, Index, Loader, Value, ops


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


def join_sums(near: tuple[Value, ...], far: tuple[Value, ...]) -> tuple[Value, ...]:
    return (ops.add(near[0], far[0]),)


def join_with_gates(dtype: torch.dtype, is_bounded: bool, has_resets: bool) -> Combine:
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


def gate_loader(scan: Scan) -> Loader:
    raw_at, reset_at = _rawgate_loader(scan), reset_loader(scan)

    def gate_at(index: Index) -> Value:
        gate = raw_at(index)
        if scan.number is None:
            gate = ops.where(_is_finite(gate, scan.dtype), gate, ops.constant(0.0, scan.dtype))
        if reset_at is not None:
            gate = ops.where(reset_at(index), ops.constant(math.nan, scan.dtype), gate)
        return gate

    return gate_at


def value_loader(scan: Scan) -> Loader:
    """What a step adds: input, and at the first step `initial` with its gate."""
    load = scan.input.make_loader()
    raw_at, reset_at, initial_at = _rawgate_loader(scan), reset_loader(scan), row_loader(scan, scan.initial)
    needs_finite_gates = scan.number is None

    def value_at(index: Index) -> Value:
        value = ops.to_dtype(load(index), scan.dtype)
        if initial_at is not None:
            carried = ops.add(value, ops.mul(raw_at(index), ops.to_dtype(initial_at(index), scan.dtype)))
            value = ops.where(_and_not(is_first(scan, index), reset_at, index), carried, value)
        if needs_finite_gates:
            is_lost = _and_not(ops.logical_not(_is_finite(raw_at(index), scan.dtype)), reset_at, index)
            if initial_at is None:
                is_lost = ops.logical_and(is_lost, ops.logical_not(is_first(scan, index)))
            value = ops.where(is_lost, ops.constant(math.nan, scan.dtype), value)
        return value

    return value_at


def _rawgate_loader(scan: Scan) -> Loader:
    """The gate that multiplies what is carried to a step, as it is given."""
    if scan.number is not None:
        number = scan.number
        return lambda index: ops.constant(number, scan.dtype)
    if not scan.has_step_gates:
        row_at = row_loader(scan, scan.gamma)
        assert row_at is not None
        return lambda index: ops.to_dtype(row_at(index), scan.dtype)
    step_at = _broadcast_loader(scan.gamma)
    if scan.shifted:
        return previous_loader(scan, step_at, 0.0, scan.dtype)
    return lambda index: ops.to_dtype(step_at(index), scan.dtype)


def reset_loader(scan: Scan) -> Callable[[Index], Value] | None:
    """Whether what is carried to a step is discarded."""
    if scan.reset is None:
        return None
    reset_at: Loader = scan.reset.make_loader()
    return previous_loader(scan, reset_at, False, torch.bool) if scan.shifted else reset_at


def row_loader(scan: Scan, tensor: Any) -> Loader | None:
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


def previous_loader(scan: Scan, load: Loader, other: float | bool, dtype: torch.dtype) -> Loader:
    """Loads from the step before, in the order of the scan, and `other` at the first step."""

    def load_at(index: Index) -> Value:
        time = index[scan.axis] + (1 if scan.reverse else -1)
        before = [*index[: scan.axis], time, *index[scan.axis + 1 :]]
        exists = ops.logical_not(is_first(scan, index))
        return ops.masked(exists, lambda: ops.to_dtype(load(before), dtype), other)

    return load_at


def is_first(scan: Scan, index: Index) -> Value:
    first = scan.size[scan.axis] - 1 if scan.reverse else 0
    return ops.eq(lowering.index_value(index[scan.axis]), lowering.index_value(first))


def _is_finite(value: Value, dtype: torch.dtype) -> Value:
    return ops.le(ops.abs(value), ops.constant(torch.finfo(dtype).max, dtype))


def _and_not(condition: Value, other_at: Callable[[Index], Value] | None, index: Index) -> Value:
    return condition if other_at is None else ops.logical_and(condition, ops.logical_not(other_at(index)))
