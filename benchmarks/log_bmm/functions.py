"""Data and peers of the log_bmm benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


def naive(a: Tensor, b: Tensor) -> Tensor:
    """All terms at once: O(n³) memory in eager mode, one kernel of n³ exponentials compiled."""
    return torch.logsumexp(a.unsqueeze(-1) + b.unsqueeze(-3), dim=-2)


def unsafe(a: Tensor, b: Tensor) -> Tensor:
    """The usual trick, a product of shifted exponentials: -inf and NaN where it underflows."""
    largest_a, largest_b = a.amax(-1, keepdim=True), b.amax(-2, keepdim=True)
    return torch.bmm((a - largest_a).exp(), (b - largest_b).exp()).log() + largest_a + largest_b


def _normal(scale: float) -> Callable[[int, int, str], tuple[Tensor, Tensor]]:
    def draw(batch: int, n: int, device: str) -> tuple[Tensor, Tensor]:
        return scale * torch.randn(batch, n, n, device=device), scale * torch.randn(batch, n, n, device=device)

    return draw


def _uniform(width: float) -> Callable[[int, int, str], tuple[Tensor, Tensor]]:
    def draw(batch: int, n: int, device: str) -> tuple[Tensor, Tensor]:
        a, b = torch.rand(batch, n, n, device=device), torch.rand(batch, n, n, device=device)
        return width * (2 * a - 1), width * (2 * b - 1)

    return draw


def _antipodal(batch: int, n: int, device: str) -> tuple[Tensor, Tensor]:
    """Every row's maximum at the first k, every column's at the last, far from what is there."""
    a, b = _normal(1)(batch, n, device)
    a[:, :, 0] += 200
    a[:, :, -1] -= 200
    b[:, 0] -= 200
    b[:, -1] += 200
    return a, b


# The first two are certified as a whole, the others hardly (U, antipodal) or in part (a quarter of N(0, 50^2) is not).
DATA: dict[str, Callable[[int, int, str], tuple[Tensor, Tensor]]] = {
    "N(0,1)": _normal(1),
    "N(0,10^2)": _normal(10),
    "U(+-1e4)": _uniform(1e4),
    "N(0,50^2)": _normal(50),
    "antipodal": _antipodal,
}


def step(f: Product, a: Tensor, b: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    grad = torch.randn(a.size(0), a.size(1), b.size(2), device=a.device)
    return lambda: torch.autograd.grad(f(a, b), (a, b), grad)
