"""Tiles of the products of filtered gradients: which, in what order, and what is done with one's sums."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """rows × columns of a product, summed `depth` terms at a time, `stages` of which are under way."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int  # on a multiprocessor


# By the shared memory of a program that they need, largest first: an H200 has 227 KB of it, an A100 163, others 99.
WIDE = Tile(128, 256, 64, 8, 4, 1)
BULK_BYTES = 209 << 10
BULK_TILE, BULK_KEPT_TILE = Tile(128, 256, 64, 8, 3, 1), Tile(256, 128, 64, 8, 4, 1)
HALF_TILES = ((BULK_BYTES, Tile(128, 128, 64, 4, 3, 2)), (0, Tile(128, 128, 32, 4, 3, 1)))
FLOAT32_TILES = ((0, Tile(64, 64, 32, 4, 2, 2)),)
BAND = 8  # tiles of successive programs: 8 rows of them share their other operand's columns in L2


@triton.jit
def load_rows(pointers, rows, columns, D, EVEN: tl.constexpr):
    """Of a matrix of D columns, 0 where `rows` is false; EVEN: no column lies beyond the last."""
    if EVEN:
        return tl.load(pointers, mask=rows[:, None], other=0)
    return tl.load(pointers, mask=rows[:, None] & (columns < D)[None, :], other=0)


@triton.jit
def load_weights(pointers, columns, D, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(columns < D)[None, :], other=0)


@triton.jit
def store_parts(
    sums, total_ptr, rest_ptr, offset, first, inside, touched, D, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, HAS_REST: tl.constexpr, KEEP_REST: tl.constexpr,
):  # fmt: skip
    """Stores total + rest + sums at the rows' `offset` and the columns from `first` on."""
    if PARTS > 1:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = tl.reshape(sums, (sums.shape[0], 2, HALF)).permute(0, 2, 1).split()
        store_parts(
            left, total_ptr, rest_ptr, offset, first, inside, touched, D, HALF, PARTS // 2, EVEN, HAS_REST, KEEP_REST
        )
        store_parts(
            right, total_ptr, rest_ptr, offset, first + HALF, inside, touched, D, HALF, PARTS // 2, EVEN, HAS_REST,
            KEEP_REST,
        )  # fmt: skip
    else:
        column = first + tl.arange(0, COLUMNS)
        offsets = offset[:, None] + column[None, :]
        sums += load_rows(total_ptr + offsets, touched, column, D, EVEN).to(tl.float32)
        if HAS_REST:
            sums += load_rows(rest_ptr + offsets, touched, column, D, EVEN).to(tl.float32)
        rounded = sums.to(total_ptr.dtype.element_ty)
        mask = inside[:, None]
        if not EVEN:
            mask = mask & (column < D)[None, :]
        tl.store(total_ptr + offsets, rounded, mask=mask)
        if KEEP_REST:
            tl.store(rest_ptr + offsets, (sums - rounded.to(tl.float32)).to(rest_ptr.dtype.element_ty), mask=mask)
