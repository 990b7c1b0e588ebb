"""Losses in the ways in which models are cut for training, on every rank."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from torch_dcs_ops import linear_cross_entropy
from torch_dcs_ops.distributed import context_parallel_targets

from distributed.dtensor_cases import mesh_of
from distributed.team import device, on_device, sentence_of


def of_context_parallel(shift: int) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[str, str], Tensor]:
    """(loss, head's gradient) of steps that context_parallel has dealt out, and those of one process; what is said of
    shift=True; and the same loss behind it."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(11, (2, 16), generator=generator)
    labels[0, 3:12] = -100
    labels = labels.to(device())
    hidden, head = (
        on_device(torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
        for shape in ((2, 16, 5), (11, 5))
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


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1031, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


def of_compiled_logits(plain_target: bool) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """A ColwiseParallel head and F.cross_entropy, as loss_parallel has them, compiled; beside one process; the log."""
    torch.compiler.reset()
    model, mesh = _Model().double(), mesh_of(dist.get_world_size())
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # the same on all ranks
        nn.init.normal_(parameter, std=0.3, generator=generator)
    x = torch.randn(4096, 8, dtype=torch.float64, generator=generator)
    target = torch.randint(1031, (4096,), generator=generator)
    target[:50] = -100
    model, x, target = model.to(device()), x.to(device()), target.to(device())
    loss = F.cross_entropy(model(x), target)
    expected = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    given = target if plain_target else distribute_tensor(target, mesh, [Replicate()])
    said: list[str] = []
    log, handler = logging.getLogger("torch_dcs_ops.compile"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with loss_parallel(), torch.compiler.config.patch(force_disable_caches=True):
            compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="dcs", fullgraph=True)
            found = compiled(x, given)
            found.backward()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    every = [found.detach(), *(parameter.grad for parameter in model.parameters())]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in every], expected, said
