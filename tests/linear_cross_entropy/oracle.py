"""F.linear and F.cross_entropy as the oracle of linear_cross_entropy, input factories, and the error budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Problem(NamedTuple):
    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor
    weight: Tensor
    probabilities: Tensor


def make(
    lead: Sequence[int] = (3, 5),
    features: int = 7,
    classes: int = 13,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    *,
    seed: int = 0,
    ignored: float = 0.2,
    ignore_index: int = -100,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype=dtype, device=device)

    target = torch.randint(classes, tuple(lead), generator=generator)
    target[torch.rand(tuple(lead), generator=generator) < ignored] = ignore_index
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Problem(
        normal(*lead, features),
        normal(classes, features),
        target.to(device),
        normal(classes),
        torch.rand(classes, generator=generator, dtype=torch.float64).to(dtype=wide, device=device) + 0.1,
        normal(*lead, classes).softmax(-1).to(wide),
    )


class Options(NamedTuple):
    """Those of linear_cross_entropy; the last two change no value."""

    linear_bias: Tensor | None = None
    weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0
    shift: int = 0
    memory_budget: int | None = None
    accumulate_dtype: torch.dtype | None = None


def oracle(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, predictions); float32 logits for half-precision operands, as a careful training loop has them."""
    of = Options(**options)
    ignore_index = -100 if of.ignore_index is None else of.ignore_index
    by_class = target.is_floating_point()
    if of.shift:
        input = input[..., : -of.shift, :]
        target = target[..., of.shift :, :] if by_class else target[..., of.shift :]
    logits = functional.linear(input, linear_weight, of.linear_bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * of.logit_scale
    if of.softcap is not None:
        logits = torch.tanh(logits / of.softcap) * of.softcap
    weight = None if of.weight is None else of.weight.to(logits.dtype)
    lead, classes = logits.shape[:-1], logits.size(-1)
    flat = logits.reshape(-1, classes)
    flat_target = target.reshape(-1, classes).to(logits.dtype) if by_class else target.reshape(-1)
    lse = flat.logsumexp(-1)
    valid = torch.ones_like(lse, dtype=torch.bool) if by_class else flat_target != ignore_index
    lse = torch.where(valid, lse, 0)
    loss = functional.cross_entropy(
        flat, flat_target, weight, reduction=of.reduction, ignore_index=ignore_index, label_smoothing=of.label_smoothing
    )
    penalty = of.z_loss * lse.square()
    if of.reduction == "mean":
        weights = torch.ones_like(lse) if weight is None or by_class else weight[torch.where(valid, flat_target, 0)]
        penalty = penalty.sum() / torch.where(valid, weights, 0).sum()
    elif of.reduction == "sum":
        penalty = penalty.sum()
    if of.z_loss:
        loss = loss + penalty
    return loss.reshape(lead) if of.reduction == "none" else loss, lse.reshape(lead), logits.argmax(-1)


def gradients(loss: Tensor, *leaves: Tensor, grad: Tensor | None = None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves, grad))


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """In the Frobenius norm."""
    difference = actual.detach().double().cpu() - exact.detach().double().cpu()
    return float(difference.norm() / exact.detach().double().norm().cpu())


def assert_within_budget(
    actual: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor], factors: Sequence[float | None]
) -> None:
    """Every error is at most its factor times what torch's own computation in the same dtype makes.

    A factor of None: not looked at. Two roundings of float32 are free.
    """
    for index, (got, reference, wide, factor) in enumerate(zip(actual, eager, exact, factors, strict=True)):
        if factor is None:
            continue
        error, budget = relative_error(got, wide), factor * relative_error(reference, wide)
        floor = 2 * torch.finfo(torch.float64 if wide.dtype == got.dtype else torch.float32).eps
        assert error <= budget + floor, f"result {index}: error {error:.3e} beyond the budget {budget:.3e}"
