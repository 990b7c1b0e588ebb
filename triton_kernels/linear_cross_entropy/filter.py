"""Filtered gradients of linear cross entropy on the GPU: the pass that packs the kept columns' gradient.

All steps are here by name; what comes before is in filter_columns.py, the products in filter_products.py, and what
a segment of chunks ends with in filter_tails.py.

Per chunk of rows: `columns` finds the vocabulary columns that some row needs and the sums of every group of rows,
`keep` numbers those columns with the targets', `gather_` makes the kept columns' gradient at the front of the rows' own
memory. How many columns are kept is known on the device alone: nothing waits for it, so that all of it can be captured
in a CUDA graph.
No sum's order depends on a race.

z, p and s of a logit: z = softcap·tanh(u / softcap) of u = logit_scale·(logit + bias), p = exp(z - lse) and s = dz/du.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import WORD, on_device, readable, units
from .filter_columns import columns, keep, mark_targets, new_buffers
from .filter_products import add_weight_gradient, finish_weight_gradient, input_gradient
from .filter_tails import add_tails, choose_rows, probabilities, share_tails, weigh_tails
from .values import capped

if TYPE_CHECKING:
    from torch_dcs_ops.reference.linear_cross_entropy.filter import Chunk

__all__ = [
    "add_tails", "add_weight_gradient", "choose_rows", "column_sums", "columns", "finish_weight_gradient", "gather_",
    "input_gradient", "keep", "mark_targets", "new_buffers", "share_tails", "target_gradient", "weigh_tails",
]  # fmt: skip

MOST = 0.9  # of the columns; where more are alive all of them are kept, and read without an index
GATHER_WARPS = 4
GATHER_ROWS = 2  # of a program: they share the reads of alive and slot, 5 bytes a column from L2
PACK_WARPS = 8
SUM_BLOCK = 64  # columns of a program of `column_sums`


def target_gradient(*_: Any) -> None:
    """Nothing: `gather_` makes it of the logits, which `columns` leaves alone."""


@triton.jit
def load_block(row_ptr, index, mask, V, MASKED: tl.constexpr):
    if MASKED:
        mask = mask & (index < V)[None, :]
    return tl.load(row_ptr + index[None, :], mask=mask, other=0)


@triton.jit
def gather_block(
    logits, row_ptr, index, inside, valid, lse, target, at_target, a, bias_ptr, alive_ptr, slot_ptr, V, softcap, scale,
    BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, WORD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of the kept columns `index`; p·s of the others, 0 of these."""
    if MASKED:
        alive = tl.load(alive_ptr + index, mask=index < V, other=0) != 0
        slot = tl.load(slot_ptr + index, mask=index < V, other=0)
    else:
        alive = tl.load(alive_ptr + index) != 0
        slot = tl.load(slot_ptr + index)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + index, mask=index < V, other=0)[None, :]
    _, sloped = probabilities(logits, bias, lse, scale, softcap, BIAS, SCALED, CAPPED)
    gradient = tl.where(index[None, :] == target, at_target, a * sloped)
    gradient = tl.where(valid, gradient, 0.0).to(logits.dtype)
    tl.store(row_ptr + slot[None, :], gradient, mask=inside & alive[None, :])
    dead = valid & (alive == 0)[None, :]
    if MASKED:
        dead = dead & (index < V)[None, :]
    # A thread has WORD successive columns: summed at once, they leave their registers.
    words = tl.reshape(tl.where(dead, sloped, 0.0), (sloped.shape[0], sloped.shape[1] // WORD, WORD))
    return tl.sum(words, 2)


@triton.jit
def row_facts(
    logits_ptr, stride, lse_ptr, target_ptr, target_stride, valid_ptr, a_ptr, h_ptr, bias_ptr, n, V, softcap, scale,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """This program's rows; as columns, whether they are there and valid, lse, a, the target, its gradient and 1 - p."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    valid = tl.load(valid_ptr + row, mask=inside, other=0) != 0
    lse = tl.load(lse_ptr + row, mask=valid, other=0)
    a = tl.load(a_ptr + row, mask=valid, other=0)
    h = tl.load(h_ptr + row, mask=valid, other=0)
    target = tl.load(target_ptr + row.to(tl.int64) * target_stride, mask=valid, other=-1)
    target = tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)

    # The target's gradient: a·p - h, of which h·(p - 1) must not cancel. log p is the one rounding of z - lse.
    hit = target >= 0
    z = tl.load(logits_ptr + row.to(tl.int64) * (stride * UNIT) + target, mask=hit, other=0).to(tl.float32)
    slope = tl.full((ROWS,), 1.0, tl.float32)
    if BIAS:
        z += tl.load(bias_ptr + target, mask=hit, other=0)
    if SCALED:
        z *= scale
    if CAPPED:
        z, slope = capped(z, softcap, tl.float32)
    p = tl.exp((z - lse).to(tl.float64))
    wide_h = h.to(tl.float64)
    at_target = ((wide_h * (p - 1) + (a.to(tl.float64) - wide_h) * p) * slope.to(tl.float64)).to(tl.float32)
    others = tl.where(hit, 1 - p, 1.0).to(tl.float32)
    return (
        row, inside[:, None], valid[:, None], lse[:, None], a[:, None], target[:, None], at_target[:, None],
        others[:, None],
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "target_stride"])
def gather_rows(
    logits_ptr, stride, lse_ptr, target_ptr, target_stride, valid_ptr, a_ptr, h_ptr, bias_ptr, alive_ptr, slot_ptr,
    mass_ptr, n, V, softcap, scale,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, BIAS: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, inside, valid, lse, a, target, at_target, _ = row_facts(
        logits_ptr, stride, lse_ptr, target_ptr, target_stride, valid_ptr, a_ptr, h_ptr, bias_ptr, n, V, softcap, scale,
        UNIT, ROWS, BIAS, SCALED, CAPPED,
    )  # fmt: skip
    row_ptr = (logits_ptr + row.to(tl.int64) * (stride * UNIT))[:, None]
    lanes = tl.arange(0, BLOCK)
    tail = tl.full((ROWS, BLOCK // WORD), 0.0, tl.float32)
    full = V // BLOCK * BLOCK
    logits = load_block(row_ptr, lanes, valid & (full > 0), V, False)
    for start in range(0, full, BLOCK):
        # The columns of this block and of those before go no further than this block's end: the next block
        # may be read before, and is. The barrier keeps the stores behind all threads' reads of this block.
        later = load_block(row_ptr, start + BLOCK + lanes, valid & (start + BLOCK < full), V, False)
        tl.debug_barrier()
        tail += gather_block(
            logits, row_ptr, start + lanes, inside, valid, lse, target, at_target, a, bias_ptr, alive_ptr, slot_ptr, V,
            softcap, scale, BIAS, SCALED, CAPPED, WORD, False,
        )  # fmt: skip
        logits = later
    if full < V:
        logits = load_block(row_ptr, full + lanes, valid, V, True)
        tl.debug_barrier()
        tail += gather_block(
            logits, row_ptr, full + lanes, inside, valid, lse, target, at_target, a, bias_ptr, alive_ptr, slot_ptr, V,
            softcap, scale, BIAS, SCALED, CAPPED, WORD, True,
        )  # fmt: skip
    tl.store(mass_ptr + row, tl.reshape(a, (ROWS,)) * tl.sum(tail, 1), mask=row < n)


@triton.jit
def load_kept(row_ptr, index_ptr, slot, count, valid):
    """The logits of the kept columns number `slot`, and which columns they are."""
    index = tl.load(index_ptr + slot, mask=slot < count, other=0)
    return tl.load(row_ptr + index[None, :], mask=valid & (slot < count)[None, :], other=0), index


@triton.jit(do_not_specialize=["n", "target_stride"])
def pack_rows(
    logits_ptr, stride, lse_ptr, target_ptr, target_stride, valid_ptr, a_ptr, h_ptr, bias_ptr, index_ptr, count_ptr,
    mass_ptr, n, V, softcap, scale,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    row, inside, valid, lse, a, target, at_target, others = row_facts(
        logits_ptr, stride, lse_ptr, target_ptr, target_stride, valid_ptr, a_ptr, h_ptr, bias_ptr, n, V, softcap, scale,
        UNIT, ROWS, BIAS, SCALED, False,
    )  # fmt: skip
    row_ptr = (logits_ptr + row.to(tl.int64) * (stride * UNIT))[:, None]
    count = tl.load(count_ptr)
    lanes = tl.arange(0, BLOCK)
    kept = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    logits, index = load_kept(row_ptr, index_ptr, lanes, count, valid)
    for start in range(0, count, BLOCK):
        # A column's number is no larger than the column: what is stored here has been read, by this block or before,
        # and the next block's columns lie beyond.
        later, later_index = load_kept(row_ptr, index_ptr, start + BLOCK + lanes, count, valid)
        tl.debug_barrier()
        bias = 0.0
        if BIAS:
            bias = tl.load(bias_ptr + index)[None, :]
        p, _ = probabilities(logits, bias, lse, scale, softcap, BIAS, SCALED, False)
        here = (start + lanes < count)[None, :]
        is_target = index[None, :] == target
        # Of a row that is certain of its target, 1 - p keeps the digits that 1 - Σ p has lost.
        kept += tl.where(here & (is_target == 0), p, 0.0)
        gradient = tl.where(is_target, at_target, a * p)
        gradient = tl.where(valid, gradient, 0.0).to(logits_ptr.dtype.element_ty)
        tl.store(row_ptr + (start + lanes)[None, :], gradient, mask=inside & here)
        logits, index = later, later_index
    tail = tl.where(valid, others - tl.sum(kept, 1)[:, None], 0.0)
    tl.store(mass_ptr + row[:, None], a * tl.where(count == V, 0.0, tail), mask=inside)


def gather_(chunk: Chunk, own: None, alive: Tensor, index: Tensor, slot: Tensor, count: Tensor, mass: Tensor) -> None:
    """Makes logits[:, :count] the kept columns' gradient, (a·p - h·[target])·s, 0 in rows that are not valid.

    `own` is what `target_gradient` returns. mass (n,) float32 becomes a times the sum of p·s over the columns that are
    not alive.
    """
    logits, lse, target, valid, a, h, linear_bias, softcap, logit_scale = chunk
    rows, classes = logits.shape
    if rows == 0:
        return
    stride, unit = units(logits.stride(0))
    word = WORD // logits.element_size()
    rows_of = (
        logits, stride, lse.contiguous(), target, target.stride(0), valid.contiguous(), a.contiguous(), h.contiguous(),
        lse if linear_bias is None else linear_bias,
    )  # fmt: skip
    is_biased, is_scaled = linear_bias is not None, logit_scale != 1.0
    with on_device(logits):
        if softcap > 0:
            # What the rows' sums of p·s are is known only here.
            gather_rows[(triton.cdiv(rows, GATHER_ROWS),)](
                *rows_of, alive, slot, mass, rows, classes, softcap, logit_scale,
                UNIT=unit, ROWS=GATHER_ROWS, BLOCK=GATHER_WARPS * 32 * word, WORD=word, BIAS=is_biased,
                SCALED=is_scaled, CAPPED=True, num_warps=GATHER_WARPS,
            )  # fmt: skip
        else:
            pack_rows[(rows,)](
                *rows_of, index, count, mass, rows, classes, 1.0, logit_scale,
                UNIT=unit, ROWS=1, BLOCK=PACK_WARPS * 32 * word, BIAS=is_biased, SCALED=is_scaled, num_warps=PACK_WARPS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def sum_kept(
    kept_ptr, stride, limit, index_ptr, count_ptr, sums_ptr, n,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BLOCK
    count = tl.load(count_ptr)
    if start < count:
        slot = start + tl.arange(0, BLOCK)
        sums = tl.full((BLOCK,), 0.0, tl.float32)
        for first in range(0, n, ROWS):
            row = first + tl.arange(0, ROWS)
            pointers = kept_ptr + row.to(tl.int64)[:, None] * (stride * UNIT) + slot[None, :]
            mask = (row < n)[:, None] & (slot < limit * UNIT)[None, :]
            sums += tl.sum(tl.load(pointers, mask=mask, other=0).to(tl.float32), 0)
        index = tl.load(index_ptr + slot, mask=slot < count, other=0)
        tl.store(sums_ptr + index, sums, mask=slot < count)


def column_sums(kept: Tensor, index: Tensor, count: Tensor) -> Tensor:
    """(V,) float32: the sum of the rows' kept column k at index[k], 0 at the columns that are not kept."""
    rows, classes = kept.shape
    sums = torch.zeros(classes, dtype=torch.float32, device=kept.device)
    stride, limit, unit = units(kept.stride(0), readable(kept))
    with on_device(kept):
        sum_kept[(triton.cdiv(classes, SUM_BLOCK),)](
            kept, stride, limit, index, count, sums, rows, UNIT=unit, ROWS=64, BLOCK=SUM_BLOCK
        )
    return sums
