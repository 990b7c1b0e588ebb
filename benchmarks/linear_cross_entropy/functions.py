"""What the benchmarks of linear_cross_entropy call: losses of (input, linear_weight, target), a step of training."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from harness import Function
from torch import Tensor
from torch.nn import functional

from torch_dcs_ops import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def own(**options: Any) -> Loss:
    return lambda x, w, y: linear_cross_entropy(x, w, y, **options)


def eager(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """float32 cross entropy of logits in input's dtype."""
    return functional.cross_entropy(functional.linear(x, w).float(), y)


def peers() -> Iterator[tuple[str, Loss]]:
    """Other packages' losses, where they are installed."""
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        yield "Liger", lambda x, w, y: loss(w, x, y)
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy as cut

        yield "cut_cross_entropy, exact", lambda x, w, y: cut(x, w, y, impl="cce_exact")
        yield "cut_cross_entropy", lambda x, w, y: cut(x, w, y)


def step(loss: Loss, x: Tensor, w: Tensor, y: Tensor) -> Function:
    """Forward and backward to fresh gradients."""

    def run() -> None:
        x.grad = w.grad = None
        loss(x, w, y).backward()

    return run


def peak_gibibytes(function: Function, leaves: Sequence[Tensor]) -> float:
    """Beyond the inputs, of the second call: what a compilation or cuBLAS allocates once is not in it. On a GPU."""
    function()
    torch.cuda.synchronize()
    for leaf in leaves:
        leaf.grad = None
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated()
    for leaf in leaves:
        leaf.grad = None
    return (most - held) / 2**30
