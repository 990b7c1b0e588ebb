"""A plain softmax over full logits as the oracle of linear_policy_loss, and losses of rows to give to both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linear_cross_entropy.oracle import Problem, leaf

KINDS: dict[str, Callable[..., Tensor]] = {"random": torch.randn, "ones": torch.ones, "zeros": torch.zeros}


def surrogate(
    log_probs: Tensor, entropy: Tensor | None, old: Tensor, advantages: Tensor, table: Tensor, beta: Any, scale: float
) -> Tensor:
    """Some of everything: several ids, both statistics, arguments of several dimensions, one for all rows, a number."""
    if log_probs.dim() > 1:
        count = log_probs.size(1)
        log_probs = (log_probs * table[:, :count]).sum(1) / max(4, count)
    ratio = (log_probs - 0.1 * old).exp()
    loss = (
        -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        + table[:, 0].square() * log_probs
        + 0.1 * beta * old
    )
    return loss if entropy is None else loss - beta * scale * entropy * old.cos()


def policy(log_probs: Tensor, entropy: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * log_probs - 0.1 * entropy


def plain(
    fn: Callable[..., Tensor], x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, *args: Any,
    reduction: str = "mean", ignore_index: int | None = -100, need_entropy: bool = True, **options: Any,
) -> Tensor:  # fmt: skip
    """Over the rows that count, one after another."""
    ignored = -100 if ignore_index is None else ignore_index
    logits = functional.linear(x, w, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * options.get("logit_scale", 1.0)
    if cap := options.get("softcap"):
        logits = torch.tanh(logits / cap) * cap
    lead = x.shape[:-1]
    ids = (target if target.dim() == x.dim() else target.unsqueeze(-1)).reshape(lead.numel(), -1)
    log_p = logits.reshape(lead.numel(), w.size(0)).log_softmax(-1)
    counts = (ids != ignored).any(1)
    args = tuple(
        arg.expand(*lead, *arg.shape[len(lead) :]).reshape(lead.numel(), *arg.shape[len(lead) :])
        if isinstance(arg, Tensor) and arg.dim()
        else arg
        for arg in args
    )
    losses = []
    for row in range(lead.numel()):
        if not counts[row]:
            losses.append(log_p.new_zeros(()))
            continue
        valid = ids[row] != ignored
        log_probs = torch.where(valid, log_p[row, torch.where(valid, ids[row], 0)], 0)
        log_probs = log_probs.unsqueeze(0) if target.dim() == x.dim() else log_probs
        entropy = -(log_p[row].exp() * log_p[row]).sum().unsqueeze(0) if need_entropy else None
        of_row = (arg[row : row + 1] if isinstance(arg, Tensor) and arg.dim() else arg for arg in args)
        losses.append(fn(log_probs, entropy, *of_row)[0])
    rows = torch.stack(losses) if losses else log_p.new_zeros(0)
    return {"none": rows.reshape(lead), "sum": rows.sum(), "mean": rows.sum() / counts.sum()}[reduction]


def ids_of(problem: Problem, count: int | None) -> Tensor:
    """(…, K) with the target first, equal ids in every row, and some ignored ones alone and with the whole row."""
    if count is None:
        return problem.target
    shape = (*problem.target.shape, count)
    ids = torch.randint(13, shape, generator=torch.Generator().manual_seed(5), device="cpu")
    ids = ids.to(problem.target.device)
    ids[..., -1] = ids[..., 0] = problem.target
    ids = ids.masked_fill((problem.target == -100).unsqueeze(-1), -100)
    if count > 2:
        ids[..., 0, 1] = -100
    return ids


def arguments(
    kind: str, lead: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float64, most_ids: int = 8
) -> tuple[Any, ...]:
    draw = KINDS[kind]
    of_sequences = (*lead[:1], *(1,) * (len(lead) - 1))
    old, advantages, table = (draw(shape, dtype=dtype) for shape in (lead, of_sequences, (*lead, most_ids)))
    return leaf(old), advantages, leaf(table), leaf(torch.tensor(0.3, dtype=dtype)), 2.0
