"""Rows of logits whose classes are shared out among ranks: what the ranks tell each other, and a rank's gradient.

Rank r holds the logits z of its classes. With lse_r, H_r (entropy) and log p_r of the softmax over these alone, and

    lse = logsumexp over r of lse_r        delta_r = lse - lse_r        s_r = exp(-delta_r)

the whole softmax has

    log p = log p_r - delta_r              H = Σ_r s_r·(H_r + delta_r)
    Σ_j w_j·(lse - z_j) = Σ_r (Σ_{j of r} w_j·(lse_r - z_j) + delta_r·Σ_{j of r} w_j)       (label smoothing)

So one all-gather of a few numbers a row is all, and everybody combines them in the order of the ranks: the same bits
everywhere. delta is log1p of the other ranks' part, not the logarithm of a sum: of a target that is certain it is all
there is of the loss.

With hit_k, the gradient of -log p at id k, and e that of H, the gradient of z_j is

    p_j·(rest + Σ_k hit_k) - e·p_j·(log p_j + H) - even·w_j - Σ_{k: id_k = j} hit_k

which the row op makes of rank r's logits for other upstream gradients: p = s_r·p_r. The columns of the ids are formed
apart, as in ops/linear_cross_entropy/ids.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import _registry
from ...ops.linear_cross_entropy.ids import IGNORED, Call, columns_of, statistics, sums_of_equal_ids, values_at
from ...reference.linear_cross_entropy.rows import row_dtype
from ..common import Ranks
from .targets import assert_one_owner

_ELSEWHERE = torch.inf  # instead of a log-probability that another rank has


class Slice(NamedTuple):
    """The classes of this rank, [first, first + size) of `classes`, and their weights in the rows' dtype."""

    first: int
    size: int
    classes: int
    weight: Tensor | None

    def local(self, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """(ids in this slice, 0 for others; which they are)."""
        ids = target - self.first
        here = (target != ignore_index) & (ids >= 0) & (ids < self.size)
        return torch.where(here, ids, 0), here

    def weights_at(self, target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
        """The class weights of the targets, 0 for others."""
        ids, here = self.local(target, ignore_index)
        if self.size == 0:
            return target.new_zeros(target.shape, dtype=dtype)
        values = target.new_ones((), dtype=dtype) if self.weight is None else self.weight[ids]
        return torch.where(here, values, 0)


class Wanted(NamedTuple):
    spread: bool  # label smoothing
    entropy: bool
    predictions: bool


class Statistics(NamedTuple):
    """Of rows, in the rows' dtype. What is not wanted has no elements."""

    lse: Tensor
    log_probs: Tensor  # (n, K) of the ids
    weight: Tensor  # (n,) of the first id's class
    entropy: Tensor
    spread: Tensor  # Σ_j w_j·(lse - z_j)
    predictions: Tensor  # the classes' numbers over all ranks, int64


class Own(NamedTuple):
    """What the gradient needs of this rank's own rows."""

    delta: Tensor
    entropy: Tensor


def combined(every: Tensor, target: Tensor, ignore_index: int, wanted: Wanted, ranks: Ranks) -> tuple[Statistics, Own]:
    """The whole softmax's, for target (n, K), from every rank's columns (ranks, columns, n) of `columns_of_slice`."""
    ids = target.size(1)
    assert_one_owner(every[:, 1 : 1 + ids], _ELSEWHERE, target, ignore_index)
    lse_of, columns = every[:, 0], iter(range(1, every.size(1)))
    top, holder = lse_of.max(0, keepdim=True)
    others = (lse_of - top).exp().scatter(0, holder, 0).sum(0)
    log_sum = torch.log1p(others)
    delta_of = log_sum - (lse_of - top)
    has_nothing = delta_of == torch.inf  # no classes, or none but -inf
    log_probs = []
    for column in [next(columns) for _ in range(ids)]:
        value = every[:, column]
        of_rank = torch.where(has_nothing, -torch.inf, value - delta_of)
        log_probs.append(torch.where(value == _ELSEWHERE, 0, of_rank).sum(0))
    weight = every[:, next(columns)].sum(0)
    none = every.new_empty(0)
    entropy, spread, own_entropy = none, none, none
    if wanted.entropy:
        entropy_of = torch.where(has_nothing, 0, every[:, next(columns)])
        own_entropy = entropy_of[ranks.rank]
        share, finite = torch.exp(-delta_of), torch.where(has_nothing, 0, delta_of)
        entropy = (share * (entropy_of + finite)).sum(0)
    if wanted.spread:
        spread_of, weight_of = every[:, next(columns)], every[:, next(columns)]
        spread = torch.where(weight_of == 0, spread_of, spread_of + weight_of * delta_of).sum(0)
    predictions = every.new_empty(0, dtype=torch.int64)
    if wanted.predictions:
        best, number = every[:, next(columns)], every[:, next(columns)]
        # The first of equal ones, as in one process.
        predictions = number.gather(0, best.argmax(0, keepdim=True)).squeeze(0).long()
    lse = top.squeeze(0) + log_sum
    whole = Statistics(lse, torch.stack(log_probs, 1), weight, entropy, spread, predictions)
    return whole, Own(delta_of[ranks.rank].contiguous(), own_entropy.contiguous())


def columns_of_slice(
    call: Call, logits: Tensor | None, target: Tensor, ignore_index: int, of: Slice, wanted: Wanted
) -> Tensor:
    """(columns, n): lse, log-probabilities of the ids (n, K), the first one's weight, and what is wanted beyond.

    logits (n, V of the slice), which stay as they are; None: the slice is empty, and adds nothing to any sum.
    """
    dtype = row_dtype(call.input.dtype)
    ids, here = of.local(target, ignore_index)
    weight = of.weights_at(target[:, 0], ignore_index, dtype)
    nothing = target.new_zeros(target.size(0), dtype=dtype)
    if logits is None:
        found = [nothing - torch.inf, *(nothing + _ELSEWHERE for _ in range(target.size(1))), weight]
        found += [nothing] * (wanted.entropy + 2 * wanted.spread)
        return torch.stack(found + ([nothing - torch.inf, nothing] if wanted.predictions else []))
    _, log_probs, (_, lse, predictions, entropy) = statistics(call, logits, ids, wanted.predictions, wanted.entropy)
    found = [lse, *torch.where(here, log_probs, _ELSEWHERE).unbind(1), weight]
    if wanted.entropy:
        found.append(entropy)
    if wanted.spread:
        total = float(of.size) if of.weight is None else of.weight.sum()
        found += [_spread(call, logits, ids[:, 0], of) * of.size, nothing + total]
    if wanted.predictions:
        # Numbers of classes are exact as float32 up to 2**24.
        best = values_at(logits, predictions.unsqueeze(1), call.linear_bias, call.options).squeeze(1)
        found += [best, (predictions + of.first).to(dtype)]
    return torch.stack(found)


def _spread(call: Call, logits: Tensor, shown: Tensor, of: Slice) -> Tensor:
    """The mean over the slice of w_j·(lse_r - z_j): what label smoothing of 1 makes the loss."""
    loss: Tensor = _registry.cross_entropy_rows_(
        logits, shown, call.linear_bias, of.weight, None, None, None, IGNORED, 1.0, call.options.softcap or 0.0,
        call.options.logit_scale, 0.0, False, False, False,
    )[0]  # fmt: skip
    return loss


class RowUpstream(NamedTuple):
    """Gradients in the rows' dtype, 0 for ignored rows and ids."""

    hit: Tensor  # (n, K): of -log p at the ids, of all ranks
    rest: Tensor  # (n,): of the lse, but for hit
    entropy: Tensor | None  # (n,)
    even: Tensor | None  # (n,): of every class's w_j·(lse - z_j), label smoothing


def to_gradient_(
    call: Call,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    of: Slice,
    upstream: RowUpstream,
    whole: Statistics,
    own: Own,
) -> None:
    """Turns the logits (n, V of the slice) into their gradient; rows of no id that counts get 0."""
    ids, here = of.local(target, ignore_index)
    counts = (target != ignore_index).any(1)
    dead = own.delta == torch.inf
    delta = torch.where(dead, 0, own.delta)
    share = torch.exp(-own.delta)
    factor = upstream.rest + upstream.hit.sum(1)
    of_lse, of_entropy = share * factor, None
    if upstream.entropy is not None:
        of_entropy = upstream.entropy * share
        of_lse = of_lse - of_entropy * (whole.entropy - delta - own.entropy)
    smoothing, of_loss = 0.0, of_lse.new_zeros(1)
    if upstream.even is not None:
        smoothing, of_loss = 1.0, upstream.even * of.size
        of_lse = of_lse - upstream.even * (float(of.size) if of.weight is None else of.weight.sum())
    columns = columns_of(logits, ids, call.linear_bias, call.options)
    shown = torch.where(counts, columns.target, IGNORED)
    softcap, scale = call.options.softcap, call.options.logit_scale
    # Another pass where smoothing takes the loss's place: the columns need a log-probability of this slice.
    own_loss = None
    if smoothing:
        own_loss = call.rows(logits, columns.target, (None, None, None), False, False, False)[0]
    loss = _registry.cross_entropy_rows_(
        logits, shown, call.linear_bias, of.weight if smoothing else None, of_loss.contiguous(), of_lse.contiguous(),
        None if of_entropy is None else of_entropy.contiguous(), IGNORED, smoothing, softcap or 0.0, scale, 0.0, True,
        False, False,
    )[0]  # fmt: skip
    log_p = columns.log_probs(loss if own_loss is None else own_loss) - delta.unsqueeze(1)
    p = log_p.exp()
    sums = sums_of_equal_ids(columns.ids, torch.where(here, upstream.hit, 0))
    value = p * (factor.unsqueeze(1) - sums) + sums * torch.expm1(log_p)
    if upstream.entropy is not None:
        finite = log_p.masked_fill(log_p == -torch.inf, 0)
        value = value - upstream.entropy.unsqueeze(1) * p * (finite + whole.entropy.unsqueeze(1))
    if upstream.even is not None:
        even = upstream.even.unsqueeze(1)
        value = value - (even if of.weight is None else even * of.weight[columns.ids])
    value = value * (scale if softcap is None else scale * (1 - (columns.z / softcap).square()))
    logits.scatter_(1, columns.ids, torch.where(counts.unsqueeze(1), value, 0).to(logits.dtype))
    if call.linear_bias is not None:
        # A bias of -inf masks classes, perhaps all of a slice: no softmax of theirs is a number.
        logits.masked_fill_((dead & counts).unsqueeze(1), 0)
