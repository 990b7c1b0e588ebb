"""The tails of filtered gradients on the GPU: a group of rows shares its own, single rows keep theirs.

At the end of a segment of chunks: `choose_rows` says which rows are single, `share_tails` makes the groups' and their
tails, `weigh_tails` what each row has of them and the rows of input that they are multiplied with, and `add_tails` adds
their products with linear_weight to input's gradient. Each is a launch or two, whatever the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import WORD, on_device, units
from .values import capped

WARPS = 4
MOST_RANKED = 1 << 15  # rows, each of which is compared with all
RANK_ROWS, RANK_BLOCK = 16, 256
TAKE_BLOCK = 2048
TAKE_WARPS = 8
PRODUCT_ROWS, PRODUCT_BLOCK = 16, 256
ADD_ROWS, ADD_BLOCK = 8, 512
SMALLEST_SUM = 1e-30  # of a tail: its inverse is finite, and less weighs nothing


class Chosen(NamedTuple):
    """S single rows of n, in their order: which, their lse, and whether they are valid and among the largest masses.

    slot (n,) is a row's number among those of them that are, else -1; those of group g are bounds[g]:bounds[g + 1].
    """

    rows: Tensor
    lse: Tensor
    valid: Tensor
    slot: Tensor
    bounds: Tensor


@triton.jit
def probabilities(
    logits, bias, lse, scale, softcap, BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr
):  # fmt: skip
    """p and p·s."""
    z = logits.to(tl.float32)
    if BIAS:
        z += bias
    if SCALED:
        z *= scale
    slope = 1.0
    if CAPPED:
        z, slope = capped(z, softcap, tl.float32)
    p = tl.exp(z - lse)
    sloped = p
    if CAPPED:
        sloped = p * slope
    return p, sloped


@triton.jit
def magnitude(values):
    """Of float32 values, as integers in the same order; NaN is the largest."""
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(values != values, 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["n"])
def rank_rows(mass_ptr, rank_ptr, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """How many rows have a larger mass, or the same and come before."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    mine = magnitude(tl.load(mass_ptr + row, mask=row < n, other=0))[:, None]
    before = tl.full((ROWS, BLOCK), 0, tl.int32)
    lanes = tl.arange(0, BLOCK)
    mass = tl.load(mass_ptr + lanes, mask=lanes < n, other=0)
    for start in range(0, n, BLOCK):
        other = start + lanes
        theirs = tl.where(other < n, magnitude(mass), -1)[None, :]
        mass = tl.load(mass_ptr + BLOCK + other, mask=BLOCK + other < n, other=0)
        # A block that comes before as a whole counts equal masses, one behind does not: one comparison.
        least = mine - (start + BLOCK <= first).to(tl.int32)
        is_before = theirs > least
        if (start < first + ROWS) & (start + BLOCK > first):
            is_before = is_before | ((theirs == mine) & (other[None, :] < row[:, None]))
        before += is_before.to(tl.int32)
    tl.store(rank_ptr + row, tl.sum(before, 1), mask=row < n)


@triton.jit(do_not_specialize=["n", "apart"])
def take_rows(
    rank_ptr, lse_ptr, valid_ptr, rows_ptr, own_lse_ptr, own_valid_ptr, slot_ptr, bounds_ptr, n, apart,
    EACH: tl.constexpr, GROUP_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows of the ranks below `apart`; one in EACH valid rows is single."""
    lanes = tl.arange(0, BLOCK)
    valid_rows = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, n, BLOCK):
        row = start + lanes
        valid_rows += (tl.load(valid_ptr + row, mask=row < n, other=0) != 0).to(tl.int32)
    count = tl.sum(valid_rows, 0)
    taken = 0
    for start in range(0, n, BLOCK):
        row = start + lanes
        inside = row < n
        rank = tl.load(rank_ptr + row, mask=inside, other=0)
        valid = tl.load(valid_ptr + row, mask=inside, other=0) != 0
        lse = tl.load(lse_ptr + row, mask=inside, other=0)
        mine = inside & (rank < apart)
        one = mine.to(tl.int32)
        slot = taken + tl.cumsum(one, 0) - one
        valid = valid & (rank.to(tl.int64) * EACH < count)
        tl.store(rows_ptr + slot, row.to(tl.int64), mask=mine)
        tl.store(own_lse_ptr + slot, lse, mask=mine)
        tl.store(own_valid_ptr + slot, valid.to(tl.uint8), mask=mine)
        tl.store(slot_ptr + row, tl.where(mine & valid, slot, -1), mask=inside)
        tl.store(bounds_ptr + row // GROUP_ROWS, slot, mask=inside & (row % GROUP_ROWS == 0))
        taken += tl.sum(one, 0)
    tl.store(bounds_ptr + (n + GROUP_ROWS - 1) // GROUP_ROWS, taken)


def choose_rows(mass: Tensor, lse: Tensor, valid: Tensor, group: int, apart: int, each: int) -> Chosen:
    """The `apart` rows of the largest |mass| (n,); single are one in `each` valid rows, the first of equal ones.

    `valid` of the result is uint8.
    """
    rows = mass.numel()
    rank = torch.empty(rows, dtype=torch.int32, device=mass.device)
    chosen = Chosen(
        mass.new_empty(apart, dtype=torch.int64), mass.new_empty(apart), mass.new_empty(apart, dtype=torch.uint8),
        torch.empty_like(rank), rank.new_empty(-(-rows // group) + 1),
    )  # fmt: skip
    with on_device(mass):
        if rows <= MOST_RANKED:
            rank_rows[(triton.cdiv(rows, RANK_ROWS),)](mass, rank, rows, ROWS=RANK_ROWS, BLOCK=RANK_BLOCK)
        else:
            order = mass.abs().sort(descending=True, stable=True).indices
            rank.scatter_(0, order, torch.arange(rows, dtype=torch.int32, device=mass.device))
        take_rows[(1,)](
            rank, lse, valid, chosen.rows, chosen.lse, chosen.valid, chosen.slot, chosen.bounds, rows, apart,
            EACH=each, GROUP_ROWS=group, BLOCK=TAKE_BLOCK, num_warps=TAKE_WARPS,
        )  # fmt: skip
    return chosen


@triton.jit(do_not_specialize=["chunk_groups"])
def part_group(
    q_ptr, q_stride, single_ptr, single_stride, bounds_ptr, lse_ptr, valid_ptr, bias_ptr, alive_ptr, parts_ptr,
    chunk_groups, V, softcap, scale,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """A block of columns of one group and of its single rows; parts (G + S, blocks): the sums of each."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1).to(tl.int64)
    inside = index < V
    # A NaN's column is alive: none comes into a tail.
    tail = tl.load(alive_ptr + group // chunk_groups * V + index, mask=inside, other=1) == 0
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + index, mask=inside, other=0)
    q = q_ptr + group * (q_stride * UNIT) + index
    total = tl.where(tail, tl.load(q, mask=inside, other=0).to(tl.float32), 0.0)
    for number in range(tl.load(bounds_ptr + group), tl.load(bounds_ptr + group + 1)):
        pointers = single_ptr + number * (single_stride * UNIT) + index
        logits = tl.load(pointers, mask=inside, other=0)
        _, sloped = probabilities(logits, bias, tl.load(lse_ptr + number), scale, softcap, BIAS, SCALED, CAPPED)
        mine = tl.where(tail & (tl.load(valid_ptr + number) != 0), sloped, 0.0).to(logits.dtype)
        tl.store(pointers, mine, mask=inside)
        mine = mine.to(tl.float32)
        at = (tl.num_programs(1) + number) * tl.num_programs(0) + tl.program_id(0)
        tl.store(parts_ptr + at, tl.sum(mine, 0))
        total -= mine
    total = tl.maximum(total, 0.0).to(q_ptr.dtype.element_ty)
    tl.store(q, total, mask=inside)
    tl.store(parts_ptr + group * tl.num_programs(0) + tl.program_id(0), tl.sum(total.to(tl.float32), 0))


def share_tails(
    q: Tensor,
    single: Tensor,
    chosen: Chosen,
    alive: Tensor,
    chunk_groups: int,
    linear_bias: Tensor | None,
    softcap: float,
    logit_scale: float,
) -> Tensor:
    """(G + S, k) float32: parts of the sums of the tails that q (G, V), and `single` (S, V), logits of rows, become.

    A tail has the columns that are not alive (C, V) in the group's chunk, one in `chunk_groups` groups; that of a group
    is without its single rows'. That of a row which is not valid is 0.
    """
    groups, classes = q.shape
    block = WARPS * 32 * WORD // q.element_size()
    parts = q.new_empty((groups + single.size(0), triton.cdiv(classes, block)), dtype=torch.float32)
    if groups == 0:
        return parts
    q_stride, single_stride, unit = units(q.stride(0), single.stride(0))
    with on_device(q):
        part_group[(parts.size(1), groups)](
            q, q_stride, single, single_stride, chosen.bounds, chosen.lse, chosen.valid,
            chosen.lse if linear_bias is None else linear_bias,
            alive, parts, chunk_groups, classes, softcap if softcap > 0 else 1.0, logit_scale,
            UNIT=unit, BLOCK=block, BIAS=linear_bias is not None, SCALED=logit_scale != 1.0, CAPPED=softcap > 0,
            num_warps=WARPS,
        )  # fmt: skip
    return parts


@triton.jit(do_not_specialize=["n", "first", "G"])
def weigh_rows(
    mass_ptr, parts_ptr, rows_ptr, slot_ptr, factors_ptr, single_ptr, input_ptr, input_stride, column_stride, index_ptr,
    sums_ptr, n, first, G, K, D, smallest,
    GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, INDEXED: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """One group, or behind these one single row, in a block of input's columns."""
    term = tl.program_id(0)
    lanes = tl.arange(0, PARTS)
    total = tl.sum(tl.load(parts_ptr + term.to(tl.int64) * K + lanes, mask=lanes < K, other=0), 0)
    inverse = tl.where(total <= smallest, 0.0, 1 / total)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    pointers = input_ptr + column.to(tl.int64) * column_stride
    sums = tl.full((BLOCK,), 0.0, tl.float32)
    if term < G:
        # Summed over the ROWS at the end alone: they lie in several warps.
        products = tl.full((ROWS, BLOCK), 0.0, tl.float32)
        for start in range(0, GROUP_ROWS, ROWS):
            row = term * GROUP_ROWS + start + tl.arange(0, ROWS)
            mass = tl.load(mass_ptr + row, mask=row < n, other=0)
            shares = tl.load(slot_ptr + row, mask=row < n, other=0) < 0
            factor = tl.where(shares, mass * inverse, 0.0)
            if tl.program_id(1) == 0:
                tl.store(factors_ptr + row, factor, mask=row < n)
            if SUMS:
                source = first.to(tl.int64) + row
                if INDEXED:
                    source = tl.load(index_ptr + source, mask=row < n, other=0)
                mask = (row < n)[:, None] & inside[None, :]
                values = tl.load(pointers[None, :] + source[:, None] * input_stride, mask=mask, other=0)
                products += factor[:, None] * values.to(tl.float32)
        sums = tl.sum(products, 0)
    else:
        row = tl.load(rows_ptr + term - G)
        factor = tl.load(mass_ptr + row) * inverse
        if tl.program_id(1) == 0:
            tl.store(single_ptr + term - G, factor)
        if SUMS:
            source = first.to(tl.int64) + row
            if INDEXED:
                source = tl.load(index_ptr + source)
            sums = factor * tl.load(pointers + source * input_stride, mask=inside, other=0).to(tl.float32)
    if SUMS:
        tl.store(sums_ptr + term.to(tl.int64) * D + column, sums.to(sums_ptr.dtype.element_ty), mask=inside)


def weigh_tails(
    mass: Tensor, parts: Tensor, chosen: Chosen, group: int, input: Tensor, index: Tensor | None, start: int,
    sums: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(factors, single): what the rows (n,) have of their groups' tails, 0 for single ones, and those (S,) of theirs.

    Row i is row index[start + i] of input, or start + i without `index`. sums (G + S, D) becomes what every tail is
    multiplied with in linear_weight's gradient: the sum of its rows of input, each times its factor.
    """
    rows, terms = mass.numel(), parts.size(0)
    factors, single = torch.empty_like(mass), torch.empty_like(chosen.lse)
    if rows == 0:
        return factors, single
    features = input.size(1) if sums is not None else 1
    with on_device(mass):
        weigh_rows[(terms, triton.cdiv(features, PRODUCT_BLOCK))](
            mass, parts, chosen.rows, chosen.slot, factors, single, input, input.stride(0), input.stride(1),
            mass if index is None else index, mass if sums is None else sums, rows, start, terms - single.numel(),
            parts.size(1), features, SMALLEST_SUM,
            GROUP_ROWS=group, ROWS=min(PRODUCT_ROWS, group), PARTS=triton.next_power_of_2(parts.size(1)),
            BLOCK=PRODUCT_BLOCK, INDEXED=index is not None, SUMS=sums is not None,
        )  # fmt: skip
    return factors, single


@triton.jit(do_not_specialize=["n", "G", "extra"])
def add_rows(
    out_ptr, out_stride, factors_ptr, single_ptr, slot_ptr, evens_ptr, table_ptr, n, D, G, extra,
    GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + row, mask=row < n, other=-1)
    shared = tl.load(factors_ptr + row, mask=row < n, other=0)
    factor = tl.where(slot < 0, shared, tl.load(single_ptr + slot, mask=slot >= 0, other=0))
    term = extra + tl.where(slot < 0, row // GROUP_ROWS, G + slot)
    mask = (row < n)[:, None] & (column < D)[None, :]
    pointers = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tails = tl.load(table_ptr + term.to(tl.int64)[:, None] * D + column[None, :], mask=mask, other=0).to(tl.float32)
    total = tl.load(pointers, mask=mask, other=0).to(tl.float32) + factor[:, None] * tails
    if EVENS:
        even = tl.load(evens_ptr + row, mask=row < n, other=0)
        total += even[:, None] * tl.load(table_ptr + column, mask=column < D, other=0).to(tl.float32)[None, :]
    tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_tails(
    out: Tensor, factors: Tensor, single: Tensor, slot: Tensor, evens: Tensor | None, table: Tensor, group: int
) -> None:
    """out (n, D) += every row's factor times its row of table: its group's, or its own where it is single.

    table (1 + G + S, D) float32: with `evens` (n,) the first row, times these, is every row's; without there is none.
    """
    rows, features = out.shape
    if out.numel() == 0:
        return
    extra = int(evens is not None)
    with on_device(out):
        add_rows[(triton.cdiv(rows, ADD_ROWS), triton.cdiv(features, ADD_BLOCK))](
            out, out.stride(0), factors, single, slot, factors if evens is None else evens, table, rows, features,
            table.size(0) - extra - single.numel(), extra,
            GROUP_ROWS=group, ROWS=ADD_ROWS, BLOCK=ADD_BLOCK, EVENS=evens is not None,
        )  # fmt: skip
