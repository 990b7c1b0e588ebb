"""Rows of a matrix moved apart in place, of which those that stay cost nothing but the look at where they belong."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on_device

BLOCK = 2048  # elements of a program
WARPS = 4


@triton.jit(do_not_specialize=["first"])
def lift_rows(values_ptr, stride, source_ptr, wanted_ptr, held_ptr, first, D, BLOCK: tl.constexpr):
    """held[i] = values[source[first + i]], where that is another row and wanted."""
    row = first + tl.program_id(0)
    source = tl.load(source_ptr + row)
    if (tl.load(wanted_ptr + row) != 0) & (source != row):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + source.to(tl.int64) * stride + column, mask=column < D)
        tl.store(held_ptr + tl.program_id(0).to(tl.int64) * D + column, values, mask=column < D)


@triton.jit(do_not_specialize=["first"])
def drop_rows(values_ptr, stride, source_ptr, wanted_ptr, held_ptr, first, D, BLOCK: tl.constexpr):
    """values[first + i] = held[i], or 0 in rows that are not wanted."""
    row = first + tl.program_id(0)
    wanted = tl.load(wanted_ptr + row) != 0
    if (wanted == 0) | (tl.load(source_ptr + row) != row):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        held = held_ptr + tl.program_id(0).to(tl.int64) * D + column
        values = tl.load(held, mask=(column < D) & wanted, other=0)
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
    held = torch.empty((min(step, rows), columns), dtype=values.dtype, device=values.device)
    with on_device(values):
        for stop in range(rows, 0, -step):
            first = max(stop - step, 0)
            grid = (stop - first, triton.cdiv(columns, BLOCK))
            arguments = (values, values.stride(0), source, wanted, held, first, columns)
            lift_rows[grid](*arguments, BLOCK=BLOCK, num_warps=WARPS)
            drop_rows[grid](*arguments, BLOCK=BLOCK, num_warps=WARPS)
