"""linear_policy_loss where its gradient scales rows: one pass over the logits, and the loss for all rows at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops import linear_policy_loss
from torch_dcs_ops.ops.linear_cross_entropy import ids as ids_module
from torch_dcs_ops.ops.linear_cross_entropy import policy_chunks, row_losses, valid_rows

from linear_cross_entropy.oracle import leaf, relative_error

ROWS, FEATURES, CLASSES = 40, 24, 50
CHUNK = 8 * 56 * 2  # bytes of logits: eight rows of bfloat16
UNIT = 2.0**-9  # of bfloat16's rounding


def clipped(log_probs: Tensor, entropy: Tensor | None, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def entropic(log_probs: Tensor, entropy: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return clipped(log_probs, entropy, old, advantages) - 0.1 * entropy


class Runs(list[str]):
    """Which way every call has taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("_run_chunks", "_run_scaled"):
            monkeypatch.setattr(policy_chunks, name, self.noting(name.removeprefix("_run_"), name))

    def noting(self, short: str, name: str) -> Callable[..., bool]:
        run = getattr(policy_chunks, name)

        def noted(*args: Any) -> bool:
            self.append(short)
            return bool(run(*args))

        return noted


@pytest.fixture(params=["", "number read"])
def runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setattr(row_losses, "_entropic", {})  # what was seen of a function on another device
    if request.param:
        # As on GPUs: how many rows are valid is known behind the first product.
        monkeypatch.setattr(ids_module, "compacts", lambda *_: "device")
        monkeypatch.setattr(valid_rows, "may_wait", lambda *_: True)
    return Runs(monkeypatch)


def operands(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, FEATURES, generator=generator).to(device, dtype)
    w = (torch.randn(CLASSES, FEATURES, generator=generator) / 4).to(device, dtype)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::5] = -100
    old = -4 + 0.3 * torch.randn(ROWS, generator=generator)
    advantages = torch.randn(ROWS, generator=generator)
    return x, w, target.to(device), old.to(device), advantages.to(device)


def exact(of: Callable[..., Tensor], x: Tensor, w: Tensor, target: Tensor, *args: Tensor) -> list[Tensor]:
    """The mean and its gradients in float64."""
    leaves = [leaf(t.double()) for t in (x, w, args[1])]
    log_p = (leaves[0] @ leaves[1].t()).log_softmax(-1)
    valid = target != -100
    picked = log_p.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    rows = of(picked, -(log_p.exp() * log_p).sum(1), args[0].double(), leaves[2])
    loss = torch.where(valid, rows, 0).sum() / valid.sum()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("frozen", ["", "input", "weight"])
def test_values_and_gradients(device: str, runs: Runs, dtype: torch.dtype, frozen: str) -> None:
    """Every factor is rounded once more than without: input's gradient, or the rows of input before their sum."""
    x, w, target, old, advantages = operands(dtype, device)
    wanted = exact(clipped, x, w, target, old, advantages)
    leaves = [x if frozen == "input" else leaf(x), w if frozen == "weight" else leaf(w), leaf(advantages)]
    for call in range(2):
        loss = linear_policy_loss(*leaves[:2], target, clipped, old, leaves[2], memory_budget=CHUNK, need_entropy=False)
        torch.testing.assert_close(loss.double(), wanted[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        every = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(loss, every)
        expected = [g for t, g in zip(leaves, wanted[1:], strict=True) if t.requires_grad]
        for got, want in zip(found, expected, strict=True):
            # Logits of up to 4 in bfloat16 are wrong by 2**-7 at the most, a gradient by three roundings besides.
            budget = 2.0**-7 + 3 * UNIT if dtype == torch.bfloat16 else 1e-5
            assert relative_error(got, want) <= budget, call
    # float32 sums linear_weight's gradient chunk by chunk.
    assert set(runs) == {"scaled" if dtype == torch.bfloat16 or frozen == "weight" else "chunks"}


def test_entropy_of_the_value_alone(device: str, runs: Runs) -> None:
    """A function is seen once before its gradient is known to leave out the entropy; its closures are the same."""
    x, w, target, old, advantages = operands(torch.bfloat16, device)

    def make(clip: float) -> Callable[..., Tensor]:
        def loss(log_probs: Tensor, entropy: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
            return clipped(log_probs, entropy, old, advantages) - 0.1 * entropy.detach().clamp(max=clip)

        return loss

    for clip in (1.0, 2.0, 1.0):
        grads = [
            torch.autograd.grad(
                linear_policy_loss(a := leaf(x), b := leaf(w), target, of, old, advantages, memory_budget=CHUNK), (a, b)
            )
            for of in (make(clip), functools.partial(make(clip)))
        ]
        for got, want in zip(*grads, strict=True):
            assert relative_error(got, want.double()) <= 4 * UNIT
    assert runs == ["chunks", *["scaled"] * 5]


def test_entropy_that_comes_in_later(device: str, runs: Runs) -> None:
    x, w, target, old, advantages = operands(torch.bfloat16, device)

    def changing(log_probs: Tensor, entropy: Tensor, old: Tensor, advantages: Tensor, use: float) -> Tensor:
        return (entropic if use else clipped)(log_probs, entropy, old, advantages)

    for use in (0.0, 0.0, 1.0, 0.0):
        leaves = leaf(x), leaf(w)
        loss = linear_policy_loss(*leaves, target, changing, old, advantages, use, memory_budget=CHUNK)
        wanted = exact(entropic if use else clipped, x, w, target, old, advantages)
        for got, want in zip(torch.autograd.grad(loss, leaves), wanted[1:], strict=False):
            assert relative_error(got, want) <= 2.0**-7 + 3 * UNIT
    assert runs == ["chunks", "scaled", "scaled", "chunks", "chunks"]


def test_rows_that_mix_are_refused(device: str, runs: Runs) -> None:
    x, w, target, *_ = operands(torch.bfloat16, device)
    with pytest.raises(RuntimeError, match="loss_fn must give the loss of a row from that row alone"):
        linear_policy_loss(leaf(x), leaf(w), target, lambda p, _: p - p.mean(), memory_budget=CHUNK, need_entropy=False)
    assert runs == ["scaled"]


def test_statistics_and_a_constant(device: str, runs: Runs) -> None:
    x, w, target, *_ = operands(torch.bfloat16, device)
    every = [
        linear_policy_loss(
            leaf(x), leaf(w), target, lambda p, _: p, memory_budget=budget, need_entropy=False, return_statistics=True
        )
        for budget in (CHUNK, None)
    ]
    torch.testing.assert_close(*every)
    assert every[0][1].shape == target.shape
    constant = linear_policy_loss(
        leaf(x), leaf(w), target, lambda p, _: p.detach(), memory_budget=CHUNK, need_entropy=False
    )
    assert not constant.requires_grad
    ignored = torch.full_like(target, -100)
    leaves = leaf(x), leaf(w)
    loss = linear_policy_loss(
        *leaves, ignored, lambda p, _: p, memory_budget=CHUNK, need_entropy=False, reduction="sum"
    )
    assert loss == 0
    assert all(not bool(g.any()) for g in torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    assert runs[:3] == ["scaled", "chunks", "scaled"]
