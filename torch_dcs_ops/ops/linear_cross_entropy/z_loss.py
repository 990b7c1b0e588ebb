"""What z_loss has added to a loss, of the rows' lse."""

from __future__ import annotations

from torch import Tensor

from ...reference.linear_cross_entropy.loss import normalizer, zeroed_if_empty
from .shift import targets
from .validate import normal_ignore_index


def z_loss_term(
    lse: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    z_loss: float,
    shift: int,
    zero_if_empty: bool,
) -> Tensor:
    """Reduced as the loss, and no part of autograd's graph; lse is 0 in ignored rows."""
    rows = z_loss * lse.detach().square()
    if reduction != "mean":
        return rows if reduction == "none" else rows.sum()
    ignored = normal_ignore_index(ignore_index)
    target = targets(target, int(shift), ignored)
    weight = None if weight is None else weight.detach()
    mean = rows.sum() / normalizer(target.detach(), weight, ignored, rows.dtype)
    return zeroed_if_empty(mean, target, ignored) if zero_if_empty else mean
