"""What other ranks need of a scan of a slice of time (distributed/scan/totals.py), by kernels that only read.

`block_totals` goes over blocks of time: a lane takes successive steps, from which the totals of the block follow in the
order of time. `fold_totals` joins those of up to FOLD blocks in the same way, until one is left for every row. Their
trees are fixed by the shape, so results are the same bit for bit.

A product of gates that has left float64's range stays outside: where one part's product has overflowed and another's is
0 by underflow, the earlier one counts. The flags of a part say what its product alone does not. A block is first taken
as if all its numbers were finite, 34 instructions a step of float32 with gates instead of 73: whatever is not shows in
its last total or product, as neither an infinity nor a NaN becomes a number again, and then it is taken once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import on_device
from ..common.layout import Layout, read_gates
from .tile import backwards, unpack

if TYPE_CHECKING:
    from torch_dcs_ops.reference.scan import ScanCall

# A lane's successive steps of a row: two sectors of memory, in vectors of 16 bytes.
LANE_BYTES = 64
LANES = 128
# Columns that fill a line of memory; a program's lanes, and the most steps of each, so many at a time.
LINE = 128
COLUMN_LANES = 256
LANE_STEPS = 64
STEPS_AT_A_TIME = 8
BUSY_PROGRAMS = 1024
# Blocks that are joined at a time.
FOLD = 1024

# Of float64.
LARGEST = tl.constexpr(1.7976931348623157e308)
# Of a part's gates: one is 0; one is not finite. And one of its steps has a reset: then nothing asks for its product.
ZERO = tl.constexpr(1)
ODD = tl.constexpr(2)
CUT = tl.constexpr(4)
SMALLEST = tl.constexpr(5e-324)


@triton.jit
def with_sign(size, number):
    return tl.where(number.to(tl.int64, bitcast=True) < 0, -size, size)


@triton.jit
def kept_above_zero(product, flags):
    """A part's product of finite gates: 0 where a gate is, and the smallest number where it has come to 0 without."""
    smallest = tl.full((), SMALLEST, tl.float64)
    kept = tl.where(product == 0, with_sign(smallest, product), product)
    kept = tl.where((flags & ZERO) != 0, 0.0, kept)
    return tl.where((flags & ODD) != 0, product, kept)


@triton.jit
def join_totals(total_0, product_0, flags_0, total_1, product_1, flags_1):
    """Part 0, then part 1, in the order of the scan."""
    odd_1 = (flags_1 & ODD) != 0
    factor = kept_above_zero(product_1, flags_1)
    # inf * 0 is a NaN: of an infinite gate it is the recurrence's, of finite ones 0 stays 0.
    passed = tl.where((total_0 == 0) & (odd_1 == 0), 0.0, factor * total_0)
    total = tl.where((flags_1 & CUT) != 0, total_1, total_1 + passed)
    flags = flags_0 | flags_1
    product = product_0 * tl.where((product_0 - product_0) == 0, product_1, factor)
    stayed = (product != product) & ((flags & ODD) == 0)
    return total, tl.where(stayed, with_sign(product_0, product_1), product), flags


@triton.jit
def load_successive(
    row, first, T, stride, inside, other, V: tl.constexpr, VECTOR: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """The V steps from `first` (1, J) on, in scan order, of the rows (P, 1): V tiles (P, J)."""
    P: tl.constexpr = row.shape[0]
    J: tl.constexpr = first.shape[1]
    steps = ()
    if VECTOR == 1:
        for i in tl.static_range(V):
            time = first + i
            valid = inside & (time < T)
            if REVERSE:
                time = T - 1 - time
            steps = steps + (tl.load(row + time * stride, mask=valid, other=other),)
    else:
        lanes = tl.arange(0, VECTOR)[None, None, :]
        for i in tl.static_range(V // VECTOR):
            begin = first[:, :, None] + i * VECTOR
            time = begin + lanes
            if REVERSE:
                time = T - VECTOR - begin + lanes
            valid = inside[:, :, None] & (time >= 0) & (time < T)
            vector = tl.load(row[:, :, None] + time * stride, mask=valid, other=other)
            part = unpack(vector, P, J, VECTOR)
            if REVERSE:
                part = backwards(part, VECTOR)
            steps = steps + part
    return steps


@triton.jit
def join_finite(total_0, product_0, total_1, product_1):
    """`join_totals` where nothing is infinite and a cut is a product of 0."""
    return total_1 + product_1 * total_0, product_0 * product_1


@triton.jit
def either(flags_0, flags_1):
    return flags_0 | flags_1


@triton.jit
def size_of(number):
    """In float32 at least: the interpreter has no arithmetic in bfloat16."""
    return tl.abs(number if number.dtype == tl.float64 else number.to(tl.float32))


@triton.jit
def load_operands(
    x_row, gamma_row, reset_row, one_gate, first, T, x_time, gamma_time, reset_time, inside,
    V: tl.constexpr, VECTOR: tl.constexpr, GATES: tl.constexpr, REVERSE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Steps, gates and resets of V successive steps: V tiles (P, J) each. Behind the last step gates of 1."""
    values = load_successive(x_row, first, T, x_time, inside, 0.0, V, VECTOR, REVERSE)
    resets = values
    if RESET:
        resets = load_successive(reset_row, first, T, reset_time, inside, 0, V, VECTOR, REVERSE)
    if GATES == "step":
        gates = load_successive(gamma_row, first, T, gamma_time, inside, 1.0, V, VECTOR, REVERSE)
    else:
        left = tl.minimum(T - first, V).to(tl.int32)
        gates = ()
        for i in tl.static_range(V):
            gates = gates + (tl.where(i < left, one_gate, 1.0),)
    return values, gates, resets


@triton.jit
def finite_lanes(
    x_row, gamma_row, reset_row, one_gate, begin, T, x_time, gamma_time, reset_time, inside,
    V: tl.constexpr, VECTOR: tl.constexpr, LANE: tl.constexpr, GATES: tl.constexpr, REVERSE: tl.constexpr,
    SHIFTED: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Of LANE steps from `begin` (1, J) on: total and product for `join_finite`, and the flags ZERO and CUT; (P, J)."""
    total = inside & (begin < 0)
    is_zero, is_cut = total | (one_gate == 0), total
    total = total.to(tl.float64)
    product = total + 1.0
    for start in range(0, LANE, V):
        values, gates, resets = load_operands(
            x_row, gamma_row, reset_row, one_gate, begin + start, T, x_time, gamma_time, reset_time, inside,
            V, VECTOR, GATES, REVERSE, RESET,
        )  # fmt: skip
        if GATES == "step":
            least = size_of(gates[0])
            for i in tl.static_range(1, V):
                least = tl.minimum(least, size_of(gates[i]))
            is_zero = is_zero | (least == 0)
        for i in tl.static_range(V):
            value, gate = values[i].to(tl.float64), gates[i].to(tl.float64)
            if RESET:
                gate = tl.where(resets[i] != 0, 0.0, gate)
                is_cut = is_cut | (resets[i] != 0)
            total = gate * (value + total) if SHIFTED else gate * total + value
            product *= gate
    return total, product, tl.where(is_zero, ZERO, 0) | tl.where(is_cut, CUT, 0)


@triton.jit
def any_lanes(
    x_row, gamma_row, reset_row, one_gate, begin, T, x_time, gamma_time, reset_time, inside,
    V: tl.constexpr, VECTOR: tl.constexpr, LANE: tl.constexpr, GATES: tl.constexpr, REVERSE: tl.constexpr,
    SHIFTED: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """The same for `join_totals`, of whatever numbers."""
    is_zero = inside & (begin < 0)
    is_odd, is_cut = is_zero, is_zero
    total = is_zero.to(tl.float64)
    product = total + 1.0
    for start in range(0, LANE, V):
        values, gates, resets = load_operands(
            x_row, gamma_row, reset_row, one_gate, begin + start, T, x_time, gamma_time, reset_time, inside,
            V, VECTOR, GATES, REVERSE, RESET,
        )  # fmt: skip
        for i in tl.static_range(V):
            value, gate = values[i].to(tl.float64), gates[i].to(tl.float64)
            is_zero = is_zero | (gate == 0)
            is_odd = is_odd | ((tl.abs(gate) < float("inf")) == 0)
            joined = gate * (value + total) if SHIFTED else gate * total + value
            if i == 0 and not SHIFTED:
                # Into a lane's first step nothing is carried yet, which an infinite gate would make a NaN of.
                joined = tl.where(start == 0, value, joined)
            if RESET:
                joined = tl.where(resets[i] != 0, 0.0 if SHIFTED else value, joined)
                is_cut = is_cut | (resets[i] != 0)
            total = joined
            product *= gate
    return total, product, tl.where(is_zero, ZERO, 0) | tl.where(is_odd, ODD, 0) | tl.where(is_cut, CUT, 0)


@triton.jit(do_not_specialize=["gamma_bits"])
def block_totals(
    x_ptr, gamma_ptr, reset_ptr, total_ptr, product_ptr, flags_ptr,
    gamma_bits: tl.int64, T, inner, groups, blocks,
    x_outer, x_time, x_inner, gamma_outer, gamma_time, gamma_inner, reset_outer, reset_time, reset_inner,
    row_entry, block_entry,
    P: tl.constexpr, J: tl.constexpr, V: tl.constexpr, VECTOR: tl.constexpr, LANE: tl.constexpr, GATES: tl.constexpr,
    REVERSE: tl.constexpr, SHIFTED: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """One program: of P rows, a block of J lanes of LANE successive steps, V of which are on their way at a time.

    SHIFTED: the total is what the last step hands on, its y times its gate. Gates and sums are taken in float64.
    """
    program = tl.program_id(0)
    column = ((program % groups) * P + tl.arange(0, P)[:, None]).to(tl.int64)
    block = ((program // groups) % blocks).to(tl.int64)
    outer = (program // groups // blocks).to(tl.int64)
    inside = column < inner
    lane = tl.arange(0, J)[None, :]
    begin = block * (J * LANE) + lane * LANE
    x_row = x_ptr + outer * x_outer + column * x_inner
    reset_row = x_row
    if RESET:
        reset_row = reset_ptr + outer * reset_outer + column * reset_inner
    gamma_row = x_row
    one_gate = tl.full((P, 1), 1.0, tl.float64)
    if GATES == "step" or GATES == "row":
        gamma_row = gamma_ptr + outer * gamma_outer + column * gamma_inner
        if GATES == "row":
            one_gate = tl.load(gamma_row, mask=inside, other=1.0).to(tl.float64)
    else:
        one_gate = one_gate * gamma_bits.to(tl.int64).to(tl.float64, bitcast=True)

    is_last = inside & (lane == J - 1)
    total, product, flags = finite_lanes(
        x_row, gamma_row, reset_row, one_gate, begin, T, x_time, gamma_time, reset_time, inside,
        V, VECTOR, LANE, GATES, REVERSE, SHIFTED, RESET,
    )  # fmt: skip
    if J > 1:
        total, product = tl.associative_scan((total, product), 1, join_finite)
    is_finite = (total - total) + (product - product) == 0
    flags = tl.reduce(flags | tl.where(is_last & (is_finite == 0), ODD, 0), 1, either, keep_dims=True)
    if (tl.max(flags) & ODD) != 0:
        total, product, flags = any_lanes(
            x_row, gamma_row, reset_row, one_gate, begin, T, x_time, gamma_time, reset_time, inside,
            V, VECTOR, LANE, GATES, REVERSE, SHIFTED, RESET,
        )  # fmt: skip
        if J > 1:
            total, product, flags = tl.associative_scan((total, product, flags), 1, join_totals)
        flags = tl.reduce(flags, 1, either, keep_dims=True)
    entry = (outer * inner + column) * row_entry + block * block_entry
    tl.store(total_ptr + entry + lane * 0, total, mask=is_last)
    tl.store(product_ptr + entry + lane * 0, product, mask=is_last)
    tl.store(flags_ptr + entry, flags, mask=inside)


@triton.jit
def fold_totals(
    total_ptr, product_ptr, flags_ptr, new_total_ptr, new_product_ptr, new_flags_ptr,
    rows, blocks, groups, row_entry, block_entry, new_row_entry, new_block_entry,
    P: tl.constexpr, J: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """One program: the blocks of P rows, J successive ones, joined. FINAL: the flags are then float64, 1 for a cut."""
    row = ((tl.program_id(0) % groups) * P + tl.arange(0, P)[:, None]).to(tl.int64)
    new_block = (tl.program_id(0) // groups).to(tl.int64)
    lane = tl.arange(0, J)[None, :]
    block = new_block * J + lane
    inside = (row < rows) & (block < blocks)
    entry = row * row_entry + block * block_entry
    total = tl.load(total_ptr + entry, mask=inside, other=0.0)
    product = tl.load(product_ptr + entry, mask=inside, other=1.0)
    flags = tl.load(flags_ptr + entry, mask=inside, other=0)
    if J > 1:
        total, product, flags = tl.associative_scan((total, product, flags), 1, join_totals)
    if FINAL:
        product = tl.where((flags & CUT) != 0, 0.0, kept_above_zero(product, flags))
        has_left = (tl.abs(product) > LARGEST) & ((flags & ODD) == 0)
        product = tl.where(has_left, with_sign(tl.full((), LARGEST, tl.float64), product), product)
    new_entry = row * new_row_entry + new_block * new_block_entry + lane * 0
    is_last = (row < rows) & (lane == J - 1)
    tl.store(new_total_ptr + new_entry, total, mask=is_last)
    tl.store(new_product_ptr + new_entry, product, mask=is_last)
    if FINAL:
        tl.store(new_flags_ptr + new_entry, tl.where((flags & CUT) != 0, 1.0, 0.0).to(tl.float64), mask=is_last)
    else:
        tl.store(new_flags_ptr + new_entry, flags, mask=is_last)


def totals(input: Tensor, call: ScanCall) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row of a scan from 0: (what it hands on, the product of its gates, 1 where a reset cuts it), in float64.

    What it hands on is its last y, and with `shifted` that times the last gate, or 0 behind a reset. A product of
    finite gates that leaves float64's range stays at its end; of a row that is cut it is 0. The results have input's
    shape without `dim`. Arguments are validated already, numbers real, and `initial` and `window` are None.
    """
    dim = call.dim % input.dim()
    shape = input.shape[:dim] + input.shape[dim + 1 :]
    if input.numel() == 0:
        zeros = input.new_zeros(shape, dtype=torch.float64)
        return zeros, torch.ones_like(zeros), torch.zeros_like(zeros)
    with on_device(input):
        return _Totals(input, call).run(shape)


class _Totals:
    """A problem's operands folded into (outer, time, inner), and its blocks."""

    def __init__(self, input: Tensor, call: ScanCall) -> None:
        self.input, self.call = input, call
        self.gates = read_gates(call.gamma, call.gamma_value, input, call.dim % input.dim())
        layout = self.layout = Layout(input, call.dim % input.dim())
        has_steps = self.gates.kind == "step"
        self.x = layout.steps(input)
        self.gamma = (layout.steps if has_steps else layout.row_values)(self.gates.tensor)
        self.reset = layout.steps(None if call.reset is None else call.reset.view(torch.uint8))
        itemsize = input.element_size()
        if layout.inner == 1:
            gates = self.gamma.tensor if has_steps and self.gamma.tensor is not None else input
            self.columns, self.vector = 1, 16 // max(itemsize, gates.element_size())
            self.steps = self.lane = max(self.vector, LANE_BYTES // itemsize)
            self.lanes = min(LANES, triton.next_power_of_2(triton.cdiv(layout.length, self.lane)))
        else:
            self.columns, self.vector = min(LINE // itemsize, triton.next_power_of_2(layout.inner)), 1
            self.lanes = min(COLUMN_LANES // self.columns, triton.next_power_of_2(layout.length))
            self.steps, self.lane = STEPS_AT_A_TIME, LANE_STEPS
        self.groups = triton.cdiv(layout.inner, self.columns)
        while self.lane > self.steps and self.blocks * self.groups * layout.outer < BUSY_PROGRAMS:
            self.lane //= 2

    @property
    def blocks(self) -> int:
        return int(triton.cdiv(self.layout.length, self.lanes * self.lane))

    def run(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        rows, blocks = self.layout.rows, self.blocks
        parts = self._new(blocks)
        x, gamma, reset = self.x, self.gamma, self.reset
        block_totals[(self.groups * blocks * self.layout.outer,)](
            x.tensor, gamma.tensor, reset.tensor, *parts,
            self.gates.bits, self.layout.length, self.layout.inner, self.groups, blocks,
            x.outer, x.time, x.inner, gamma.outer, gamma.time, gamma.inner, reset.outer, reset.time, reset.inner,
            *self._entries(blocks),
            self.columns, self.lanes, self.steps, self.vector, self.lane, self.gates.kind, self.call.reverse,
            self.call.shifted, reset.tensor is not None, num_warps=max(1, self.columns * self.lanes // 32),
        )  # fmt: skip
        while True:
            joined = min(FOLD, triton.next_power_of_2(blocks))
            at_once = min(FOLD // joined, triton.next_power_of_2(rows))
            left, groups = triton.cdiv(blocks, joined), triton.cdiv(rows, at_once)
            new = self._new(left, torch.float64 if left == 1 else torch.int32)
            fold_totals[(groups * left,)](
                *parts, *new, rows, blocks, groups, *self._entries(blocks), *self._entries(left), at_once, joined,
                left == 1, num_warps=max(1, min(4, at_once * joined // 32)),
            )  # fmt: skip
            parts, blocks = new, left
            if blocks == 1:
                total, product, cut = (self.layout.unfold_rows(part, shape) for part in parts)
                return total, product, cut

    def _new(self, blocks: int, flags: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, Tensor]:
        dtypes = (torch.float64, torch.float64, flags)
        total, product, flag = (self.input.new_empty(blocks * self.layout.rows, dtype=dtype) for dtype in dtypes)
        return total, product, flag

    def _entries(self, blocks: int) -> tuple[int, int]:
        """Strides of rows and blocks: neighboring columns are written by neighboring lanes."""
        return (blocks, 1) if self.columns == 1 else (1, self.layout.rows)
