"""Rows of a matrix moved apart in place, of which those that stay cost nothing but the look at where they belong."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import WORD, Relaunched, on_device

BLOCK = 2048  # elements of a program
WARPS = 4
ORDER_BLOCK, ORDER_WARPS = 2048, 8


@triton.jit(do_not_specialize=["target_stride", "ignore_index", "n"])
def order_targets(
    target_ptr, target_stride, ignore_index: tl.int64, index_ptr, rank_ptr, valid_ptr, count_ptr, n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the rows are few, and what it replaces are a dozen launches before the first GEMM."""
    lanes = tl.arange(0, BLOCK)
    counts = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, n, BLOCK):
        row = start + lanes
        target = tl.load(target_ptr + row.to(tl.int64) * target_stride, mask=row < n, other=0)
        counts += ((target != ignore_index) & (row < n)).to(tl.int32)
    count = tl.sum(counts, 0)
    before = 0
    for start in range(0, n, BLOCK):
        row = start + lanes
        inside = row < n
        target = tl.load(target_ptr + row.to(tl.int64) * target_stride, mask=inside, other=0)
        valid = inside & (target != ignore_index)
        one = valid.to(tl.int32)
        rank = before + tl.cumsum(one, 0) - one
        slot = tl.where(valid, rank, count + row - rank)
        tl.store(index_ptr + slot, row.to(tl.int64), mask=inside)
        tl.store(rank_ptr + row, rank.to(tl.int64), mask=inside)
        tl.store(valid_ptr + row, valid, mask=inside)
        before += tl.sum(one, 0)
    tl.store(count_ptr, count)


_order_targets = Relaunched(order_targets)


def order_rows(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(index, rank, valid, count): index (n,) int64 has the rows with another target (n,), ascending, then the others.

    rank (n,) int64: how many of the former come before a row; valid (n,) bool: whether it is one; count (1,) int32.
    """
    rows = target.numel()
    index, rank = (torch.empty(rows, dtype=torch.int64, device=target.device) for _ in range(2))
    valid, count = torch.empty_like(index, dtype=torch.bool), torch.empty(1, dtype=torch.int32, device=target.device)
    stride = target.stride(0)
    key = target.device, target.dtype, target.data_ptr() % WORD == 0, max(rows, stride) < 1 << 31
    with on_device(target):
        _order_targets(
            key, (1, 1, 1), target, stride, ignore_index, index, rank, valid, count, rows, BLOCK=ORDER_BLOCK,
            num_warps=ORDER_WARPS,
        )  # fmt: skip
    return index, rank, valid, count


@triton.jit(do_not_specialize=["first"])
def lift_rows(values_ptr, stride, source_ptr, wanted_ptr, lifted_ptr, first, D, BLOCK: tl.constexpr):
    """lifted[i] = values[source[first + i]], where that is another row and wanted."""
    row = first + tl.program_id(0)
    source = tl.load(source_ptr + row)
    if (tl.load(wanted_ptr + row) != 0) & (source != row):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + source.to(tl.int64) * stride + column, mask=column < D)
        tl.store(lifted_ptr + tl.program_id(0).to(tl.int64) * D + column, values, mask=column < D)


@triton.jit(do_not_specialize=["first"])
def drop_rows(values_ptr, stride, source_ptr, wanted_ptr, lifted_ptr, first, D, BLOCK: tl.constexpr):
    """values[first + i] = lifted[i], or 0 in rows that are not wanted."""
    row = first + tl.program_id(0)
    wanted = tl.load(wanted_ptr + row) != 0
    if (wanted == 0) | (tl.load(source_ptr + row) != row):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        lifted = lifted_ptr + tl.program_id(0).to(tl.int64) * D + column
        values = tl.load(lifted, mask=(column < D) & wanted, other=0)
        tl.store(values_ptr + row.to(tl.int64) * stride + column, values, mask=column < D)


def restore_rows(values: Tensor, source: Tensor, wanted: Tensor, step: int) -> None:
    """values[i] = values[source[i]] for the wanted rows i, and 0 in the others, `step` rows at a time.

    values (N, D) with rows that are contiguous; source (N,) int64, of which that of a wanted row is at most its own
    number, and ascending; wanted (N,) bool. From the last rows to the first, so that none that is read has been
    written.
    """
    rows, columns = values.shape
    if values.numel() == 0:
        return
    lifted = torch.empty((min(step, rows), columns), dtype=values.dtype, device=values.device)
    with on_device(values):
        for stop in range(rows, 0, -step):
            first = max(stop - step, 0)
            grid = (stop - first, triton.cdiv(columns, BLOCK))
            arguments = (values, values.stride(0), source, wanted, lifted, first, columns)
            lift_rows[grid](*arguments, BLOCK=BLOCK, num_warps=WARPS)
            drop_rows[grid](*arguments, BLOCK=BLOCK, num_warps=WARPS)
