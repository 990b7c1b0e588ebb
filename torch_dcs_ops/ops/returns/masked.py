"""Returns of sequences some of whose steps do not count, as if these were not there.

Such a step passes on what is carried: its gate is 1, it adds nothing, and the value of a next state is that of the next
step that counts. So the fused op serves, with discounts of every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...reference.returns import TemporalDifferenceCall
from ...reference.scan import align_gates
from .._common.autocast import autocast_operands
from .._common.validate import FLOATING
from ..scan.discounted_cumsum import discounted_cumsum
from ..scan.packed import check_cu_seqlens, check_of_sequences
from .call import ON_POLICY, Operands, discount, fused_returns, promoted
from .formulas import as_bool, either, next_values_of
from .packed import packed_operands
from .validate import check_mask, check_return_types, check_returns


class _Counted(NamedTuple):
    """A call by next_values, in which steps that do not count are neutral."""

    rewards: Tensor
    values: Tensor | None  # as they were given
    after: Tensor
    terminated: Tensor | None
    truncated: Tensor | None
    rates: tuple[Tensor, Tensor]
    counts: Tensor
    dim: int


def masked_gae(
    op: str,
    operands: Operands,
    rates: tuple[Any, Any],
    mask: Tensor,
    cu_seqlens: Tensor | None,
    time_dim: int,
    check_discounts: bool,
) -> tuple[Tensor, Tensor]:
    c = _counted(op, operands, rates, mask, cu_seqlens, time_dim, check_discounts, "gae_lambda")
    assert c.values is not None
    values = c.values.masked_fill(~c.counts, 0.0)
    advantages, returns, _ = fused_returns(
        op, (c.rewards, values, c.after, None, c.terminated, c.truncated), c.rates, ON_POLICY, c.dim,
        (True, True, False), False, "gae_lambda",
    )  # fmt: skip
    return advantages, torch.where(c.counts, returns, advantages + c.values)


def masked_lambda_returns(
    op: str,
    operands: Operands,
    rates: tuple[Any, Any],
    mask: Tensor,
    cu_seqlens: Tensor | None,
    time_dim: int,
    check_discounts: bool,
) -> Tensor:
    c = _counted(op, operands, rates, mask, cu_seqlens, time_dim, check_discounts, "lambda_")
    # Behind the last step that counts nothing does: it bootstraps as the last one of all.
    left = discounted_cumsum(c.counts.double(), 1.0, dim=c.dim, cu_seqlens=cu_seqlens)
    ends = either(c.truncated, c.counts & (left == 1))
    operands = (c.rewards, None, c.after, None, c.terminated, ends)
    return fused_returns(op, operands, c.rates, ON_POLICY, c.dim, (False, True, False), False)[1]


def _counted(
    op: str,
    operands: Operands,
    rates: tuple[Any, Any],
    mask: Tensor,
    cu_seqlens: Tensor | None,
    time_dim: int,
    check_discounts: bool,
    lambda_name: str,
) -> _Counted:
    rewards, values, next_values, bootstrap_value, terminated, truncated = operands
    gamma = discount(op, "gamma", rates[0], rewards, check_discounts)
    trace = discount(op, lambda_name, rates[1], rewards, check_discounts)
    check_return_types(op, rewards, time_dim, values=values, next_values=next_values, bootstrap_value=bootstrap_value,
                       terminated=terminated, truncated=truncated, mask=mask, gamma=gamma[0],
                       **{lambda_name: trace[0]})  # fmt: skip
    *cast, mask = autocast_operands(*operands, mask)
    operands, _, _ = promoted(tuple(cast), None, time_dim if cu_seqlens is None else None)
    rewards, values, next_values, bootstrap_value, terminated, truncated = operands
    mask = as_bool(mask) if mask.dtype in FLOATING else mask
    call = TemporalDifferenceCall(
        rewards, values, next_values, bootstrap_value if cu_seqlens is None else None, terminated, truncated, *gamma,
        *trace, dim=time_dim, need_advantages=lambda_name == "gae_lambda", need_targets=True,
    )  # fmt: skip
    dim = check_returns(op, call, lambda_name=lambda_name)
    check_mask(op, mask, rewards)
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, "rewards", rewards, dim)
        if bootstrap_value is not None:
            check_of_sequences(op, "bootstrap_value", bootstrap_value, "rewards", rewards, dim, cu_seqlens)

    counts = as_bool(mask)
    skipped = ~counts
    rewards = rewards.masked_fill(skipped, 0.0)
    terminated, truncated = (None if flag is None else as_bool(flag) & counts for flag in (terminated, truncated))
    after, known = next_values, None
    if after is None:
        known = torch.zeros_like(rewards) if values is None else values.masked_fill(skipped, 0.0)
        known = discounted_cumsum(known, 1.0, dim=dim, initial=bootstrap_value, reset=counts, cu_seqlens=cu_seqlens)
    if cu_seqlens is not None:
        operands = (rewards, known, after, bootstrap_value, None, truncated)
        _, _, after, _, _, truncated = packed_operands(op, operands, cu_seqlens, dim)
    elif known is not None:
        after = next_values_of(rewards, known, bootstrap_value, dim)
        after = after if truncated is None else after.masked_fill(truncated, 0.0)
    assert after is not None
    dtype = torch.promote_types(rewards.dtype, torch.float32)

    def neutral(rate: Tensor | None, number: float) -> Tensor:
        if rate is None:
            return torch.ones_like(rewards, dtype=dtype).masked_fill(counts, number)
        return torch.where(counts, align_gates(rate.to(rewards.device, dtype), rewards.dim(), dim), 1.0)

    rates = neutral(*gamma), neutral(*trace)
    return _Counted(rewards, values, after.masked_fill(skipped, 0.0), terminated, truncated, rates, counts, dim)
