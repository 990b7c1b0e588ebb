"""The divergence of two linear heads in plain PyTorch over the full logits; differentiable any number of times.

With p the student's and q the teacher's softmax, m = beta·q + (1 - beta)·p:

    forward     sum q·(log q - log p)
    reverse     sum p·(log p - log q)
    jsd         beta·sum q·(log q - log m) + (1 - beta)·sum p·(log p - log m)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, func

from .log_probs import scaled_logits
from .rows import row_dtype


class Divergence(NamedTuple):
    """What is no tensor in a call, in the schemas' order. The last one means nothing here."""

    direction: str = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0
    ignore_index: int = -100
    memory_budget: int | None = None


NAMES = ("input", "linear_weight", "teacher_input", "teacher_weight", "linear_bias", "teacher_bias")


def linear_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None,
    teacher_bias: Tensor | None,
    target: Tensor | None,
    options: Divergence,
) -> Tensor:
    """Of every row, 0 where target is `ignore_index`."""
    z = scaled_logits(input, linear_weight, linear_bias, options.softcap, options.logit_scale)
    teacher = scaled_logits(
        teacher_input, teacher_weight, teacher_bias, options.teacher_softcap, options.teacher_logit_scale
    )
    dtype = row_dtype(input.dtype)
    log_p, log_q = ((values / options.temperature).log_softmax(-1).to(dtype) for values in (z, teacher))
    rows = divergence(log_p, log_q, options.direction, options.beta)
    return rows if target is None else torch.where(target != options.ignore_index, rows, 0)


def divergence(log_p: Tensor, log_q: Tensor, direction: str, beta: float) -> Tensor:
    if direction == "forward":
        return relative_entropy(log_q, log_p)
    if direction == "reverse":
        return relative_entropy(log_p, log_q)
    log_m = log_mixture(log_p, log_q, beta)
    return beta * relative_entropy(log_q, log_m) + (1 - beta) * relative_entropy(log_p, log_m)


def relative_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum p·(log p - log q); a class that p does not have counts 0."""
    return (log_p.exp() * torch.where(log_p == -torch.inf, 0, log_p - log_q)).sum(-1)


def log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    neither = (log_p == -torch.inf) & (log_q == -torch.inf)
    log_p, log_q = log_p.masked_fill(neither, 0), log_q.masked_fill(neither, 0)
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


def linear_kl_div_gradients(
    grad: Tensor,
    operands: tuple[Tensor | None, ...],
    target: Tensor | None,
    options: Divergence,
    needs: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """Gradients of the operands, in the order of NAMES, differentiable in turn; empty ones for what is not needed."""
    wanted = {name: tensor for name, tensor, need in zip(NAMES, operands, needs, strict=True) if need}

    def rows(values: dict[str, Tensor]) -> Tensor:
        merged = dict(zip(NAMES, operands, strict=True)) | values
        return linear_kl_div(target=target, options=options, **merged)  # type: ignore[arg-type]

    found = func.vjp(rows, wanted)[1](grad.to(row_dtype(_first(operands).dtype)))[0] if wanted else {}
    return tuple(found.get(name, grad.new_empty(0)) for name in NAMES)


def _first(operands: tuple[Tensor | None, ...]) -> Tensor:
    assert operands[0] is not None
    return operands[0]
