"""Filtered gradients over dense logits in float64, chunk by chunk, and data whose softmax is sparse."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dcs_ops.ops._common.triton import launchers
from torch_dcs_ops.ops.linear_cross_entropy import filter_tails
from torch_dcs_ops.reference.linear_cross_entropy import filter as reference

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS = 2**-6
CLASSES, FEATURES = 501, 16
GROUP = 32
APART = 32


def operands(rows: int = 150, dtype: torch.dtype = F32, device: str = "cpu", *, seed: int = 0) -> list[Tensor]:
    """input, linear_weight, target, linear_bias, weight: a few classes have most of a row's probability.

    The rows of linear_weight share a direction, as those of language models do.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    w = (normal(CLASSES, FEATURES) + 0.7 * normal(FEATURES)) / FEATURES**0.5
    target = torch.randint(CLASSES, (rows,), generator=generator)
    x = 5 * w[target] + 3 * w[torch.randint(CLASSES, (rows,), generator=generator)] + 0.5 * normal(rows, FEATURES)
    target[torch.rand(rows, generator=generator) < 0.2] = -100
    weight = torch.rand(CLASSES, generator=generator, dtype=F64) + 0.1
    bias = normal(CLASSES) / 4
    wide = F64 if dtype == F64 else F32
    return [
        x.to(device, dtype), w.to(device, dtype), target.to(device), bias.to(device, dtype), weight.to(device, wide)
    ]  # fmt: skip


def budget_of(chunk: int, dtype: torch.dtype = F32) -> int:
    """Bytes of logits for that many rows."""
    words = 16 // dtype.itemsize
    return chunk * -(-CLASSES // words) * 16


def most_alive(x: Tensor) -> float:
    """The part of the columns beyond which a chunk keeps all."""
    steps = launchers("linear_cross_entropy.filter") if x.is_cuda else reference
    assert steps is not None
    return float(steps.MOST)


class Options(NamedTuple):
    """Those of the loss, the gradients of its results, and how tails are shared out."""

    linear_bias: Tensor | None = None
    weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0
    grad_loss: Tensor | float = 1.0
    grad_lse: Tensor | float = 0.0
    share: bool = True
    group_rows: int = GROUP


def dense(
    x: Tensor, w: Tensor, target: Tensor, chunk: int, eps: float, **options: Any
) -> tuple[list[Tensor], list[float]]:
    """Filtered gradients of x, w and the bias in float64, and the part of the columns each chunk keeps.

    Logits are those of the operands' own dtype. `share` False drops the tail. On a CPU chunks are of valid rows. One
    row in 32 of every segment of chunks, those of the largest tails, is exact.
    """
    of = Options(**options)
    valid = target != of.ignore_index
    if not x.is_cuda and not bool(valid.all()):
        of = of._replace(grad_loss=_of_rows(of.grad_loss, valid), grad_lse=_of_rows(of.grad_lse, valid))
        (x_gradient, *gradients), kept = dense(x[valid], w, target[valid], chunk, eps, **of._asdict())
        whole = x_gradient.new_zeros(x.shape)
        whole[valid] = x_gradient
        return [whole, *gradients], kept
    at = torch.where(valid, target, 0)
    class_weight = x.new_ones(w.size(0), dtype=F64) if of.weight is None else of.weight.double()
    own = torch.where(valid, class_weight[at], 0)
    upstream = torch.where(valid, of.grad_loss, 0).double() / (own.sum() if of.reduction == "mean" else 1)
    parts = []
    for start in range(0, x.size(0), chunk):
        rows = slice(start, min(start + chunk, x.size(0)))
        u, y, mask = upstream[rows, None], at[rows, None], valid[rows, None]
        z = torch.mm(x[rows], w.t()).double() + (0 if of.linear_bias is None else of.linear_bias.double())
        z = z * of.logit_scale
        slope = torch.ones_like(z)
        if of.softcap is not None:
            z = torch.tanh(z / of.softcap) * of.softcap
            slope = 1 - (z / of.softcap).square()
        lse, p = z.logsumexp(1, keepdim=True), z.softmax(1)
        hit = u * (1 - of.label_smoothing) * class_weight[y]
        even = u * of.label_smoothing / w.size(0)
        a = hit + even * class_weight.sum() + 2 * of.z_loss * lse * u
        a = a + torch.where(
            mask, of.grad_lse if isinstance(of.grad_lse, float) else of.grad_lse[rows, None].double(), 0
        )
        alive = ((p > eps) & mask).any(0)
        alive[y[mask]] = True
        if alive.sum() > int(most_alive(x) * w.size(0)):
            alive[:] = True
        tail = torch.where(alive | ~mask, 0, p * slope)
        own = (-hit * slope.gather(1, y), even * class_weight * slope)
        parts.append(_Part(a, p * slope, tail, alive, y, mask, own))
    found = []
    for first in range(0, len(parts), max(filter_tails.SEGMENT_ROWS // chunk, 1)):
        found += _segment(parts[first : first + max(filter_tails.SEGMENT_ROWS // chunk, 1)], of.share, of.group_rows)
    g = torch.cat(found) * of.logit_scale if found else x.new_zeros(0, w.size(0), dtype=F64)
    return [g @ w.double(), g.t() @ x.double(), g.sum(0)], [float(part.alive.double().mean()) for part in parts]


class _Part(NamedTuple):
    """A chunk: a·p·s is its gradient, and its tail's without a, but for what `own` adds at targets and takes away."""

    a: Tensor
    shares: Tensor
    tail: Tensor
    alive: Tensor
    target: Tensor
    valid: Tensor
    own: tuple[Tensor, Tensor]


def _segment(parts: list[_Part], share: bool, group_rows: int) -> list[Tensor]:
    mass = torch.cat([(part.a * part.tail).sum(1) for part in parts])
    count = int(torch.cat([part.valid for part in parts]).sum())
    apart = mass.abs().sort(descending=True, stable=True).indices[: -(-count // APART)]
    exact = torch.zeros_like(mass, dtype=torch.bool).index_fill_(0, apart, True) & share
    found = []
    for part in parts:
        alone, exact = exact[: part.a.size(0), None], exact[part.a.size(0) :]
        rest = torch.where(alone, 0, part.tail)
        g = part.a * part.shares
        for group in range(0, rest.size(0), group_rows):
            rows = slice(group, group + group_rows)
            q = rest[rows].sum(0)
            shared = part.a[rows] * rest[rows].sum(1, keepdim=True) * (q / q.sum().clamp(min=1e-300))
            kept = part.alive | alone[rows]
            g[rows] = torch.where(kept, g[rows], shared if share else 0)
        g = g.scatter_add(1, part.target, part.own[0]) - part.own[1]
        found.append(torch.where(part.valid, g, 0))
    return found


def _of_rows(grad: Tensor | float, valid: Tensor) -> Tensor | float:
    return grad[valid] if isinstance(grad, Tensor) and grad.dim() else grad
