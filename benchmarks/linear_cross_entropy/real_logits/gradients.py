"""Exact gradients in float32, and what a filter does to them: columns kept, tail mass, the error of sharing the tail.

All of it in plain PyTorch, a block of rows at a time: those whose columns the op chooses together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from torch_dcs_ops.ops._common.triton import launchers
from torch_dcs_ops.ops.linear_cross_entropy.plan import make_filtered_plan
from torch_dcs_ops.reference.linear_cross_entropy import filter as reference

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Errors:
    """Relative Frobenius norms."""

    input: float
    linear_weight: float


@dataclass(frozen=True)
class Sparsity:
    """Over blocks the fraction of the columns that is kept, over rows the probability that is left in the tail."""

    eps: float
    block_rows: int
    kept: float
    kept_least: float
    kept_most: float
    tail_mean: float
    tail_quantiles: dict[float, float]


@dataclass(frozen=True)
class Gradients:
    """Of the mean loss, float32."""

    input: Tensor
    linear_weight: Tensor

    def errors(self, input: Tensor, linear_weight: Tensor) -> Errors:
        """Of other gradients, of any dtype."""
        return Errors(
            _norm(input.float() - self.input) / _norm(self.input),
            _norm(linear_weight.float() - self.linear_weight) / _norm(self.linear_weight),
        )


def power_name(eps: float) -> str:
    return f"2^{math.log2(eps):g}"


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def block_rows(x: Tensor, w: Tensor) -> int:
    """How many rows the op takes at a time, without a memory budget of the caller's."""
    return make_filtered_plan(x.size(0), w.size(0), x.dtype, x.device.type).rows


def _blocks(x: Tensor, w: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """The probabilities (n, V) of one block of rows after another, float32 throughout."""
    wide = w.float()
    for start in range(0, x.size(0), rows):
        part = slice(start, min(start + rows, x.size(0)))
        yield part, functional.softmax(x[part].float() @ wide.t(), 1)


def exact_gradients(x: Tensor, w: Tensor, y: Tensor) -> Gradients:
    """x (N, D), w (V, D), y (N,); the GEMMs are as exact as torch.set_float32_matmul_precision says."""
    count, wide = y.numel(), w.float()
    gradients = Gradients(torch.empty_like(x, dtype=torch.float32), torch.zeros_like(wide))
    for part, p in _blocks(x, w, block_rows(x, w)):
        # In float32 p - 1 cancels only where p is so near 1 that the row has no weight in the norms.
        p[torch.arange(p.size(0), device=p.device), y[part]] -= 1
        p /= count
        torch.mm(p, wide, out=gradients.input[part])
        gradients.linear_weight.addmm_(p.t(), x[part].float())
    return gradients


def _alive(p: Tensor, y: Tensor, eps: float) -> Tensor:
    """The columns (V,) that are kept: all of them, where more than the op's limit would be."""
    alive = p.amax(0) > eps
    alive[y] = True
    steps = launchers("linear_cross_entropy.filter") if p.is_cuda else None
    return alive | (alive.sum() > int((steps or reference).MOST * p.size(1)))


def sparsity(x: Tensor, w: Tensor, y: Tensor, filters: Sequence[float]) -> list[Sparsity]:
    """One for each eps."""
    rows = block_rows(x, w)
    kept: dict[float, list[Tensor]] = {eps: [] for eps in filters}
    tails: dict[float, list[Tensor]] = {eps: [] for eps in filters}
    for part, p in _blocks(x, w, rows):
        for eps in filters:
            alive = _alive(p, y[part], eps)
            kept[eps].append(alive.float().mean())
            tails[eps].append(p @ (~alive).float())
    found = []
    for eps in filters:
        fractions, tail = torch.stack(kept[eps]), torch.cat(tails[eps])
        quantiles = torch.quantile(tail, torch.tensor(QUANTILES, device=tail.device)).tolist()
        found.append(
            Sparsity(
                eps,
                rows,
                float(fractions.mean()),
                float(fractions.min()),
                float(fractions.max()),
                float(tail.mean()),
                dict(zip(QUANTILES, quantiles, strict=True)),
            )
        )
    return found


def kept_fraction(x: Tensor, w: Tensor, y: Tensor, eps: float) -> float:
    """The mean over blocks."""
    return sparsity(x, w, y, [eps])[0].kept
