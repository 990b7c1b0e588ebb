"""linear_kl_div in compiled graphs: a mean or a sum makes both heads' logits once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, func

from torch_dcs_ops import linear_kl_div

from linear_cross_entropy.oracle import leaf
from linear_cross_entropy.recorder import Recorder
from linear_cross_entropy.test_kl_div import DIRECTIONS, heads_of


def loss_of(options: dict[str, Any]) -> Any:
    def loss(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, target: Tensor) -> Tensor:
        return linear_kl_div(x.tanh(), w, teacher_x, teacher_w, target=target, **options) * 3

    return loss


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_products(device: str, fresh_compiler: None, direction: str, reduction: str) -> None:
    recorder, loss = Recorder(), loss_of({"direction": direction, "reduction": reduction, "memory_budget": 300})

    def run(*args: Tensor) -> Tensor:
        return loss(*args).sum()

    compiled = torch.compile(run, fullgraph=True, backend=recorder)
    heads = heads_of(device=device)
    student = leaf(heads.x), leaf(heads.w)
    args = (*student, heads.teacher_x, heads.teacher_w, heads.target)
    torch.testing.assert_close(
        *(torch.autograd.grad(of(*args), student) for of in (run, compiled)), rtol=1e-12, atol=1e-14
    )
    forward, backward = recorder.ops
    if reduction == "none":
        assert (forward, backward) == (["dcs.linear_kl_div.default"], ["dcs._linear_kl_div_backward.default"])
    else:
        assert forward == ["dcs._linear_kl_div_forward.default"]
        assert "dcs._linear_kl_div_backward.default" not in backward


def test_sizes_that_change(device: str, fresh_compiler: None) -> None:
    """All gradients, with rows that are ignored and a mean of none of them."""
    loss = loss_of({"direction": "jsd", "zero_if_empty": True})
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for lead in ((2, 4), (3, 5)):
        heads = heads_of(lead, device=device)
        leaves = [leaf(t) for t in heads[:4]]
        for target in (heads.target, torch.full_like(heads.target, -100)):
            results = [(value := run(*leaves, target), torch.autograd.grad(value, leaves)) for run in (loss, compiled)]
            torch.testing.assert_close(*results)


def test_functional_gradients(device: str, fresh_compiler: None) -> None:
    """Under torch.func it is a composition, in a graph as well."""
    heads = heads_of((3, 2), device=device)

    def of_samples(x: Tensor, w: Tensor) -> Tensor:
        def sample(x: Tensor, teacher_x: Tensor, target: Tensor) -> Tensor:
            return linear_kl_div(x, w, teacher_x, heads.teacher_w, target=target)

        return func.vmap(func.grad(sample))(x, heads.teacher_x, heads.target.clamp(min=0))

    args = heads.x, heads.w
    torch.testing.assert_close(torch.compile(of_samples, fullgraph=True, backend="aot_eager")(*args), of_samples(*args))


def test_a_gradient_of_a_gradient_is_refused(device: str, fresh_compiler: None) -> None:
    """As of all that is compiled, and not without a word."""
    heads = heads_of(device=device)
    student = leaf(heads.x), leaf(heads.w)
    compiled = torch.compile(loss_of({}), fullgraph=True, backend="aot_eager")
    loss = compiled(*student, heads.teacher_x, heads.teacher_w, heads.target)
    (grad,) = torch.autograd.grad(loss, student[0], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (loss + grad.square().sum()).backward()
