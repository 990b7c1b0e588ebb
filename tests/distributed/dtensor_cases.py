"""Ops called with DTensors, beside the same call with plain tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torch_dcs_ops as dcs

from distributed.team import device, on_device, sentence_of

R = Replicate()
Layouts = Sequence[Any]
_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(*shape: int) -> DeviceMesh:
    return _meshes.setdefault(shape, init_device_mesh(device(), shape))


def _weights(like: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, like.numel(), dtype=torch.float64, device=like.device).view(like.shape)


def compare(
    name: str,
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    layouts: Layouts,
    mesh: DeviceMesh,
    compiler: str | None = None,
) -> str:
    """What differs, results and gradients of all floating-point operands; "" if nothing does."""
    wants = [t.is_floating_point() for t in tensors]
    plain = [t.clone().requires_grad_(w) for t, w in zip(tensors, wants, strict=True)]
    shards = [distribute_tensor(t, mesh, p).requires_grad_(w) for t, p, w in zip(tensors, layouts, wants, strict=True)]
    run = function
    if compiler is not None:
        torch.compiler.reset()
        run = torch.compile(function, backend=compiler, fullgraph=True)
    worst = 0.0
    for differentiates in (True, False):
        with torch.set_grad_enabled(differentiates):
            expected, found = function(*plain), run(*shards)
            expected = expected if isinstance(expected, tuple) else (expected,)
            found = found if isinstance(found, tuple) else (found,)
        assert all(isinstance(f, DTensor) for f in found)
        pairs = list(zip(found, expected, strict=True))
        if differentiates:
            replicated = [R] * mesh.ndim
            total = sum((e * _weights(e)).sum() for e in expected if e.requires_grad)
            of_shards = sum(
                (f * distribute_tensor(_weights(e), mesh, replicated)).sum() for f, e in pairs if e.requires_grad
            )
            wanted = torch.autograd.grad(total, [p for p, w in zip(plain, wants, strict=True) if w])
            got = torch.autograd.grad(of_shards, [s for s, w in zip(shards, wants, strict=True) if w])
            pairs += list(zip(got, wanted, strict=True))
        for f, e in pairs:
            # Under LocalTensorMode: the same on all ranks.
            whole, e = (t.reconcile() if hasattr(t, "reconcile") else t for t in (f.full_tensor().detach(), e.detach()))
            assert whole.shape == e.shape, (name, whole.shape, e.shape)
            worst = max([worst, *(whole - e).abs().flatten().tolist()])
    return "" if worst < 1e-12 else f"{name} {layouts} {compiler}: {worst}"


def lines(compiler: str | None = None) -> list[str]:
    mesh, generator = mesh_of(dist.get_world_size()), torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(device())

    x, g, u, reset = uniform(5, 7, 3) - 0.5, uniform(5, 7, 3), uniform(5, 3), uniform(5, 7, 3) < 0.2
    cut, one = ~reset & (g < 0.1), torch.tensor(0.8, dtype=torch.float64, device=device())
    scan, returns = dcs.discounted_cumsum, dcs.returns
    found = []

    def add(
        function: Callable[..., Any], tensors: Sequence[Tensor], layouts: Layouts, compiler: str | None = None
    ) -> None:
        found.append(compare(f"case {len(found)}", function, tensors, layouts, mesh, compiler))

    for of in ([R], [Shard(0)], [Shard(1)], [Shard(2)]):
        row = [Shard(0)] if of == [Shard(0)] else [R]
        add(lambda x, i, r: scan(x, 0.9, dim=1, initial=i, reset=r), (x, u, reset), (of, row, of))
        add(lambda x, c: scan(x, c, dim=1), (x, u), (of, row))
        add(lambda x, c, r: scan(x, c, dim=1, direction="left", reset=r), (x, g, reset), (of, of, of))
        add(lambda x, c: scan(x, c, dim=1), (x, one), (of, [R]))
        add(lambda x: dcs.cumsum(x, 1), (x,), (of,))
        add(lambda x: dcs.softmax(x, 1), (x,), (of,))
        add(
            lambda r, v, b, t, c: returns.gae(r, v, bootstrap_value=b, terminated=t, truncated=c, time_dim=1),
            (x, g, u, reset, cut),
            (of, of, row, of, of),
        )
        add(
            lambda r, v, t: returns.n_step_returns(r, n=3, next_values=v, terminated=t, time_dim=1),
            (x, g, reset),
            (of, of, of),
        )
    add(lambda x: scan(x, 0.9, dim=1, window=3), (x,), ([Shard(1)],))
    if dist.get_world_size() == 4:
        mesh = mesh_of(2, 2)
        for of in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(1)]):
            add(lambda x, c, r: scan(x, c, dim=1, reset=r), (x, g, reset), (of, of, of))
            add(lambda x: dcs.softmax(x, 1), (x,), (of,))
    return [difference for difference in found if difference]


def matrices() -> list[str]:
    mesh, generator = mesh_of(dist.get_world_size()), torch.Generator().manual_seed(0)
    a = torch.randn(5, 4, 3, generator=generator, dtype=torch.float64)
    b = torch.randn(5, 3, 6, generator=generator, dtype=torch.float64)
    a, b = on_device((a, b))
    found = []
    S = Shard
    for pair in ((R, R), (S(0), S(0)), (S(0), R), (S(1), R), (R, S(2)), (S(2), S(1))):
        layouts = [[placement] for placement in pair]
        found.append(compare("log_bmm", dcs.log_bmm, (a, b), layouts, mesh))
        found.append(compare("max_bmm", lambda a, b: dcs.max_bmm(a, b)[0], (a, b), layouts, mesh))
    return [one for one in found if one]


def loss_operands() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 6, 5), (11, 5), (11,)))
    target = torch.randint(11, (4, 6), generator=generator)
    target[0, :3] = -100
    return on_device((h, w, b, target))  # type: ignore[no-any-return]


def losses(compiler: str | None = None) -> list[str]:
    ranks = dist.get_world_size()
    one = mesh_of(ranks)
    h, w, b, t = loss_operands()
    S = Shard
    layouts: list[tuple[DeviceMesh, Layouts]] = [
        (one, ([R], [R], [R], [R])), (one, ([S(0)], [R], [R], [S(0)])), (one, ([R], [S(0)], [S(0)], [R])),
        (one, ([R], [S(0)], [R], [R])), (one, ([S(0)], [S(0)], [S(0)], [S(0)])), (one, ([S(1)], [R], [R], [R])),
        (one, ([S(1)], [S(0)], [S(0)], [S(1)])), (one, ([S(2)], [S(1)], [R], [R])),
    ]  # fmt: skip
    if ranks == 4:
        two = mesh_of(2, 2)
        layouts += [
            (two, ([S(0), R], [R, S(0)], [R, S(0)], [S(0), R])),
            (two, ([S(0), S(1)], [R, S(0)], [R, S(0)], [S(0), S(1)])),
            (two, ([S(0), S(1)], [R, R], [R, R], [S(0), S(1)])),
            (two, ([S(0), S(0)], [R, R], [R, R], [S(0), S(0)])),
        ]
    every: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.1}
    calls: list[Callable[..., Any]] = [
        lambda h, w, b, t: dcs.linear_cross_entropy(h, w, t, linear_bias=b),
        lambda h, w, b, t: dcs.linear_cross_entropy(h, w, t, linear_bias=b, reduction="none", **every),
        lambda h, w, b, t: dcs.linear_cross_entropy(h, w, t, linear_bias=b, return_lse=True, **every),
        lambda h, w, b, t: dcs.linear_cross_entropy(h, w, t, linear_bias=b, reduction="sum", return_predictions=True),
        lambda h, w, b, t: dcs.linear_log_probs(h, w, t, linear_bias=b),
        lambda h, w, b, t: dcs.linear_log_probs(h, w, t.unsqueeze(-1), linear_bias=b, return_lse=True),
    ]
    found = []
    for mesh, layout in layouts:
        for at, call in enumerate(calls):
            found.append(compare(f"loss {at}", call, (h, w, b, t), layout, mesh, compiler))
    # Class weights, as whole numbers: compare asks for the gradient of all others.
    c = torch.arange(11, device=device()) % 4
    weighted = lambda h, w, t, c: dcs.linear_cross_entropy(h, w, t, weight=c.double())  # noqa: E731
    of_rows, of_classes = ([S(0)], [R], [S(0)], [R]), ([R], [S(0)], [R], [S(0)])
    found += [compare("weights", weighted, (h, w, t, c), layout, one) for layout in (of_rows, of_classes)]
    teacher = (h[..., :3] + 1, w[:, :3] * 2)

    def kl(h: Tensor, w: Tensor, x: Tensor, v: Tensor, b: Tensor, t: Tensor, direction: str) -> Tensor:
        return dcs.linear_kl_div(h, w, x, v, linear_bias=b, target=t, reduction="none", direction=direction)

    of_heads: list[tuple[DeviceMesh, Layouts]] = [
        (one, ([S(0)], [R], [S(0)], [R], [R], [S(0)])), (one, ([R], [S(0)], [R], [S(0)], [S(0)], [R])),
        (one, ([S(0)], [S(0)], [R], [R], [R], [S(0)])), (one, ([R], [R], [S(1)], [S(0)], [R], [R])),
    ]  # fmt: skip
    if ranks == 4:
        of_heads.append((two, ([S(0), R], [R, S(0)], [S(0), R], [R, S(0)], [R, R], [S(0), R])))
    for direction, (mesh, layout) in itertools.product(("forward", "reverse", "jsd"), of_heads):
        call = functools.partial(kl, direction=direction)
        found.append(compare(direction, call, (h, w, *teacher, b, t), layout, mesh, compiler))
    return [difference for difference in found if difference]


def layouts_of_results() -> dict[str, Any]:
    """Where the gradients of a shared-out vocabulary are left."""
    mesh = mesh_of(dist.get_world_size())
    h, w, _, t = loss_operands()
    h, w = distribute_tensor(h, mesh, [R]).requires_grad_(), distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    loss = dcs.linear_cross_entropy(h, w, distribute_tensor(t, mesh, [R]))
    dh, dw = torch.autograd.grad(loss, (h, w))
    return {
        "loss": loss.placements == (R,),
        "input": dh.placements == (Partial(),),
        "weight": dw.placements == (Shard(0),),
    }


def refusals() -> dict[str, str]:
    mesh = mesh_of(dist.get_world_size())
    h, w, _, t = loss_operands()
    x = distribute_tensor(h, mesh, [R])
    other = DeviceMesh(device(), list(range(dist.get_world_size()))[::-1])
    calls: dict[str, Callable[[], Any]] = {
        "linear_cross_entropy: linear_weight must be a DTensor like the other operands, got a plain tensor": lambda: (
            dcs.linear_cross_entropy(x, w, t)
        ),
        "gamma must be a DTensor like the other operands, got a plain tensor": lambda: dcs.discounted_cumsum(x, h),
        "input must be a DTensor like the other operands, got a plain tensor": lambda: dcs.discounted_cumsum(h, x),
        "input must be this rank's plain tensor, got a DTensor": lambda: (
            dcs.distributed.vocab_parallel_linear_cross_entropy(x, w, t, group=dist.group.WORLD)
        ),
        "for which this op has no rule": lambda: dcs.sample_bmm(x, x.transpose(1, 2)),
        "gamma must be on the other operands' mesh": lambda: dcs.discounted_cumsum(x, distribute_tensor(h, other, [R])),
    }
    return {sentence: sentence_of(call)[1] for sentence, call in calls.items()}
