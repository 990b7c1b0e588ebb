"""softmax and its gradient on CUDA, into memory that held NaN, against the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dcs_ops import softmax

from softmax.oracle import assert_gradient, assert_softmax

backward = torch.ops.dcs._softmax_backward.default


def check(x: Tensor, dim: int) -> None:
    """Forward and backward, into memory that held NaN."""
    g = torch.randn(x.shape, device="cuda").to(x.dtype)
    poison()
    y = softmax(x, dim)
    assert y.stride() == torch.empty_like(x).stride()
    assert_softmax(y, x, dim)
    poison()
    dx = backward(g, y, dim)
    assert dx.stride() == torch.empty_like(y).stride()
    assert_gradient(dx, g, y, dim)


def poison() -> None:
    """What the allocator hands out next is full of NaN."""
    for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        for _ in range(4):
            torch.full((size,), float("nan"), device="cuda")
