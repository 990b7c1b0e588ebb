"""The steps of a filtered gradient in plain PyTorch: what the kernels compute, and what a CPU runs.

Of a chunk of rows of logits, with z, p, lse and the slope s = dz/dlogit / logit_scale as in rows.py, the
gradient of the logits in row i is a_i·p_ij·s_ij - h_i·[j = t_i]·s_ij (label smoothing apart, which is of rank one). A
column is alive, and its gradient kept, where any row has p > eps or its target. The columns that are not alive are the
tail: a row has its exact mass there, m_i = a_i·Σ_j p_ij·s_ij, and the shape q_j = Σ p_ij·s_ij of its group of rows.

The steps follow one another on the same logits, which belong to them: `target_gradient`, `columns`, `keep`, `gather_`,
then the products. `mark_targets` comes before some chunks; after these, the steps of filter_tails.py and the last
product.
Here `columns` leaves p in the place of float32 logits, so that no other buffer of their size is read or written, and
the number of kept columns is read from `count`. The kernels leave both alone: they run in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .filter_tails import add_tails, choose_rows, holds_p, probabilities, share_tails, weigh_tails
from .rows import row_dtype

__all__ = [
    "add_tails", "add_weight_gradient", "choose_rows", "column_sums", "columns", "finish_weight_gradient", "gather_",
    "input_gradient", "keep", "mark_targets", "new_buffers", "share_tails", "target_gradient", "weigh_tails",
]  # fmt: skip

MOST = 0.5  # of the columns; where more are alive all of them are kept, and nothing is copied
_BLOCK_ELEMENTS = 1 << 21  # of one block of rows: some megabytes, which stay in the cache from step to step
_WIDE_BYTES = 32 << 20  # of float32 sums, where a half-precision result has to be widened


class Chunk(NamedTuple):
    """Rows of logits (n, V) and what the gradient of them is made of; a and h are 0 in rows that are not valid."""

    logits: Tensor
    lse: Tensor
    target: Tensor
    valid: Tensor
    a: Tensor
    h: Tensor
    linear_bias: Tensor | None
    softcap: float
    logit_scale: float


def target_gradient(chunk: Chunk) -> Tensor:
    """(a·p - h)·s of the valid rows at their targets, without the cancellation in p - 1; (n,), 0 in other rows.

    Before `columns`, after which the logits are no longer there.
    """
    logits, lse, target, valid, a, h, linear_bias, softcap, logit_scale = chunk
    rows = valid.nonzero().squeeze(1)
    column, a, h = target[rows], a[rows], h[rows]
    value = logits[rows, column].to(row_dtype(logits.dtype))
    if linear_bias is not None:
        value = value + linear_bias[column]
    z = value * logit_scale
    if softcap > 0:
        squashed = torch.tanh(z / softcap)
        z, slope = squashed * softcap, 1 - squashed * squashed
        a, h = a * slope, h * slope
    log_p = z - lse[rows]
    gradient = h * torch.expm1(log_p) + (a - h) * log_p.exp()
    return torch.zeros_like(lse).index_copy_(0, rows, gradient)


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
    """alive (V,) uint8 becomes 1 where a valid row of logits (n, V) has p > eps or NaN.

    q (n / group, V) in logits' dtype becomes Σ p·s over the valid rows of each group of rows, of all columns. lse and
    valid are (n,). What is in `logits` afterwards is for `gather_`.
    """
    rows, classes = logits.shape
    for part in _blocks(rows, classes, group):
        p, shares = probabilities(logits[part], lse[part], valid[part], linear_bias, softcap, logit_scale)
        alive |= ~(p.amax(0) <= eps)  # with a NaN as well: it stays in its own row, where the columns are kept
        _sum_groups(shares, q[part.start // group : -(-part.stop // group)], group)


def mark_targets(alive: Tensor, target: Tensor, valid: Tensor, chunk: int) -> None:
    """alive (chunks, V) uint8 becomes 1 at the targets of the valid rows (n,), `chunk` of which are of one chunk."""
    rows = valid.nonzero().squeeze(1)
    alive[rows // chunk, target[rows]] = 1


def new_buffers(like: Tensor, classes: int) -> None:
    """`keep` makes its results anew."""


def keep(alive: Tensor, since: Tensor, number: int, most: int, buffers: None) -> tuple[Tensor, Tensor, Tensor]:
    """(index, slot, count) of the alive columns (V,) of chunk `number`; more than `most` of them become all.

    index (V,) int32: the kept columns in ascending order, then any; slot (V,) int32: the index of a kept column in it;
    count (1,) int32: how many there are. since (V,) int32 becomes the least number of a chunk that keeps a column.
    """
    if int(alive.sum()) > most:
        alive.fill_(1)
    since[alive != 0] = since[alive != 0].clamp_(max=number)
    kept = alive.nonzero().squeeze(1)
    index = torch.full_like(alive, alive.numel() - 1, dtype=torch.int32)
    index[: kept.numel()] = kept
    slot = (alive.cumsum(0) - 1).clamp_(min=0).to(torch.int32)
    return index, slot, index.new_full((1,), kept.numel())


def gather_(chunk: Chunk, own: Tensor, alive: Tensor, index: Tensor, slot: Tensor, count: Tensor, mass: Tensor) -> None:
    """mass (n,) becomes a·Σ p·s of every row's tail, the first `count` columns of logits the kept columns' gradient.

    Other arguments as in `columns`, of `target_gradient` (own) and of `keep`.
    """
    logits, lse, target, valid, a, _, linear_bias, softcap, logit_scale = chunk
    rows, classes = logits.shape
    kept = int(count)
    index = index[:kept].long()
    tail_columns = (alive == 0).to(row_dtype(logits.dtype))
    for part in _blocks(rows, classes, 1):
        if holds_p(logits, softcap):
            shares = logits[part]
        else:
            _, shares = probabilities(logits[part], lse[part], valid[part], linear_bias, softcap, logit_scale)
        torch.mv(shares, tail_columns, out=mass[part])
        if kept < classes:
            shares = shares.gather(1, index.expand(shares.size(0), -1))
        logits[part, :kept] = shares.mul_(a[part].unsqueeze(1))
    which = valid.nonzero().squeeze(1)
    logits[which, slot[target[which]].long()] = own[which].to(logits.dtype)
    mass.mul_(a)


def input_gradient(kept: Tensor, index: Tensor, count: Tensor, linear_weight: Tensor, out: Tensor) -> None:
    """out (n, D) = kept[:, :count]·linear_weight[index[:count]]."""
    used = int(count)
    if used < linear_weight.size(0):
        linear_weight = linear_weight.index_select(0, index[:used])
    torch.mm(kept[:, :used], linear_weight, out=out)


def add_weight_gradient(
    kept: Tensor, index: Tensor, count: Tensor, input: Tensor, total: Tensor, rest: Tensor | None, since: Tensor,
    number: int,
) -> None:  # fmt: skip
    """total[index] (V, D) += keptᵀ·input in float32; `rest`, of total's dtype, is what total's rounding leaves out.

    A row of total whose `since` (V,) is not below `number` has not been written yet.
    """
    used = int(count)
    rows = None if used == total.size(0) else index[:used].long()
    _add_product(kept[:, :used], rows, input, total, rest, since, number, keep_rest=True)


def finish_weight_gradient(
    q: Tensor, sums: Tensor, total: Tensor, rest: Tensor | None, since: Tensor, number: int, keep_rest: bool
) -> None:
    """total += rest + qᵀ·sums for q (G, V) and sums (G, D), every row of it; rest only with `keep_rest`."""
    _add_product(q, None, sums, total, rest, since, number, keep_rest)


def column_sums(kept: Tensor, index: Tensor, count: Tensor) -> Tensor:
    """(V,): the sums of the kept columns at their indices, 0 elsewhere."""
    used = int(count)
    sums = kept.new_zeros(index.numel(), dtype=row_dtype(kept.dtype))
    sums[index[:used].long()] = kept[:, :used].sum(0, dtype=sums.dtype)
    return sums


def _blocks(rows: int, classes: int, group: int) -> Iterator[slice]:
    """Of whole groups of rows, but for the last one."""
    step = max(_BLOCK_ELEMENTS // (group * classes), 1) * group
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _sum_groups(shares: Tensor, out: Tensor, group: int) -> None:
    """out (n / group, V) = the sums over groups of rows of `shares` (n, V)."""
    full = shares.size(0) // group
    if full:
        out[:full] = shares[: full * group].unflatten(0, (full, group)).sum(1)
    if full < out.size(0):
        out[full] = shares[full * group :].sum(0)


def _add_product(
    left: Tensor,
    rows: Tensor | None,
    right: Tensor,
    total: Tensor,
    rest: Tensor | None,
    since: Tensor,
    number: int,
    keep_rest: bool,
) -> None:
    """total[rows] += leftᵀ·right, rows None for all of them; by slices, so that float32 sums stay small."""
    wide = row_dtype(total.dtype)
    step = max(_WIDE_BYTES // (wide.itemsize * max(left.size(0), total.size(1), 1)), 1)
    right = right.to(wide)
    for start in range(0, left.size(1), step):
        part = slice(start, start + step)
        target_rows = part if rows is None else rows[part]
        # A view, where neither a choice of rows nor another dtype asks for a copy.
        sums = total[target_rows].to(wide)
        if rest is not None:
            sums.add_(rest[target_rows])
        fresh = (since[target_rows] >= number).nonzero().squeeze(1)
        if fresh.numel():
            sums.index_fill_(0, fresh, 0)
        sums.addmm_(left[:, part].t().to(wide), right)
        rounded = sums.to(total.dtype)
        if rows is not None or wide != total.dtype:
            total[target_rows] = rounded
        if rest is not None and keep_rest:
            rest[target_rows] = sums.sub_(rounded).to(rest.dtype)
