"""Losses in the ways in which models are cut for training, on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel

from torch_dcs_ops import linear_cross_entropy
from torch_dcs_ops.distributed import context_parallel_targets

from distributed.dtensor_cases import mesh_of
from distributed.team import sentence_of


def of_context_parallel(shift: int) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[str, str], Tensor]:
    """(loss, head's gradient) of steps that context_parallel has dealt out, and those of one process; what is said of
    shift=True; and the same loss behind it."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(11, (2, 16), generator=generator)
    labels[0, 3:12] = -100
    hidden, head = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((2, 16, 5), (11, 5))
    )
    expected = linear_cross_entropy(hidden, head, labels, shift=shift)
    assert isinstance(expected, Tensor)
    wanted = torch.autograd.grad(expected, head)[0]
    targets, count = context_parallel_targets(labels, shift=shift)
    buffers: list[Any] = [hidden.detach().clone(), targets]
    with context_parallel(mesh_of(dist.get_world_size()), buffers=buffers, buffer_seq_dims=[1, 1]):
        loss = linear_cross_entropy(buffers[0], head, buffers[1], reduction="sum") / count
        said = sentence_of(lambda: linear_cross_entropy(buffers[0], head, buffers[1], shift=True))
        assert isinstance(loss, Tensor)
        both = [loss.detach(), *torch.autograd.grad(loss, head)]
    for value in both:
        dist.all_reduce(value)
    again = linear_cross_entropy(hidden, head, labels, shift=shift)
    assert isinstance(again, Tensor)
    return both[0], both[1], expected.detach(), wanted, said, again.detach()
