"""The loss of a linear layer's logits in plain PyTorch over the full logits, differentiable any number of times.

The meaning of every option, the oracle of the tests, and what the derivatives beyond the first are taken of. Logits
and everything behind them are in float32 for half-precision inputs (float64 for float64), and the result stays so.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, func
from torch.nn import functional

from .rows import row_dtype


class Options(NamedTuple):
    """What is no tensor in a call of the private ops, in their schemas' order. The last four mean nothing here."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0
    grad_filter_eps: float | None = None
    memory_budget: int | None = None
    accumulate_dtype: torch.dtype | None = None
    logits_dtype: torch.dtype | None = None


class Needs(NamedTuple):
    """Of which operands the gradient is wanted."""

    input: bool = False
    linear_weight: bool = False
    linear_bias: bool = False


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    options: Options = Options(),  # noqa: B008  (immutable)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, predictions, entropy) for input (..., D), linear_weight (V, D), target (...) or (..., V).

    The last three have a value per row. Rows whose target is `ignore_index` have the loss, lse and entropy 0.
    """
    dtype = row_dtype(input.dtype)
    bias = None if linear_bias is None else linear_bias.to(dtype)
    logits = functional.linear(input.to(dtype), linear_weight.to(dtype), bias)
    return cross_entropy(logits, target, weight, options)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`linear_cross_entropy` from the logits (..., V), before logit_scale and softcap, on."""
    dtype = logits.dtype
    logits = logits * options.logit_scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    weight = None if weight is None else weight.to(dtype)
    lse, log_p = logits.logsumexp(-1), logits.log_softmax(-1)
    valid = _valid(target, options.ignore_index)
    loss = _row_losses(log_p, target, weight, valid, options)
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    # p·log p is 0 where p is 0, and so are its derivatives.
    finite = log_p.masked_fill(log_p == -torch.inf, 0)
    entropy = -(log_p.exp() * finite).sum(-1)
    if valid is not None:
        loss, lse, entropy = (torch.where(valid, rows, 0) for rows in (loss, lse, entropy))
    return reduce(loss, target, weight, options), lse, logits.argmax(-1), entropy


def linear_cross_entropy_gradients(
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: Options,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, linear_weight and linear_bias, differentiable in turn; empty ones for what is not needed."""
    dtype = row_dtype(input.dtype)
    upstream = [None if grad is None else grad.to(dtype) for grad in (grad_loss, grad_lse, grad_entropy)]
    operands = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    wanted = {name: operands[name] for name, need in needs._asdict().items() if need}

    def outputs(values: dict[str, Tensor]) -> tuple[Tensor, ...]:
        merged = operands | values
        loss, lse, _, entropy = linear_cross_entropy(target=target, weight=weight, options=options, **merged)  # type: ignore[arg-type]
        return tuple(rows for rows, grad in zip((loss, lse, entropy), upstream, strict=True) if grad is not None)

    cotangents = tuple(grad for grad in upstream if grad is not None)
    if wanted and cotangents:
        pullback = func.vjp(outputs, wanted)[1]
        (found,) = pullback(cotangents)
    else:
        found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items() if tensor is not None}
    empty = input.new_empty(0)
    return found.get("input", empty), found.get("linear_weight", empty), found.get("linear_bias", empty)


def reduce(loss: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> Tensor:
    """The losses of rows, reduced."""
    if options.reduction == "none":
        return loss
    total = loss.sum()
    return total if options.reduction == "sum" else total / normalizer(target, weight, options.ignore_index, loss.dtype)


def normalizer(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype, keep_dims: int = 0
) -> Tensor:
    """What a mean divides by: the weights of the valid targets, or the number of rows for class probabilities.

    One value for each entry of the first `keep_dims` dimensions.
    """
    if target.is_floating_point():
        return target.new_full(target.shape[:keep_dims], math.prod(target.shape[keep_dims:-1]), dtype=dtype)
    valid = target != ignore_index
    counted = valid if weight is None else torch.where(valid, weight.to(dtype)[torch.where(valid, target, 0)], 0)
    return counted.flatten(keep_dims).sum(-1, dtype=dtype) if target.dim() > keep_dims else counted.to(dtype)


def zeroed_if_empty(loss: Tensor, target: Tensor, ignore_index: int, keep_dims: int = 0) -> Tensor:
    """A mean, or 0 where it is one over no valid target; for each entry of the first `keep_dims` dimensions."""
    return torch.where(normalizer(target, None, ignore_index, loss.dtype, keep_dims) > 0, loss, 0)


def shifted_target(target: Tensor, shift: int, ignore_index: int) -> Tensor:
    """The targets (..., T) of `shift` steps on, `ignore_index` at the last steps, which have none."""
    last = target.new_full((*target.shape[:-1], shift), ignore_index)
    return torch.cat((target[..., shift:], last), -1)


def _valid(target: Tensor, ignore_index: int) -> Tensor | None:
    return None if target.is_floating_point() else target != ignore_index


def _row_losses(log_p: Tensor, target: Tensor, weight: Tensor | None, valid: Tensor | None, options: Options) -> Tensor:
    classes, smoothing = log_p.size(-1), options.label_smoothing
    if valid is None:
        q = target.to(log_p.dtype)
        if smoothing:
            q = q * (1 - smoothing) + smoothing / classes
        return -(log_p * (q if weight is None else q * weight)).sum(-1)
    index = torch.where(valid, target, 0).unsqueeze(-1)
    loss = -log_p.gather(-1, index).squeeze(-1)
    if weight is not None:
        loss = loss * weight[index.squeeze(-1)]
    if smoothing:
        spread = (log_p if weight is None else log_p * weight).sum(-1)
        loss = loss * (1 - smoothing) - spread * (smoothing / classes)
    return loss
