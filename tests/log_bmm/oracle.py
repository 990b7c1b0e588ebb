"""What the tests of log_bmm, max_bmm and sample_bmm share: data sets, float64 oracles, error budgets.

Nothing here calls torch_dcs_ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

INF = math.inf
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def naive(a: Tensor, b: Tensor) -> Tensor:
    """The definition, of which torch differentiates everything (to NaN on masked rows)."""
    return torch.logsumexp(a.unsqueeze(-1) + b.unsqueeze(-3), dim=-2)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Exact(NamedTuple):
    """In float64, on the CPU."""

    out: Tensor
    log_s: Tensor
    weights: Tensor  # (B, I, K, J), 0 where everything is masked


def exact(a: Tensor, b: Tensor) -> Exact:
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    terms = a.unsqueeze(-1) + b.unsqueeze(-3)
    out = terms.logsumexp(-2)
    largest = [torch.where(x == -INF, 0, x) for x in (a.amax(2, keepdim=True), b.amax(1, keepdim=True))]
    weights = torch.where(out.unsqueeze(-2) == -INF, 0, (terms - out.unsqueeze(-2)).exp())
    return Exact(out, out - largest[0] - largest[1], weights)


def product(weights: Tensor, x: Tensor | None, y: Tensor | None, z: Tensor | None, over: int) -> Tensor:
    """The sum of W x y z over i (0), k (1) or j (2), the operand in the result's place left out."""
    terms = weights
    if x is not None and over != 2:
        terms = terms * x.cpu().double().unsqueeze(-1)
    if y is not None and over != 1:
        terms = terms * y.cpu().double().unsqueeze(-2)
    if z is not None and over != 0:
        terms = terms * z.cpu().double().unsqueeze(-3)
    return terms.sum(over + 1)


def spread(a: Tensor, b: Tensor) -> float:
    """How far apart the finite numbers of one operand are, at most."""
    finite = [x.detach()[x.isfinite()].double() for x in (a, b)]
    return max(float(x.max() - x.min()) if x.numel() else 0.0 for x in finite)


def forward_error(out: Tensor, expected: Tensor) -> float:
    """The largest, relative to max(1, |expected|); infinite where infinities or NaN differ."""
    out = out.detach().cpu().double()
    same = (out == expected) | (out.isnan() & expected.isnan())
    error = (out - expected).abs() / expected.abs().clamp(min=1)
    worst = torch.where(same, 0, error.nan_to_num(INF, INF, INF))
    return float(worst.max()) if worst.numel() else 0.0


def gradient_error(gradient: Tensor, expected: Tensor, magnitudes: Tensor | None = None) -> float:
    """The largest, relative to the largest gradient.

    magnitudes: the sums of their terms' absolute values, which the error is relative to where terms may cancel: each is
    rounded by a part of itself.
    """
    gradient = gradient.detach().cpu().double()
    sizes = expected.abs() if magnitudes is None else magnitudes
    scale = float(sizes.max()) if expected.numel() else 0.0
    if not scale:
        return float(gradient.abs().max()) if gradient.numel() else 0.0
    return float((gradient - expected).abs().max()) / scale


def forward_budget(dtype: torch.dtype) -> float:
    """float32's is what users are promised; a half result is rounded once more."""
    return {torch.float64: 1e-14, torch.float32: 1e-5}.get(dtype, 1e-5 + torch.finfo(dtype).eps / 2)


def gradient_budget(dtype: torch.dtype, width: float) -> float:
    """Of the largest gradient, 1e-6, or on wider data what a weight exp(a + b - log S) is rounded by.

    The sum a + b and log S are as large as the data is wide, and each is rounded by 2^-24 of itself: a relative error
    of the exponential. Its own, the product's and log K's share of log S make 2^-22 with it.
    """
    if dtype == torch.float64:
        return max(1e-14, 2**-51 * width)
    wide = max(1e-6, 2**-23 * width + 2**-22)
    return wide if dtype == torch.float32 else wide + torch.finfo(dtype).eps / 2


def _normal(scale: float) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return lambda batch, n: (scale * torch.randn(batch, n, n), scale * torch.randn(batch, n, n))


def _uniform(width: float) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return lambda batch, n: (width * (2 * torch.rand(batch, n, n) - 1), width * (2 * torch.rand(batch, n, n) - 1))


def _crf_chain(batch: int, n: int) -> tuple[Tensor, Tensor]:
    """Both halves of a chain of random potentials, some 100 nats of it."""
    chain = torch.randn(32 if n < 100 else 8, batch, n, n, dtype=torch.float64)
    while len(chain) > 2:
        chain = torch.stack([naive(a, b) for a, b in zip(chain[::2], chain[1::2], strict=True)])
    return chain[0].float(), chain[1].float()


def _hmm(batch: int, n: int) -> tuple[Tensor, Tensor]:
    """Transitions to the two states on either side; those of half of the second steps to one side only."""
    distance = torch.arange(n) - torch.arange(n)[:, None]
    inside = distance.abs() <= 2
    first, second = torch.randn(batch, n, n), torch.randn(batch, n, n)
    one_sided = inside & ((distance >= 0) | (torch.arange(n) % 2 == 0))
    return (
        torch.where(inside, first, -INF).log_softmax(-1),
        torch.where(one_sided, second, -INF).log_softmax(-1),
    )


def _antipodal(batch: int, n: int) -> tuple[Tensor, Tensor]:
    """Every row's maximum is at the first k, every column's at the last, 400 apart from what is there."""
    a, b = torch.randn(batch, n, n), torch.randn(batch, n, n)
    a[:, :, 0] += 200
    a[:, :, -1] -= 200
    b[:, 0] -= 200
    b[:, -1] += 200
    return a, b


def _masked(batch: int, n: int) -> tuple[Tensor, Tensor]:
    """-inf in seven of ten places, rows and columns of nothing else, and some of which the supports do not meet."""
    a, b = 10 * torch.randn(batch, n, n), 10 * torch.randn(batch, n, n)
    a[torch.rand(a.shape) < 0.7] = -INF
    b[torch.rand(b.shape) < 0.7] = -INF
    a[:, 1] = b[:, :, 2] = -INF
    a[:, 3, ::2] = b[:, 1::2, 4] = -INF
    a[:, n // 2] = torch.randn(n)
    return a, b


def _masked_wide(batch: int, n: int) -> tuple[Tensor, Tensor]:
    """As above, and so wide that most of the products underflow."""
    a, b = _masked(batch, n)
    return 30 * a, 30 * b


DATA: dict[str, Callable[[int, int], tuple[Tensor, Tensor]]] = {
    "N(0, 1)": _normal(1),
    "N(0, 10^2)": _normal(10),
    "N(0, 20^2)": _normal(20),
    "N(0, 30^2)": _normal(30),
    "N(0, 50^2)": _normal(50),
    "U(+-100)": _uniform(1e2),
    "U(+-1e3)": _uniform(1e3),
    "U(+-1e4)": _uniform(1e4),
    "CRF chain": _crf_chain,
    "HMM": _hmm,
    "antipodal": _antipodal,
    "masked": _masked,
    "masked, wide": _masked_wide,
}


def _permuted(tensor: Tensor) -> Tensor:
    axes = list(range(tensor.dim()))[::-1]
    return tensor.permute(axes).contiguous().permute(axes)


def _strided(tensor: Tensor) -> Tensor:
    padded = tensor.new_full([2 * size for size in tensor.shape], torch.nan)
    return padded[tuple(slice(None, None, 2) for _ in tensor.shape)].copy_(tensor)


def _sub_view(tensor: Tensor) -> Tensor:
    padded = tensor.new_full([size + 3 for size in tensor.shape], torch.nan)
    return padded[tuple(slice(2, 2 + size) for size in tensor.shape)].copy_(tensor)


# The same numbers (of the first batch alone for "expanded") in memory laid out differently; what lies between is NaN.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(-1, -2).contiguous().transpose(-1, -2),
    "permuted": _permuted,
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
    "strided": _strided,
    "sub_view": _sub_view,
}
