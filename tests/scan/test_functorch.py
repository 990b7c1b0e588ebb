"""torch.func over the public function and the raw ops, against the same transforms of an oracle made of aten ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

from torch_dcs_ops import cumsum, discounted_cumsum

from scan.oracle import differentiable_oracle, make, make_gamma, make_reset
from support.selection import slow

SHAPE, BATCH = (3, 5), 4
ARGNUMS = (0, 1, 2)
RESET = make_reset(SHAPE)

Function = Callable[..., Tensor]


def public(x: Tensor, gamma: Tensor, initial: Tensor, reset: Tensor = RESET, window: Any = None) -> Tensor:
    return discounted_cumsum(x, gamma, initial=initial, reset=reset.to(x.device), window=window)


def raw(x: Tensor, gamma: Tensor, initial: Tensor, reset: Tensor = RESET, window: Any = None) -> Tensor:
    y: Tensor = torch.ops.dcs.discounted_cumsum.Tensor(
        x, gamma, initial=initial, reset=reset.to(x.device), window=window
    )
    return y


def private(x: Tensor, gamma: Tensor, initial: Tensor, reset: Tensor = RESET, window: Any = None) -> Tensor:
    y: Tensor = torch.ops.dcs._scan(x, gamma, 1.0, -1, True, False, initial, reset.to(x.device), window)
    return y


def expected(x: Tensor, gamma: Tensor, initial: Tensor, reset: Tensor = RESET, window: Any = None) -> Tensor:
    return differentiable_oracle(x, gamma, initial=initial, reset=reset.to(x.device), window=window)


def loss(f: Function) -> Function:
    return lambda *args: f(*args).pow(3).sum()


def squares(tensors: Any) -> Tensor:
    return sum(t.square().sum() for t in torch.utils._pytree.tree_leaves(tensors))  # type: ignore[return-value]


def tangents_for(args: Any) -> tuple[Tensor, ...]:
    return tuple(make(a.shape, a.dtype, a.device, seed=20 + i) for i, a in enumerate(args))


def dual(f: Function, args: Any) -> Any:
    with forward_ad.dual_level():
        y = f(*[forward_ad.make_dual(a, t) for a, t in zip(args, tangents_for(args), strict=True)])
        return tuple(forward_ad.unpack_dual(y))


def reverse_over_dual(f: Function, args: Any) -> Any:
    args = [a.clone().requires_grad_() for a in args]
    with forward_ad.dual_level():
        y = f(*[forward_ad.make_dual(a, t) for a, t in zip(args, tangents_for(args), strict=True)])
        primal, tangent = forward_ad.unpack_dual(y)
        return torch.autograd.grad(tangent.square().sum() + primal.pow(3).sum(), args)


def autograd_over_grad(f: Function, args: Any) -> Any:
    args = [a.clone().requires_grad_() for a in args]
    return torch.autograd.grad(squares(func.grad(loss(f), ARGNUMS)(*args)), args)


def jvp(f: Function, args: Any) -> Any:
    return func.jvp(f, tuple(args), tangents_for(args))


TRANSFORMS: dict[str, Callable[[Function, Any], Any]] = {
    "grad": lambda f, a: func.grad(loss(f), ARGNUMS)(*a),
    "grad of grad": lambda f, a: func.grad(lambda *b: squares(func.grad(loss(f), ARGNUMS)(*b)), ARGNUMS)(*a),
    "vjp": lambda f, a: func.vjp(f, *a)[1](a[0]),
    "jvp": jvp,
    "jvp of jvp": lambda f, a: func.jvp(lambda *b: jvp(f, b)[1], tuple(a), tangents_for(a)),
    "jvp of grad": lambda f, a: func.jvp(func.grad(loss(f), ARGNUMS), tuple(a), tangents_for(a)),
    "grad of jvp": lambda f, a: func.grad(lambda *b: squares(jvp(f, b)[1]), ARGNUMS)(*a),
    "jacfwd": lambda f, a: func.jacfwd(f, ARGNUMS)(*a),
    "jacrev": lambda f, a: func.jacrev(f, ARGNUMS)(*a),
    "hessian": lambda f, a: func.hessian(loss(f), ARGNUMS)(*a),
    "jacrev of jacfwd": lambda f, a: func.jacrev(func.jacfwd(loss(f), ARGNUMS), ARGNUMS)(*a),
    "dual numbers": dual,
    "autograd over dual numbers": reverse_over_dual,
    "autograd over func.grad": autograd_over_grad,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("function", [public, raw, private])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.each_pair
def test_derivatives(device: str, window: int | None, function: Any, name: str) -> None:
    check(device, TRANSFORMS[name], window, function)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("function", [public, slow(raw), slow(private)])
@pytest.mark.parametrize("window", [None, slow(3)])
def test_linearize(device: str, window: int | None, function: Any) -> None:
    """It traces the function: as long as ten others."""
    check(device, lambda f, a: func.linearize(f, *a)[1](*tangents_for(a)), window, function)


def check(device: str, transform: Callable[[Function, Any], Any], window: int | None, function: Any) -> None:
    for kind in ("row", "step"):
        args = (
            make(SHAPE, torch.float64, device),
            make_gamma(kind, SHAPE, 1, torch.float64, device),
            make(SHAPE[:1], torch.float64, device, seed=3),
        )
        results = [
            transform(lambda *a, f=f: f(*a, window=window), args)  # type: ignore[misc]
            for f in (function, expected)
        ]
        torch.testing.assert_close(results[0], results[1])


def batch_of(kind: str, device: str) -> list[Tensor]:
    shape = (BATCH, *SHAPE)
    gamma = make_gamma("step" if kind == "step" else "row", shape, 2, torch.float64, device)
    return [
        make(shape, torch.float64, device),
        gamma,
        make(shape[:2], torch.float64, device, seed=3),
        make_reset(shape, device),
    ]


def loop(f: Function, args: list[Tensor], batched: Any) -> Any:
    """What vmap stands for."""
    rows = [f(*[a[k] if b else a for a, b in zip(args, batched, strict=True)]) for k in range(BATCH)]
    if isinstance(rows[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    return torch.stack(rows)


@pytest.mark.parametrize("function", [public, raw, private])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["row", "step"])
def test_vmap_over_any_of_the_operands(device: str, kind: str, window: int | None, function: Any) -> None:
    batch = batch_of(kind, device)
    for batched in itertools.product((True, False), repeat=4):
        if not any(batched):
            continue
        args = [t if b else t[0] for t, b in zip(batch, batched, strict=True)]
        got = func.vmap(lambda *a: function(*a, window=window), tuple(0 if b else None for b in batched))(*args)
        wanted = loop(lambda *a: expected(*a, window=window), args, batched)
        torch.testing.assert_close(got, wanted)


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("function", [public, raw, private])
def test_vmap_with_other_transforms(device: str, function: Any) -> None:
    for kind in ("row", "step"):
        x, gamma, initial, reset = batch = batch_of(kind, device)
        every = (True,) * 4
        moved = (x.movedim(0, 2), gamma.movedim(0, -1), initial.movedim(0, 1), reset.movedim(0, 1))
        torch.testing.assert_close(func.vmap(function, (2, -1, 1, 1))(*moved), loop(expected, batch, every))
        torch.testing.assert_close(func.vmap(func.vmap(function))(*batch), loop(func.vmap(expected), batch, every))
        per_sample = func.vmap(func.grad(loss(function), ARGNUMS))(*batch)
        torch.testing.assert_close(per_sample, loop(func.grad(loss(expected), ARGNUMS), batch, every))

        def total(f: Function) -> Any:
            return lambda *a: func.vmap(f)(*a, reset).pow(3).sum()  # noqa: B023

        torch.testing.assert_close(
            func.grad(total(function), ARGNUMS)(*batch[:3]), func.grad(total(expected), ARGNUMS)(*batch[:3])
        )
        leaves = [t.clone().requires_grad_() for t in batch[:3]]
        torch.testing.assert_close(
            torch.autograd.grad(total(function)(*leaves), leaves), torch.autograd.grad(total(expected)(*leaves), leaves)
        )


def test_vmap_moves_every_dim_and_direction(device: str) -> None:
    x = make((BATCH, 2, 3, 5), torch.float64, device)
    for dim, direction in itertools.product(range(-3, 3), ("right", "left")):
        gamma = make_gamma("row", (2, 3, 5), dim, torch.float64, device)
        for position in range(4):
            got = func.vmap(
                lambda t, dim=dim, gamma=gamma, direction=direction: discounted_cumsum(
                    t, gamma, dim=dim, direction=direction
                ),
                in_dims=position,
            )(x.movedim(0, position))
            wanted = torch.stack([discounted_cumsum(t, gamma, dim=dim, direction=direction) for t in x])
            torch.testing.assert_close(got, wanted)


def test_vmap_over_scalars_numbers_and_cumsum(device: str) -> None:
    x = make((BATCH,), torch.float64, device)
    initial, gamma = x + 1, x / 3
    got = func.vmap(lambda a, g, i: discounted_cumsum(a, g, initial=i))(x, gamma, initial)
    torch.testing.assert_close(got, x + gamma * initial)
    got = func.vmap(lambda a, i: discounted_cumsum(a, 0.5, initial=i), (None, 0))(x[0], initial)
    torch.testing.assert_close(got, x[0] + 0.5 * initial)
    rows = make((BATCH, 6), torch.float64, device)
    torch.testing.assert_close(func.vmap(lambda a: discounted_cumsum(a, 0.5))(rows), discounted_cumsum(rows, 0.5))
    torch.testing.assert_close(func.vmap(cumsum)(rows), rows.cumsum(1))
    torch.testing.assert_close(func.vmap(cumsum)(rows[:, 0]), rows[:, 0])
    torch.testing.assert_close(func.vmap(lambda a: cumsum(a, reverse=True), 1)(rows), rows.flip(0).cumsum(0).flip(0).T)


@pytest.mark.parametrize("shape", [(7,), (3, 7)], ids=str)
def test_every_sample_has_its_own_gradient_of_one_gamma(device: str, shape: tuple[int, ...]) -> None:
    x = make((BATCH, *shape), torch.float64, device)
    gammas = torch.linspace(0.1, 0.9, BATCH, dtype=torch.float64, device=device)

    def gradient(gamma: Tensor, sample: Tensor) -> Tensor:
        return func.grad(lambda g: discounted_cumsum(sample, g).sin().sum())(gamma)

    for gamma, position in ((gammas[1], None), (gammas, 0)):
        got = func.vmap(gradient, (position, 0))(gamma, x)
        wanted = [gradient(gammas[1] if position is None else gammas[i], x[i]) for i in range(BATCH)]
        torch.testing.assert_close(got, torch.stack(wanted))


def test_vmap_checks_the_logical_shapes(device: str) -> None:
    x = make((BATCH, 3, 5), torch.float64, device)
    with pytest.raises(RuntimeError, match=r"without dim 1, \(3,\), to give one discount a row, got \(4,\)"):
        func.vmap(lambda a: discounted_cumsum(a, torch.ones(4, dtype=torch.float64, device=device)))(x)
    with pytest.raises(IndexError, match=r"dim must be in \[-2, 1\] for a 2-D input, got 2"):
        func.vmap(lambda a: discounted_cumsum(a, 0.5, dim=2))(x)


def test_per_sample_gradients_of_a_module(device: str) -> None:
    """The usual functional_call recipe, with the op inside."""
    model = torch.nn.Linear(5, 5, dtype=torch.float64, device=device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = make((BATCH, 3, 5), torch.float64, device)

    def sample_loss(parameters: Any, sample: Tensor) -> Tensor:
        return discounted_cumsum(func.functional_call(model, parameters, (sample,)), 0.9).square().sum()

    got = func.vmap(func.grad(sample_loss), (None, 0))(parameters, x)
    for k in range(BATCH):
        model.zero_grad()
        discounted_cumsum(model(x[k]), 0.9).square().sum().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(got[name][k], p.grad)
