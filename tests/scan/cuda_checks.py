"""Checks of scans on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dcs_ops import discounted_cumsum


def drawn(shape: tuple[int, int, int], dtype: torch.dtype, padding: int = 0, offset: int = 0) -> Tensor:
    """A view with gaps between steps, from an address on that is not aligned."""
    outer, steps, columns = shape
    pitch = columns + padding
    memory = torch.randn(outer * steps * pitch + offset, device="cuda").to(dtype)
    return memory[offset:].view(outer, steps, pitch)[..., :columns]


def check_against_cpu(x: Tensor, gamma: Tensor, initial: Tensor, reset: Tensor, *, dim: int, direction: str) -> None:
    """Output and gradients, with gamma's and without, against the CPU's kernels in double."""
    grad = torch.randn(x.shape, device="cuda").to(x.dtype)
    y = discounted_cumsum(x, gamma, dim=dim, direction=direction, initial=initial, reset=reset)
    got = torch.autograd.grad(y, (x, gamma, initial), grad)
    alone = discounted_cumsum(x, gamma.detach(), dim=dim, direction=direction, initial=initial.detach(), reset=reset)
    (got_alone,) = torch.autograd.grad(alone, x, grad)  # by the kernels without gamma's gradient
    leaves = [leaf.detach().double().cpu().requires_grad_() for leaf in (x, gamma, initial)]
    options = {"dim": dim, "direction": direction, "initial": leaves[2], "reset": reset.cpu()}
    expected = discounted_cumsum(leaves[0], leaves[1], **options)
    wanted = torch.autograd.grad(expected, leaves, grad.double().cpu())
    eps = torch.finfo(x.dtype).eps + (1e-6 if x.dtype != torch.float64 else 1e-12)
    assert (y.double().cpu() - expected).abs().max() <= eps * expected.abs().max()
    for found, of in ((got[0], wanted[0]), (got_alone, wanted[0]), (got[2], wanted[2])):
        assert (found.double().cpu() - of).abs().max() <= eps * of.abs().max()
    # A term carries the rounding of the output and of the gradient, a sum of n terms those of n, each on its own.
    terms = x.numel() / gamma.numel()
    bound = 8 * eps * terms**0.5 * expected.abs().max() * wanted[0].abs().max()
    assert (got[1].double().cpu() - wanted[1]).abs().max() <= bound
