"""Compiled autograd over an eager forward: the backward of every op is traced without a graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import torch_dcs_ops as d

from support.selection import slow

TARGET = torch.tensor([0, 4, 2, 1])
IDS = torch.tensor([[0, 1], [2, 2], [-100, 3], [4, 0]])
RESET = torch.tensor([[False, False, True, False, False, False]] * 4)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def weighted(output: Tensor) -> Tensor:
    """A sum whose gradient is another number in every place."""
    return (output * torch.linspace(-1, 1, output.numel()).view_as(output).cos()).sum()


def gae(rewards: Tensor, values: Tensor) -> Tensor:
    advantages, targets = d.returns.gae(rewards, values, bootstrap_value=values[0] * 2, terminated=RESET)
    return weighted(advantages) + weighted(targets.square())


# name: (the loss, the shapes of its operands)
CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "a number": (lambda x: weighted(d.discounted_cumsum(x, 0.5)), ((4, 6),)),
    "a per-row gamma": (lambda x, g: weighted(d.discounted_cumsum(x, g, reset=RESET)), ((4, 6), (4,))),
    "per-step gamma": (lambda x, g, i: weighted(d.discounted_cumsum(x, g, initial=i)), ((4, 6), (4, 6), (4,))),
    "window, a row": (lambda x, g: weighted(d.discounted_cumsum(x, g, window=3)), ((4, 6), (4,))),
    "window, a step": (lambda x, g: weighted(d.discounted_cumsum(x, g, window=3)), ((4, 6), (4, 6))),
    "cumsum": (lambda x: weighted(d.cumsum(x, reverse=True)), ((4, 6),)),
    "gae": (gae, ((4, 6), (4, 6))),
    "n_step_returns": (
        lambda r, v: weighted(d.returns.n_step_returns(r, v, n=2, bootstrap_value=v[0], terminated=RESET)),
        ((4, 6), (4, 6)),
    ),
    "softmax": (lambda x: weighted(d.softmax(x)), ((4, 6),)),
    "linear_cross_entropy": (lambda x, w: d.linear_cross_entropy(x, w, TARGET), ((4, 6), (5, 6))),
    "losses of rows": (
        lambda x, w: weighted(d.linear_cross_entropy(x, w, TARGET, reduction="none")),
        ((4, 6), (5, 6)),
    ),
    "linear_log_probs": (
        lambda x, w: sum(map(weighted, d.linear_log_probs(x, w, TARGET)), torch.zeros(())),
        ((4, 6), (5, 6)),
    ),
    "linear_log_probs of ids": (
        lambda x, w: weighted(d.linear_log_probs(x, w, IDS, need_entropy=False, return_argmax_log_prob=True)[1]),
        ((4, 6), (5, 6)),
    ),
    "linear_top_k": (lambda x, w: weighted(d.linear_top_k(x, w, 2)[0]), ((4, 6), (5, 6))),
    "linear_kl_div": (lambda x, w, y, v: d.linear_kl_div(x, w, y, v), ((4, 6), (5, 6), (4, 3), (5, 3))),
    "log_bmm": (lambda a, b: weighted(d.log_bmm(a, b)), ((4, 6), (6, 3))),
    "max_bmm": (lambda a, b: weighted(d.max_bmm(a, b)[0]), ((4, 6), (6, 3))),
}  # fmt: skip


def compiler(graph: Any) -> Any:
    return torch.compile(graph, backend="aot_eager", fullgraph=True)


def gradients(loss: Callable[..., Tensor], operands: list[Tensor], compiled: bool) -> list[Tensor]:
    leaves = [operand.clone().requires_grad_() for operand in operands]
    if compiled:
        with compiled_autograd._enable(compiler):
            loss(*leaves).backward()
    else:
        loss(*leaves).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


# Beside another case of the same node.
RARE = ("a number", "a per-row gamma", "window, a row", "losses of rows", "linear_log_probs of ids")


@pytest.mark.parametrize("name", [slow(name) if name in RARE else name for name in CASES])
def test_gradients_are_those_of_the_engine(name: str) -> None:
    loss, shapes = CASES[name]
    operands = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
    expected = gradients(loss, operands, False)
    assert len(expected) == len(shapes)
    torch.testing.assert_close(gradients(loss, operands, True), expected)


def test_other_arguments_are_not_taken_for_those_of_the_first_backward() -> None:
    """What a node keeps beside tensors guards the compiled backward."""
    x = torch.rand(4, 4, dtype=torch.float64)
    for options in ({"dim": 0}, {"dim": 1}, {"dim": 1, "direction": "left"}, {"dim": 1, "window": 2}):
        for gamma in (0.5, 0.25):

            def loss(x: Tensor, gamma: float = gamma, options: dict[str, Any] = options) -> Tensor:
                return weighted(d.discounted_cumsum(x, gamma, **options))

            torch.testing.assert_close(gradients(loss, [x], True), gradients(loss, [x], False))
    for dim in (0, 1):

        def of_softmax(x: Tensor, dim: int = dim) -> Tensor:
            return weighted(d.softmax(x, dim))

        torch.testing.assert_close(gradients(of_softmax, [x], True), gradients(of_softmax, [x], False))


def test_by_the_setting() -> None:
    x, w = torch.rand(4, 6), torch.rand(5, 6)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    loss = d.linear_cross_entropy(d.discounted_cumsum(leaves[0], 0.5), leaves[1], TARGET)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend="aot_eager")()

    def eager(x: Tensor, w: Tensor) -> Tensor:
        return d.linear_cross_entropy(d.discounted_cumsum(x, 0.5), w, TARGET)

    torch.testing.assert_close([leaf.grad for leaf in leaves], gradients(eager, [x, w], False))
