"""Ops with DTensors of random shapes and layouts, against the same calls with plain tensors.

On the ranks of a group, and, as `python layout_cases.py ranks first last` (seeds), on as many ranks as one likes in one
process, by torch's LocalTensorMode. That runs an op for one rank after the other, so that no vocabulary may be shared
out, of which the ranks talk inside an op; nor time, where what is done depends on whether a rank has any. Nor is it
drawn so there; but torch's own rules may share it out on the way to an op (of one step a row, say), which leaves the
case to the ranks of a group.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import torch_dcs_ops as dcs
from torch_dcs_ops.distributed.dtensor import lines

from distributed.dtensor_cases import compare, mesh_of
from distributed.team import on_device


class TimeIsShared(Exception):
    """Where it cannot be."""


MESHES = {2: ((2,),), 3: ((3,),), 4: ((4,), (2, 2)), 6: ((6,), (2, 3), (3, 2))}


class Drawn(NamedTuple):
    name: str
    function: Callable[..., Any]
    tensors: list[Tensor]
    layouts: list[list[Any]]


class Draw:
    """Of one seed; `axes` is the mesh's number of them, `shares` whether vocabularies and time may be shared out."""

    def __init__(self, seed: int, axes: int, shares: bool) -> None:
        self.draw, self.axes, self.shares = random.Random(seed), axes, shares
        self.generator = torch.Generator().manual_seed(seed)

    def size(self) -> int:
        return self.draw.randrange(1, 8)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def flags(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < 0.3

    def layout(self, tensor: Tensor, *whole: int) -> list[Any]:
        """A placement for every axis; the dimensions `whole` are cut only where anything may be."""
        dims = [dim for dim in range(tensor.dim()) if self.shares or dim not in whole]
        return [self.draw.choice([Replicate(), *map(Shard, dims)]) for _ in range(self.axes)]

    def line(self) -> Drawn:
        ndim = self.draw.randrange(1, 4)
        shape, dim = [self.size() for _ in range(ndim)], self.draw.randrange(ndim)
        shape[dim] += 1  # one step of time is nothing to share out
        x, rows = self.normal(*shape), self.normal(*shape[:dim], *shape[dim + 1 :])
        direction, has_reset = self.draw.choice(["left", "right"]), self.draw.random() < 0.5
        kind = self.draw.choice(["softmax", "cumsum", "number", "row", "step"])
        if kind == "softmax":
            return Drawn(kind, lambda x: dcs.softmax(x, dim), [x], [self.layout(x, dim)])
        if kind == "cumsum":
            return Drawn(kind, lambda x: dcs.cumsum(x, dim), [x], [self.layout(x, dim)])
        gates = {"number": None, "row": rows.abs().clamp(max=1), "step": self.normal(*shape).abs().clamp(max=1)}[kind]
        tensors = [x, rows] if gates is None else [x, rows, gates]

        def scan(x: Tensor, initial: Tensor, *more: Tensor) -> Tensor:
            gamma = more[0] if gates is not None else 0.9
            return dcs.discounted_cumsum(
                x, gamma, dim=dim, direction=direction, initial=initial, reset=more[-1] if has_reset else None
            )

        if has_reset:
            tensors.append(self.flags(*shape))
        return Drawn(kind, scan, tensors, [self.layout(t, *([dim] if t.dim() == ndim else [])) for t in tensors])

    def returns(self) -> Drawn:
        shape = [self.size() for _ in range(2)]
        dim, lam = self.draw.randrange(2), self.draw.random()
        shape[dim] += 1
        tensors = [self.normal(*shape), self.normal(*shape), self.normal(shape[1 - dim]), self.flags(*shape)]

        def gae(r: Tensor, v: Tensor, b: Tensor, t: Tensor) -> Any:
            return dcs.returns.gae(r, v, bootstrap_value=b, terminated=t, time_dim=dim, gae_lambda=lam)

        return Drawn("gae", gae, tensors, [self.layout(t, *([dim] if t.dim() == 2 else [])) for t in tensors])

    def matrices(self) -> Drawn:
        b, i, j, k = (self.size() for _ in range(4))
        tensors = [self.normal(b, i, k), self.normal(b, k, j)]
        name = self.draw.choice(["log_bmm", "max_bmm"])
        function = dcs.log_bmm if name == "log_bmm" else lambda a, b: dcs.max_bmm(a, b)[0]
        return Drawn(name, function, tensors, [self.layout(t) for t in tensors])

    def loss(self) -> Drawn:
        lead = [self.size() for _ in range(self.draw.randrange(1, 3))]
        features, classes, pick = self.size(), self.size() + 1, self.draw.choice
        tensors = [self.normal(*lead, features), self.normal(classes, features), self.normal(classes)]
        target = torch.randint(classes, lead, generator=self.generator)
        options: dict[str, Any] = {"softcap": pick([None, 3.0]), "logit_scale": pick([1.0, -0.7])}
        name = pick(["linear_cross_entropy", "linear_log_probs", "linear_kl_div"])
        if name != "linear_log_probs":
            options["reduction"] = pick(["none", "sum", "mean"])
        if name == "linear_cross_entropy":
            options |= {
                "label_smoothing": pick([0.0, 0.2]),
                "z_loss": pick([0.0, 0.1]),
                "return_lse": pick([True, False]),
            }
        if name != "linear_kl_div":
            target.view(-1)[1:][self.flags(target.numel() - 1)] = -100  # not all of them
            function: Any = getattr(dcs, name)
            run = lambda h, w, b, t: function(h, w, t, linear_bias=b, **options)  # noqa: E731
        else:
            options["direction"] = pick(["forward", "reverse", "jsd"])
            width = self.size()
            tensors += [self.normal(*lead, width), self.normal(classes, width)]

            def run(h: Tensor, w: Tensor, b: Tensor, x: Tensor, v: Tensor, t: Tensor) -> Tensor:
                return dcs.linear_kl_div(h, w, x, v, linear_bias=b, target=t, **options)

        tensors.append(target)
        of_classes = (1, 2, 4) if name == "linear_kl_div" else (1, 2)
        layouts = [self.layout(t, *([0] if at in of_classes else [])) for at, t in enumerate(tensors)]
        return Drawn(f"{name} {options}", run, tensors, layouts)


def differences(seeds: range, shares: bool, ranks: int, mode: Callable[[], Any] = contextlib.nullcontext) -> list[str]:
    """`mode` is that of the calls; tensors are drawn outside of it, as LocalTensorMode's ranks draw apart."""
    found = []
    for seed in seeds:
        shape = MESHES[ranks][seed % len(MESHES[ranks])]
        draw = Draw(seed, len(shape), shares)
        case = draw.draw.choice([draw.line, draw.line, draw.returns, draw.matrices, draw.loss, draw.loss])()
        try:
            with mode():
                said = f"{seed} {case.name}"
                found.append(compare(said, case.function, on_device(case.tensors), case.layouts, mesh_of(*shape)))
        except TimeIsShared:
            continue
        except Exception as error:
            found.append(f"{seed} {case.name} {case.layouts} {[tuple(t.shape) for t in case.tensors]}: {error!r}")
    return [one for one in found if one]


def on_a_rank(first: int, last: int) -> list[str]:
    return differences(range(first, last), True, dist.get_world_size())


def main() -> None:
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    ranks, first, last = map(int, sys.argv[1:])
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    refuse = mock.Mock(side_effect=TimeIsShared)
    with mock.patch.object(lines, "_shared", refuse):
        found = differences(range(first, last), False, ranks, lambda: LocalTensorMode(ranks))
    print(f"{refuse.call_count} of {last - first} left out", *found[:10], sep="\n")
    sys.exit(len(found) > 0 or refuse.call_count > (last - first) / 10)


if __name__ == "__main__":
    main()
