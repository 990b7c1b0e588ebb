"""torch.func over linear_cross_entropy and linear_log_probs, against the same transforms of the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.nn import functional

from torch_dcs_ops import linear_cross_entropy, linear_log_probs

from linear_cross_entropy.oracle import make, oracle

ARGNUMS = (0, 1, 2)
BATCH = 3
OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.1}
Function = Callable[..., Any]


def fused(reduction: str = "mean", **options: Any) -> Function:
    def f(x: Tensor, w: Tensor, b: Tensor, y: Tensor, weight: Tensor) -> Any:
        return linear_cross_entropy(x, w, y, linear_bias=b, weight=weight, reduction=reduction, **OPTIONS, **options)

    return f


def expected(reduction: str = "mean", **options: Any) -> Function:
    def f(x: Tensor, w: Tensor, b: Tensor, y: Tensor, weight: Tensor) -> Any:
        return oracle(x, w, y, linear_bias=b, weight=weight, reduction=reduction, **OPTIONS, **options)[0]

    return f


def squares(tensors: Any) -> Tensor:
    return sum(t.square().sum() for t in torch.utils._pytree.tree_leaves(tensors))  # type: ignore[return-value]


def scalar(f: Function) -> Function:
    return lambda *args: squares(f(*args))


TRANSFORMS: dict[str, Callable[[Function, Any, Any], Any]] = {
    "grad": lambda f, a, c: func.grad(scalar(f), ARGNUMS)(*a, *c),
    "grad of grad": lambda f, a, c: func.grad(lambda *b: squares(func.grad(scalar(f), ARGNUMS)(*b)), ARGNUMS)(*a, *c),
    "vjp": lambda f, a, c: (lambda pair: pair[1](torch.ones_like(pair[0])))(func.vjp(lambda *b: f(*b, *c), *a)),
    "jvp": lambda f, a, c: func.jvp(lambda *b: f(*b, *c), tuple(a), tuple(t.sin() for t in a)),
    "jvp of grad": lambda f, a, c: func.jvp(
        func.grad(scalar(lambda *b: f(*b, *c)), ARGNUMS), tuple(a), tuple(t.sin() for t in a)
    ),
    "jacrev": lambda f, a, c: func.jacrev(f, ARGNUMS)(*a, *c),
    "jacfwd": lambda f, a, c: func.jacfwd(f, ARGNUMS)(*a, *c),
    "hessian": lambda f, a, c: func.hessian(scalar(f), ARGNUMS)(*a, *c),
    "autograd over grad": lambda f, a, c: (
        lambda leaves: torch.autograd.grad(squares(func.grad(scalar(f), ARGNUMS)(*leaves, *c)), leaves)
    )([t.clone().requires_grad_() for t in a]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_derivatives(device: str, reduction: str, name: str) -> None:
    x, w, y, b, weight, _ = make((4,), 3, 5, device=device)
    results = [TRANSFORMS[name](f(reduction), (x, w, b), (y, weight)) for f in (fused, expected)]
    torch.testing.assert_close(*results)


def loop(f: Function, args: Any, batched: Any) -> Any:
    """What vmap stands for."""
    rows = [f(*[a[k] if has else a for a, has in zip(args, batched, strict=True)]) for k in range(BATCH)]
    if isinstance(rows[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    return torch.stack(rows)


def batch_of(lead: tuple[int, ...], device: str) -> list[Tensor]:
    problems = [make(lead, 3, 5, device=device, seed=k, ignored=0.1) for k in range(BATCH)]
    stacked = [torch.stack(tensors) for tensors in zip(*problems, strict=True)]
    x, w, y, b, weight, _ = stacked
    return [x, w, b, y, weight]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_vmap_over_any_of_the_operands(device: str, shift: int, reduction: str) -> None:
    batch = batch_of((2, 4), device)
    f, g = fused(reduction, shift=shift), expected(reduction, shift=shift)
    for batched in itertools.product((True, False), repeat=5):
        if not any(batched):
            continue
        args = [t if has else t[0] for t, has in zip(batch, batched, strict=True)]
        dims = tuple(0 if has else None for has in batched)
        torch.testing.assert_close(func.vmap(f, dims)(*args), loop(g, args, batched))


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("dims", [(0, None, None, 0, None), (0, 0, 0, 0, 0), (None, 0, None, None, None)], ids=str)
def test_vmap_with_other_transforms(device: str, dims: Any) -> None:
    batch = batch_of((4,), device)
    batched = [d is not None for d in dims]
    args = [t if has else t[0] for t, has in zip(batch, batched, strict=True)]
    for reduction in ("none", "mean"):
        f, g = fused(reduction), expected(reduction)
        per_sample = func.vmap(func.grad(scalar(f), ARGNUMS), dims)(*args)
        torch.testing.assert_close(per_sample, loop(func.grad(scalar(g), ARGNUMS), args, batched))
        tangents = func.vmap(func.jacfwd(f, ARGNUMS), dims)(*args)
        torch.testing.assert_close(tangents, loop(func.jacfwd(g, ARGNUMS), args, batched))

        def total(*a: Tensor, f: Function = f) -> Tensor:
            return squares(func.vmap(f, dims)(*a))

        def expected_total(*a: Tensor, g: Function = g) -> Tensor:
            return squares(loop(g, a, batched))  # F.cross_entropy itself fails under grad of vmap

        torch.testing.assert_close(func.grad(total, ARGNUMS)(*args), func.grad(expected_total, ARGNUMS)(*args))
        leaves = [t.clone().requires_grad_() for t in args[:3]]
        torch.testing.assert_close(
            torch.autograd.grad(total(*leaves, *args[3:]), leaves),
            torch.autograd.grad(expected_total(*leaves, *args[3:]), leaves),
        )


def test_vmap_of_every_result(device: str) -> None:
    x, w, b, y, _ = batch_of((4,), device)

    def f(x: Tensor, y: Tensor) -> Any:
        return linear_cross_entropy(x, w[0], y, linear_bias=b[0], return_lse=True, return_predictions=True)

    torch.testing.assert_close(func.vmap(f)(x, y), loop(f, (x, y), (True, True)))
    nested = func.vmap(func.vmap(lambda x, y: f(x[None], y[None])))(x, y)
    assert nested[0].shape == (BATCH, 4)
    moved = func.vmap(f, (1, -1))(x.movedim(0, 1), y.movedim(0, -1))
    torch.testing.assert_close(moved, func.vmap(f)(x, y))


def test_vmap_of_class_probabilities(device: str) -> None:
    x = make((BATCH, 4), 3, 5, device=device)
    for dims in ((0, 0), (None, 0), (0, None)):
        args = [t if d == 0 else t[0] for t, d in zip((x.input, x.probabilities), dims, strict=True)]
        for reduction in ("none", "mean"):
            results = [
                func.vmap(lambda a, q, f=f, r=reduction: f(a, x.linear_weight, q, reduction=r), dims)(*args)
                for f in (linear_cross_entropy, lambda *a, **k: oracle(*a, **k)[0])
            ]
            torch.testing.assert_close(*results)


def test_log_probs(device: str) -> None:
    x, w, b, y, _ = batch_of((4,), device)
    y = y.clamp(0)

    def reference(x: Tensor, y: Tensor) -> Any:
        log_p = functional.linear(x, w[0], b[0]).log_softmax(-1)
        return log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    def f(x: Tensor, y: Tensor) -> Any:
        return linear_log_probs(x, w[0], y, linear_bias=b[0])

    torch.testing.assert_close(func.vmap(f)(x, y), func.vmap(reference)(x, y))
    torch.testing.assert_close(func.vmap(func.grad(scalar(f)))(x, y), func.vmap(func.grad(scalar(reference)))(x, y))
    torch.testing.assert_close(func.vmap(func.jacfwd(f))(x, y), func.vmap(func.jacfwd(reference))(x, y))


def test_vmap_of_means_of_which_one_is_empty(device: str) -> None:
    x, w, _, y, _ = batch_of((4,), device)
    y = torch.where(torch.arange(BATCH, device=device)[:, None] == 1, -100, y)

    def f(a: Tensor, t: Tensor) -> Tensor:
        return linear_cross_entropy(a, w[0], t, zero_if_empty=True)

    losses = func.vmap(f)(x, y)
    assert float(losses[1]) == 0
    torch.testing.assert_close(losses, torch.stack([f(*sample) for sample in zip(x, y, strict=True)]))
    per_sample = func.vmap(func.grad(f))(x, y)
    torch.testing.assert_close(per_sample, torch.stack([func.grad(f)(*sample) for sample in zip(x, y, strict=True)]))


def test_vmap_checks_the_logical_shapes(device: str) -> None:
    x, w, _, y, _ = batch_of((4,), device)
    with pytest.raises(ValueError, match=r"target must have input's shape without its last dimension, \(4,\)"):
        func.vmap(lambda a: linear_cross_entropy(a, w[0], y))(x)
    with pytest.raises(ValueError, match="reduction must be"):
        func.vmap(lambda a, t: linear_cross_entropy(a, w[0], t, reduction="max"))(x, y)


def test_per_sample_gradients_of_a_module(device: str) -> None:
    """The usual functional_call recipe, with the op behind a layer."""
    problem = make((BATCH, 4), 3, 5, device=device, ignored=0.0)
    model = torch.nn.Linear(3, 3, dtype=torch.float64, device=device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def sample_loss(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        hidden = func.functional_call(model, parameters, (x,))
        loss: Tensor = linear_cross_entropy(hidden, problem.linear_weight, y)
        return loss

    got = func.vmap(func.grad(sample_loss), (None, 0, 0))(parameters, problem.input, problem.target)
    for k in range(BATCH):
        model.zero_grad()
        loss = oracle(model(problem.input[k]), problem.linear_weight, problem.target[k])[0]
        loss.backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(got[name][k], p.grad)
