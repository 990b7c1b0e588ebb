"""Filtered gradients under autograd's modes, torch.func, torch.compile and the module; and what they hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, func

from torch_dcs_ops import linear_cross_entropy
from torch_dcs_ops.nn import LinearCrossEntropyLoss
from torch_dcs_ops.ops.linear_cross_entropy import filter as gradient_filter
from torch_dcs_ops.ops.linear_cross_entropy.plan import make_filtered_plan

from linear_cross_entropy.filter.oracle import CLASSES, EPS, FEATURES, GROUP, budget_of, dense, operands
from linear_cross_entropy.oracle import gradients, leaf, relative_error
from linear_cross_entropy.test_memory import peak


@pytest.fixture(autouse=True)
def _small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of these tests has not the classes for an eps of 16/V."""
    monkeypatch.setattr(gradient_filter, "LEAST_ODDS", 1)


def test_retained_graphs(device: str) -> None:
    x, w, target, _, _ = operands(device=device)
    for reduction in ("mean", "none"):
        leaves = leaf(x), leaf(w)
        loss = linear_cross_entropy(*leaves, target, reduction=reduction, grad_filter_eps=EPS, memory_budget=1).sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        again = torch.autograd.grad(3 * loss, leaves)
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(3 * a, b)


def test_derivatives_beyond_the_first_are_exact(device: str) -> None:
    x, w, target, _, _ = operands(40, device=device)
    v = torch.randn_like(x)
    for reduction in ("mean", "none"):
        seconds = []
        for eps in (EPS, None):
            leaves = leaf(x), leaf(w)
            loss = linear_cross_entropy(*leaves, target, reduction=reduction, grad_filter_eps=eps, memory_budget=1)
            first = torch.autograd.grad(loss.sum(), leaves, create_graph=True)
            if eps is not None:
                expected, _ = dense(x, w, target, 32, EPS, reduction=reduction)
                assert relative_error(first[0], expected[0]) < 4e-6
            seconds.append(torch.autograd.grad((first[0] * v).sum(), leaves))
        torch.testing.assert_close(seconds[0], seconds[1])


def test_forward_mode_is_exact(device: str) -> None:
    x, w, target, _, _ = operands(70, device=device)
    tangents = [
        func.jvp(
            lambda t, eps=eps: linear_cross_entropy(t, w, target, grad_filter_eps=eps), (x,), (torch.ones_like(x),)
        )
        for eps in (None, EPS)
    ]
    torch.testing.assert_close(tangents[1], tangents[0])


def test_functional_gradients(device: str) -> None:
    x, w, target, _, _ = operands(64, device=device)
    options = {"grad_filter_eps": EPS, "memory_budget": 1}

    def loss(t: Tensor, head: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(t, head, y, **options)

    got = func.grad(loss, (0, 1))(x, w, target)
    expected, _ = dense(x, w, target, 32, EPS)
    assert relative_error(got[0], expected[0]) < 4e-6
    assert relative_error(got[1], expected[1]) < 4e-6
    # Samples as long as a chunk: each has its own columns, as without vmap.
    samples = x.view(2, 32, -1), w, target.view(2, 32)
    batched = func.vmap(func.grad(loss, (0, 1)), (0, None, 0))(*samples)
    for index in range(2):
        alone = func.grad(loss, (0, 1))(samples[0][index], w, samples[2][index])
        torch.testing.assert_close([g[index] for g in batched], list(alone))


def test_vmap_of_a_loss(device: str) -> None:
    x, w, target, _, _ = operands(64, device=device)
    leaves = leaf(x), leaf(w)
    losses = func.vmap(
        lambda t, y: linear_cross_entropy(t, leaves[1], y, reduction="sum", grad_filter_eps=EPS, memory_budget=1)
    )(leaves[0].view(2, 32, -1), target.view(2, 32))
    expected, _ = dense(x, w, target, 32, EPS, reduction="sum")
    for gradient, wanted in zip(gradients(losses.sum(), *leaves), expected, strict=False):
        assert relative_error(gradient, wanted) < 4e-6


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(device: str, reduction: str, fresh_compiler: None) -> None:
    x, w, target, _, _ = operands(device=device)

    def step(t: Tensor, head: Tensor) -> Tensor:
        return linear_cross_entropy(
            t, head, target, reduction=reduction, grad_filter_eps=EPS, memory_budget=budget_of(64)
        ).sum()

    found = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = leaf(x), leaf(w)
        found.append(gradients(run(*leaves), *leaves))
    torch.testing.assert_close(found[1], found[0])


def test_op_check() -> None:
    x, w, target, bias, _ = operands(64)
    torch.library.opcheck(
        torch.ops.dcs.linear_cross_entropy.default,
        (leaf(x), leaf(w), target),
        {"linear_bias": leaf(bias), "grad_filter_eps": EPS, "memory_budget": 1},
    )


def test_module(device: str) -> None:
    x, w, target, bias, _ = operands(device=device)
    module = LinearCrossEntropyLoss(FEATURES, CLASSES, bias=True, device=device, grad_filter_eps=EPS)
    module.load_state_dict({"linear.weight": w, "linear.bias": bias})
    module(x, target).backward()
    plan = make_filtered_plan(x.size(0), CLASSES, x.dtype, device, None)
    expected, _ = dense(x, w, target, plan.rows, EPS, linear_bias=bias, group_rows=plan.group_rows)
    assert relative_error(module.linear.weight.grad, expected[1]) < 4e-6
    assert f"grad_filter_eps={EPS}" in repr(module)


def test_memory() -> None:
    """Beyond the gradients: a chunk of logits, the tails of a segment, and copies of what a chunk keeps of the head."""
    rows, chunk = 4096, 64
    x, w, target, _, _ = operands(rows)
    leaves = leaf(x), leaf(w)
    used = peak(
        lambda: linear_cross_entropy(*leaves, target, grad_filter_eps=EPS, memory_budget=budget_of(chunk)).backward()
    )
    tails = (rows // GROUP) * (w.size(0) + 2 * FEATURES) * 4
    assert used <= x.nbytes + 4 * w.nbytes + budget_of(chunk) + tails + (1 << 20)
    assert used < rows * CLASSES * 4 / 4
