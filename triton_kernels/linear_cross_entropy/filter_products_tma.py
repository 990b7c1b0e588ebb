"""The products of filtered gradients with operands that the tensor memory accelerator loads (compute capability 9 on).

Threads that do not load operands by themselves have registers and time for larger tiles. The L2 cache's bandwidth, at
which the kernels of filter_products.py run on an H200, is enough for a quarter more of them (1024 rows, 9000 columns
and 4096 features: 189 to 159 us a sum over rows, 169 to 125 over columns; 128256 columns of 320 rows 1250 to 890).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.tiles import tile_at
from .filter_tiles import load_rows, load_weights, store_parts

_ALIGNMENT = 16  # bytes, of rows


def descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """Of blocks of a matrix, which are 0 beyond its last row and column; None where its rows are not aligned."""
    step = matrix.stride(0) * matrix.element_size()
    if matrix.numel() == 0 or matrix.stride(1) != 1 or step <= 0 or step % _ALIGNMENT or matrix.data_ptr() % _ALIGNMENT:
        return None
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


@triton.jit(do_not_specialize=["n"])
def multiply_kept_in_bulk(
    kept, index_ptr, count_ptr, weight_ptr, weight_stride, out_ptr, out_stride, n, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    down, across = tile_at(tl.program_id(0), tl.cdiv(n, ROWS), tl.cdiv(D, COLUMNS), BAND)
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    term = tl.arange(0, DEPTH)
    weight_ptr += column[None, :]
    count = tl.load(count_ptr)
    full = count // DEPTH * DEPTH
    sums = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    # Half of the steps ahead are for the index, the other half for the rows that it leads to.
    for start in tl.range(0, full, DEPTH, num_stages=2 * STAGES - 1):
        gradient = kept.load([down * ROWS, start])
        index = tl.load(index_ptr + start + term)
        weight = load_weights(weight_ptr + index.to(tl.int64)[:, None] * weight_stride, column, D, EVEN)
        sums = tl.dot(gradient, weight, sums)
    if full < count:
        inside = full + term < count
        gradient = kept.load([down * ROWS, full])
        gradient = tl.where(inside[None, :], gradient, 0.0).to(gradient.dtype)
        index = tl.load(index_ptr + full + term, mask=inside, other=0)
        weight = load_rows(weight_ptr + index.to(tl.int64)[:, None] * weight_stride, inside, column, D, EVEN)
        sums = tl.dot(gradient, weight, sums)
    out = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    mask = (row < n)[:, None]
    if not EVEN:
        mask = mask & (column < D)[None, :]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "chunk"])
def add_products_in_bulk(
    left, right, index_ptr, count_ptr, total_ptr, rest_ptr, since_ptr, chunk, total_stride, n, V, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, EVEN: tl.constexpr,
    PACKED: tl.constexpr, PARTS: tl.constexpr, HAS_REST: tl.constexpr, KEEP_REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`add_products`."""
    count = V
    if PACKED:
        count = tl.load(count_ptr)
    tiles_down = tl.cdiv(count, ROWS)
    tiles_across = tl.cdiv(D, COLUMNS)
    # One loop over the steps of all tiles: the next tile's operands are on their way while this one's sums are stored.
    for number in tl.range(tl.program_id(0), tiles_down * tiles_across, tl.num_programs(0), flatten=True):
        down, across = tile_at(number, tiles_down, tiles_across, BAND)
        sums = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for start in tl.range(0, n, DEPTH, num_stages=STAGES):
            gradient = left.load([start, down * ROWS])
            factor = right.load([start, across * COLUMNS])
            sums = tl.dot(tl.trans(gradient), factor, sums)
        slot = down * ROWS + tl.arange(0, ROWS)
        # Columns past the count hold anything: they are of rows that are not stored.
        inside = slot < count
        row = slot
        if PACKED:
            row = tl.load(index_ptr + slot, mask=inside, other=0)
        touched = inside & (tl.load(since_ptr + row, mask=inside, other=0) < chunk)
        # By parts: what is loaded has to fit into the registers beside the sums.
        store_parts(
            sums, total_ptr, rest_ptr, row.to(tl.int64) * total_stride, across * COLUMNS, inside, touched, D, COLUMNS,
            PARTS, EVEN, HAS_REST, KEEP_REST,
        )  # fmt: skip
