"""Generalized advantage estimation where time is shared out among ranks: distributed/scan around the next values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._common import autocast
from ..ops._common.validate import check_flag, fail
from ..ops.returns.call import discount
from ..ops.returns.formulas import discounts_of, one_step_errors
from ..ops.returns.validate import check_one_bootstrap, check_return_types, check_returns
from ..reference.returns import TemporalDifferenceCall
from .common import check_not_differentiated_again
from .scan.discounted_cumsum import Layout, check_same, check_segments, layout_of, scanned

_OP = "sequence_parallel_gae"


class _NextValues(torch.autograd.Function):
    """Of every segment of time the first value of the next one, bootstrap_value behind the last: (segments, *rows)."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, bootstrap_value: Tensor, has_steps: bool, layout: Layout) -> Tensor:
        ranks = layout.ranks
        # A rank without steps passes on what comes behind it.
        mark = torch.full_like(first, float(has_steps))
        values, marks = ranks.gather(torch.stack((first, mark))).unbind(1)
        fold = layout.fold(from_the_end=True)
        into, _ = fold.carried(values, torch.ones_like(values), marks, bootstrap_value.expand(first.shape[1:]))
        ctx.layout, ctx.shape = layout, bootstrap_value.shape
        ctx.save_for_backward(marks)
        return into[ranks.rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        check_not_differentiated_again(_OP)
        (marks,) = ctx.saved_tensors
        ranks = ctx.layout.ranks
        every = ranks.gather(grad)
        nothing = torch.zeros_like(every[0, 0])
        into, behind = ctx.layout.fold(from_the_end=False).carried(every, torch.ones_like(every), marks, nothing)
        of_first = torch.where(marks[ranks.rank] != 0, into[ranks.rank], 0)
        return of_first, behind.sum_to_size(ctx.shape), None, None


def sequence_parallel_gae(
    rewards: Tensor,
    values: Tensor,
    *,
    group: dist.ProcessGroup,
    next_values: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    terminated: Tensor | None,
    truncated: Tensor | None = None,
    gamma: float | Tensor = 0.99,
    gae_lambda: float | Tensor = 0.95,
    time_dim: int = 0,
    zigzag: bool = False,
    check_discounts: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`torch_dcs_ops.returns.gae` where every rank of a group holds successive steps along `time_dim`.

    Args:
        rewards, values, next_values, terminated, truncated: this rank's steps, any number of them, 0 too.
        bootstrap_value: V behind the last step of all ranks, the same on all of them; the value behind a rank's last
            step is the next rank's first, which takes an all-gather of its own.
        gamma, gae_lambda: numbers, tensors for every row that are the same on all ranks, or for each of this rank's
            steps.
        group, zigzag: see :func:`sequence_parallel_discounted_cumsum`.

    Returns:
        advantages and returns of this rank's steps, in rewards' dtype.

    Raises:
        IndexError, RuntimeError, TypeError, ValueError: as of returns.gae, on all ranks alike in the first eager call
            of its kind.
    """
    rates = {"gamma": gamma, "gae_lambda": gae_lambda}
    operands = {
        "rewards": rewards, "values": values, "next_values": next_values, "bootstrap_value": bootstrap_value,
        "terminated": terminated, "truncated": truncated,
    }  # fmt: skip
    operands |= {name: rate if isinstance(rate, Tensor) else None for name, rate in rates.items()}

    def check() -> None:
        of_time = {name: operands[name] for name in ("values", "next_values", "terminated", "truncated")}
        check_flag(_OP, "zigzag", zigzag)
        check_return_types(_OP, rewards, time_dim, bootstrap_value=bootstrap_value, **of_time)
        check_one_bootstrap(_OP, next_values, bootstrap_value)
        gammas, traces = (discount(_OP, name, rate, rewards, check_discounts) for name, rate in rates.items())
        call = TemporalDifferenceCall(
            rewards, values, next_values, bootstrap_value, terminated, truncated, *gammas, *traces, dim=time_dim,
            need_advantages=True,
        )  # fmt: skip
        for name, rate in rates.items():
            if isinstance(rate, Tensor) and rate.requires_grad:
                fail(_OP, f"{name} must not require a gradient where time is shared out")
        check_segments(_OP, rewards, check_returns(_OP, call, lambda_name="gae_lambda"), zigzag)

    same = {name: "a tensor" if isinstance(rate, Tensor) else str(rate) for name, rate in rates.items()}
    check_same(_OP, group, operands, time_dim, {**same, "time_dim": time_dim, "zigzag": zigzag}, check)
    dim = time_dim % rewards.dim()
    layout = layout_of(_OP, group, zigzag)
    r, v, after, behind = autocast.autocast_operands(rewards, values, next_values, bootstrap_value)
    if after is None:
        after = _next_values(v, behind, layout, dim)
        if truncated is not None:
            after = torch.where(truncated != 0, 0, after)
    gammas, traces = (discount(_OP, name, rate, rewards, check_discounts) for name, rate in rates.items())
    call = TemporalDifferenceCall(r, v, after, None, terminated, truncated, *gammas, *traces, dim=dim)
    wide = autocast.widened(r)
    gate = discounts_of(call, wide).gate
    ends = [flag != 0 for flag in (terminated, truncated) if flag is not None]
    reset = None if not ends else ends[0] if len(ends) == 1 else ends[0] | ends[1]
    advantages = scanned(one_step_errors(call), gate, layout, dim, "right", None, reset)
    return advantages.to(r.dtype), (advantages + v).to(r.dtype)


def _next_values(values: Tensor, behind: Tensor, layout: Layout, dim: int) -> Tensor:
    """The value behind every step; `behind` is that behind the last one of all ranks."""
    segments = layout.split(values, dim)
    steps = segments.size(dim + 1)
    first = segments.select(dim + 1, 0) if steps else segments.sum(dim + 1)
    nexts = _NextValues.apply(first, behind, steps > 0, layout)  # type: ignore[no-untyped-call]
    # Of nothing too, as all ranks' backwards communicate.
    last = nexts.unsqueeze(dim + 1).narrow(dim + 1, 0, min(steps, 1))
    return layout.joined(torch.cat((segments.narrow(dim + 1, min(steps, 1), max(steps - 1, 0)), last), dim + 1), dim)
