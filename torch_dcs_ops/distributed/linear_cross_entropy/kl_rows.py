"""The divergence of rows of two heads whose classes are shared out among ranks: what the ranks tell each other.

With top the largest z of a head's classes and total = log Σ exp(z - top), of each rank's and of all of them,

    delta_r = (total - total_r) + (top - top_r)        log p = log p_r - delta_r        s_r = exp(-delta_r)

and the divergence of q from p, of which rank r has that of its own two softmaxes,

    Σ q·(log q - log p) = Σ_r s_r(q)·(KL_r + delta_r(p) - delta_r(q))

So one all-gather of five numbers a row is all for "forward" and "reverse". The mixture of "jsd" needs both deltas
first: one of four, and another of this rank's part of its two sums. Everybody combines them in the order of the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.linear_cross_entropy.kl_rows import KlRows
from ...reference.linear_cross_entropy.kl_slices import COLUMNS
from ..common import Ranks

_NORMALIZERS = 4
# Of a direction's compared head (index of its columns, and of its sum): whose softmax weighs the sum.
_WEIGHS = {"forward": 1, "reverse": 0}
Kernels = Any  # reference/linear_cross_entropy/kl_slices.py, or what has its functions


def slice_columns(call: KlRows | None, rows: int, like: Tensor, direction: str, kernels: Kernels) -> Tensor:
    """(columns, rows) of a rank to tell; call None: it has no classes."""
    found = like.new_zeros((COLUMNS, rows)) if call is None else kernels.statistics(call)
    if call is None:
        found[0:_NORMALIZERS:2], found[1:_NORMALIZERS:2] = torch.finfo(found.dtype).min, -torch.inf
    if direction == "jsd":
        return found[:_NORMALIZERS]
    index = _NORMALIZERS + _WEIGHS[direction]
    return torch.cat((found[:_NORMALIZERS], found[index : index + 1]))


def _whole(top_of: Tensor, total_of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A head's normalizers over all ranks, and every rank's delta, from every rank's (ranks, n)."""
    top = top_of.amax(0)
    below = top_of - top
    total = (below + total_of).exp().sum(0).log()
    return top, total, (total - total_of) - below


def known_of(columns: Tensor, direction: str, ranks: Ranks) -> Tensor:
    """(COLUMNS, n): what is known of the whole, from every rank's columns; of "jsd" but for the sums."""
    every = ranks.gather(columns).unbind(1)
    known = columns.new_zeros((COLUMNS, columns.size(1)))
    deltas = []
    for head in (0, 1):
        known[2 * head], known[2 * head + 1], delta = _whole(every[2 * head], every[2 * head + 1])
        deltas.append(delta)
    if direction != "jsd":
        own = _WEIGHS[direction]
        weighing, other = deltas[own], deltas[1 - own]
        part = torch.where(other == torch.inf, torch.inf, every[_NORMALIZERS] + (other - weighing))
        part = torch.where(weighing == torch.inf, 0, torch.exp(-weighing) * part)
        known[_NORMALIZERS + own] = part.sum(0)
    return known


def add_mixture_sums_(known: Tensor, call: KlRows | None, ranks: Ranks, kernels: Kernels) -> None:
    """The sums of "jsd", by an all-gather of two numbers a row."""
    own = torch.zeros_like(known[_NORMALIZERS:]) if call is None else kernels.mixture_sums(call, known)
    known[_NORMALIZERS:] = ranks.gather(own).sum(0)


def divergences(known: Tensor, direction: str, beta: float) -> Tensor:
    of_student, of_teacher = known[_NORMALIZERS], known[_NORMALIZERS + 1]
    if direction == "jsd":
        return beta * of_teacher + (1 - beta) * of_student
    return of_teacher if direction == "forward" else of_student
