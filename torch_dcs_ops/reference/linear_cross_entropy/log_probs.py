"""Log-probabilities of several classes a row, in plain PyTorch over the full logits, with derivatives of every order.

The meaning of `linear_log_probs`, the oracle of its tests, and what the derivatives beyond the first are taken of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, func
from torch.nn import functional

from .loss import Needs
from .rows import row_dtype


class HeadOptions(NamedTuple):
    """What is no tensor in a call, in the schemas' order. The last two mean nothing here."""

    softcap: float | None = None
    logit_scale: float = 1.0
    ignore_index: int = -100
    memory_budget: int | None = None
    logits_dtype: torch.dtype | None = None


def scaled_logits(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, softcap: float | None, logit_scale: float
) -> Tensor:
    """(..., V), float32 for half-precision operands."""
    dtype = row_dtype(input.dtype)
    bias = None if linear_bias is None else linear_bias.to(dtype)
    z = functional.linear(input.to(dtype), linear_weight.to(dtype), bias) * logit_scale
    return z if softcap is None else torch.tanh(z / softcap) * softcap


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None = None,
    options: HeadOptions = HeadOptions(),  # noqa: B008  (immutable)
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(log_probs, entropy, lse, predictions, argmax_log_prob) for input (..., D) and ids (..., K).

    An id that is `ignore_index` has the log-probability 0. A row of no other ids has 0 everywhere but in predictions.
    """
    z = scaled_logits(input, linear_weight, linear_bias, options.softcap, options.logit_scale)
    log_p = z.log_softmax(-1)
    valid = ids != options.ignore_index
    rows = valid.any(-1)
    log_probs = torch.where(valid, log_p.gather(-1, torch.where(valid, ids, 0)), 0)
    finite = log_p.masked_fill(log_p == -torch.inf, 0)
    entropy = torch.where(rows, -(log_p.exp() * finite).sum(-1), 0)
    predictions = z.argmax(-1)
    best = torch.where(rows, log_p.gather(-1, predictions.unsqueeze(-1)).squeeze(-1), 0)
    return log_probs, entropy, torch.where(rows, z.logsumexp(-1), 0), predictions, best


def linear_log_probs_gradients(
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    linear_bias: Tensor | None,
    options: HeadOptions,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, linear_weight and linear_bias, differentiable in turn; empty ones for what is not needed."""
    dtype = row_dtype(input.dtype)
    upstream = [None if grad is None else grad.to(dtype) for grad in (grad_log_probs, grad_entropy, grad_lse)]
    operands = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    wanted = {name: operands[name] for name, need in needs._asdict().items() if need}

    def outputs(values: dict[str, Tensor]) -> tuple[Tensor, ...]:
        results = linear_log_probs(ids=ids, options=options, **(operands | values))  # type: ignore[arg-type]
        return tuple(rows for rows, grad in zip(results[:3], upstream, strict=True) if grad is not None)

    cotangents = tuple(grad for grad in upstream if grad is not None)
    if wanted and cotangents:
        (found,) = func.vjp(outputs, wanted)[1](cotangents)
    else:
        found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items() if tensor is not None}
    empty = input.new_empty(0)
    return found.get("input", empty), found.get("linear_weight", empty), found.get("linear_bias", empty)


def linear_top_k(
    input: Tensor, linear_weight: Tensor, k: int, linear_bias: Tensor | None, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """(log_probs, indices) of the k largest of every row, in descending order."""
    z = scaled_logits(input, linear_weight, linear_bias, options.softcap, options.logit_scale)
    log_probs, indices = z.log_softmax(-1).topk(k, -1)
    return log_probs, indices
