"""Filtered gradients on the GPU: which vocabulary columns a chunk of rows needs, and the sums of its groups of rows.

z, p and s of a logit as in filter.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import WORD, on_device, units
from .filter_tails import probabilities

# With 4 rows at a time eight programs fit into a multiprocessor, and 1024 rows of 128256 columns onto an H200 at once:
# 8 rows take 72 registers a thread and a second round, 101 us and not 75.
COLUMNS_WARPS, COLUMNS_ROWS = 4, 4
NUMBER_BLOCK = 1024  # columns, or rows, that a program of `keep` and `mark_targets` numbers


@triton.jit
def sum_block(
    logits_ptr, stride, lse_ptr, valid_ptr, bias_ptr, alive_ptr, q_ptr, q_stride, n, V, softcap, scale, eps, group,
    index, UNIT: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One group of rows; MASKED: some of the columns `index` lie beyond the last, or rows of the group do."""
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + index, mask=index < V, other=0)[None, :]
    largest = tl.full((BLOCK,), 0.0, tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, GROUP_ROWS, ROWS):
        row = group * GROUP_ROWS + first + tl.arange(0, ROWS)
        valid = tl.load(valid_ptr + row, mask=row < n, other=0) != 0
        lse = tl.load(lse_ptr + row, mask=valid, other=0)
        pointers = logits_ptr + row.to(tl.int64)[:, None] * (stride * UNIT) + index[None, :]
        if MASKED:
            logits = tl.load(pointers, mask=valid[:, None] & (index < V)[None, :], other=0)
        else:
            logits = tl.load(pointers)
        p, sloped = probabilities(logits, bias, lse[:, None], scale, softcap, BIAS, SCALED, CAPPED)
        p = tl.where(valid[:, None], p, 0.0)
        largest = tl.maximum(largest, tl.max(p, 0))
        if CAPPED:
            p = tl.where(valid[:, None], sloped, 0.0)
        total += tl.sum(p, 0)
    # A maximum passes over a NaN, the sum does not. A column with one is alive, so that it stays in its own row.
    alive = (largest > eps) | (total != total)
    tl.store(alive_ptr + index, tl.full((BLOCK,), 1, tl.uint8), mask=alive & (index < V))
    q = q_ptr + group.to(tl.int64) * q_stride + index
    if MASKED:
        tl.store(q, total.to(q_ptr.dtype.element_ty), mask=index < V)
    else:
        tl.store(q, total.to(q_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["n", "groups"])
def sum_groups(
    logits_ptr, stride, lse_ptr, valid_ptr, bias_ptr, alive_ptr, q_ptr, q_stride, n, V, groups, softcap, scale, eps,
    UNIT: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    # From the last columns to the first: of all rows, the row op has read the last ones last, and those read here last
    # are the first that `gather_` reads, when both find them in L2.
    group = tl.program_id(0) % groups
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) // groups * BLOCK
    index = start + tl.arange(0, BLOCK)
    row = group * GROUP_ROWS + tl.arange(0, GROUP_ROWS)
    valid_rows = tl.sum((tl.load(valid_ptr + row, mask=row < n, other=0) != 0).to(tl.int32), 0)
    # Without a mask words are loaded whatever V is a multiple of; rows that are not valid too, where there are others.
    if (start + BLOCK <= V) & (group * GROUP_ROWS + GROUP_ROWS <= n) & (valid_rows > 0):
        sum_block(
            logits_ptr, stride, lse_ptr, valid_ptr, bias_ptr, alive_ptr, q_ptr, q_stride, n, V, softcap, scale, eps,
            group, index, UNIT, GROUP_ROWS, ROWS, BLOCK, BIAS, SCALED, CAPPED, False,
        )  # fmt: skip
    else:
        sum_block(
            logits_ptr, stride, lse_ptr, valid_ptr, bias_ptr, alive_ptr, q_ptr, q_stride, n, V, softcap, scale, eps,
            group, index, UNIT, GROUP_ROWS, ROWS, BLOCK, BIAS, SCALED, CAPPED, True,
        )  # fmt: skip


def columns(
    logits: Tensor,
    lse: Tensor,
    valid: Tensor,
    linear_bias: Tensor | None,
    softcap: float,
    logit_scale: float,
    eps: float,
    q: Tensor,
    group: int,
    alive: Tensor,
) -> None:
    """alive (V,) uint8 becomes 1 where p > eps, or NaN, in a valid row; q (groups, V) the groups' sums of p·s.

    A group is `group` rows, a multiple of 8, the last one fewer. The sums are over the valid rows and of all columns.
    """
    rows, classes = logits.shape
    if rows == 0:
        return
    block = COLUMNS_WARPS * 32 * WORD // logits.element_size()
    stride, unit = units(logits.stride(0))
    with on_device(logits):
        groups = -(-rows // group)
        sum_groups[(triton.cdiv(classes, block) * groups,)](
            logits, stride, lse.contiguous(), valid.contiguous(), lse if linear_bias is None else linear_bias,
            alive, q, q.stride(0), rows, classes, groups, softcap if softcap > 0 else 1.0, logit_scale, eps,
            UNIT=unit, GROUP_ROWS=group, ROWS=COLUMNS_ROWS, BLOCK=block, BIAS=linear_bias is not None,
            SCALED=logit_scale != 1.0, CAPPED=softcap > 0, num_warps=COLUMNS_WARPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "target_stride", "chunk"])
def mark_rows(target_ptr, target_stride, valid_ptr, alive_ptr, n, V, chunk, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = tl.load(valid_ptr + row, mask=row < n, other=0) != 0
    target = tl.load(target_ptr + row.to(tl.int64) * target_stride, mask=valid, other=-1)
    offset = (row // chunk).to(tl.int64) * V + target
    tl.store(alive_ptr + offset, tl.full((BLOCK,), 1, tl.uint8), mask=(target >= 0) & (target < V))


def mark_targets(alive: Tensor, target: Tensor, valid: Tensor, chunk: int) -> None:
    """alive (chunks, V) uint8 becomes 1 at the targets of the valid rows (n,), `chunk` of which are of one chunk.

    Targets outside [0, V) mark nothing.
    """
    rows = target.numel()
    if rows:
        with on_device(alive):
            mark_rows[(triton.cdiv(rows, NUMBER_BLOCK),)](
                target, target.stride(0), valid.contiguous(), alive, rows, alive.size(1), chunk, BLOCK=NUMBER_BLOCK
            )


@triton.jit
def count_alive(alive_ptr, counts_ptr, V, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = tl.load(alive_ptr + index, mask=index < V, other=0) != 0
    tl.store(counts_ptr + tl.program_id(0), tl.sum(alive.to(tl.int32), 0))


@triton.jit(do_not_specialize=["most", "number"])
def order_columns(
    alive_ptr, since_ptr, counts_ptr, index_ptr, slot_ptr, count_ptr, V, most, number,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Alive columns first, then the others, both ascending; every block sums the counts of those before it itself."""
    this = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    counts = tl.load(counts_ptr + blocks, mask=blocks < tl.num_programs(0), other=0)
    total = tl.sum(counts, 0)
    before = tl.sum(tl.where(blocks < this, counts, 0), 0)
    index = this * BLOCK + tl.arange(0, BLOCK)
    inside = index < V
    alive = (tl.load(alive_ptr + index, mask=inside, other=0) != 0).to(tl.int32)
    since = tl.load(since_ptr + index, mask=inside, other=0)
    slot = before + tl.cumsum(alive, 0) - alive
    slot = tl.where(alive != 0, slot, total + index - slot)
    # A scalar condition beside a whole block: all or none.
    flat = total > most
    slot = tl.where(flat, index, slot)
    alive = tl.where(flat, 1, alive)
    tl.store(alive_ptr + index, alive.to(tl.uint8), mask=inside)
    tl.store(since_ptr + index, tl.full((BLOCK,), 0, tl.int32) + number, mask=inside & (alive != 0) & (since > number))
    tl.store(slot_ptr + index, slot, mask=inside)
    tl.store(index_ptr + slot, index, mask=inside)
    if this == 0:
        tl.store(count_ptr, tl.where(flat, V, total))


class Buffers(NamedTuple):
    """What `keep` writes; `counts` is for itself."""

    index: Tensor
    slot: Tensor
    count: Tensor
    counts: Tensor


def new_buffers(like: Tensor, classes: int) -> Buffers:
    """On the device of `like`."""
    sizes = (classes, classes, 1, triton.cdiv(classes, NUMBER_BLOCK))
    return Buffers(*(like.new_empty(size, dtype=torch.int32) for size in sizes))


def keep(alive: Tensor, since: Tensor, number: int, most: int, buffers: Buffers) -> tuple[Tensor, Tensor, Tensor]:
    """(index, slot, count) of the alive columns of chunk `number`; more than `most` of them become all.

    `alive` (V,) is changed in place, and so is `since` (V,) int32: the least number of a chunk that keeps the column.
    `index` (V,) int32: the kept columns, ascending, then the others; slot[index] = 0, 1, ...; `count` (1,) int32. They
    lie in `buffers`.
    """
    classes, blocks = alive.numel(), buffers.counts.numel()
    index, slot, count, counts = buffers
    with on_device(alive):
        count_alive[(blocks,)](alive, counts, classes, BLOCK=NUMBER_BLOCK)
        order_columns[(blocks,)](
            alive, since, counts, index, slot, count, classes, most, number,
            BLOCK=NUMBER_BLOCK, BLOCKS=triton.next_power_of_2(blocks),
        )  # fmt: skip
    return index, slot, count
