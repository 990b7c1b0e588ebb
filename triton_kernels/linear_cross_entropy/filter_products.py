"""The products of filtered gradients: the kept columns' gradient, packed, times rows of linear_weight or of the input.

How many columns are kept is read on the device. `input_gradient` launches a program a tile, whose sum is that long;
`add_weight_gradient` and `finish_weight_gradient` a fixed number of programs, which take tiles until there are no more.
Where operands are aligned for it, the kernels of filter_products_tma.py do all that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import device_of, on_device, readable, units
from ..common.tiles import tile_at
from .filter_products_tma import add_products_in_bulk, descriptor, multiply_kept_in_bulk
from .filter_tiles import (
    BAND,
    BULK_BYTES,
    BULK_KEPT_TILE,
    BULK_TILE,
    FLOAT32_TILES,
    HALF_TILES,
    WIDE,
    Tile,
    load_rows,
    load_weights,
    store_parts,
)  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def multiply_kept(
    kept_ptr, stride, index_ptr, count_ptr, weight_ptr, weight_stride, out_ptr, out_stride, n, V, D,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    down, across = tile_at(tl.program_id(0), tl.cdiv(n, ROWS), tl.cdiv(D, COLUMNS), BAND)
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    term = tl.arange(0, DEPTH)
    # Rows beyond the last read the last one, and are not stored.
    row_ptr = kept_ptr + tl.minimum(row, n - 1).to(tl.int64)[:, None] * (stride * UNIT)
    weight_ptr += column[None, :]
    count = tl.load(count_ptr)
    full = count // DEPTH * DEPTH
    sums = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    if count == V:
        for start in tl.range(0, full, DEPTH, num_stages=STAGES):
            gradient = tl.load(row_ptr + (start + term)[None, :])
            weight = load_weights(weight_ptr + (start + term).to(tl.int64)[:, None] * weight_stride, column, D, EVEN)
            sums = tl.dot(gradient, weight, sums, input_precision=PRECISION)
    else:
        # Half of the steps ahead are for the index, the other half for the rows that it leads to.
        for start in tl.range(0, full, DEPTH, num_stages=2 * STAGES - 1):
            gradient = tl.load(row_ptr + (start + term)[None, :])
            index = tl.load(index_ptr + start + term)
            weight = load_weights(weight_ptr + index.to(tl.int64)[:, None] * weight_stride, column, D, EVEN)
            sums = tl.dot(gradient, weight, sums, input_precision=PRECISION)
    if full < count:
        # The only step that masks the columns of `kept`, which masked are read one by one.
        inside = full + term < count
        gradient = tl.load(row_ptr + (full + term)[None, :], mask=inside[None, :], other=0)
        index = tl.load(index_ptr + full + term, mask=inside, other=0)
        weight = load_rows(weight_ptr + index.to(tl.int64)[:, None] * weight_stride, inside, column, D, EVEN)
        sums = tl.dot(gradient, weight, sums, input_precision=PRECISION)
    out = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    mask = (row < n)[:, None]
    if not EVEN:
        mask = mask & (column < D)[None, :]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=mask)


def input_gradient(kept: Tensor, index: Tensor, count: Tensor, linear_weight: Tensor, out: Tensor) -> None:
    """out (n, D) = kept[:, :count] @ linear_weight[index[:count]], summed in float32."""
    rows, features = out.shape
    if out.numel() == 0:
        return
    tile = _tile(kept)
    if tile.depth == WIDE.depth and 2 * _tiles(WIDE, rows, features) > device_of(kept).multiprocessors:
        tile = WIDE
    stride, unit = units(kept.stride(0))
    linear_weight = _with_rows(linear_weight)
    bulk, kept_desc = BULK_KEPT_TILE, None
    if tile is WIDE and _takes_bulk(kept) and _copies_rows(linear_weight):
        kept_desc = descriptor(kept, bulk.rows, bulk.depth)
    with on_device(kept):
        if kept_desc is not None:
            multiply_kept_in_bulk[(_tiles(bulk, rows, features),)](
                kept_desc, index, count, linear_weight, linear_weight.stride(0), out, out.stride(0), rows, features,
                ROWS=bulk.rows, COLUMNS=bulk.columns, DEPTH=bulk.depth, BAND=BAND, EVEN=features % bulk.columns == 0,
                STAGES=bulk.stages, num_warps=bulk.warps,
            )  # fmt: skip
            return
        multiply_kept[(_tiles(tile, rows, features),)](
            kept, stride, index, count, linear_weight, linear_weight.stride(0), out, out.stride(0), rows,
            linear_weight.size(0), features,
            UNIT=unit, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, BAND=BAND,
            EVEN=features % tile.columns == 0, PRECISION=_precision(kept), STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "chunk"])
def add_products(
    left_ptr, left_stride, limit, index_ptr, count_ptr, right_ptr, right_stride, total_ptr, rest_ptr, since_ptr,
    chunk, total_stride, n, V, D,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
    HAS_REST: tl.constexpr, KEEP_REST: tl.constexpr,
):  # fmt: skip
    """total's rows += leftᵀ @ right; PACKED: column k of left is of row index[k] of total.

    Rows that have been written are those `since` a chunk before `chunk`.
    """
    count = V
    if PACKED:
        count = tl.load(count_ptr)
    tiles_down = tl.cdiv(count, ROWS)
    tiles_across = tl.cdiv(D, COLUMNS)
    term = tl.arange(0, DEPTH)
    for number in range(tl.program_id(0), tiles_down * tiles_across, tl.num_programs(0)):
        down, across = tile_at(number, tiles_down, tiles_across, BAND)
        slot = down * ROWS + tl.arange(0, ROWS)
        column = across * COLUMNS + tl.arange(0, COLUMNS)
        # Before the sums: behind them what total holds is waited for alone.
        inside_slots = slot < count
        row = slot
        if PACKED:
            row = tl.load(index_ptr + slot, mask=inside_slots, other=0)
        touched = inside_slots & (tl.load(since_ptr + row, mask=inside_slots, other=0) < chunk)
        left = left_ptr + term.to(tl.int64)[:, None] * (left_stride * UNIT) + slot[None, :]
        right = right_ptr + term.to(tl.int64)[:, None] * right_stride + column[None, :]
        sums = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for start in range(0, n, DEPTH):
            inside = term < n - start
            # Columns past the count hold anything: they are of rows that are not stored.
            gradient = tl.load(left, mask=inside[:, None] & (slot < limit * UNIT)[None, :], other=0)
            factor = load_rows(right, inside, column, D, EVEN)
            sums = tl.dot(tl.trans(gradient), factor, sums, input_precision=PRECISION)
            left += DEPTH * (left_stride * UNIT)
            right += DEPTH * right_stride

        offset = row.to(tl.int64) * total_stride
        # By parts: what is loaded has to fit into the registers beside the sums.
        store_parts(
            sums, total_ptr, rest_ptr, offset, across * COLUMNS, inside_slots, touched, D, COLUMNS, PARTS, EVEN,
            HAS_REST, KEEP_REST,
        )  # fmt: skip


def add_weight_gradient(
    kept: Tensor, index: Tensor, count: Tensor, input: Tensor, total: Tensor, rest: Tensor | None, since: Tensor,
    number: int,
) -> None:  # fmt: skip
    """total[index[:count]] (+)= kept[:, :count]ᵀ @ input, summed in float32.

    Rows whose `since` (V,) int32 is not below `number` are written, not added to: total and rest may be uninitialized.
    `rest` (None: there is none) holds what the rounding of total lost.
    """
    _add_products(kept, index, count, input, total, rest, since, number, keep_rest=rest is not None)


def finish_weight_gradient(
    q: Tensor, sums: Tensor, total: Tensor, rest: Tensor | None, since: Tensor, number: int, keep_rest: bool
) -> None:
    """Every row of total becomes qᵀ @ sums, plus total + rest where `since` is below `number`; rest with keep_rest."""
    _add_products(q, None, None, sums, total, rest, since, number, keep_rest)


def _add_products(
    left: Tensor, index: Tensor | None, count: Tensor | None, right: Tensor, total: Tensor, rest: Tensor | None,
    since: Tensor, chunk: int, keep_rest: bool,
) -> None:  # fmt: skip
    terms, classes = left.shape
    features = total.size(1)
    if total.numel() == 0 or (index is not None and terms == 0):
        return
    tile = _tile(left)
    right = _with_rows(right)
    left_desc = right_desc = None
    if terms and features >= BULK_TILE.columns and _takes_bulk(left):
        left_desc = descriptor(left, BULK_TILE.depth, BULK_TILE.rows)
        right_desc = descriptor(right, BULK_TILE.depth, BULK_TILE.columns)
    if left_desc is not None and right_desc is not None:
        tile = BULK_TILE
        with on_device(left):
            add_products_in_bulk[(min(device_of(left).multiprocessors, _tiles(tile, classes, features)),)](
                left_desc, right_desc, since if index is None else index, since if count is None else count, total,
                total if rest is None else rest, since, chunk, total.stride(0), terms, classes, features,
                ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, BAND=BAND, EVEN=features % tile.columns == 0,
                PACKED=index is not None, PARTS=2, HAS_REST=rest is not None, KEEP_REST=keep_rest, STAGES=tile.stages,
                num_warps=tile.warps,
            )  # fmt: skip
        return
    stride, limit, unit = units(left.stride(0), readable(left))
    programs = min(tile.programs * device_of(left).multiprocessors, _tiles(tile, classes, features))
    with on_device(left):
        add_products[(programs,)](
            left, stride, limit, since if index is None else index, since if count is None else count, right,
            right.stride(0), total, total if rest is None else rest, since, chunk, total.stride(0), terms, classes,
            features,
            UNIT=unit, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, BAND=BAND,
            EVEN=features % tile.columns == 0, PRECISION=_precision(left), PACKED=index is not None,
            PARTS=tile.columns // 32, HAS_REST=rest is not None, KEEP_REST=keep_rest, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip


def _tile(operand: Tensor) -> Tile:
    tiles = FLOAT32_TILES if operand.dtype == torch.float32 else HALF_TILES
    shared_memory = device_of(operand).shared_memory
    return next(tile for least, tile in tiles if shared_memory >= least)


def _takes_bulk(operand: Tensor) -> bool:
    return operand.dtype != torch.float32 and device_of(operand).shared_memory >= BULK_BYTES


def _copies_rows(matrix: Tensor) -> bool:
    """Whether Triton knows of the alignment that lets rows that an index names go to shared memory past registers."""
    return not any(number % 16 for number in (matrix.data_ptr(), matrix.stride(0), matrix.size(1)))


def _tiles(tile: Tile, rows: int, columns: int) -> int:
    return triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)


def _precision(operand: Tensor) -> str:
    # Of float32: no rounding to TF32.
    return "ieee" if operand.dtype == torch.float32 else "tf32"


def _with_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
