"""The residual mass of the filtered columns of a segment of chunks, in plain PyTorch: tails, shared and single.

`choose_rows` says which rows are single, `share_tails` makes the tails, `weigh_tails` what rows have of them and the
rows of input that they are multiplied with, `add_tails` adds their products with linear_weight to input's gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .rows import row_dtype

_SMALLEST_SUM = 1e-30  # of q: its inverse is finite, and the tails of less weigh nothing


class Chosen(NamedTuple):
    """S single rows of n, in their order: which, their lse, and whether they are valid and among the largest masses.

    slot (n,) is a row's number among those of them that are, else -1; those of group g are bounds[g]:bounds[g + 1].
    """

    rows: Tensor
    lse: Tensor
    valid: Tensor
    slot: Tensor
    bounds: Tensor


def choose_rows(mass: Tensor, lse: Tensor, valid: Tensor, group: int, apart: int, each: int) -> Chosen:
    """The `apart` rows of the largest |mass| (n,); single are one in `each` valid rows, the first of equal ones."""
    count = mass.numel()
    # In their order, so that those of a group are neighbors. Rows that have no gradient do not count: with or without
    # them the same rows are chosen.
    rows, rank = mass.abs().sort(descending=True, stable=True).indices[:apart].sort()
    single = valid[rows] & (rank * each < valid.sum())
    starts = torch.arange(0, count + group, group, device=rows.device)
    slot = torch.full_like(valid, -1, dtype=torch.int32)
    slot[rows] = torch.where(single, torch.arange(rows.numel(), dtype=torch.int32, device=rows.device), -1)
    return Chosen(rows, lse[rows], single, slot, torch.searchsorted(rows, starts))


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
    """(G + S, 1): the sums of the tails that q (G, V) of groups, and `single` (S, V), logits of rows, become in place.

    A tail has the columns that are not alive (C, V) in the group's chunk, one in `chunk_groups` groups; that of a group
    is without its single rows'. That of a row which is not valid is 0.
    """
    totals = chosen.lse.new_empty(q.size(0) + single.size(0), 1)
    for group, (first, last) in enumerate(zip(chosen.bounds[:-1].tolist(), chosen.bounds[1:].tolist(), strict=True)):
        tail_columns = alive[group // chunk_groups] == 0
        rows = slice(first, last)
        _, shares = probabilities(single[rows], chosen.lse[rows], chosen.valid[rows], linear_bias, softcap, logit_scale)
        single[rows] = torch.where(tail_columns, shares, 0)
        others = q[group].to(shares.dtype)
        if first < last:
            others = (others - single[rows].sum(0, dtype=others.dtype)).clamp_(min=0)
        q[group] = torch.where(tail_columns, others, 0)
    torch.sum(q, 1, keepdim=True, dtype=totals.dtype, out=totals[: q.size(0)])
    torch.sum(single, 1, keepdim=True, dtype=totals.dtype, out=totals[q.size(0) :])
    return totals


def weigh_tails(
    mass: Tensor, parts: Tensor, chosen: Chosen, group: int, input: Tensor, index: Tensor | None, start: int,
    sums: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(factors, single): what the rows (n,) have of their groups' tails, 0 for single ones, and those (S,) of theirs.

    Row i is row index[start + i] of input, or start + i without `index`. sums (G + S, D) becomes what every tail is
    multiplied with in linear_weight's gradient: the sum of its rows of input, each times its factor.
    """
    count, groups = mass.numel(), parts.size(0) - chosen.rows.numel()
    totals = parts.sum(1)
    inverse = torch.where(totals <= _SMALLEST_SUM, 0, totals.reciprocal())
    factors = mass * inverse[:groups].repeat_interleave(group)[:count]
    factors = torch.where(chosen.slot < 0, factors, 0)
    single = mass[chosen.rows] * inverse[groups:]
    if sums is not None:
        for first in range(groups):
            rows = slice(first * group, min((first + 1) * group, count))
            of_input = slice(start + rows.start, start + rows.stop)
            of_group = input[of_input] if index is None else input[index[of_input]]
            torch.mm(factors[None, rows].to(input.dtype), of_group, out=sums[first : first + 1])
        numbers = start + chosen.rows
        own = input[numbers if index is None else index[numbers]]
        sums[groups:] = own * single.unsqueeze(1)
    return factors, single


def add_tails(
    out: Tensor, factors: Tensor, single: Tensor, slot: Tensor, evens: Tensor | None, table: Tensor, group: int
) -> None:
    """out (n, D) += every row's factor times its row of table: its group's, or its own where it is single.

    table (1 + G + S, D): with `evens` (n,) the first row, times these, is every row's; without there is none.
    """
    extra = int(evens is not None)
    groups = table.size(0) - extra - single.numel()
    for first in range(groups):
        rows = slice(first * group, (first + 1) * group)
        out[rows].addcmul_(factors[rows].unsqueeze(1), table[extra + first])
    singles = (slot >= 0).nonzero().squeeze(1)
    own = slot[singles].long()
    exact = out[singles].to(table.dtype).addcmul_(single[own].unsqueeze(1), table[extra + groups + own])
    out[singles] = exact.to(out.dtype)
    if evens is not None:
        out.addcmul_(evens.unsqueeze(1), table[:1])


def holds_p(logits: Tensor, softcap: float) -> bool:
    """Whether `columns` leaves p in the logits: where nothing is rounded by that, and p·s is p."""
    return logits.dtype == row_dtype(logits.dtype) and not softcap > 0


def probabilities(
    logits: Tensor, lse: Tensor, valid: Tensor, linear_bias: Tensor | None, softcap: float, logit_scale: float
) -> tuple[Tensor, Tensor]:
    """p and p·s, 0 in rows that are not valid; in the logits' place where they may be."""
    z = logits if holds_p(logits, softcap) else logits.to(row_dtype(logits.dtype), copy=True)
    if linear_bias is not None:
        z.add_(linear_bias)
    if logit_scale != 1.0:
        z.mul_(logit_scale)
    slope = None
    if softcap > 0:
        slope = z.div_(softcap).tanh_()
        z = slope * softcap
        slope.square_().neg_().add_(1)
    p = z.sub_(lse.unsqueeze(1)).exp_()
    shares = p if slope is None else slope.mul_(p)
    ignored = (~valid).nonzero().squeeze(1)
    if ignored.numel():
        p.index_fill_(0, ignored, 0)
        shares.index_fill_(0, ignored, 0)
    return p, shares
